//! Common parts of the kernels of a linear layer with 16-bit tokens: the layout of weights, the parameters, packing,
//! and decoding.
//!
//! # Panels
//!
//! A *panel* is [`PANEL_ROWS`] rows of one k-block: the weights that a warpgroup multiplies at a time. A matrix `[n,
//! k]` is a sequence of panels: the panels of the first rows along K, then the panels of the next rows. Rows and
//! columns that the matrix lacks are zeros. Tokens stay in their natural order: 16 bytes of a token, eight columns, are
//! a row of a core matrix. Each of the four lanes that share a row of `wgmma`'s A (PTX ISA, "Register Fragments for
//! wgmma.mma_async") has two neighboring columns of each core matrix.
//!
//! * Values come first, row by row, [`ROW_BYTES`] each: the four *words* of each lane. Nibble j of word t of lane L is
//!   column `32t + 8·(j%4) + 2L + j/4` ([`column()`]), so that the nibbles i and i+4, which decode into one register,
//!   are neighbors.
//! * Scales follow, row by row, [`ROW_SCALES`] each, in natural order. A word has two scales: scale 2t for registers 0
//!   and 1, scale 2t+1 for the other two.
//!
//! Words and scales are packed by [`OperandType::pack`](crate::units::OperandType::pack) and
//! [`OperandType::pack_scale`](crate::units::OperandType::pack_scale).
//!
//! # Parts of K
//!
//! Where N is small and K is long, instances with two *parts* sum each half of the k-blocks alone and then add both
//! sums: C = part 0 + part 1, in f32. Few tokens have one CTA per part, in a cluster. With many tokens, one CTA sums one
//! part after the other. The bits are the same, but differ from the bits of an instance with one part, so the number of
//! parts must be a function of N and K alone.
//!
//! [`moe_sm90`](crate::wgmma::moe_sm90) permutes K instead. That saves a sixth of the decoding, but takes a launch for
//! the tokens.

use bytemuck::{Pod, Zeroable};

use crate::{
    decoding::{BARRIER_BYTES, K_BLOCK, LANE_WORDS, WARPGROUP_ROWS},
    format::BLOCK,
};

#[cfg(feature = "linear")]
pub(crate) mod decode;
#[cfg(feature = "linear")]
mod pack;
#[cfg(feature = "linear")]
#[cfg_attr(not(feature = "linear_sm90"), expect(dead_code, reason = "only Hopper's instances have two parts of K"))]
pub(crate) mod split;

/// Rows per panel.
pub const PANEL_ROWS: u32 = WARPGROUP_ROWS;

/// Lanes that share a row of a fragment.
pub const ROW_LANES: u32 = 4;

/// Bytes of a lane's words of a row.
pub const LANE_BYTES: u32 = 4 * LANE_WORDS as u32;

/// Bytes of a row's values in a panel.
pub const ROW_BYTES: u32 = ROW_LANES * LANE_BYTES;

/// Scales of a row in a panel, one byte each.
pub const ROW_SCALES: u32 = K_BLOCK / BLOCK;

/// Offset of the scales in a panel, in bytes.
pub const PANEL_SCALES: u32 = PANEL_ROWS * ROW_BYTES;

/// Bytes of a panel.
pub const PANEL_BYTES: u32 = PANEL_SCALES + PANEL_ROWS * ROW_SCALES;

/// Number of k-blocks in `k` columns; the last k-block may not be whole.
#[inline(always)]
pub const fn k_blocks(k: u32) -> u32 {
    k.div_ceil(K_BLOCK)
}

/// First k-block of part `part` of `parts`; the next part's first k-block is its end. Parts differ by at most one
/// k-block.
#[inline(always)]
pub const fn part_begin(part: u32, parts: u32, k: u32) -> u32 {
    if parts == 1 { part * k_blocks(k) } else { (part as u64 * k_blocks(k) as u64 / parts as u64) as u32 }
}

/// Bytes of a *piece*: four sums that a thread sends to the same thread of the cluster's other CTA.
pub const PIECE_BYTES: u32 = 16;

/// Bytes of the memory in which `threads` threads of a CTA receive `pieces` pieces each, with its barrier.
pub const fn inbox_bytes(threads: u32, pieces: u32) -> u32 {
    threads * pieces * PIECE_BYTES + BARRIER_BYTES
}

/// Bytes of the panels of a matrix `[n, k]`.
#[inline(always)]
pub const fn matrix_bytes(n: u32, k: u32) -> u64 {
    panel_offset(n.div_ceil(PANEL_ROWS), 0, k)
}

/// Offset of a panel in a matrix with `k` columns, in bytes. The panel has the rows from `64·panel` on of one k-block.
#[inline(always)]
pub const fn panel_offset(panel: u32, k_block: u32, k: u32) -> u64 {
    (panel as u64 * k_blocks(k) as u64 + k_block as u64) * PANEL_BYTES as u64
}

/// The column of a k-block that nibble `nibble` of a lane's word holds.
#[inline(always)]
pub const fn column(lane: u32, word: u32, nibble: u32) -> u32 {
    32 * word + 8 * (nibble % 4) + 2 * lane + nibble / 4
}

/// A tensor map, encoded by the driver: the tokens `[m, k]` as bytes. A box is a row of 128 bytes of each token of a
/// tile, with the 128-byte swizzle.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TokenMap(pub [u64; 16]);

/// Bytes of a token in a box of its [`TokenMap`].
pub const BOX_BYTES: u32 = 128;

/// The parameter of a product: `C = α·A·Bᵀ + bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Launch {
    /// Tensor map of the tokens. It is the first field, because the kernel passes on its address, not its bytes.
    pub token_map: TokenMap,
    /// Address of the first token, a multiple of 16.
    pub tokens: u64,
    /// Bytes between tokens, a multiple of 16.
    pub token_pitch: u64,
    /// Address of the panels of B, a multiple of 16.
    pub panels: u64,
    /// Address of C `[m, n]`, 16-bit numbers of the token type, rows without gaps; a multiple of 16.
    pub c: u64,
    /// Address of α, an f32 per column of C: the global scale of that row of B. Projections that share one matrix keep
    /// their own scales.
    pub alpha: u64,
    /// Address of the bias, an f32 per column of C; 0 if there is none.
    pub bias: u64,
    /// Number of tokens, rows of C.
    pub m: u32,
    /// Rows of B, columns of C; a multiple of 16, not 0.
    pub n: u32,
    /// Number of elements that are summed; a multiple of 16, not 0.
    pub k: u32,
    /// Number of tiles along the tokens: `m` divided by the instance's `tile_tokens`, rounded up.
    pub token_tiles: u32,
}

/// The entry that packs.
pub const PACK_ENTRY: &str = "linear_pack";

/// The parameter of [`PACK_ENTRY`]: a matrix from a checkpoint's layout into panels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Pack {
    /// Address of the values, `[n, k/2]` bytes without gaps, two codes per byte, the element of even K in the low half;
    /// a multiple of 8.
    pub values: u64,
    /// Address of the scales, `[n, k/16]`, e4m3.
    pub scales: u64,
    /// Address of the panels, a multiple of 16.
    pub panels: u64,
    /// Address of a `u64`, `u64::MAX` before the launch. By an atomic minimum it becomes the index of the first scale
    /// that is NaN or has a sign, if there is one.
    pub invalid: u64,
    /// Rows; a multiple of 16, not 0.
    pub n: u32,
    /// Columns; a multiple of 16, not 0.
    pub k: u32,
    /// [`OperandType`](crate::units::OperandType) as a number.
    pub operand_type: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Pack {
    /// Threads per CTA. A thread packs a row of a k-block.
    pub const THREADS: u32 = 128;

    /// Number of CTAs of a grid.
    pub const fn blocks(n: u32, k: u32) -> u64 {
        (n.div_ceil(PANEL_ROWS) as u64 * PANEL_ROWS as u64 * k_blocks(k) as u64).div_ceil(Self::THREADS as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::collections::BTreeSet;

    #[test]
    fn nibbles_of_a_word_map_to_columns_of_one_scale() {
        let mut found = BTreeSet::new();
        for (lane, word) in (0..ROW_LANES).flat_map(|lane| (0..LANE_WORDS as u32).map(move |word| (lane, word))) {
            for nibble in 0..8 {
                assert!(found.insert(column(lane, word, nibble)));
                assert_eq!(column(lane, word, nibble) / BLOCK, 2 * word + nibble % 4 / 2);
            }
            for register in 0..4 {
                assert_eq!(column(lane, word, register) + 1, column(lane, word, register + 4));
            }
        }
        assert!(found.into_iter().eq(0..K_BLOCK));
    }

    #[test]
    fn parts_cover_the_k_blocks_and_are_even() {
        for k in [128, 272, 384, 14336, 1 << 20] {
            assert_eq!([part_begin(0, 1, k), part_begin(1, 1, k)], [0, k_blocks(k)]);
            let [begin, middle, end] = [0, 1, 2].map(|part| part_begin(part, 2, k));
            assert_eq!((begin, end), (0, k_blocks(k)));
            assert!(middle <= end - middle && end - middle <= middle + 1);
        }
    }

    #[test]
    fn panels_follow_each_other_without_gaps() {
        for (n, k) in [(16_u32, 16_u32), (64, 128), (80, 144), (4096, 2880)] {
            let panels =
                (0..n.div_ceil(PANEL_ROWS)).flat_map(|panel| (0..k_blocks(k)).map(move |block| (panel, block)));
            let end = panels.fold(0, |end, (panel, block)| {
                assert_eq!(panel_offset(panel, block, k), end);
                end + u64::from(PANEL_BYTES)
            });
            assert_eq!(end, matrix_bytes(n, k));
        }
    }
}
