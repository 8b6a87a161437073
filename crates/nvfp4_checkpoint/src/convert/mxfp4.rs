//! Converts MXFP4 to NVFP4 without loss. An MXFP4 block of 32 has a power of two as its scale. Two NVFP4 blocks of 16
//! hold the same numbers with the same codes, if that power is an E4M3 scale times the tensor's global scale. E4M3 has
//! the powers 2⁻⁹ to 2⁸, so with a power of two as global scale, exponents may span 17. Blocks with smaller exponents
//! are rounded anew.

use std::ops::{AddAssign, Range};

use crate::source::{MX_BLOCK, Source, decode_mxfp4};
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, e4m3};
use nvfp4_core::quantize::{Loss, quantize_blocks_measured};

/// Bias of the exponents of MXFP4 scales.
const BIAS: i32 = 127;

/// Exponents of the largest and smallest power of two in E4M3.
const LARGEST: i32 = 8;
const SMALLEST: i32 = -9;

/// Number of blocks of 16 that keep their numbers, of all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exact {
    /// Blocks whose numbers do not change.
    pub blocks: usize,
    /// All blocks.
    pub all: usize,
}

impl AddAssign for Exact {
    fn add_assign(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.all += other.all;
    }
}

/// Returns the largest exponent of the blocks that are not all zeros, without bias; `None` if all numbers are 0, or
/// the matrix is not MXFP4.
///
/// # Errors
/// [`Error::NotFinite`] with the index in the matrix, if a scale is NaN.
pub(super) fn largest_exponent(source: &Source<'_>) -> Result<Option<i32>, Error> {
    let [rows, k] = source.sizes();
    let mut largest = None;
    for row in 0..rows {
        let Some((codes, exponents)) = source.mxfp4_row(row) else { return Ok(None) };
        for (block, (codes, &exponent)) in codes.chunks_exact(MX_BLOCK / 2).zip(exponents).enumerate() {
            if exponent == u8::MAX {
                return Err(Error::NotFinite { index: row * k + block * MX_BLOCK, value: f32::NAN });
            }
            if Some(i32::from(exponent)) > largest && !is_zero(codes) {
                largest = Some(i32::from(exponent));
            }
        }
    }
    Ok(largest.map(|exponent| exponent - BIAS))
}

/// Returns the exponent of the global scale for blocks with exponents up to `largest`.
pub(super) fn global_exponent(largest: Option<i32>) -> i32 {
    // A divisor, as compressed-tensors stores it, must be a finite f32.
    largest.map_or(0, |largest| (largest - LARGEST).max(f32::MIN_EXP - 1))
}

/// Converts some rows, with the global scale 2^`global`. Exact blocks keep their codes.
///
/// # Errors
/// [`Error::NotFinite`] with the index in these rows.
pub(super) fn convert_rows(
    source: &Source<'_>,
    rows: Range<usize>,
    global: i32,
    values: &mut [u8],
    scales: &mut [u8],
) -> Result<(Loss, Exact), Error> {
    let (mut loss, mut exact) = (Loss::default(), Exact::default());
    let values = values.chunks_exact_mut(MX_BLOCK / 2);
    let scales = scales.chunks_exact_mut(MX_BLOCK / BLOCK);
    let blocks = rows.flat_map(|row| {
        let (codes, exponents) = source.mxfp4_row(row).unwrap_or_default();
        codes.chunks_exact(MX_BLOCK / 2).zip(exponents)
    });
    let mut decoded = [0.0; MX_BLOCK];
    for (index, ((codes, &exponent), (values, scales))) in blocks.zip(values.zip(scales)).enumerate() {
        let power = i32::from(exponent) - BIAS - global;
        exact.all += MX_BLOCK / BLOCK;
        decode_mxfp4(codes, exponent, &mut decoded);
        if (SMALLEST..=LARGEST).contains(&power) || is_zero(codes) {
            exact.blocks += MX_BLOCK / BLOCK;
            values.copy_from_slice(codes);
            scales.fill(e4m3::encode(f32::exp2(power.clamp(SMALLEST, LARGEST) as f32)));
            loss = loss.join(Loss::none(&decoded));
        } else {
            let rounded = quantize_blocks_measured(&decoded, f32::exp2(global as f32), values, scales);
            loss = loss.join(rounded.map_err(|error| error.further_on(index * MX_BLOCK))?);
        }
    }
    Ok((loss, exact))
}

/// Whether all codes are 0 or -0.
fn is_zero(codes: &[u8]) -> bool {
    codes.iter().all(|code| code & 0x77 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Elements, Rows};
    use nvfp4_core::format::Matrix;

    /// Converts rows of one block per exponent; every code is `code`.
    fn converted(code: u8, exponents: &[u8]) -> (Vec<f32>, Vec<f32>, Exact) {
        let codes = vec![code * 0x11; exponents.len() * MX_BLOCK / 2];
        let k = exponents.len() * MX_BLOCK;
        let source = Source::new(Elements::Mxfp4 { codes: &codes, exponents }, [1, k], false, Rows::all(1));
        let global = global_exponent(largest_exponent(&source).unwrap());
        let (mut values, mut scales) = (vec![0; k / 2], vec![0; k / BLOCK]);
        let (loss, exact) = convert_rows(&source, 0..1, global, &mut values, &mut scales).unwrap();
        let mut buffer = Vec::new();
        let wanted = source.rows(0..1, &mut buffer);
        let wanted: Vec<f32> = (0..k).map(|index| wanted.at(index)).collect();
        let matrix = Matrix::new(1, k, values, scales, f32::exp2(global as f32)).unwrap();
        let mut got = vec![0.0; k];
        matrix.dequantize_row(0, &mut got);
        assert_eq!(loss.max_abs() == 0.0, got == wanted);
        (got, wanted, exact)
    }

    #[test]
    fn exponents_that_span_seventeen_change_no_number() {
        for code in 0..16 {
            let (got, wanted, exact) = converted(code, &[127, 110, 118, 127]);
            assert_eq!((got, exact), (wanted, Exact { blocks: 8, all: 8 }), "code {code}");
        }
    }

    #[test]
    fn only_blocks_below_the_range_are_rounded() {
        let (got, wanted, exact) = converted(1, &[127, 109, 110]);
        assert_eq!(exact, Exact { blocks: 4, all: 6 });
        assert!(got[..32] == wanted[..32] && got[64..] == wanted[64..]);
        // Zeros need no scale.
        assert_eq!(converted(0, &[127, 0, 254]).2, Exact { blocks: 6, all: 6 });
    }

    #[test]
    fn smallest_exponents_have_a_global_scale() {
        assert_eq!((global_exponent(Some(-127)), global_exponent(Some(3)), global_exponent(None)), (-126, -5, 0));
        let codes = [0x11; 16];
        let nan = Source::new(Elements::Mxfp4 { codes: &codes, exponents: &[255] }, [1, 32], false, Rows::all(1));
        assert!(matches!(largest_exponent(&nan), Err(Error::NotFinite { index: 0, .. })));
    }
}
