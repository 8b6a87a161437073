//! Order of K in products, and places of the elements of a k-block; shared by the code that decodes weights and the
//! code that decodes tokens.
//!
//! A row's k-block has 64 packed bytes. The four lanes that share a row of a fragment have 16 bytes each: four words of
//! 8 elements. Word t is used in products 2t and 2t+1 of the k-block, which sum over 16 columns each. Elements i and
//! i+4 of a word decode to register i, for i = 0 to 3, and are neighboring columns of a product. Registers 0 and 1 are
//! in the left and the right half of product 2t's columns, registers 2 and 3 in the left and the right half of product
//! 2t+1's columns.
//!
//! So core matrix 4t+i of B, 8 tokens × 8 columns, holds register i of word t of the four lanes.

use cuda_std::wgmma;

use crate::{
    format::BLOCK,
    wgmma::gated_sm90::abi::{CORE_MATRIX_ROWS, K_ALIGNMENT, LANE_BYTES, STRIP_BYTES},
};

/// Words of a row and k-block that a lane decodes.
pub const LANE_WORDS: u32 = LANE_BYTES / 4;

/// Number of elements per word.
pub const WORD_ELEMENTS: u32 = 8;

/// Number of registers, of two elements each, that a word decodes to.
pub const WORD_PAIRS: usize = 4;

/// Number of scale factors of a lane's words of a row.
pub const LANE_SCALES: u32 = LANE_WORDS * WORD_ELEMENTS / BLOCK;

/// Bytes of a row of a core matrix; a row belongs to one token (PTX ISA, "Canonical Layouts").
pub const CORE_MATRIX_ROW_BYTES: u32 = 16;

/// Bytes of a core matrix. The core matrices of a strip are in sequence along K.
pub const CORE_MATRIX_BYTES: u32 = CORE_MATRIX_ROWS * CORE_MATRIX_ROW_BYTES;

const _: () = assert!(LANE_BYTES * 2 == K_ALIGNMENT && LANE_SCALES == 2);
const _: () = assert!(LANE_WORDS * WORD_PAIRS as u32 * CORE_MATRIX_BYTES == STRIP_BYTES);
const _: () = assert!(wgmma::K * 2 == 2 * CORE_MATRIX_ROW_BYTES, "a product must have two core matrices along K");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wgmma::gated_sm90::abi::{K_BLOCK_BYTES, ROW_LANES, lane_offset};

    extern crate std;
    use std::collections::BTreeSet;

    /// Shared memory serves 128 bytes at a time: the 16-byte loads of a quarter warp.
    fn meet_every_bank_once(offsets: impl Iterator<Item = u32>, bytes: u32) {
        let banks: BTreeSet<_> = offsets.map(|offset| offset % 128 / bytes).collect();
        assert_eq!(banks.len() as u32, 128 / bytes);
    }

    #[test]
    fn loads_of_weights_meet_every_bank_once() {
        // Two neighboring rows of a fragment are an even and an odd row of the panel.
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
