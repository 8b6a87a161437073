//! From sums to outputs: α, the gate, rounding to 16 bits. Plain arithmetic that vectorises and gives the same bits
//! everywhere.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::layout::PANEL_ROWS;
use crate::problem::OutDtype;

/// What becomes of sums.
#[derive(Clone, Copy)]
pub(super) struct Epilogue {
    /// What the sums of each projection are multiplied with.
    alphas: [f64; 2],
    /// Pre-activations beyond it become it.
    limit: f32,
    dtype: OutDtype,
}

impl Epilogue {
    /// Of sums of NVFP4 tokens, which have doubled values on both sides. A step's α keeps the exact value within f32, and
    /// the limit keeps a sum at the very edge from being rounded to infinity.
    pub fn of_nvfp4(alphas: [f64; 2], dtype: OutDtype) -> Self {
        const DOT_UNIT: f64 = 0.25;
        Self { alphas: alphas.map(|alpha| alpha * DOT_UNIT), limit: f32::MAX, dtype }
    }

    /// Of sums of 16-bit tokens, times the global scales of the weights. Infinities stay.
    pub fn of_bits16(globals: [f32; 2], dtype: OutDtype) -> Self {
        Self { alphas: globals.map(f64::from), limit: f32::INFINITY, dtype }
    }

    /// A pre-activation.
    #[inline(always)]
    fn scaled(&self, sum: f32, projection: usize) -> f32 {
        ((f64::from(sum) * self.alphas[projection]) as f32).clamp(-self.limit, self.limit)
    }
}

/// Writes the outputs of one token in a panel of `features` outputs: two sums make an output if gated, one if plain.
#[inline(always)]
pub(super) fn write(sums: &[f32; PANEL_ROWS], epilogue: &Epilogue, features: usize, out: &mut [u16]) {
    const GATED_FEATURES: usize = PANEL_ROWS / 2;
    let mut values = [0.0; PANEL_ROWS];
    if features == GATED_FEATURES {
        for i in 0..GATED_FEATURES {
            values[i] = silu_times(epilogue.scaled(sums[i], 0), epilogue.scaled(sums[GATED_FEATURES + i], 1));
        }
    } else {
        for i in 0..PANEL_ROWS {
            values[i] = epilogue.scaled(sums[i], 0);
        }
    }
    round(&mut values[..out.len()], epilogue.dtype, out);
}

/// Rounds to 16 bits. There is one NaN, since instruction sets do not agree on its sign.
#[inline(always)]
pub(super) fn round(values: &mut [f32], dtype: OutDtype, out: &mut [u16]) {
    for value in &mut *values {
        *value = if value.is_nan() { f32::NAN } else { *value };
    }
    match dtype {
        OutDtype::F16 => out.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values),
        // To the nearest, and to the even one of two. `half` takes them one by one, on account of NaN.
        OutDtype::Bf16 => {
            for (out, value) in out.iter_mut().zip(values) {
                let bits = value.to_bits();
                *out = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
            }
        }
    }
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
    fn sums_at_the_edge_of_f32_stay_finite_and_infinities_infinite() {
        let epilogue = Epilogue::of_nvfp4([4.1; 2], OutDtype::F16);
        assert_eq!([f32::MAX, -f32::MAX].map(|sum| epilogue.scaled(sum, 0)), [f32::MAX, f32::MIN]);
        assert_eq!(silu_times(f32::MIN, f32::MAX), 0.0);
        let epilogue = Epilogue::of_bits16([2.0; 2], OutDtype::F16);
        assert_eq!([f32::MAX, -f32::INFINITY].map(|sum| epilogue.scaled(sum, 1)), [f32::INFINITY, -f32::INFINITY]);
    }

    #[test]
    fn there_is_one_nan() {
        for dtype in [OutDtype::F16, OutDtype::Bf16] {
            let mut bits = [0; 5];
            round(&mut [f32::NAN, -f32::NAN, f32::from_bits(0x7FA0_0001), 1.0, -f32::INFINITY], dtype, &mut bits);
            let nan = dtype.round_f32(f32::NAN);
            assert_eq!(bits, [nan, nan, nan, dtype.round_f32(1.0), dtype.round_f32(-f32::INFINITY)]);
        }
    }

    #[test]
    fn numbers_are_rounded_as_the_reference_does() {
        for dtype in [OutDtype::F16, OutDtype::Bf16] {
            // All signs and exponents, with ties and their neighbours in both types.
            for high in 0..=u16::MAX {
                let number = |low: u32| f32::from_bits(u32::from(high) << 16 | low);
                let mut values = [0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(number);
                let want = values.map(|value| dtype.round_f32(if value.is_nan() { f32::NAN } else { value }));
                let mut bits = [0; 7];
                round(&mut values, dtype, &mut bits);
                assert_eq!(bits, want, "{high:#x}");
            }
        }
    }
}
