//! The blocked layout of scale factors, which tensor cores and cuBLAS read.
//!
//! Rows are padded to 128 and scale columns (blocks of K) to 4. Each 128 × 4 tile is 512 contiguous bytes, in which
//! scale (r, c) is byte `(r % 32)·16 + (r % 128 / 32)·4 + c % 4`; tiles follow row-major. Source: cuBLAS documentation,
//! "1D Block Scaling Factors Layout"; PTX ISA, "Scale Factor B/A Layout" of `tcgen05.mma` `.block16`.

use std::borrow::Cow;

use kernels_gpu::format::{SCALE_TILE_COLUMNS, SCALE_TILE_ROWS, scale_word_offset};

use crate::error::Error;

/// Rows per tile.
pub const TILE_ROWS: usize = SCALE_TILE_ROWS as usize;
/// Scale columns per tile, which cover 64 elements of K.
pub const TILE_COLUMNS: usize = SCALE_TILE_COLUMNS as usize;
const TILE_BYTES: usize = TILE_ROWS * TILE_COLUMNS;

/// Number of bytes of the blocked layout for `rows` rows of `columns` scales, including padding.
pub const fn len(rows: usize, columns: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * columns.div_ceil(TILE_COLUMNS) * TILE_BYTES
}

/// Returns the offset of the scale at (`row`, `column`) for rows of `columns` scales; rows and columns must be below
/// 2³².
#[inline]
pub fn offset(row: usize, column: usize, columns: usize) -> usize {
    let (tile, tiles) = (column / TILE_COLUMNS, columns.div_ceil(TILE_COLUMNS));
    scale_word_offset(row as u32, tile as u32, tiles as u32) as usize + column % TILE_COLUMNS
}

/// Writes row-major scales (`rows × columns` bytes) into `blocked` in the blocked layout; its padding becomes zero.
///
/// # Panics
/// Panics if `linear` is not `rows × columns` bytes long, or `blocked` not [`len`]`(rows, columns)`.
pub fn write_linear(rows: usize, columns: usize, linear: &[u8], blocked: &mut [u8]) {
    assert_eq!(linear.len(), rows * columns, "`linear` needs one byte per scale");
    assert_eq!(blocked.len(), len(rows, columns), "`blocked` needs the length of the blocked layout");
    blocked.fill(0);
    for row in 0..rows {
        // Four neighboring columns stay adjacent.
        for (tile, scales) in linear[row * columns..][..columns].chunks(TILE_COLUMNS).enumerate() {
            let at = offset(row, tile * TILE_COLUMNS, columns);
            blocked[at..at + scales.len()].copy_from_slice(scales);
        }
    }
}

/// Scale factors in the blocked layout: borrowed bytes, or converted and owned bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedScales<'a> {
    rows: usize,
    columns: usize,
    bytes: Cow<'a, [u8]>,
}

impl<'a> BlockedScales<'a> {
    /// Takes bytes in the blocked layout.
    ///
    /// # Errors
    /// [`Error::Length`] unless the length is exactly [`len`]`(rows, columns)`.
    pub fn new(rows: usize, columns: usize, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self, Error> {
        let bytes = bytes.into();
        let expected = len(rows, columns);
        if bytes.len() != expected {
            return Err(Error::Length { what: "blocked scales", got: bytes.len(), expected });
        }
        Ok(Self { rows, columns, bytes })
    }

    /// Converts row-major scales (`rows × columns` bytes); the padding is zero.
    ///
    /// # Panics
    /// Panics if `linear` is not `rows × columns` bytes long.
    pub fn from_linear(rows: usize, columns: usize, linear: &[u8]) -> BlockedScales<'static> {
        let mut bytes = vec![0; len(rows, columns)];
        write_linear(rows, columns, linear, &mut bytes);
        BlockedScales { rows, columns, bytes: bytes.into() }
    }

    /// Converts back to row-major scales.
    pub fn to_linear(&self) -> Vec<u8> {
        let mut linear = Vec::with_capacity(self.rows * self.columns);
        for row in 0..self.rows {
            for column in (0..self.columns).step_by(TILE_COLUMNS) {
                let at = offset(row, column, self.columns);
                linear.extend_from_slice(&self.bytes[at..at + TILE_COLUMNS.min(self.columns - column)]);
            }
        }
        linear
    }

    /// Returns the bytes, including padding.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes, including padding, as owned or borrowed data.
    pub fn into_bytes(self) -> Cow<'a, [u8]> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_a_bijection_onto_the_padded_tiles() {
        let (rows, columns) = (256, 12);
        let mut seen = vec![false; len(rows, columns)];
        for row in 0..rows {
            for column in 0..columns {
                assert!(!std::mem::replace(&mut seen[offset(row, column, columns)], true));
            }
        }
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn conversion_moves_every_scale_and_pads_with_zeros() {
        for (rows, columns) in [(0, 4), (1, 1), (7, 3), (128, 4), (129, 5), (300, 180)] {
            let linear: Vec<u8> = (0..rows * columns).map(|i| (i % 126 + 1) as u8).collect();
            let blocked = BlockedScales::from_linear(rows, columns, &linear);
            let mut padding = blocked.bytes().to_vec();
            for row in 0..rows {
                for column in 0..columns {
                    let byte = &mut padding[offset(row, column, columns)];
                    assert_eq!(std::mem::take(byte), linear[row * columns + column]);
                }
            }
            assert!(padding.iter().all(|&byte| byte == 0));
            assert_eq!(blocked.to_linear(), linear);
        }
    }

    #[test]
    fn valid_bytes_are_borrowed_and_wrong_lengths_refused() {
        let bytes = vec![1; len(130, 5)];
        let view = BlockedScales::new(130, 5, &bytes[..]).unwrap();
        assert_eq!(view.bytes().as_ptr(), bytes.as_ptr());
        assert!(BlockedScales::new(130, 5, &bytes[1..]).is_err());
    }
}
