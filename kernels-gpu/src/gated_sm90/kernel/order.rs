//! In which order products sum over K, and where a stage's elements lie: what those who decode weights and those who decode
//! tokens agree on.
//!
//! Of a row's 64 packed bytes in a stage, the fragment's lanes 0 to 3 take 16 each: four words of 8 elements. Word t serves
//! products 2t and 2t+1. Elements i and i+4 of a word, i = 0 to 3, decode into one register, a pair of neighbouring columns
//! of the product: i = 0, 1 are the pairs of product 2t's left and right half, i = 2, 3 those of product 2t+1's. So chunk
//! 4t+i of B, 8 columns, has the pairs i of the words t of lanes 0 to 3.

use cuda_std::wgmma;

use crate::{
    format::BLOCK,
    gated_sm90::abi::{CORE_MATRIX_ROWS, K_ALIGNMENT, LANE_BYTES, STRIP_BYTES},
};

/// Words of a row that a lane decodes a stage.
pub const LANE_WORDS: u32 = LANE_BYTES / 4;

/// Elements of a word.
pub const WORD_ELEMENTS: u32 = 8;

/// Registers, of two elements each, that a word decodes to.
pub const WORD_PAIRS: usize = 4;

/// Scale factors of a lane's words.
pub const LANE_SCALES: u32 = LANE_WORDS * WORD_ELEMENTS / BLOCK;

/// Bytes of a token in a chunk of B, and from a chunk of eight tokens to the next: one core matrix behind the other
/// ("Canonical Layouts", no swizzle).
pub const CHUNK_BYTES: u32 = 16;
pub const CHUNK_STRIDE: u32 = CORE_MATRIX_ROWS * CHUNK_BYTES;

const _: () = assert!(LANE_BYTES * 2 == K_ALIGNMENT && LANE_SCALES == 2);
const _: () = assert!(LANE_WORDS * WORD_PAIRS as u32 * CHUNK_STRIDE == STRIP_BYTES && wgmma::K * 2 == 2 * CHUNK_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gated_sm90::abi::{K_BLOCK_BYTES, ROW_LANES, lane_offset};

    extern crate std;
    use std::collections::BTreeSet;

    /// Shared memory serves 128 bytes at a time: a quarter warp's loads of 16 bytes.
    fn meet_every_bank_once(offsets: impl Iterator<Item = u32>, bytes: u32) {
        let banks: BTreeSet<_> = offsets.map(|offset| offset % 128 / bytes).collect();
        assert_eq!(banks.len() as u32, 128 / bytes);
    }

    #[test]
    fn loads_of_weights_meet_every_bank_once() {
        // Two neighbours of a fragment's rows have an even row of the panel and an odd one.
        for [even, odd] in [[0, 3], [4, 7], [8, 11], [2, 1], [6, 5]] {
            meet_every_bank_once(
                [even, odd].into_iter().flat_map(|row| (0..4).map(move |lane| lane_offset(row, lane))),
                16,
            );
        }
    }

    #[test]
    fn a_row_keeps_its_bytes() {
        for row in 0..16 {
            let lanes: BTreeSet<_> = (0..ROW_LANES).map(|lane| lane_offset(row, lane)).collect();
            let expected: BTreeSet<_> = (0..ROW_LANES).map(|lane| row * K_BLOCK_BYTES + lane * LANE_BYTES).collect();
            assert_eq!(lanes, expected);
        }
    }
}
