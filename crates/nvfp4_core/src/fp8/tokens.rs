//! Quantizes 16-bit tokens to e4m3 codes with a scale.

use crate::format::e4m3;
use crate::problem::TokenDtype;

/// Tokens with smaller magnitudes get the scale of this magnitude, 2⁻¹²⁶, so that a scale and its inverse are normal
/// numbers.
pub const MAGNITUDE_FLOOR: f32 = e4m3::MAX * f32::MIN_POSITIVE;

/// Writes a token's codes and returns its scale: its largest magnitude (at least [`MAGNITUDE_FLOOR`]) / 448 in f32. A
/// code is the f32 product of the number and the inverse of the scale, rounded to e4m3, ties to even, saturated to
/// ±448.
///
/// A token with a NaN gets a NaN scale and NaN codes. A token with an infinity gets an infinite scale, NaN at that
/// position and zeros elsewhere. So every result computed from the token is NaN.
///
/// # Panics
/// Panics if the numbers of codes and elements differ.
pub fn quantize_token(dtype: TokenDtype, bits: &[u16], codes: &mut [u8]) -> f32 {
    assert_eq!(bits.len(), codes.len(), "`codes` needs one byte per number");
    // As integers, magnitudes have the order of the numbers, and NaN is above infinity.
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
        // The result is at most 448 · (1 + 2⁻²³), which does not become NaN.
        for largest in 0x3F80..0x4000u16 {
            let mut code = [0];
            quantize_token(TokenDtype::Bf16, &[largest], &mut code);
            assert_eq!(code, [e4m3::MAX_CODE]);
        }
    }

    #[test]
    fn the_smallest_and_the_largest_tokens_have_normal_scales() {
        assert_eq!(quantized(TokenDtype::Bf16, &[0.0, -0.0]), (vec![0.0, -0.0], f32::MIN_POSITIVE));
        // The smallest subnormal bf16 is 2⁻¹³³, which is 2⁻⁷ of the scale.
        let (codes, scale) = quantized(TokenDtype::Bf16, &[f32::from_bits(0x0001_0000), 0.0]);
        assert_eq!((&codes[..], scale), (&[1.0 / 128.0, 0.0][..], f32::MIN_POSITIVE));
        let largest = f32::from_bits(0x7F7F_0000);
        let (codes, scale) = quantized(TokenDtype::Bf16, &[largest, -largest / 448.0]);
        assert_eq!((&codes[..], scale), (&[448.0, -1.0][..], largest / 448.0));
        assert_eq!(quantized(TokenDtype::F16, &[65504.0]).0, [448.0]);
    }

    #[test]
    fn non_finite_number_makes_its_token_nan() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let (codes, scale) = quantized(dtype, &[1.0, f32::NAN, f32::INFINITY, 0.0]);
            assert!(scale.is_nan() && codes.iter().all(|code| code.is_nan()));
            let (codes, scale) = quantized(dtype, &[1.0, f32::NEG_INFINITY, -2.0]);
            assert!(scale == f32::INFINITY && codes[1].is_nan() && codes[0] == 0.0 && codes[2] == 0.0);
        }
    }
}
