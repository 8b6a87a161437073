//! Rows of tokens sorted by expert, as bulk copies bring them to `wgmma`: on both sides.
//!
//! A *line* is [`LINE_BYTES`] of a row: what it has of one k-block in e4m3, or of half of one in 16-bit numbers; zeros where K has no
//! more (or NaN in a row of NaN). Lines lie in the order of K, `[lines of a row][rows]`, so that a line of each of a tile's rows is
//! one piece of memory, and one copy. Each
//! expert's rows begin at a multiple of [`ROW_MULTIPLE`]. In a line, the 16-byte chunks are swizzled by the row, as `wgmma` wants
//! rows of 128 bytes (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Swizzling Modes", 128-byte): a tile
//! begins at a multiple of eight rows, and lies at a multiple of 1024 bytes in shared memory.

use crate::{
    format::BLOCK,
    units::{K_BLOCK, k_blocks},
};

/// Bytes of a line.
pub const LINE_BYTES: u32 = 128;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16;

/// Chunks of a line.
pub const LINE_CHUNKS: u32 = LINE_BYTES / CHUNK_BYTES;

/// What the first row of each expert is a multiple of: the rows after which the swizzle repeats.
pub const ROW_MULTIPLE: u32 = 8;

/// The most rows of so many choices of so many experts, if each expert's are filled up to a multiple of `row_multiple`.
pub const fn most_rows(choices: u64, experts: u32, row_multiple: u32) -> u64 {
    let hit = if choices < experts as u64 { choices } else { experts as u64 };
    choices + hit * (row_multiple - 1) as u64
}

/// The offset of a row's line of this index, in bytes, where memory holds so many rows.
#[inline(always)]
pub const fn line(rows: u32, index: u32, row: u32) -> u64 {
    (index as u64 * rows as u64 + row as u64) * LINE_BYTES as u64
}

/// The offset of a chunk in the line of a row.
#[inline(always)]
pub const fn chunk(row: u32, chunk: u32) -> u32 {
    (chunk ^ row) % LINE_CHUNKS * CHUNK_BYTES
}

/// Lines that a row of 16-bit numbers has of a k-block.
pub const K_BLOCK_LINES: u32 = K_BLOCK * 2 / LINE_BYTES;

/// Elements of 16 bits of a chunk.
pub const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Rows behind the last one that a copy of lines of 16-bit numbers may bring along: a product may be wider than its tile.
pub const SPARE_ROWS: u32 = 64;

/// Bytes of so many rows of `k` 16-bit numbers.
pub const fn bits16_bytes(rows: u64, k: u32) -> u64 {
    ((k_blocks(k) * K_BLOCK_LINES) as u64 * rows + SPARE_ROWS as u64) * LINE_BYTES as u64
}

/// The offset of a 16-bit number, in bytes, where memory holds so many rows of `k`: the one at this position of all columns in the
/// order of K.
#[inline(always)]
pub const fn bits16_place(rows: u32, k: u32, row: u32, position: u32) -> u64 {
    let (mut k_block, mut in_block) = (position / K_BLOCK, position % K_BLOCK);
    // The last 16 columns may be a k-block of their own.
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
    fn chunks_of_eight_rows_fill_them_and_each_column_of_chunks_meets_every_bank() {
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
    fn every_16_bit_number_has_a_place_in_the_lines_of_its_k_block() {
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
    fn rows_are_most_where_each_expert_lacks_one_of_a_whole_multiple() {
        assert_eq!([most_rows(3, 8, 8), most_rows(16, 2, 8), most_rows(100, 8, 1)], [24, 30, 100]);
    }
}
