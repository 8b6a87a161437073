//! A packed NVFP4 matrix over borrowed or shared bytes.

use std::ops::Range;

use super::blocked::BlockedScales;
use super::bytes::Bytes;
use super::{BLOCK, e2m1, e4m3};
use crate::error::Error;

/// A K-major matrix `[rows, K]` in NVFP4.
///
/// Two values share a byte, with the even element of K in the low nibble; scales are row-major `[rows, K/16]`.
/// [`Matrix::new`] checks that all scales are valid (see [`e4m3::is_scale`]) and that the global scale is finite and
/// not negative.
///
/// ```
/// use nvfp4_core::format::Matrix;
/// let (values, scales) = ([0x72; 16], [0x38; 2]); // pairs of (1, 6), scales of 1
/// let matrix = Matrix::new(1, 32, &values[..], &scales[..], 0.5)?;
/// let mut row = vec![0.0; 32];
/// matrix.dequantize_row(0, &mut row);
/// assert_eq!(row[..2], [0.5, 3.0]);
/// # Ok::<_, nvfp4_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix<'a> {
    rows: usize,
    k: usize,
    values: Bytes<'a>,
    scales: Bytes<'a>,
    global_scale: f32,
}

impl<'a> Matrix<'a> {
    /// Takes `rows × K/2` bytes of values and `rows × K/16` scales.
    ///
    /// # Errors
    /// Returns an error if K is not a multiple of 16, a length is wrong, a scale is negative or NaN, or the global
    /// scale is negative, infinite or NaN.
    pub fn new(
        rows: usize,
        k: usize,
        values: impl Into<Bytes<'a>>,
        scales: impl Into<Bytes<'a>>,
        global_scale: f32,
    ) -> Result<Self, Error> {
        let (values, scales) = (values.into(), scales.into());
        if !k.is_multiple_of(BLOCK) {
            return Err(Error::BlockAlignment { k });
        }
        let expected = |per_row: usize| rows.checked_mul(per_row).ok_or(Error::TooLarge);
        for (what, got, expected) in
            [("packed values", values.len(), expected(k / 2)?), ("scales", scales.len(), expected(k / BLOCK)?)]
        {
            if got != expected {
                return Err(Error::Length { what, got, expected });
            }
        }
        if let Some(at) = scales.iter().position(|&code| !e4m3::is_scale(code)) {
            let blocks = k / BLOCK;
            return Err(Error::BlockScale { code: scales[at], row: at / blocks, block: at % blocks });
        }
        if !global_scale.is_finite() || global_scale < 0.0 {
            return Err(Error::GlobalScale { value: global_scale });
        }
        Ok(Self { rows, k, values, scales, global_scale })
    }

    /// Number of rows: tokens of activations (M), or output features of weights (N).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, a multiple of 16.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Packed values, `rows × K/2` bytes.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// Row-major scales, `rows × K/16` bytes.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Global scale: the factor of the whole matrix.
    pub fn global_scale(&self) -> f32 {
        self.global_scale
    }

    /// Packed values of a row, `K/2` bytes.
    #[inline]
    pub fn row_values(&self, row: usize) -> &[u8] {
        &self.values[row * (self.k / 2)..][..self.k / 2]
    }

    /// Scales of a row, `K/16` bytes.
    #[inline]
    pub fn row_scales(&self, row: usize) -> &[u8] {
        &self.scales[row * (self.k / BLOCK)..][..self.k / BLOCK]
    }

    /// Returns the scales in the layout that tensor cores read.
    pub fn blocked_scales(&self) -> BlockedScales<'static> {
        BlockedScales::from_linear(self.rows, self.k / BLOCK, &self.scales)
    }

    /// Returns a view of some rows, for example the tokens of an expert, without copying.
    ///
    /// # Panics
    /// Panics if the range exceeds the rows.
    pub fn slice_rows(&self, rows: Range<usize>) -> Matrix<'_> {
        let bytes = |per_row: usize| rows.start * per_row..rows.end * per_row;
        Matrix {
            rows: rows.len(),
            k: self.k,
            values: Bytes::Borrowed(&self.values[bytes(self.k / 2)]),
            scales: Bytes::Borrowed(&self.scales[bytes(self.k / BLOCK)]),
            global_scale: self.global_scale,
        }
    }

    /// Writes the numbers of a row, global scale included, as f32.
    ///
    /// # Panics
    /// Panics if `out` is not K long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        self.decode_row(row, self.global_scale, out);
    }

    /// Writes the numbers of a row, without the global scale, as exact f32.
    ///
    /// # Panics
    /// Panics if `out` is not K long.
    pub fn numbers_row(&self, row: usize, out: &mut [f32]) {
        self.decode_row(row, 1.0, out);
    }

    fn decode_row(&self, row: usize, global_scale: f32, out: &mut [f32]) {
        assert_eq!(out.len(), self.k, "`out` needs K numbers");
        for ((out, values), &scale) in self.blocks(row, out) {
            let scale = e4m3::decode(scale) * global_scale;
            for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *pair = [e2m1::decode(byte) * scale, e2m1::decode(byte >> 4) * scale];
            }
        }
    }

    /// Writes the numbers of a row, without the global scale, as exact integers in units of 2⁻¹⁰
    /// ([`super::FIXED_POINT_BITS`]); their magnitudes are at most 12 · 229,376 < 2²².
    ///
    /// # Panics
    /// Panics if `out` is not K long.
    pub fn fixed_point_row(&self, row: usize, out: &mut [i32]) {
        assert_eq!(out.len(), self.k, "`out` needs K numbers");
        for ((out, values), &scale) in self.blocks(row, out) {
            let scale = e4m3::fixed_point(scale);
            for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *pair = [byte & 0xF, byte >> 4].map(|code| i32::from(e2m1::DOUBLED[usize::from(code)]) * scale);
            }
        }
    }

    /// Iterates over the blocks of a row: output slice, packed values and scale.
    fn blocks<'s, T>(
        &'s self,
        row: usize,
        out: &'s mut [T],
    ) -> impl Iterator<Item = ((&'s mut [T], &'s [u8]), &'s u8)> {
        out.chunks_exact_mut(BLOCK).zip(self.row_values(row).chunks_exact(BLOCK / 2)).zip(self.row_scales(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_lengths_scales_and_sizes_are_located() {
        let new = |k, values: usize, scales: Vec<u8>, global| Matrix::new(2, k, vec![0; values], scales, global);
        assert!(new(32, 32, vec![0; 4], 1.0).is_ok());
        assert!(matches!(new(24, 24, vec![0; 3], 1.0), Err(Error::BlockAlignment { k: 24 })));
        assert!(matches!(new(32, 31, vec![0; 4], 1.0), Err(Error::Length { what: "packed values", .. })));
        assert!(matches!(new(32, 32, vec![0; 5], 1.0), Err(Error::Length { what: "scales", .. })));
        for code in [0x7F, 0x80, 0xFF] {
            let refused = new(32, 32, vec![0, 0, 0x7E, code], 1.0);
            assert!(matches!(refused, Err(Error::BlockScale { row: 1, block: 1, .. })), "{code:#x}");
        }
        for global in [f32::NAN, f32::INFINITY, -1.0] {
            assert!(matches!(new(32, 32, vec![0; 4], global), Err(Error::GlobalScale { .. })));
        }
        assert!(matches!(Matrix::new(usize::MAX, 16, vec![], vec![], 1.0), Err(Error::TooLarge)));
    }

    #[test]
    fn fixed_point_matches_the_dequantized_number() {
        for scale in 0..=e4m3::MAX_CODE {
            let values: Vec<u8> = (0..8).map(|i| (2 * i) | (2 * i + 1) << 4).collect();
            let matrix = Matrix::new(1, 16, values, vec![scale], 1.0).unwrap();
            let (mut fixed, mut float) = ([0; 16], [0.0; 16]);
            matrix.fixed_point_row(0, &mut fixed);
            matrix.dequantize_row(0, &mut float);
            for code in 0..16u8 {
                let number = e2m1::decode(code) * e4m3::decode(scale);
                assert_eq!(float[usize::from(code)], number);
                assert_eq!(fixed[usize::from(code)] as f32 / 1024.0, number);
            }
        }
    }

    #[test]
    fn row_slices_are_borrowed() {
        let matrix = Matrix::new(4, 16, (0..32).collect::<Vec<u8>>(), vec![1, 2, 3, 4], 2.0).unwrap();
        let slice = matrix.slice_rows(1..3);
        assert_eq!((slice.rows(), slice.scales(), slice.row_values(1)), (2, &[2, 3][..], matrix.row_values(2)));
        assert_eq!(slice.values().as_ptr(), matrix.row_values(1).as_ptr());
        assert_eq!(matrix.slice_rows(4..4).rows(), 0);
    }
}
