//! Layout of NVFP4 in memory, and the formats of C, as all kernels and the host use them.
//!
//! A value is e2m1. Two values share a byte, with the element of even K in the low nibble. Every [`BLOCK`] values along
//! K share a scale factor, an e4m3 without sign. Scales lie in the *blocked layout* (cuBLAS, "1D Block Scaling Factors
//! Layout"): tiles of 128 rows × 4 scale columns, with the tiles of the same rows in sequence along K, padded to whole
//! tiles.

use core::ops::Add;

/// Number of consecutive elements of K that share a scale factor.
pub const BLOCK: u32 = 16;

/// Rows of a tile of the blocked scale layout.
pub const SCALE_TILE_ROWS: u32 = 128;

/// Scale columns of a tile of the blocked scale layout.
pub const SCALE_TILE_COLUMNS: u32 = 4;

/// Elements of K that a tile of the blocked scale layout covers.
pub const SCALE_TILE_K: u32 = BLOCK * SCALE_TILE_COLUMNS;

/// Bytes of a tile of the blocked scale layout.
pub const SCALE_TILE_BYTES: u32 = SCALE_TILE_ROWS * SCALE_TILE_COLUMNS;

/// Largest e2m1 value.
pub const LARGEST_VALUE: f32 = 6.0;

/// Scale of a block of small numbers, 2⁻⁹: the smallest nonzero scale.
pub const LEAST_SCALE: u8 = 1;

/// Scale of a block with a NaN or infinite number.
pub const NAN_SCALE: u8 = 0x7f;

/// Code of an output format: IEEE half precision.
pub const OUTPUT_F16: u32 = 0;

/// Code of an output format: bfloat16.
pub const OUTPUT_BF16: u32 = 1;

/// Place of a row's four scales, one word, in a tile of the blocked layout at `tile`, which is an address or an offset.
#[inline(always)]
pub fn scale_row<Place: Add<u32, Output = Place>>(tile: Place, row: u32) -> Place {
    tile + row % 32 * 16 + row % SCALE_TILE_ROWS / 32 * 4
}

/// Offset of the four scales of row `row` in the `tile`-th tile along K, in bytes from the start of a matrix of scales
/// with `tiles` tiles along K.
#[inline(always)]
pub fn scale_word_offset(row: u32, tile: u32, tiles: u32) -> u64 {
    let tile = u64::from(row / SCALE_TILE_ROWS) * u64::from(tiles) + u64::from(tile);
    tile * u64::from(SCALE_TILE_BYTES) + u64::from(scale_row(0_u32, row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_words_follow_the_blocked_layout() {
        for (row, column, columns) in [(0, 0, 4), (1, 2, 4), (33, 5, 12), (127, 3, 4), (128, 0, 8), (300, 23, 28)] {
            // byte (r%32)*16 + (r%128/32)*4 + c%4 of the 512 bytes of tile (r/128, c/4)
            let byte = (row % 32) * 16 + (row % 128 / 32) * 4 + column % 4;
            let expected = ((row / 128) * (columns / 4) + column / 4) * 512 + byte;
            let word = scale_word_offset(row, column / 4, columns / 4);
            assert_eq!(word + u64::from(column % 4), u64::from(expected), "{row} {column} {columns}");
        }
    }
}
