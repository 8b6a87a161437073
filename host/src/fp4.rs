//! Tokens in NVFP4, and weights as they are: W4A4.
//!
//! A layer whose [`TokenFormat`](crate::problem::TokenFormat) is `Nvfp4` multiplies tokens and weights of 4 bits, as Blackwell's tensor cores
//! do. Its tokens, its intermediate and its output lie in memory as 16-bit numbers all the same; only what is multiplied differs:
//!
//! * A token has a global scale: the *input scale* that its expert comes with ([`InputScales`]), or else one of its own, its largest
//!   magnitude / 2688. A global scale for a whole batch would make a token's result depend on the others, and there is none.
//! * Its blocks of 16 have e4m3 scales, and its numbers are e2m1 ([`quantize_token`]). The intermediate is rounded to the tokens' type
//!   first, and then treated like a token.
//! * Products of e2m1 · e4m3 on both sides are exact. Their sums are f32, in an order that is the device's: the reference has a bound for
//!   them ([`crate::moe::oracle`]).
//! * A sum is multiplied by `token's global scale · weights' global scale`, rounded to f32, and has its bias. From there on, activation
//!   and roundings are as ever.
//!
//! `docs/accuracy.md` has what that costs in accuracy.

use crate::error::Error;
use crate::format::{BLOCK, FIXED_POINT_BITS, Matrix, e2m1, e4m3};
use crate::fp8::QuantizedRows;
use crate::problem::TokenDtype;

/// The largest number over its global scale.
pub const LARGEST: f32 = e2m1::MAX * e4m3::MAX;

/// The least global scale, 2⁻¹⁰⁰: so small that only zeros are left of smaller numbers, and so large that all quotients are normal
/// f32.
pub const LEAST_GLOBAL: f32 = f32::from_bits((127 - 100) << 23);

/// The scale of a block of small numbers: the least that is not 0.
const LEAST_SCALE: u8 = 1;

/// The global scales of an expert's tokens, as checkpoints carry them (`input_scale`): largest magnitude / 2688 of what calibration saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputScales {
    /// Of what gate and up multiply. Where a checkpoint has one for each, the larger.
    pub gate_up: f32,
    /// Of what down multiplies.
    pub down: f32,
}

impl InputScales {
    /// Checks that both are from 2⁻¹⁰⁰ to 2¹⁰⁰.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the projection.
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
        "input scale {scale:e} is not from 2^-100 to 2^100; leave input scales out, and each token has its own"
    )))
}

/// A row of numbers, each the product of an e2m1 and an e4m3, in units of 2⁻¹⁰.
#[derive(Clone, Debug, PartialEq)]
pub struct Factors {
    numbers: Vec<i32>,
    is_nan: bool,
}

impl Factors {
    /// Of e2m1 codes, one a byte, and the scales of their blocks.
    pub fn new(codes: &[u8], scales: &[u8]) -> Self {
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales);
        let number =
            |scale: u8| move |&code: &u8| i32::from(e2m1::DOUBLED[usize::from(code & 0xF)]) * e4m3::fixed_point(scale);
        Self {
            numbers: blocks.flat_map(|(codes, &scale)| codes.iter().map(number(scale))).collect(),
            is_nan: scales.iter().any(|&scale| !e4m3::is_scale(scale)),
        }
    }

    /// A row of weights.
    pub fn of_row(matrix: &Matrix<'_>, row: usize) -> Self {
        let mut numbers = vec![0; matrix.k()];
        matrix.fixed_point_row(row, &mut numbers);
        Self { numbers, is_nan: false }
    }
}

/// The sum of the products of two rows of the same K: exact, and then rounded to f32. NaN if either has one.
///
/// # Panics
/// If they have not the same K.
pub fn sum(a: &Factors, b: &Factors) -> f32 {
    const UNIT: f32 = 1.0 / (1u64 << (2 * FIXED_POINT_BITS)) as f32;
    assert_eq!(a.numbers.len(), b.numbers.len(), "factors of each other");
    if a.is_nan || b.is_nan {
        return f32::NAN;
    }
    let products = a.numbers.iter().zip(&b.numbers).map(|(&a, &b)| i64::from(a) * i64::from(b));
    // Products are below 2⁴³, and there are 2²⁰ at most.
    products.sum::<i64>() as f32 * UNIT
}

/// What a projection makes of a [`sum`]: times the token's global scale and the weights', plus the bias if there is one. The factor is
/// f32, and so is the fused multiplication and addition.
#[inline]
pub fn scaled(sum: f32, token_global: f32, global: f32, bias: Option<f32>) -> f32 {
    // The sum of anything and -0 is the former.
    (token_global * global).mul_add(sum, bias.unwrap_or(-0.0))
}

/// Rows of K numbers of a type, with an input scale or else a global scale each.
///
/// # Panics
/// If K is 0.
pub fn quantize(dtype: TokenDtype, bits: &[u16], k: usize, input_scale: Option<f32>) -> QuantizedRows {
    let (mut codes, mut block_scales) = (vec![0; bits.len()], vec![0; bits.len() / BLOCK]);
    let parts = codes.chunks_exact_mut(k).zip(block_scales.chunks_exact_mut(k / BLOCK));
    let rows = bits.chunks_exact(k).zip(parts);
    let scales = rows.map(|(bits, (codes, scales))| quantize_token(dtype, bits, input_scale, codes, scales)).collect();
    QuantizedRows { codes, block_scales, scales }
}

/// Writes a token's e2m1 codes, one a byte, and the e4m3 scales of its blocks, and returns its global scale: the input scale, or else its
/// largest magnitude, at least 2688 · [`LEAST_GLOBAL`], over 2688.
///
/// A block's scale is the e4m3 nearest to its largest magnitude over (6 · the global scale), ties to even, from 2⁻⁹ to 448. A code is the
/// e2m1 nearest to the number times the inverse of (the scale · the global scale), ties to even, saturated to ±6. Each operation is
/// rounded to f32.
///
/// A block with a NaN or an infinity has a scale of NaN and codes of 0, and so have all blocks if the global scale is not finite; so that
/// all that is made of the token is NaN.
///
/// # Panics
/// If there are not as many codes as numbers, and a scale for each 16 of them.
pub fn quantize_token(
    dtype: TokenDtype,
    bits: &[u16],
    input_scale: Option<f32>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> f32 {
    assert_eq!((codes.len(), scales.len() * BLOCK), (bits.len(), bits.len()), "a code for each number");
    // As integers, magnitudes have the order of their numbers, and NaN is above infinity.
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
        // The second block has a scale of its own.
        let (codes, scales, global) =
            quantized(TokenDtype::F16, &[block(&[2688.0]), block(&[3.0, 0.25, 5.0])].concat(), None);
        assert_eq!((&codes[16..19], &scales[..], global), (&[4.0, 0.5, 6.0][..], &[448.0, 0.8125][..], 1.0));
    }

    #[test]
    fn an_input_scale_is_taken_as_it_is_and_saturates_what_is_larger() {
        let (codes, scales, global) = quantized(TokenDtype::Bf16, &block(&[1.0, 0.5, -0.25]), Some(0.25));
        // 1 / (6 · 0.25) = 0.667, of which the nearest e4m3 is 0.6875: 1 is 5.8 units.
        assert_eq!((&codes[..3], &scales[..], global), (&[6.0, 3.0, -1.5][..], &[0.6875][..], 0.25));
        let (codes, scales, _) = quantized(TokenDtype::Bf16, &block(&[10_000.0, 448.0]), Some(1.0));
        assert_eq!((&codes[..2], &scales[..]), (&[6.0, 1.0][..], &[448.0][..]));
        assert!(InputScales { gate_up: 0.25, down: 1.0 }.check().is_ok());
        for scale in [0.0, f32::NAN, f32::INFINITY, -1.0, 1e-31] {
            let error = InputScales { gate_up: 0.25, down: scale }.check().unwrap_err().to_string();
            assert!(error.starts_with("down: input scale") && error.contains("is not from 2^-100 to 2^100"), "{error}");
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
        // The least input scale, and numbers far too large for it.
        let (codes, scales, _) = quantized(TokenDtype::Bf16, &block(&[largest, -1.0]), Some(LEAST_GLOBAL));
        assert_eq!((&codes[..2], scales[0]), (&[6.0, -6.0][..], 448.0));
    }

    #[test]
    fn sums_are_exact_and_have_nan_where_a_scale_has() {
        // 6 · 448 squared, and 0.5 · 2⁻⁹ squared: 2⁻²⁰.
        let of = |code: u8, scale: u8| Factors::new(&[code; BLOCK], &[scale]);
        assert_eq!(sum(&of(7, e4m3::MAX_CODE), &of(15, e4m3::MAX_CODE)), -16.0 * 2688.0 * 2688.0);
        assert_eq!(sum(&of(1, 1), &of(1, 1)), 16.0 / (1 << 20) as f32);
        assert!(sum(&of(0, e4m3::NAN_CODE), &of(0, 1)).is_nan());
        assert_eq!(scaled(3.0, 0.5, 4.0, Some(1.0)), 7.0);
        assert_eq!(scaled(-0.0, 0.5, 4.0, None).to_bits(), 1 << 31);
    }

    #[test]
    fn what_is_not_finite_makes_scales_nan() {
        for (number, dtype) in [f32::NAN, f32::NEG_INFINITY].into_iter().zip([TokenDtype::F16, TokenDtype::Bf16]) {
            let numbers = [block(&[1.0, number]), block(&[3.0])].concat();
            let (codes, scales, global) = quantized(dtype, &numbers, None);
            assert!(!global.is_finite() && scales.iter().all(|scale| scale.is_nan()) && codes == [0.0; 32]);
            let (codes, scales, global) = quantized(dtype, &numbers, Some(1.0));
            assert!(scales[0].is_nan() && (codes[16], scales[1], global) == (6.0, 0.5, 1.0));
        }
    }
}
