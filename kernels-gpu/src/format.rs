//! NVFP4 as it lies in memory, and the formats of C: what all kernels and the host agree on.

/// Consecutive elements of K that share a scale factor.
pub const BLOCK: u32 = 16;

/// Rows of a tile of the blocked scale layout (128 rows × 4 scale columns are 512 contiguous bytes).
pub const SCALE_TILE_ROWS: u32 = 128;

/// Scale columns of a tile of the blocked scale layout.
pub const SCALE_TILE_COLUMNS: u32 = 4;

/// Code of an output format: IEEE half precision.
pub const OUTPUT_F16: u32 = 0;

/// Code of an output format: bfloat16.
pub const OUTPUT_BF16: u32 = 1;

/// Where, in bytes, the four scales of `row` and of the `tile`-th four scale columns lie in the blocked layout
/// (cuBLAS, "1D Block Scaling Factors Layout"); `tiles` is the number of such fours in a row, rounded up.
pub const fn scale_word_offset(row: u32, tile: u32, tiles: u32) -> u64 {
    let (tile_row, row) = (row / SCALE_TILE_ROWS, row % SCALE_TILE_ROWS);
    let tile = tile_row as u64 * tiles as u64 + tile as u64;
    tile * (SCALE_TILE_ROWS * SCALE_TILE_COLUMNS) as u64 + (row % 32 * 16 + row / 32 * 4) as u64
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
