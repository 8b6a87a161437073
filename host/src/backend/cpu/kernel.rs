//! The one algorithm, over any instruction set: exact integer dot products of blocks of 16, scaled and summed in f32.
//!
//! A product of two block scales and a dot product of 16 values has at most 20 significant bits, so f32 holds it exactly,
//! and adding it, fused or not, rounds once. The order is fixed: block after block within a chunk of K, then chunk after
//! chunk. So all instruction sets, and any number of threads, give the same bits.

use std::ops::Range;

use super::epilogue;
use super::layout::{
    CHUNK_BLOCKS, PANEL_ROWS, PackedBlock, PackedScales, Panels, QUADS, TokenBlock, TokenChunk, chunks,
};
use crate::problem::OutDtype;

/// An instruction set. A value of such a type exists only on a machine that has it.
pub(super) trait Simd: Copy {
    /// Rows of a panel that are computed together; divides [`PANEL_ROWS`].
    const LANES: usize;
    /// How many tokens' sums fit in the registers at a time: 1, 2, 4 or 8.
    const TOKENS: usize;
    /// Weights of one block for [`Self::LANES`] rows, and their scales.
    type Weights: Copy;
    /// A sum for each of the rows.
    type Sums: Copy;

    /// Unpacks a block of a panel.
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut Block);

    /// Loads rows `lane..lane + LANES`.
    fn load(self, block: &Block, lane: usize) -> Self::Weights;

    /// Zeros.
    fn zero(self) -> Self::Sums;

    /// Adds the scaled dot products of a block.
    fn accumulate(self, sums: Self::Sums, weights: Self::Weights, token: &TokenBlock) -> Self::Sums;

    /// Adds the sums to those in memory.
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]);

    /// Runs [`compute`], compiled for this instruction set.
    fn compute(self, tile: &Tile<'_>, scratch: &mut Scratch);
}

/// A block of 16 elements of K of a panel, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Block {
    /// Weights: four bytes of a row, then four of the next. They are biased to be unsigned where the instruction wants
    /// that.
    pub quads: [[[u8; 4]; PANEL_ROWS]; QUADS],
    pub scales: [f32; PANEL_ROWS],
}

/// The most tokens of a tile.
pub(super) const TILE_TOKENS: usize = 256;

/// The most panels of a tile. Each panel reads a chunk of the tile's tokens from the L2 cache once.
pub(super) const TILE_PANELS: usize = 4;

/// What a thread works on.
pub(super) struct Scratch {
    panel: [Block; CHUNK_BLOCKS],
    sums: [[[f32; PANEL_ROWS]; TILE_TOKENS]; TILE_PANELS],
}

impl Scratch {
    pub fn new() -> Box<Self> {
        let block = Block { quads: [[[0; 4]; PANEL_ROWS]; QUADS], scales: [0.0; PANEL_ROWS] };
        Box::new(Self { panel: [block; CHUNK_BLOCKS], sums: [[[0.0; PANEL_ROWS]; TILE_TOKENS]; TILE_PANELS] })
    }
}

/// A rectangle of a group's output.
pub(super) struct Tile<'a> {
    pub weights: &'a Panels,
    /// At most [`TILE_PANELS`].
    pub panels: Range<usize>,
    /// The group's tokens: the first chunk of K of all M, then the next chunk.
    pub tokens: &'a [TokenChunk],
    pub m: usize,
    /// At most [`TILE_TOKENS`].
    pub rows: Range<usize>,
    pub alphas: [f64; 2],
    pub out_dtype: OutDtype,
    /// The group's output, `[M, N]`. Nobody else reads or writes the tile's rows and columns of it.
    pub output: *mut u16,
}

/// Computes a tile and writes its outputs.
#[inline(always)]
pub(super) fn compute<S: Simd>(simd: S, tile: &Tile<'_>, scratch: &mut Scratch) {
    let (weights, rows) = (tile.weights, tile.rows.len());
    let Scratch { panel: unpacked, sums } = scratch;
    let sums = &mut sums[..tile.panels.len()];
    sums.iter_mut().for_each(|sums| sums[..rows].fill([0.0; PANEL_ROWS]));
    for chunk in 0..chunks(weights.k) {
        let tokens = &tile.tokens[chunk * tile.m..][tile.rows.clone()];
        for (panel, sums) in tile.panels.clone().zip(&mut *sums) {
            let (values, scales) = weights.chunk(panel, chunk);
            let blocks = &mut unpacked[..values.len()];
            for ((values, scales), out) in values.iter().zip(scales).zip(&mut *blocks) {
                prefetch_after(values);
                prefetch_after(scales);
                simd.unpack(values, scales, out);
            }
            add_products(simd, blocks, tokens, &mut sums[..rows]);
        }
    }
    for (panel, sums) in tile.panels.clone().zip(sums) {
        let column = panel * weights.features;
        let columns = weights.features.min(weights.n - column);
        for (row, sums) in tile.rows.clone().zip(&*sums) {
            // SAFETY: row < M and column + columns ≤ N, so these elements are of the group's output; nobody else reads
            // or writes them, by the contract of `Tile::output`.
            let out = unsafe { std::slice::from_raw_parts_mut(tile.output.add(row * weights.n + column), columns) };
            epilogue::write(sums, tile.alphas, weights.features, tile.out_dtype, out);
        }
    }
}

/// Prefetches what lies a page of values further on. Processors prefetch by themselves only to the end of a page, and
/// with few tokens memory is the limit.
#[inline(always)]
fn prefetch_after<T>(item: &T) {
    const DISTANCE: usize = 4096 / size_of::<PackedBlock>();
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = std::ptr::from_ref(item).wrapping_add(DISTANCE).cast::<i8>().wrapping_add(line);
        // SAFETY: SSE is part of x86-64, and a prefetch reads nothing and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (item, DISTANCE);
}

/// Adds the products of tokens and a panel over one chunk of K.
#[inline(always)]
fn add_products<S: Simd>(simd: S, blocks: &[Block], tokens: &[TokenChunk], sums: &mut [[f32; PANEL_ROWS]]) {
    for (tokens, sums) in tokens.chunks(S::TOKENS).zip(sums.chunks_mut(S::TOKENS)) {
        let (mut tokens, mut sums) = (tokens, sums);
        // Tokens that are computed together share the loads of weights. The last few of a group are taken in powers of
        // two.
        while !tokens.is_empty() {
            let count = 1 << tokens.len().ilog2();
            let (these, later) = std::mem::take(&mut sums).split_at_mut(count);
            match count {
                8 => add_products_of::<S, 8>(simd, blocks, tokens, these),
                4 => add_products_of::<S, 4>(simd, blocks, tokens, these),
                2 => add_products_of::<S, 2>(simd, blocks, tokens, these),
                _ => add_products_of::<S, 1>(simd, blocks, tokens, these),
            }
            (tokens, sums) = (&tokens[count..], later);
        }
    }
}

#[inline(always)]
fn add_products_of<S: Simd, const T: usize>(
    simd: S,
    blocks: &[Block],
    tokens: &[TokenChunk],
    sums: &mut [[f32; PANEL_ROWS]],
) {
    let tokens: &[TokenChunk; T] = tokens.first_chunk().expect("the caller counted the tokens");
    let memory: &mut [[f32; PANEL_ROWS]; T] = sums.first_chunk_mut().expect("the caller counted the sums");
    assert!(blocks.len() <= CHUNK_BLOCKS);
    for lane in (0..PANEL_ROWS).step_by(S::LANES) {
        let mut sums = [simd.zero(); T];
        for (index, block) in blocks.iter().enumerate() {
            let weights = simd.load(block, lane);
            for (sums, token) in sums.iter_mut().zip(tokens) {
                *sums = simd.accumulate(*sums, weights, &token[index]);
            }
        }
        for (sums, memory) in sums.into_iter().zip(&mut *memory) {
            simd.add_to(sums, &mut memory[lane..lane + S::LANES]);
        }
    }
}
