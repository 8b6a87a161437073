//! eˣ and 1/(1 + e⁻ˣ) in f32, built from additions, multiplications and divisions with IEEE 754 rounding, so host and
//! device compute the same bits.

/// Returns eˣ for x ≤ 0, accurate to about the last bit of an f32. Returns 0 if the result is below the normal numbers.
/// The method is Cody and Waite's: x = n·ln 2 + r, and e^r by its Taylor series. ln 2 is split into two parts so that n
/// times the first part is exact.
#[inline(always)]
pub fn exp_of_negative(x: f32) -> f32 {
    /// ln 2 in two parts: its first 9 bits, and the rest.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// A number of this size has no fractional bits. Adding it rounds to an integer, which remains in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// 1/i! for i from 7 to 0.
    const SERIES: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    /// Below this x, n is −127, so the exponent field and the result are 0.
    const LOWEST: f32 = -88.0;
    let x = x.max(LOWEST);
    let rounded = x * core::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let power_of_two = f32::from_bits(exponent << 23);
    SERIES.into_iter().reduce(|sum, term| sum * r + term).unwrap_or_default() * power_of_two
}

/// Returns 1/(1 + e⁻ˣ), accurate to about the last bit of an f32 unless the result is subnormal. Returns 0 for x ≤ −88,
/// and NaN for NaN.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let power = exp_of_negative(if x < 0.0 { x } else { -x });
    let divisor = 1.0 + power;
    let sigmoid = if x < 0.0 { power / divisor } else { 1.0 / divisor };
    if x.is_nan() { x } else { sigmoid }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn exponentials_are_accurate_to_two_ulps() {
        for i in 0..=870_000 {
            let x = i as f32 * -1e-4;
            let (got, want) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 2.0 * f64::from(f32::EPSILON), "{x}: {got} {want}");
        }
        assert_eq!([-0.0, -88.0, -1e30].map(exp_of_negative), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn sigmoids_are_accurate_to_three_ulps() {
        for i in -870_000..=870_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (f64::from(sigmoid(x)), 1.0 / (1.0 + (-f64::from(x)).exp()));
            assert!((got - want).abs() <= want * 3.0 * f64::from(f32::EPSILON), "{x}: {got} {want}");
        }
        assert_eq!([f32::NEG_INFINITY, -88.0, 0.0, 100.0, f32::INFINITY].map(sigmoid), [0.0, 0.0, 0.5, 1.0, 1.0]);
        assert!(sigmoid(f32::NAN).is_nan());
    }
}
