//! f32, f16 or bf16 to NVFP4, by the algorithm of NVIDIA's ModelOpt.
//!
//! A tensor has one global scale, `amax / (6·448)`, so that the largest block scale is the largest E4M3 number. A block
//! of 16 has the scale `amax of the block / (6·global)`, rounded to E4M3 and at least 2⁻⁹; a block of zeros has 1.
//! Values are divided by both scales and rounded to nearest, ties to even. All of this is f32, as in ModelOpt.

use rayon::prelude::*;

use crate::error::Error;
use crate::format::{BLOCK, Matrix, e2m1, e4m3};

/// A number that can be quantised: f32, [`half::f16`], [`half::bf16`].
pub trait Number: Copy + Sync + Into<f32> {}
impl<T: Copy + Sync + Into<f32>> Number for T {}

/// The code of the smallest positive scale, 2⁻⁹: a block scale of zero would lose what its block holds.
const SMALLEST_SCALE: u8 = 1;

/// The code of a scale of 1, for a block of zeros.
const SCALE_OF_ZEROS: u8 = 0x38;

/// Rows quantised by one task.
const ROWS: usize = 16;

/// Quantises a row-major matrix `[rows, k]`, its global scale taken from its largest magnitude.
///
/// ```
/// let numbers: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
/// let matrix = nvfp4::quantize::quantize(&numbers, 2, 16)?;
/// let mut row = [0.0; 16];
/// matrix.dequantize_row(0, &mut row);
/// assert_eq!(row[0], -16.0); // the largest magnitude is kept to within f32's rounding
/// # Ok::<_, nvfp4::Error>(())
/// ```
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity; [`Error::BlockAlignment`] or [`Error::Length`] on wrong sizes.
pub fn quantize<T: Number>(numbers: &[T], rows: usize, k: usize) -> Result<Matrix<'static>, Error> {
    let global = global_scale(numbers)?;
    quantize_with(numbers, rows, k, global)
}

/// The global scale that ModelOpt gives to a tensor: [`global_scale_for`] its [`amax`].
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity.
pub fn global_scale<T: Number>(numbers: &[T]) -> Result<f32, Error> {
    amax(numbers).map(global_scale_for)
}

/// The global scale for numbers of at most this magnitude: `amax / (6·448)`. For zero it is 1, and never below the
/// smallest normal f32.
pub fn global_scale_for(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / (e2m1::MAX * e4m3::MAX)).max(f32::MIN_POSITIVE) }
}

/// The largest magnitude; 0 for no numbers.
///
/// # Errors
/// [`Error::NotFinite`] on NaN or infinity.
pub fn amax<T: Number>(numbers: &[T]) -> Result<f32, Error> {
    let amax = f32::from_bits(numbers.par_iter().map(|&x| magnitude_bits(x.into())).max().unwrap_or(0));
    if !amax.is_finite() {
        let index = numbers.iter().position(|&x| !x.into().is_finite()).expect("the maximum is one of them");
        return Err(Error::NotFinite { index, value: numbers[index].into() });
    }
    Ok(amax)
}

/// Quantises with a global scale given from outside, such as one calibrated for activations; what is too large for it
/// saturates.
///
/// # Errors
/// [`Error::NotFinite`], [`Error::BlockAlignment`], [`Error::Length`]; [`Error::GlobalScale`] unless it is positive and
/// finite.
pub fn quantize_with<T: Number>(numbers: &[T], rows: usize, k: usize, global: f32) -> Result<Matrix<'static>, Error> {
    if k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(Error::BlockAlignment { k });
    }
    if rows.checked_mul(k) != Some(numbers.len()) {
        let expected = rows.saturating_mul(k);
        return Err(Error::Mismatch { what: "numbers to quantise", got: numbers.len(), expected });
    }
    if !(global.is_finite() && global > 0.0) {
        return Err(Error::GlobalScale { value: global });
    }
    let (mut values, mut scales) = (vec![0; numbers.len() / 2], vec![0; numbers.len() / BLOCK]);
    numbers
        .par_chunks(ROWS * k)
        .zip(values.par_chunks_mut(ROWS * k / 2))
        .zip(scales.par_chunks_mut(ROWS * k / BLOCK))
        .enumerate()
        .try_for_each(|(chunk, ((numbers, values), scales))| {
            quantize_blocks(numbers, global, values, scales).map_err(|error| match error {
                Error::NotFinite { index, value } => Error::NotFinite { index: index + chunk * ROWS * k, value },
                other => other,
            })
        })?;
    Matrix::new(rows, k, values, scales, global)
}

/// Quantises whole blocks into their packed values (a byte for two numbers) and scales (a byte for 16).
///
/// # Errors
/// [`Error::NotFinite`] with the index of the number.
///
/// # Panics
/// If the lengths do not belong together.
pub fn quantize_blocks<T: Number>(
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<(), Error> {
    assert!(numbers.len() == scales.len() * BLOCK && values.len() * 2 == numbers.len(), "whole blocks");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: both features were detected on the line above.
        return unsafe { quantize_blocks_avx2(numbers, global, values, scales) };
    }
    quantize_blocks_portable(numbers, global, values, scales)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn quantize_blocks_avx2<T: Number>(
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<(), Error> {
    quantize_blocks_portable(numbers, global, values, scales)
}

#[inline(always)]
fn quantize_blocks_portable<T: Number>(
    numbers: &[T],
    global: f32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<(), Error> {
    let (blocks, values) = (numbers.as_chunks::<BLOCK>().0, values.as_chunks_mut::<{ BLOCK / 2 }>().0);
    for (index, ((numbers, values), scale)) in blocks.iter().zip(values).zip(scales).enumerate() {
        let numbers = numbers.map(Into::into);
        let amax = f32::from_bits(numbers.map(magnitude_bits).into_iter().fold(0, u32::max));
        if !amax.is_finite() {
            let within = numbers.iter().position(|x| !x.is_finite()).expect("the maximum is one of them");
            return Err(Error::NotFinite { index: index * BLOCK + within, value: numbers[within] });
        }
        *scale = match amax / (e2m1::MAX * global) {
            0.0 => SCALE_OF_ZEROS,
            wanted => e4m3::encode(wanted).max(SMALLEST_SCALE),
        };
        let unit = e4m3::decode(*scale) * global;
        // The sum turns −0 into 0, which is what ModelOpt makes of it.
        let codes = numbers.map(|x| e2m1::encode(x / unit + 0.0));
        *values = std::array::from_fn(|pair| codes[2 * pair] | codes[2 * pair + 1] << 4);
    }
    Ok(())
}

/// The bits of |x|: ordered as magnitudes are, with infinity and NaN on top.
#[inline]
fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn numbers_that_nvfp4_holds_survive_unchanged() {
        // A block of every value, times scales from small to the largest, which fixes the global scale at 1.
        let numbers: Vec<f32> = [0.25f32, 1.0, 18.0, 448.0]
            .iter()
            .flat_map(|scale| (0..16).map(move |code| e2m1::decode(code) * scale))
            .collect();
        let matrix = quantize(&numbers, 2, 32).unwrap();
        assert_eq!(matrix.global_scale(), 1.0);
        let back: Vec<f32> = (0..2)
            .flat_map(|row| {
                let mut out = vec![0.0; 32];
                matrix.dequantize_row(row, &mut out);
                out
            })
            .collect();
        assert_eq!(back, numbers);
    }

    #[test]
    fn zeros_and_tiny_numbers_quantise_to_finite_scales() {
        let zeros = quantize(&[0.0f32; 16], 1, 16).unwrap();
        assert_eq!((zeros.global_scale(), zeros.scales()), (1.0, &[SCALE_OF_ZEROS][..]));
        let tiny = quantize(&[f32::from_bits(1); 16], 1, 16).unwrap();
        assert!(tiny.global_scale() > 0.0);
        assert_eq!(quantize::<f32>(&[], 0, 16).unwrap().rows(), 0);
    }

    #[test]
    fn what_cannot_be_quantised_is_refused_with_its_index() {
        let mut numbers = vec![1.0f32; 64 * 48];
        assert!(matches!(quantize(&numbers, 128, 24), Err(Error::BlockAlignment { k: 24 })));
        assert!(matches!(quantize(&numbers, 63, 48), Err(Error::Mismatch { .. })));
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            numbers[2000] = bad;
            assert!(matches!(quantize(&numbers, 64, 48), Err(Error::NotFinite { index: 2000, .. })));
            assert!(matches!(quantize_with(&numbers, 64, 48, 1.0), Err(Error::NotFinite { index: 2000, .. })));
        }
        assert!(matches!(quantize_with(&[1.0f32; 16], 1, 16, 0.0), Err(Error::GlobalScale { .. })));
    }

    proptest! {
        #[test]
        fn the_error_is_at_most_half_a_step_of_the_block(numbers in prop::collection::vec(-1e4f32..1e4, 64)) {
            let matrix = quantize(&numbers, 1, 64).unwrap();
            let mut back = vec![0.0; 64];
            matrix.dequantize_row(0, &mut back);
            for (block, scale) in matrix.scales().iter().enumerate() {
                // The largest values are 4 and 6, a step of 2 apart; a scale rounded down by 1/16 cuts 6.375 to 6.
                let unit = e4m3::decode(*scale) * matrix.global_scale();
                for i in block * 16..(block + 1) * 16 {
                    prop_assert!((back[i] - numbers[i]).abs() <= unit * 1.000001, "{} became {}", numbers[i], back[i]);
                }
            }
        }

        #[test]
        fn the_type_of_the_numbers_does_not_matter(numbers in prop::collection::vec(-100f32..100.0, 32)) {
            let narrow: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f32(x)).collect();
            let widened: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            prop_assert_eq!(quantize(&narrow, 2, 16).unwrap(), quantize(&widened, 2, 16).unwrap());
        }
    }
}
