//! From 16-bit tokens to e4m3 codes with a scale.

use crate::format::{BLOCK, e4m3};
use crate::problem::{TokenDtype, TokenFormat};

/// Tokens of which none is larger have the scale of this magnitude, 2⁻¹²⁶. It keeps a scale and its inverse normal numbers.
pub const MAGNITUDE_FLOOR: f32 = e4m3::MAX * f32::MIN_POSITIVE;

/// No code of e2m1, and a NaN that no device computes.
const POISON: u8 = 0xFF;

/// Rows of codes, e4m3 or e2m1, each with a scale. Two of them are equal if they have the same bits.
#[derive(Clone, Debug, Default)]
pub struct QuantizedRows {
    /// `[rows, K]`, a code a byte, columns in their natural order.
    pub codes: Vec<u8>,
    /// `[rows, K / 16]`, e4m3: the scales of NVFP4's blocks; empty for FP8, which has none.
    pub block_scales: Vec<u8>,
    /// `[rows]`.
    pub scales: Vec<f32>,
}

impl PartialEq for QuantizedRows {
    fn eq(&self, other: &Self) -> bool {
        let bits = |scales: &[f32]| -> Vec<u32> { scales.iter().map(|scale| scale.to_bits()).collect() };
        (&self.codes, &self.block_scales, bits(&self.scales))
            == (&other.codes, &other.block_scales, bits(&other.scales))
    }
}

impl Eq for QuantizedRows {}

impl QuantizedRows {
    /// Rows of NaN.
    pub fn poisoned(format: TokenFormat, rows: usize, k: usize) -> Self {
        let block_scales = if format == TokenFormat::Nvfp4 { rows * k / BLOCK } else { 0 };
        Self { codes: vec![POISON; rows * k], block_scales: vec![POISON; block_scales], scales: vec![f32::NAN; rows] }
    }

    /// Fills it with NaN, so that what a device fails to write is found.
    pub fn poison(&mut self) {
        self.codes.fill(POISON);
        self.block_scales.fill(POISON);
        self.scales.fill(f32::NAN);
    }

    /// Puts further rows behind these.
    pub fn append(&mut self, mut rows: Self) {
        self.codes.append(&mut rows.codes);
        self.block_scales.append(&mut rows.block_scales);
        self.scales.append(&mut rows.scales);
    }

    /// Rows of K numbers of a type, as FP8.
    ///
    /// # Panics
    /// If K is 0.
    pub fn of(dtype: TokenDtype, bits: &[u16], k: usize) -> Self {
        let scales = Vec::with_capacity(bits.len() / k);
        let mut quantized = Self { codes: vec![0; bits.len()], block_scales: Vec::new(), scales };
        for (bits, codes) in bits.chunks_exact(k).zip(quantized.codes.chunks_exact_mut(k)) {
            quantized.scales.push(quantize_token(dtype, bits, codes));
        }
        quantized
    }
}

/// Writes a token's codes and returns its scale: its largest magnitude, at least [`MAGNITUDE_FLOOR`], over 448, in f32. A code is the
/// e4m3 nearest to the number times the inverse of the scale, both in f32, ties to even, saturated to ±448.
///
/// A token with a NaN has a scale of NaN and codes of NaN. One with an infinity has an infinite scale, a NaN in that place and zeros
/// elsewhere, so that all that is made of it is NaN.
///
/// # Panics
/// If there are not as many codes as numbers.
pub fn quantize_token(dtype: TokenDtype, bits: &[u16], codes: &mut [u8]) -> f32 {
    assert_eq!(bits.len(), codes.len(), "a code for each number");
    // As integers, magnitudes have the order of their numbers, and NaN is above infinity.
    let largest = bits.iter().map(|&bits| bits & 0x7FFF).max().unwrap_or(0);
    let largest = (dtype.decode(largest) as f32).to_bits().max(MAGNITUDE_FLOOR.to_bits());
    let scale = f32::from_bits(largest) / e4m3::MAX;
    let inverse = 1.0 / scale;
    for (code, &bits) in codes.iter_mut().zip(bits) {
        *code = e4m3::encode_signed(dtype.decode(bits) as f32 * inverse);
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(dtype: TokenDtype, numbers: &[f32]) -> (Vec<f32>, f32) {
        let bits: Vec<u16> = numbers.iter().map(|&number| dtype.round_f32(number)).collect();
        let mut codes = vec![0; bits.len()];
        let scale = quantize_token(dtype, &bits, &mut codes);
        (codes.into_iter().map(e4m3::decode).collect(), scale)
    }

    #[test]
    fn the_largest_magnitude_becomes_448() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let (codes, scale) = quantized(dtype, &[0.5, -7.0, 0.0, 3.5, -0.015625]);
            assert_eq!((&codes[..], scale), (&[32.0, -448.0, 0.0, 224.0, -1.0][..], 1.0 / 64.0));
        }
        // 448 · (1 + 2⁻²³) at most, which is no NaN.
        for largest in 0x3F80..0x4000u16 {
            let mut code = [0];
            quantize_token(TokenDtype::Bf16, &[largest], &mut code);
            assert_eq!(code, [e4m3::MAX_CODE]);
        }
    }

    #[test]
    fn the_smallest_and_the_largest_tokens_have_normal_scales() {
        assert_eq!(quantized(TokenDtype::Bf16, &[0.0, -0.0]), (vec![0.0, -0.0], f32::MIN_POSITIVE));
        // The smallest subnormal bf16 is 2⁻¹³³, and so 2⁻⁷ of the scale.
        let (codes, scale) = quantized(TokenDtype::Bf16, &[f32::from_bits(0x0001_0000), 0.0]);
        assert_eq!((&codes[..], scale), (&[1.0 / 128.0, 0.0][..], f32::MIN_POSITIVE));
        let largest = f32::from_bits(0x7F7F_0000);
        let (codes, scale) = quantized(TokenDtype::Bf16, &[largest, -largest / 448.0]);
        assert_eq!((&codes[..], scale), (&[448.0, -1.0][..], largest / 448.0));
        assert_eq!(quantized(TokenDtype::F16, &[65504.0]).0, [448.0]);
    }

    #[test]
    fn what_is_not_finite_makes_its_token_nan() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let (codes, scale) = quantized(dtype, &[1.0, f32::NAN, f32::INFINITY, 0.0]);
            assert!(scale.is_nan() && codes.iter().all(|code| code.is_nan()));
            let (codes, scale) = quantized(dtype, &[1.0, f32::NEG_INFINITY, -2.0]);
            assert!(scale == f32::INFINITY && codes[1].is_nan() && codes[0] == 0.0 && codes[2] == 0.0);
        }
    }
}
