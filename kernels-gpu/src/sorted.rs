//! Layout of token rows sorted by expert, as bulk copies bring them to `wgmma`; shared by host and device.
//!
//! A *line* is [`LINE_BYTES`] of a row: one k-block in e4m3, or half of a k-block in 16-bit numbers. Columns past K are
//! zeros (or NaN in a row of NaN). Lines lie in the order of K, `[lines of a row][rows]`, so one line of all rows of a
//! tile is contiguous, and one bulk copy brings it.
//!
//! Each expert's rows begin at a multiple of [`ROW_MULTIPLE`]. In a line, the 16-byte chunks are swizzled by the row,
//! as `wgmma` requires for rows of 128 bytes (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout:
//! Swizzling Modes", 128-byte): a tile begins at a multiple of eight rows, and lies at a multiple of 1024 bytes in
//! shared memory.

use crate::{
    format::BLOCK,
    units::{K_BLOCK, k_blocks},
};

/// Bytes of a line.
pub const LINE_BYTES: u32 = 128;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16;

/// Number of chunks per line.
pub const LINE_CHUNKS: u32 = LINE_BYTES / CHUNK_BYTES;

/// The first row of each expert is a multiple of this: the swizzle repeats after this many rows.
pub const ROW_MULTIPLE: u32 = 8;

/// Maximum number of rows for `choices` choices of `experts` experts, with each expert's rows padded to a multiple of
/// `row_multiple`.
pub const fn most_rows(choices: u64, experts: u32, row_multiple: u32) -> u64 {
    let hit = if choices < experts as u64 { choices } else { experts as u64 };
    choices + hit * (row_multiple - 1) as u64
}

/// Offset in bytes of line `index` of row `row`, in memory that holds `rows` rows.
#[inline(always)]
pub const fn line(rows: u32, index: u32, row: u32) -> u64 {
    (index as u64 * rows as u64 + row as u64) * LINE_BYTES as u64
}

/// Offset in bytes of a chunk within the line of a row.
#[inline(always)]
pub const fn chunk(row: u32, chunk: u32) -> u32 {
    (chunk ^ row) % LINE_CHUNKS * CHUNK_BYTES
}

/// Lines per k-block of a row of 16-bit numbers.
pub const K_BLOCK_LINES: u32 = K_BLOCK * 2 / LINE_BYTES;

/// Number of 16-bit elements per chunk.
pub const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Rows past the last one that a copy of 16-bit lines may read, since an MMA may be wider than its tile.
pub const SPARE_ROWS: u32 = 64;

/// Bytes of `rows` rows of `k` 16-bit numbers.
pub const fn bits16_bytes(rows: u64, k: u32) -> u64 {
    ((k_blocks(k) * K_BLOCK_LINES) as u64 * rows + SPARE_ROWS as u64) * LINE_BYTES as u64
}

/// Offset in bytes of a row's 16-bit number at `position` in the order of K, in memory that holds `rows` rows of `k`
/// numbers.
#[inline(always)]
pub const fn bits16_place(rows: u32, k: u32, row: u32, position: u32) -> u64 {
    let (mut k_block, mut in_block) = (position / K_BLOCK, position % K_BLOCK);
    // The last 16 columns may form a separate k-block.
    let last = k_blocks(k) - 1;
    if last > k / K_BLOCK && position >= k - BLOCK {
        (k_block, in_block) = (last, position - (k - BLOCK));
    }
    let chunk_index = in_block / CHUNK_ELEMENTS;
    line(rows, k_block * K_BLOCK_LINES + chunk_index / LINE_CHUNKS, row)
        + (chunk(row, chunk_index % LINE_CHUNKS) + in_block % CHUNK_ELEMENTS * 2) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

    use crate::units::{block_columns, block_start};

    #[test]
    fn chunks_fill_eight_rows_and_meet_every_bank() {
        let place = |row: u32, index: u32| line(64, 1, row) + u64::from(chunk(row, index));
        let all: BTreeSet<_> = (0..8).flat_map(|row| (0..8).map(move |index| place(row, index))).collect();
        assert_eq!(
            all.into_iter().collect::<std::vec::Vec<_>>(),
            (0..64).map(|at| 8192 + 16 * at).collect::<std::vec::Vec<_>>()
        );
        for index in 0..8 {
            let banks: BTreeSet<_> = (0..8).map(|row| place(row, index) % 128).collect();
            assert_eq!(banks.len(), 8);
        }
    }

    #[test]
    fn bits16_numbers_lie_in_lines_of_their_k_block() {
        for k in [16, 48, 128, 176, 240, 272] {
            let mut places = BTreeSet::new();
            for k_block in 0..k_blocks(k) {
                let (start, columns) = (block_start(k, k_block), block_columns(k, k_block));
                for (row, column) in (0..24).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                    let place = bits16_place(24, k, row, start + column);
                    let of_line = (k_block * K_BLOCK_LINES + column / 64) as u64 * 24 + u64::from(row);
                    assert_eq!(place / 128, of_line, "{k} columns: row {row}, column {}", start + column);
                    assert_eq!(place as u32 % 128 / 16, (column / 8 % 8) ^ (row % 8));
                    assert!(place.is_multiple_of(2) && places.insert(place));
                }
            }
            assert_eq!(places.len(), 24 * k as usize);
            assert!(*places.last().unwrap() < bits16_bytes(24, k));
        }
    }

    #[test]
    fn most_rows_counts_the_padding_of_each_expert() {
        assert_eq!([most_rows(3, 8, 8), most_rows(16, 2, 8), most_rows(100, 8, 1)], [24, 30, 100]);
    }
}
