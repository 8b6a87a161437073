//! From sums to outputs: α, biases, the activation, and rounding to 16 bits. Plain arithmetic, which vectorizes and
//! gives the same bits on every CPU.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::activation::{activated, silu_times};
use super::layout::PANEL_ROWS;
use crate::moe::Activation;
use crate::problem::TokenDtype;

/// Computation of outputs from sums.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a> {
    /// Factor for the sums of each projection.
    alphas: [f64; 2],
    /// Pre-activations are clamped to ±`limit`.
    limit: f32,
    /// One bias per column, added after clamping. Empty if the projection has no bias.
    biases: [&'a [f32]; 2],
    /// Applied after the biases. `None` gives `silu(gate)·up` if gated, and the biased value of a plain projection.
    activation: Option<Activation>,
    dtype: TokenDtype,
}

impl<'a> Epilogue<'a> {
    /// Epilogue for sums of NVFP4 tokens, whose operands both hold doubled values: `silu(gate)·up`, or one projection.
    /// A step's α is checked so that the exact value stays within f32, and the limit keeps a sum near `f32::MAX` from
    /// rounding to infinity.
    pub fn of_nvfp4(alphas: [f64; 2], dtype: TokenDtype) -> Self {
        const DOT_UNIT: f64 = 0.25;
        Self {
            alphas: alphas.map(|alpha| alpha * DOT_UNIT),
            limit: f32::MAX,
            biases: [&[]; 2],
            activation: None,
            dtype,
        }
    }

    /// Epilogue for sums of 16-bit tokens, which are multiplied with the global scales of the weights. Infinities stay.
    /// With one projection, the second global scale and the second biases are ignored.
    pub fn of_bits16(
        globals: [f32; 2],
        biases: [&'a [f32]; 2],
        activation: Option<Activation>,
        dtype: TokenDtype,
    ) -> Self {
        Self { alphas: globals.map(f64::from), limit: f32::INFINITY, biases, activation, dtype }
    }

    /// Computes a pre-activation without its bias.
    #[inline(always)]
    fn scaled(&self, sum: f32, projection: usize) -> f32 {
        ((f64::from(sum) * self.alphas[projection]) as f32).clamp(-self.limit, self.limit)
    }

    /// Computes `N` neighboring pre-activations from `column` on, with their biases. Values after the last column are
    /// arbitrary.
    #[inline(always)]
    fn scaled_columns<const N: usize>(&self, sums: &[f32], projection: usize, column: usize) -> [f32; N] {
        let mut values = [0.0; N];
        for i in 0..N {
            values[i] = self.scaled(sums[i], projection);
        }
        for (value, bias) in values.iter_mut().zip(self.biases[projection].iter().skip(column)) {
            *value += bias;
        }
        values
    }
}

/// Writes the outputs of one token in one panel. The panel has `features` outputs, and the first is `column`. An output
/// takes two sums if gated, one if plain.
#[inline(always)]
pub(super) fn write(
    sums: &[f32; PANEL_ROWS],
    epilogue: &Epilogue<'_>,
    features: usize,
    column: usize,
    out: &mut [u16],
) {
    const GATED_FEATURES: usize = PANEL_ROWS / 2;
    let mut values = [0.0; PANEL_ROWS];
    if features == GATED_FEATURES {
        let (gate, up) = sums.split_at(GATED_FEATURES);
        let gate: [f32; GATED_FEATURES] = epilogue.scaled_columns(gate, 0, column);
        let up: [f32; GATED_FEATURES] = epilogue.scaled_columns(up, 1, column);
        match epilogue.activation {
            None | Some(Activation::Silu) => {
                for i in 0..GATED_FEATURES {
                    values[i] = silu_times(gate[i], up[i]);
                }
            }
            Some(activation) => {
                for i in 0..GATED_FEATURES {
                    values[i] = activated(activation, gate[i], up[i]);
                }
            }
        }
    } else {
        values = epilogue.scaled_columns(sums, 0, column);
        if let Some(activation) = epilogue.activation {
            for value in &mut values {
                *value = activated(activation, 0.0, *value);
            }
        }
    }
    round(&mut values[..out.len()], epilogue.dtype, out);
}

/// Rounds to 16 bits. All NaN become one NaN, since instruction sets differ in its sign.
#[inline(always)]
pub(super) fn round(values: &mut [f32], dtype: TokenDtype, out: &mut [u16]) {
    for value in &mut *values {
        *value = if value.is_nan() { f32::NAN } else { *value };
    }
    match dtype {
        TokenDtype::F16 => out.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values),
        // Round to nearest, ties to even. `half` converts bf16 one by one, because of NaN.
        TokenDtype::Bf16 => {
            for (out, value) in out.iter_mut().zip(values) {
                let bits = value.to_bits();
                *out = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_nvfp4_sums_stay_finite_and_infinities_stay_infinite() {
        let epilogue = Epilogue::of_nvfp4([4.1; 2], TokenDtype::F16);
        assert_eq!([f32::MAX, -f32::MAX].map(|sum| epilogue.scaled(sum, 0)), [f32::MAX, f32::MIN]);
        assert_eq!(silu_times(f32::MIN, f32::MAX), 0.0);
        let epilogue = Epilogue::of_bits16([2.0; 2], [&[]; 2], None, TokenDtype::F16);
        assert_eq!([f32::MAX, -f32::INFINITY].map(|sum| epilogue.scaled(sum, 1)), [f32::INFINITY, -f32::INFINITY]);
    }

    #[test]
    fn each_column_gets_its_own_bias() {
        let (sums, bias) = ([1.0; PANEL_ROWS], (0..40).map(|column| column as f32).collect::<Vec<_>>());
        let mut out = [0; PANEL_ROWS];
        let epilogue = Epilogue::of_bits16([0.5; 2], [&bias, &[]], Some(Activation::Relu2), TokenDtype::Bf16);
        write(&sums, &epilogue, PANEL_ROWS, 2, &mut out);
        assert_eq!(TokenDtype::Bf16.decode(out[3]), 5.5 * 5.5);
        // Columns 32 to 39 are the last panel.
        write(&sums, &epilogue, PANEL_ROWS, 32, &mut out[..8]);
        assert_eq!(TokenDtype::Bf16.decode(out[7]), 1560.0, "39.5² = 1560.25, rounded to bf16");
        let epilogue = Epilogue::of_bits16([0.5; 2], [&[], &bias], Some(Activation::GPT_OSS), TokenDtype::F16);
        write(&sums, &epilogue, PANEL_ROWS / 2, 0, &mut out[..16]);
        let want = Activation::GPT_OSS.apply(0.5, 3.5);
        assert!((TokenDtype::F16.decode(out[3]) - want).abs() < 1e-3 * want);
    }

    #[test]
    fn every_nan_rounds_to_the_same_bits() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let mut bits = [0; 5];
            round(&mut [f32::NAN, -f32::NAN, f32::from_bits(0x7FA0_0001), 1.0, -f32::INFINITY], dtype, &mut bits);
            let nan = dtype.round_f32(f32::NAN);
            assert_eq!(bits, [nan, nan, nan, dtype.round_f32(1.0), dtype.round_f32(-f32::INFINITY)]);
        }
    }

    #[test]
    fn rounding_matches_the_reference() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            // All signs and exponents, with ties and their neighbors for both types.
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
