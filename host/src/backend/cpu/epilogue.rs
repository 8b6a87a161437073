//! From sums to outputs: α, the gate, rounding to 16 bits. Plain arithmetic that vectorises and gives the same bits
//! everywhere.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use super::layout::PANEL_ROWS;
use crate::problem::OutDtype;

/// Unit of a dot product of doubled values.
const DOT_UNIT: f64 = 0.25;

/// Writes the outputs of one token in a panel of `features` outputs: two sums make an output if gated, one if plain.
#[inline(always)]
pub(super) fn write(sums: &[f32; PANEL_ROWS], alphas: [f64; 2], features: usize, dtype: OutDtype, out: &mut [u16]) {
    const GATED_FEATURES: usize = PANEL_ROWS / 2;
    let mut values = [0.0; PANEL_ROWS];
    if features == GATED_FEATURES {
        for i in 0..GATED_FEATURES {
            values[i] = silu_times(scaled(sums[i], alphas[0]), scaled(sums[GATED_FEATURES + i], alphas[1]));
        }
    } else {
        for i in 0..PANEL_ROWS {
            values[i] = scaled(sums[i], alphas[0]);
        }
    }
    let values = &values[..out.len()];
    match dtype {
        OutDtype::F16 => out.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values),
        OutDtype::Bf16 => out.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(values),
    }
}

/// A pre-activation. A step's α keeps the exact value within f32. The clamp keeps a sum at the very edge from being
/// rounded to infinity.
#[inline(always)]
fn scaled(sum: f32, alpha: f64) -> f32 {
    ((f64::from(sum) * (alpha * DOT_UNIT)) as f32).clamp(f32::MIN, f32::MAX)
}

/// `silu(gate)·up = gate·up/(1+e⁻ᵍᵃᵗᵉ)`, computed so that an intermediate result leaves f32 only if the final result
/// does. With s = e^(−|gate|/2), it is `gate·up/(1+s²)` for a positive gate and `(gate·s)(up·s)/(1+s²)` for a negative
/// one.
#[inline(always)]
pub(super) fn silu_times(gate: f32, up: f32) -> f32 {
    let s = exp_of_negative(gate.abs() * -0.5);
    let factor = if gate < 0.0 { s } else { 1.0 };
    (gate * factor) * (up * factor) / (1.0 + s * s)
}

/// eˣ for x ≤ 0 to about an f32's last bit; 0 where it is below the normal numbers. The method is Cody and Waite's: x =
/// n·ln 2 + r, and e^r by its Taylor series. ln 2 is split into two parts so that n times the first is exact.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    /// The two parts of ln 2: its first 9 bits, and the rest.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// A number of this size has no fractional bits. Adding it rounds to an integer, which is left in the last bits.
    const ROUND: f32 = 12_582_912.0;
    /// 1/i! for i from 7 to 0.
    const SERIES: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    /// Below this x, n is −127: the exponent field is 0, and so is the result.
    const LOWEST: f32 = -88.0;
    let x = x.max(LOWEST);
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let power_of_two = f32::from_bits(exponent << 23);
    SERIES.into_iter().reduce(|sum, term| sum * r + term).unwrap_or_default() * power_of_two
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::silu;

    #[test]
    fn exponentials_are_right_to_two_units_in_the_last_place() {
        for i in 0..=870_000 {
            let x = i as f32 * -1e-4;
            let (got, want) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 2.0 * f64::from(f32::EPSILON), "{x}: {got} {want}");
        }
        assert_eq!([-0.0, -88.0, -1e30].map(exp_of_negative), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_gate_has_its_limits_and_never_gives_nan() {
        let numbers: Vec<f32> = [0.0, 1e-30, 1e-3, 0.5, 3.0, 40.0, 87.0, 89.0, 150.0, 200.0, 1e5, 1e20, f32::MAX]
            .into_iter()
            .flat_map(|x| [x, -x])
            .collect();
        for &gate in &numbers {
            for &up in &numbers {
                let (got, want) = (f64::from(silu_times(gate, up)), silu(gate.into()) * f64::from(up));
                let close = (got - want).abs() <= want.abs() * 1e-6 + f64::from(f32::MIN_POSITIVE);
                assert!(close || got == f64::from(want as f32), "silu({gate})·{up}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn sums_at_the_edge_of_f32_stay_finite() {
        assert_eq!(scaled(f32::MAX, 4.1), f32::MAX);
        assert_eq!(scaled(-f32::MAX, 4.1), f32::MIN);
        assert_eq!(silu_times(f32::MIN, f32::MAX), 0.0);
    }
}
