//! Rows of NVFP4 as the kernels of an MoE layer's products on Blackwell read them, tokens and weights: on both sides.
//!
//! *Values* are rows of [`row_bytes`], the element of even K in the low nibble; what pads a row is never read. *Scales* lie in the
//! blocked layout ([`format`](crate::format)), padded to whole tiles of it.
//!
//! Weights have a matrix of scales for each matrix of values. Tokens are sorted by expert, and each *tile of tokens*, of up to
//! [`TILE_TOKENS`], has scale tiles of its own, in which its first token is the first row. So a product's tile of tokens never begins
//! inside of a scale tile, whatever number of rows the experts before it have.

use crate::format::{BLOCK, SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS, scale_row};

/// The most tokens of a tile: rows of a scale tile.
pub const TILE_TOKENS: u32 = SCALE_TILE_ROWS;

/// The N of the tensor core's products is a multiple of this, and the scales of a tile's tokens are written up to such a one.
pub const TOKEN_STEP: u32 = 8;

/// Bytes from one row of values to the next: those of K elements, filled up to what a tensor map asks for.
pub const fn row_bytes(k: u32) -> u32 {
    k.div_ceil(2 * MAP_ALIGNMENT) * MAP_ALIGNMENT
}

/// Rows that a tensor map describes are multiples of so many bytes apart (CUDA driver API, `cuTensorMapEncodeTiled`).
const MAP_ALIGNMENT: u32 = 16;

/// Scale tiles along K.
pub const fn scale_tiles(k: u32) -> u32 {
    k.div_ceil(SCALE_TILE_K)
}

/// Bytes of the scales of a tile of tokens.
pub const fn token_scale_bytes(k: u32) -> u64 {
    scale_tiles(k) as u64 * SCALE_TILE_BYTES as u64
}

/// Bytes of the scales of a matrix of weights.
pub const fn weight_scale_bytes(rows: u32, k: u32) -> u64 {
    rows.div_ceil(SCALE_TILE_ROWS) as u64 * token_scale_bytes(k)
}

/// Bytes of the values of so many rows.
pub const fn value_bytes(rows: u64, k: u32) -> u64 {
    rows * row_bytes(k) as u64
}

/// The offset of the scale that a token of a tile has for a block of K, from the scales of the first tile of tokens on.
#[inline(always)]
pub fn token_scale(tile: u32, token: u32, block: u32, k: u32) -> u64 {
    let columns = SCALE_TILE_K / BLOCK;
    let tile = u64::from(tile) * token_scale_bytes(k) + u64::from(block / columns) * u64::from(SCALE_TILE_BYTES);
    tile + u64::from(scale_row(0_u32, token) + block % columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

    #[test]
    fn rows_begin_where_a_tensor_map_may_have_them() {
        assert_eq!([16, 32, 48, 2880].map(row_bytes), [16, 16, 32, 1440]);
        assert_eq!([16, 64, 80].map(scale_tiles), [1, 1, 2]);
        assert_eq!(weight_scale_bytes(144, 80), 2 * 2 * 512);
    }

    #[test]
    fn each_scale_of_two_tiles_has_a_place_of_its_own() {
        let k = 80;
        let of_tile = |tile| (0..TILE_TOKENS).flat_map(move |token| (0..8).map(move |block| (tile, token, block)));
        let places: BTreeSet<_> = (0..2).flat_map(of_tile).map(|(t, r, b)| token_scale(t, r, b, k)).collect();
        assert_eq!((places.len() as u64, places.last()), (2 * token_scale_bytes(k), Some(&(2 * 1024 - 1))));
    }
}
