//! Layers with NVFP4 tokens and NVFP4 weights (W4A4).
//!
//! A layer whose [`TokenFormat`](crate::problem::TokenFormat) is `Nvfp4` multiplies 4-bit tokens by 4-bit weights, as
//! Blackwell's tensor cores do. Tokens, intermediate and output are 16-bit numbers in memory; only the multiplied
//! operands differ:
//!
//! * A token has a global scale: the *input scale* of its expert ([`InputScales`]), or else the token's own scale, its
//!   largest magnitude / 2688. A global scale per batch is not supported, because a token's result would depend on the
//!   other tokens.
//! * A token's blocks of 16 have e4m3 scales, and its numbers are e2m1 ([`quantize_token`]). The intermediate is
//!   rounded to the token type first, and then quantized like a token.
//! * Products of e2m1 · e4m3 on both sides are exact. Their sums are f32, in an order that depends on the device; the
//!   reference bounds the error ([`crate::moe::oracle`]).
//! * A sum is multiplied by `token's global scale · weights' global scale`, rounded to f32, and the bias is added.
//!   Activation and later roundings are the same as with 16-bit tokens.
//!
//! `benches/lab/accuracy.md` reports the effect on accuracy.

use crate::error::Error;
use crate::format::{BLOCK, FIXED_POINT_BITS, Matrix, e2m1, e4m3};
use crate::problem::TokenDtype;

/// Ratio of the largest number to its global scale.
pub const LARGEST: f32 = e2m1::MAX * e4m3::MAX;

/// Smallest global scale, 2⁻¹⁰⁰. Numbers too small for it become zero, and all quotients stay normal f32.
pub const LEAST_GLOBAL: f32 = f32::from_bits((127 - 100) << 23);

/// Code of the smallest nonzero block scale, for blocks of small numbers.
const LEAST_SCALE: u8 = 1;

/// Global scales of an expert's tokens, as checkpoints store them (`input_scale`): largest magnitude / 2688 during
/// calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputScales {
    /// Input scale of gate and up; the larger one if a checkpoint has one for each.
    pub gate_up: f32,
    /// Input scale of down.
    pub down: f32,
}

impl InputScales {
    /// Checks that both scales are from 2⁻¹⁰⁰ to 2¹⁰⁰.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name of the projection.
    pub fn check(&self) -> Result<(), Error> {
        check_input_scale(self.gate_up).map_err(|error| error.at("gate and up"))?;
        check_input_scale(self.down).map_err(|error| error.at("down"))
    }
}

/// Checks that an input scale is from 2⁻¹⁰⁰ to 2¹⁰⁰.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_input_scale(scale: f32) -> Result<(), Error> {
    if (LEAST_GLOBAL..=1.0 / LEAST_GLOBAL).contains(&scale) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "input scale {scale:e} must be from 2^-100 to 2^100; without input scales, each token gets its own global scale"
    )))
}

/// A row of products e2m1 · e4m3, in units of 2⁻¹⁰.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    numbers: Vec<i32>,
    is_nan: bool,
}

impl Factors {
    /// Takes e2m1 codes, one per byte, and the scales of their blocks.
    pub fn new(codes: &[u8], scales: &[u8]) -> Self {
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales);
        let number =
            |scale: u8| move |&code: &u8| i32::from(e2m1::DOUBLED[usize::from(code & 0xF)]) * e4m3::fixed_point(scale);
        Self {
            numbers: blocks.flat_map(|(codes, &scale)| codes.iter().map(number(scale))).collect(),
            is_nan: scales.iter().any(|&scale| !e4m3::is_scale(scale)),
        }
    }

    /// Takes a row of weights.
    pub fn of_row(matrix: &Matrix<'_>, row: usize) -> Self {
        let mut numbers = vec![0; matrix.k()];
        matrix.fixed_point_row(row, &mut numbers);
        Self { numbers, is_nan: false }
    }
}

/// Returns the sum of the products of two rows with the same K: exact, then rounded to f32. NaN if a row has a NaN
/// scale.
///
/// # Panics
/// Panics if the rows differ in K.
pub fn sum(a: &Factors, b: &Factors) -> f32 {
    const UNIT: f32 = 1.0 / (1u64 << (2 * FIXED_POINT_BITS)) as f32;
    assert_eq!(a.numbers.len(), b.numbers.len(), "both rows must have the same K");
    if a.is_nan || b.is_nan {
        return f32::NAN;
    }
    let products = a.numbers.iter().zip(&b.numbers).map(|(&a, &b)| i64::from(a) * i64::from(b));
    // Products are below 2⁴³, and there are at most 2²⁰ of them.
    products.sum::<i64>() as f32 * UNIT
}

/// Scales a [`sum`] by the token's global scale and the weights' global scale, and adds the bias if there is one. The
/// factor is f32, and the multiplication and addition are one f32 FMA.
#[inline]
pub fn scaled(sum: f32, token_global: f32, global: f32, bias: Option<f32>) -> f32 {
    // Adding -0 changes no number.
    (token_global * global).mul_add(sum, bias.unwrap_or(-0.0))
}

/// Writes a token's e2m1 codes, one per byte, and the e4m3 scales of its blocks; returns its global scale. The global
/// scale is the input scale, or else the token's largest magnitude (at least 2688 · [`LEAST_GLOBAL`]) / 2688.
///
/// A block's scale is its largest magnitude / (6 · global scale), rounded to e4m3, ties to even, from 2⁻⁹ to 448. A
/// code is the number times the inverse of (scale · global scale), rounded to e2m1, ties to even, saturated to ±6. Each
/// operation is rounded to f32.
///
/// A block with a NaN or an infinity gets a NaN scale and codes of 0. If the global scale is not finite, all blocks do.
/// So every result computed from the token is NaN.
///
/// # Panics
/// Panics unless there is one code per number and one scale per 16 numbers.
pub fn quantize_token(
    dtype: TokenDtype,
    bits: &[u16],
    input_scale: Option<f32>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> f32 {
    assert_eq!(
        (codes.len(), scales.len() * BLOCK),
        (bits.len(), bits.len()),
        "`codes` needs one byte per number, `scales` one byte per block"
    );
    // As integers, magnitudes have the order of the numbers, and NaN is above infinity.
    let amax = |bits: &[u16]| {
        let largest = bits.iter().map(|&bits| bits & 0x7FFF).max().unwrap_or(0);
        dtype.decode(largest) as f32
    };
    let global = input_scale.unwrap_or_else(|| {
        let largest = amax(bits).to_bits().max((LARGEST * LEAST_GLOBAL).to_bits());
        f32::from_bits(largest) / LARGEST
    });
    let blocks = bits.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<BLOCK>().0).zip(scales);
    for ((bits, codes), scale) in blocks {
        let amax = amax(bits);
        if !amax.is_finite() || !global.is_finite() {
            (*scale, *codes) = (e4m3::NAN_CODE, [0; BLOCK]);
            continue;
        }
        *scale = e4m3::encode(amax / (e2m1::MAX * global)).max(LEAST_SCALE);
        let inverse = 1.0 / (e4m3::decode(*scale) * global);
        *codes = bits.map(|bits| e2m1::encode(dtype.decode(bits) as f32 * inverse));
    }
    global
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(dtype: TokenDtype, numbers: &[f32], input_scale: Option<f32>) -> (Vec<f32>, Vec<f32>, f32) {
        let bits: Vec<u16> = numbers.iter().map(|&number| dtype.round_f32(number)).collect();
        let (mut codes, mut scales) = (vec![0; bits.len()], vec![0; bits.len() / BLOCK]);
        let global = quantize_token(dtype, &bits, input_scale, &mut codes, &mut scales);
        (codes.into_iter().map(e2m1::decode).collect(), scales.into_iter().map(e4m3::decode).collect(), global)
    }

    fn block(first: &[f32]) -> Vec<f32> {
        let mut numbers = vec![0.0; BLOCK];
        numbers[..first.len()].copy_from_slice(first);
        numbers
    }

    #[test]
    fn the_largest_magnitude_becomes_6_times_448() {
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let (codes, scales, global) = quantized(dtype, &block(&[1.0, -3.0, -2688.0, 448.0]), None);
            assert_eq!((&codes[..4], &scales[..], global), (&[0.0, -0.0, -6.0, 1.0][..], &[448.0][..], 1.0));
        }
        // The second block has a different scale.
        let (codes, scales, global) =
            quantized(TokenDtype::F16, &[block(&[2688.0]), block(&[3.0, 0.25, 5.0])].concat(), None);
        assert_eq!((&codes[16..19], &scales[..], global), (&[4.0, 0.5, 6.0][..], &[448.0, 0.8125][..], 1.0));
    }

    #[test]
    fn given_input_scale_saturates_larger_numbers() {
        let (codes, scales, global) = quantized(TokenDtype::Bf16, &block(&[1.0, 0.5, -0.25]), Some(0.25));
        // 1 / (6 · 0.25) = 0.667; the nearest e4m3 is 0.6875, so 1 is 5.8 units.
        assert_eq!((&codes[..3], &scales[..], global), (&[6.0, 3.0, -1.5][..], &[0.6875][..], 0.25));
        let (codes, scales, _) = quantized(TokenDtype::Bf16, &block(&[10_000.0, 448.0]), Some(1.0));
        assert_eq!((&codes[..2], &scales[..]), (&[6.0, 1.0][..], &[448.0][..]));
        assert!(InputScales { gate_up: 0.25, down: 1.0 }.check().is_ok());
        for scale in [0.0, f32::NAN, f32::INFINITY, -1.0, 1e-31] {
            let error = InputScales { gate_up: 0.25, down: scale }.check().unwrap_err().to_string();
            assert!(
                error.starts_with("down: input scale") && error.contains("must be from 2^-100 to 2^100"),
                "{error}"
            );
        }
    }

    #[test]
    fn small_numbers_and_the_largest_have_normal_quotients() {
        let (codes, scales, global) =
            quantized(TokenDtype::Bf16, &block(&[0.0, -0.0, f32::from_bits(0x0001_0000)]), None);
        assert_eq!((scales[0], global), (1.0 / 512.0, LEAST_GLOBAL));
        assert_eq!(codes.iter().map(|code| code.to_bits()).take(3).collect::<Vec<_>>(), [0, 1 << 31, 0]);
        let largest = f32::from_bits(0x7F7F_0000);
        let (codes, scales, global) = quantized(TokenDtype::Bf16, &block(&[largest, -largest / 6.0]), None);
        assert_eq!((&codes[..2], scales[0], global), (&[6.0, -1.0][..], 448.0, largest / 2688.0));
        // The smallest input scale, with numbers far too large for it.
        let (codes, scales, _) = quantized(TokenDtype::Bf16, &block(&[largest, -1.0]), Some(LEAST_GLOBAL));
        assert_eq!((&codes[..2], scales[0]), (&[6.0, -6.0][..], 448.0));
    }

    #[test]
    fn sums_are_exact_and_nan_scales_spread() {
        // 6 · 448 squared, and 0.5 · 2⁻⁹ squared: 2⁻²⁰.
        let of = |code: u8, scale: u8| Factors::new(&[code; BLOCK], &[scale]);
        assert_eq!(sum(&of(7, e4m3::MAX_CODE), &of(15, e4m3::MAX_CODE)), -16.0 * 2688.0 * 2688.0);
        assert_eq!(sum(&of(1, 1), &of(1, 1)), 16.0 / (1 << 20) as f32);
        assert!(sum(&of(0, e4m3::NAN_CODE), &of(0, 1)).is_nan());
        assert_eq!(scaled(3.0, 0.5, 4.0, Some(1.0)), 7.0);
        assert_eq!(scaled(-0.0, 0.5, 4.0, None).to_bits(), 1 << 31);
    }

    #[test]
    fn non_finite_numbers_make_scales_nan() {
        for (number, dtype) in [f32::NAN, f32::NEG_INFINITY].into_iter().zip([TokenDtype::F16, TokenDtype::Bf16]) {
            let numbers = [block(&[1.0, number]), block(&[3.0])].concat();
            let (codes, scales, global) = quantized(dtype, &numbers, None);
            assert!(!global.is_finite() && scales.iter().all(|scale| scale.is_nan()) && codes == [0.0; 32]);
            let (codes, scales, global) = quantized(dtype, &numbers, Some(1.0));
            assert!(scales[0].is_nan() && (codes[16], scales[1], global) == (6.0, 0.5, 1.0));
        }
    }
}
