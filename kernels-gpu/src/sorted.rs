//! Rows of tokens sorted by expert, as bulk copies bring them to `wgmma`: on both sides.
//!
//! A *line* is what one row has of one k-block: [`LINE_BYTES`], whatever the element's type, zeros where K has no more (or NaN in a row
//! of NaN). Lines lie
//! k-block by k-block, `[k-blocks][rows]`, so that the rows of a tile are one piece of memory in each k-block, and one copy. Each
//! expert's rows begin at a multiple of [`ROW_MULTIPLE`]. In a line, the 16-byte chunks are swizzled by the row, as `wgmma` wants
//! rows of 128 bytes (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout: Swizzling Modes", 128-byte): a tile
//! begins at a multiple of eight rows, and lies at a multiple of 1024 bytes in shared memory.

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

/// The offset of a row's line of a k-block, in bytes, where memory holds so many rows.
#[inline(always)]
pub const fn line(rows: u32, k_block: u32, row: u32) -> u64 {
    (k_block as u64 * rows as u64 + row as u64) * LINE_BYTES as u64
}

/// The offset of a chunk in the line of a row.
#[inline(always)]
pub const fn chunk(row: u32, chunk: u32) -> u32 {
    (chunk ^ row) % LINE_CHUNKS * CHUNK_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

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
    fn rows_are_most_where_each_expert_lacks_one_of_a_whole_multiple() {
        assert_eq!([most_rows(3, 8, 8), most_rows(16, 2, 8), most_rows(100, 8, 1)], [24, 30, 100]);
    }
}
