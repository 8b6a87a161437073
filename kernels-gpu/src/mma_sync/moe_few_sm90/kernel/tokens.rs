//! A lane's tokens of a product, loaded from global memory into registers. Their columns are in natural order in
//! memory.
//!
//! Four lanes share a token, which is a column of the product's B. They hold the same elements of K as of weights
//! ([`units`](crate::units)): 16 neighboring elements of each 64, two words of eight.

use cuda_std::{
    global::{GlobalAddress, ld_global_b32_or_zero, ld_global_v4_b32_or_zero},
    integer::{opaque_b32, prmt_b32},
    warp::lane_id,
};

use crate::{
    decoding::LANE_WORDS,
    format::BLOCK,
    units::{K_BLOCK, ROW_LANES, WORD_ELEMENTS, block_columns, block_start},
};

/// Bytes of an element.
const ELEMENT_BYTES: u32 = 2;

/// Columns of half a k-block.
const HALF_COLUMNS: u32 = K_BLOCK / 2;

/// The elements of each of a lane's words, in neighboring pairs.
pub(super) type Elements = [[u32; 4]; LANE_WORDS];

/// Offset of a lane's elements in a whole k-block of a token, in bytes.
#[inline(always)]
pub(super) const fn lane_place_of_token(lane: u32) -> u32 {
    lane * (BLOCK * ELEMENT_BYTES)
}

/// Offset of a lane's word from there, in bytes.
#[inline(always)]
pub(super) const fn word_place(word: u32) -> u32 {
    (word / 2 * HALF_COLUMNS + word % 2 * WORD_ELEMENTS) * ELEMENT_BYTES
}

/// A lane's token.
pub(super) struct Tokens {
    at: GlobalAddress,
    k: u32,
}

impl Tokens {
    /// The token of `k` elements at an address.
    #[inline(always)]
    pub(super) const fn at(at: GlobalAddress, k: u32) -> Self {
        Self { at, k }
    }

    /// Loads the lane's elements of a whole k-block.
    ///
    /// # Safety
    /// The token is complete, begins at a multiple of 16, and has the k-block.
    #[inline(always)]
    pub(super) unsafe fn load(&self, k_block: u32) -> Elements {
        let lane = lane_place_of_token(lane_id() % ROW_LANES);
        let first = self.at + (u64::from(k_block) * u64::from(K_BLOCK * ELEMENT_BYTES) + u64::from(lane));
        [0, 1, 2, 3].map(|word| {
            // SAFETY: the token is complete and has the k-block, so the word exists, at a multiple of 16.
            unsafe { ld_global_v4_b32_or_zero(true, first + u64::from(word_place(word))) }
        })
    }

    /// Loads the lane's elements of a partial k-block. Columns that do not fill 64 give each lane half a block, or a
    /// quarter of one: two pairs, which go to the registers that would hold the same pairs of a full word.
    ///
    /// # Safety
    /// The requirements of [`Self::load`].
    #[inline(always)]
    pub(super) unsafe fn load_ragged(&self, k_block: u32) -> Elements {
        let (lane, k_block) = (lane_id() % ROW_LANES, opaque_b32(k_block));
        let columns = block_columns(self.k, k_block);
        let start = self.at + u64::from(block_start(self.k, k_block) * ELEMENT_BYTES);
        let half = |half: u32| {
            let (first, left) = (half * HALF_COLUMNS, columns.saturating_sub(half * HALF_COLUMNS));
            let at = |element: u32| start + u64::from((first + element) * ELEMENT_BYTES);
            let is_whole = left >= HALF_COLUMNS;
            let of_lane = lane * if is_whole { BLOCK } else { WORD_ELEMENTS };
            let has_word = left >= ROW_LANES * WORD_ELEMENTS;
            let has_pairs = left == ROW_LANES * WORD_ELEMENTS / 2;
            // SAFETY: the token is complete and the predicates admit only columns that the k-block has; addresses are
            // multiples of the loads' sizes.
            unsafe {
                let [a, b, c, d] = ld_global_v4_b32_or_zero(has_word, at(of_lane));
                let second = ld_global_v4_b32_or_zero(is_whole, at(of_lane + WORD_ELEMENTS));
                let pair = |pair: u32| ld_global_b32_or_zero(has_pairs, at(lane * (WORD_ELEMENTS / 2) + 2 * pair));
                [[a | pair(0), b, c | pair(1), d], second]
            }
        };
        let ([first, second], [third, fourth]) = (half(0), half(1));
        [first, second, third, fourth]
    }
}

/// B of a word's two products: register i has elements i and i+4, like a decoded weight.
#[inline(always)]
pub(super) fn pairs([first, second, third, fourth]: [u32; 4]) -> [[u32; 2]; 2] {
    const LOW: u32 = 0x5410;
    const HIGH: u32 = 0x7632;
    [(first, third), (second, fourth)].map(|(low, high)| [prmt_b32(low, high, LOW), prmt_b32(low, high, HIGH)])
}
