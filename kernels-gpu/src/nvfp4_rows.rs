//! Layout of NVFP4 tokens and weights in MoE layers on Blackwell, shared by host and device.
//!
//! *Values* are rows of [`row_bytes`], the element of even K in the low nibble; row padding is never read. *Scales* lie
//! in the blocked layout ([`format`](crate::format)), padded to whole scale tiles.
//!
//! Weights have one matrix of scales per matrix of values. Tokens are sorted by expert. Each *tile of tokens*, up to
//! [`TILE_TOKENS`], has its own scale tiles, and its first token is their first row. So a GEMM tile never starts inside
//! a scale tile, whatever the row counts of the preceding experts.

use crate::format::{BLOCK, SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS, scale_row};

/// Maximum number of tokens per tile: the rows of a scale tile.
pub const TILE_TOKENS: u32 = SCALE_TILE_ROWS;

/// The N of an MMA is a multiple of this. Scales of a tile's tokens are written up to the next multiple.
pub const TOKEN_STEP: u32 = 8;

/// Elements of K per k-block: the content of one stage of a kernel that multiplies NVFP4.
pub const K_BLOCK: u32 = 256;

/// Bytes of a row of values in a k-block: the span of the 128-byte swizzle, and the inner size of every tensor map's
/// box.
pub const K_BLOCK_BYTES: u32 = K_BLOCK / 2;

/// Bytes from one row of values to the next: K elements, padded to the alignment of a tensor map.
pub const fn row_bytes(k: u32) -> u32 {
    k.div_ceil(2 * MAP_ALIGNMENT) * MAP_ALIGNMENT
}

/// The row pitch of a tensor map is a multiple of this many bytes (CUDA driver API, `cuTensorMapEncodeTiled`).
const MAP_ALIGNMENT: u32 = 16;

/// Number of scale tiles along K.
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

/// Bytes of the values of `rows` rows.
pub const fn value_bytes(rows: u64, k: u32) -> u64 {
    rows * row_bytes(k) as u64
}

/// Offset of the scale of a token's block in tile `tile`, in bytes from the scales of the first tile of tokens.
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
    fn row_pitch_meets_tensor_map_alignment() {
        assert_eq!([16, 32, 48, 2880].map(row_bytes), [16, 16, 32, 1440]);
        assert_eq!([16, 64, 80].map(scale_tiles), [1, 1, 2]);
        assert_eq!(weight_scale_bytes(144, 80), 2 * 2 * 512);
    }

    #[test]
    fn scales_of_two_tiles_do_not_overlap() {
        let k = 80;
        let of_tile = |tile| (0..TILE_TOKENS).flat_map(move |token| (0..8).map(move |block| (tile, token, block)));
        let places: BTreeSet<_> = (0..2).flat_map(of_tile).map(|(t, r, b)| token_scale(t, r, b, k)).collect();
        assert_eq!((places.len() as u64, places.last()), (2 * token_scale_bytes(k), Some(&(2 * 1024 - 1))));
    }
}
