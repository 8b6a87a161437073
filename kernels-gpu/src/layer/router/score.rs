//! Order of scores and arithmetic of weights, in f32 by operations with IEEE 754 rounding, so host and device compute
//! the same bits.

use crate::exp::exp_of_negative;
pub use crate::exp::sigmoid;

/// Number added to a sum of sigmoids before division by it, as in DeepSeek-V3's code.
pub const LEAST_SUM: f32 = 1e-20;

/// Number of partial sums over experts. Each partial sum adds its experts one after another; the partial sums are added
/// in pairs.
pub const LANES: usize = 32;

/// Key of a NaN, below the key of every number.
const NAN: u32 = 1;

/// Returns a key with the order of scores: both zeros have one key, and NaN has the lowest. A key is never 0.
#[inline(always)]
pub const fn key(score: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    // -0 + 0 is 0.
    let bits = (score + 0.0).to_bits();
    if score.is_nan() {
        NAN
    } else if bits & SIGN == 0 {
        bits | SIGN
    } else {
        !bits
    }
}

/// Returns the score of a key; 0 for both zeros.
#[inline(always)]
pub const fn score_of(key: u32) -> f32 {
    const SIGN: u32 = 1 << 31;
    if key == NAN {
        f32::NAN
    } else if key & SIGN == 0 {
        f32::from_bits(!key)
    } else {
        f32::from_bits(key ^ SIGN)
    }
}

/// Returns e^(`logit` − `largest`), and 1 if the two are equal, even if they are infinite.
#[inline(always)]
pub fn power(logit: f32, largest: f32) -> f32 {
    if logit == largest { 1.0 } else { exp_of_negative(logit - largest) }
}

/// Returns the square root of softplus(x) = ln(1 + eˣ) (the scores of DeepSeek-V4's routers, `sqrtsoftplus` in vLLM),
/// accurate to eight units in the last place of an f32. Returns 0 for x ≤ −88, and NaN for NaN.
///
/// softplus(x) is max(x, 0) + ln(1 + e^(−|x|)), and ln(1 + y) is 2·artanh(y/(2 + y)) by its series (Abramowitz and
/// Stegun, 4.1.27).
#[inline(always)]
pub fn sqrt_softplus(x: f32) -> f32 {
    /// Coefficients of s¹⁴ to 1. The argument is at most 1/3, so the next term is below 2⁻²⁶ of the sum.
    const SERIES: [f32; 8] = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0, 1.0];
    let power = exp_of_negative(if x < 0.0 { x } else { -x });
    let argument = power / (2.0 + power);
    let square = argument * argument;
    let logarithm = 2.0 * argument * SERIES.into_iter().reduce(|sum, term| sum * square + term).unwrap_or_default();
    let root = sqrt(if x > 0.0 { x } else { 0.0 } + logarithm);
    if x.is_nan() { x } else { root }
}

/// Returns the square root, rounded to nearest.
#[inline(always)]
fn sqrt(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::float::sqrt_rn_f32(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    x.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_of_softplus_are_accurate_to_eight_ulps() {
        for i in -870_000..=870_000 {
            let x = i as f32 * 1e-4;
            let (got, exact) = (f64::from(sqrt_softplus(x)), f64::from(x));
            let want = (exact.max(0.0) + (-exact.abs()).exp().ln_1p()).sqrt();
            assert!((got - want).abs() <= want * 8.0 * f64::from(f32::EPSILON), "{x}: {got} {want}");
        }
        let roots = [f32::NEG_INFINITY, -88.0, f32::INFINITY].map(sqrt_softplus);
        assert_eq!(roots, [0.0, 0.0, f32::INFINITY]);
        assert!(sqrt_softplus(f32::NAN).is_nan());
    }

    #[test]
    fn keys_have_the_order_of_scores() {
        let scores = [f32::NEG_INFINITY, f32::MIN, -1.0, -1e-45, 0.0, 1e-45, 1.0, f32::MAX, f32::INFINITY];
        assert!(scores.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
        assert!(scores.iter().all(|&score| score_of(key(score)) == score && key(score) > key(f32::NAN)));
        assert_eq!(key(-0.0), key(0.0));
        assert!(key(f32::NAN) > 0 && key(-f32::NAN) == key(f32::NAN) && score_of(key(f32::NAN)).is_nan());
    }

    #[test]
    fn powers_of_infinite_logits_are_one_or_zero() {
        assert_eq!(power(f32::INFINITY, f32::INFINITY), 1.0);
        assert_eq!(power(f32::NEG_INFINITY, f32::NEG_INFINITY), 1.0);
        assert_eq!([power(3.0, f32::INFINITY), power(f32::NEG_INFINITY, 3.0)], [0.0; 2]);
    }
}
