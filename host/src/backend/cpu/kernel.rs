//! The algorithm, common to all instruction sets and both kinds of tokens: decode the weights of one chunk of K into
//! the L1 cache, then multiply them with tokens and add the products to f32 sums.
//!
//! The order of every sum is fixed, so the bits of the result depend neither on the instruction set, nor on the number
//! of threads, nor on the batch:
//!
//! * **NVFP4 tokens**: exact integer dot products of blocks of 16. The product of two block scales and a dot product
//!   has at most 20 significant bits, so f32 holds it exactly, and adding it to the sum, fused or not, rounds once.
//!   Blocks are added in order within a chunk of K, and chunks in order.
//! * **16-bit tokens**: 32 columns at a time. One sum adds the even columns with fused multiply-adds, column after
//!   column, starting from zero; a second sum adds the odd columns in the same way. Their total is added to the sum of
//!   all columns before. Intel's AMX computes in this order (Intel Architecture Instruction Set Extensions Programming
//!   Reference, TDPBF16PS), and so does AVX-512 BF16 if both columns of a pair are even or both are odd
//!   (`avx512_bf16`). The product of a token (up to 11 significant bits) and a weight (6) is exact in f32, also if the
//!   token is subnormal. An instruction set without fused multiply-adds therefore gives the same bits, unless a product
//!   overflows (see `portable`). The error is less than [`crate::moe::oracle`] allows for a device.

use std::ops::Range;

use super::epilogue::{self, Epilogue};
use super::layout::{PANEL_ROWS, PackedBlock, PackedScales, PanelSums, Panels, Scratch, Tokens};

/// An instruction set. A value of an implementing type exists only on a machine that has the instruction set.
pub(super) trait Simd<T: Tokens>: Copy {
    /// Rows of a panel that are computed together. Divides [`PANEL_ROWS`].
    const LANES: usize;
    /// Number of tokens whose sums fit in the registers at a time: 1, 2, 4 or 8.
    const TOKENS: usize;
    /// One sum for each of the `LANES` rows.
    type Sums: Copy;

    /// Decodes a block of a panel.
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut T::Block);

    /// Returns sums of zero.
    fn zero(self) -> Self::Sums;

    /// Multiplies a block of 16 elements of `N` tokens with rows `lane..lane + LANES` and adds the products to the
    /// sums.
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &T::Block,
        lane: usize,
        tokens: [&T::Block16; N],
    );

    /// Adds the sums to the sums in memory.
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]);

    /// Runs [`compute`], compiled for this instruction set.
    fn compute(self, tile: &Tile<'_, T>, scratch: &mut Scratch<T>);
}

/// A rectangle of a product's output.
pub(super) struct Tile<'a, T: Tokens> {
    pub weights: &'a Panels,
    /// Up to [`TILE_PANELS`](super::layout::TILE_PANELS) panels.
    pub panels: Range<usize>,
    /// The product's tokens in the order of [`super::layout`]: the first chunk of K of all M tokens, then the next
    /// chunk.
    pub tokens: &'a [T::Block16],
    /// Result of [`Tokens::are_ordinary`] for these tokens.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels of x86-64 read it"))]
    pub are_ordinary: bool,
    pub m: usize,
    /// Up to [`TILE_TOKENS`](super::layout::TILE_TOKENS) rows.
    pub rows: Range<usize>,
    pub epilogue: Epilogue<'a>,
    /// The product's output, `[M, N]`. Only this tile's thread accesses the tile's rows and columns of the output.
    pub output: *mut u16,
}

/// [`Simd::compute`] of an instruction set.
pub(super) type Kernel<T> = Box<dyn Fn(&Tile<'_, T>, &mut Scratch<T>) + Send + Sync>;

/// Computes a tile and writes its outputs.
#[inline(always)]
pub(super) fn compute<S: Simd<T>, T: Tokens>(simd: S, tile: &Tile<'_, T>, scratch: &mut Scratch<T>) {
    let (weights, rows) = (tile.weights, tile.rows.len());
    let sums = &mut scratch.sums[..tile.panels.len()];
    sums.iter_mut().for_each(|sums| sums[..rows].fill([0.0; PANEL_ROWS]));
    for (chunk, tokens) in tile.tokens.chunks(T::CHUNK_BLOCKS * tile.m).enumerate() {
        let tokens = &tokens[T::CHUNK_BLOCKS * tile.rows.start..][..T::CHUNK_BLOCKS * rows];
        for (panel, sums) in tile.panels.clone().zip(&mut *sums) {
            let packed = weights.blocks(panel, T::CHUNK_BLOCKS * chunk, T::CHUNK_BLOCKS);
            let sums = &mut sums[..rows];
            match rows {
                1 => stream::<S, T, 1>(simd, packed, tokens, sums),
                2 => stream::<S, T, 2>(simd, packed, tokens, sums),
                4 if S::TOKENS >= 4 => stream::<S, T, 4>(simd, packed, tokens, sums),
                _ => {
                    let blocks = &mut scratch.panel[..packed.0.len()];
                    for ((values, scales), out) in packed.0.iter().zip(packed.1).zip(&mut *blocks) {
                        prefetch_after(values);
                        prefetch_after(scales);
                        simd.unpack(values, scales, out);
                    }
                    add_products(simd, blocks, tokens, sums);
                }
            }
        }
    }
    write(tile, sums);
}

/// Writes the outputs of a tile from its sums.
pub(super) fn write<T: Tokens>(tile: &Tile<'_, T>, sums: &[PanelSums]) {
    let weights = tile.weights;
    for (panel, sums) in tile.panels.clone().zip(sums) {
        let column = panel * weights.features;
        let columns = weights.features.min(weights.n - column);
        for (row, sums) in tile.rows.clone().zip(sums) {
            // SAFETY: `output` points to M·N elements. row < M and column + columns ≤ N, so these elements lie within
            // them. They belong to this tile, and only this thread accesses the elements of its tile.
            let out = unsafe { std::slice::from_raw_parts_mut(tile.output.add(row * weights.n + column), columns) };
            epilogue::write(sums, &tile.epilogue, weights.features, column, out);
        }
    }
}

/// Prefetches the bytes one page of values after `item`. The hardware prefetcher stops at the end of a page, and with
/// few tokens the speed is limited by memory.
#[inline(always)]
pub(super) fn prefetch_after<T>(item: &T) {
    const DISTANCE: usize = 4096 / size_of::<PackedBlock>();
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = std::ptr::from_ref(item).wrapping_add(DISTANCE).cast::<i8>().wrapping_add(line);
        // SAFETY: SSE is part of x86-64. A prefetch reads nothing into registers and does not fault, whatever the
        // address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (item, DISTANCE);
}

/// Does the same as [`add_products`] for up to 8 tokens, but multiplies each block right after it is decoded. Decoded
/// weights are not written to memory, and loads from memory never pause.
#[inline(always)]
fn stream<S: Simd<T>, T: Tokens, const N: usize>(
    simd: S,
    (values, scales): (&[PackedBlock], &[PackedScales]),
    tokens: &[T::Block16],
    sums: &mut [[f32; PANEL_ROWS]],
) {
    const { assert!(N <= 8) }
    let memory: &mut [[f32; PANEL_ROWS]; N] = sums.first_chunk_mut().expect("`N` is the number of sums");
    let tokens: [&[T::Block16]; N] = std::array::from_fn(|token| &tokens[T::CHUNK_BLOCKS * token..][..values.len()]);
    let mut start = 0;
    for (values, scales) in values.chunks(T::SUM_BLOCKS).zip(scales.chunks(T::SUM_BLOCKS)) {
        let mut sums = [[simd.zero(); N]; PANEL_ROWS];
        let lanes = PANEL_ROWS / S::LANES;
        let tokens = tokens.map(|token| &token[start..][..values.len()]);
        for (index, (values, scales)) in values.iter().zip(scales).enumerate() {
            prefetch_after(values);
            prefetch_after(scales);
            let mut block = T::ZERO_BLOCK;
            simd.unpack(values, scales, &mut block);
            for (part, sums) in sums[..lanes].iter_mut().enumerate() {
                simd.accumulate(sums, &block, part * S::LANES, tokens.map(|token| &token[index]));
            }
        }
        for (part, sums) in sums[..lanes].iter().enumerate() {
            for (&sums, memory) in sums.iter().zip(&mut *memory) {
                simd.add_to(sums, &mut memory[part * S::LANES..][..S::LANES]);
            }
        }
        start += values.len();
    }
}

/// Adds the products of tokens and a panel over one chunk of K.
#[inline(always)]
fn add_products<S: Simd<T>, T: Tokens>(
    simd: S,
    blocks: &[T::Block],
    tokens: &[T::Block16],
    sums: &mut [[f32; PANEL_ROWS]],
) {
    let (mut tokens, mut sums) = (tokens, sums);
    // Tokens that are computed together share the loads of weights. The last tokens are taken in powers of two.
    while !sums.is_empty() {
        let count = S::TOKENS.min(1 << sums.len().ilog2());
        let (these, later) = std::mem::take(&mut sums).split_at_mut(count);
        match count {
            8 => add_products_of::<S, T, 8>(simd, blocks, tokens, these),
            4 => add_products_of::<S, T, 4>(simd, blocks, tokens, these),
            2 => add_products_of::<S, T, 2>(simd, blocks, tokens, these),
            _ => add_products_of::<S, T, 1>(simd, blocks, tokens, these),
        }
        (tokens, sums) = (&tokens[T::CHUNK_BLOCKS * count..], later);
    }
}

#[inline(always)]
fn add_products_of<S: Simd<T>, T: Tokens, const N: usize>(
    simd: S,
    blocks: &[T::Block],
    tokens: &[T::Block16],
    sums: &mut [[f32; PANEL_ROWS]],
) {
    let memory: &mut [[f32; PANEL_ROWS]; N] = sums.first_chunk_mut().expect("`N` is the number of sums");
    let tokens: [&[T::Block16]; N] = std::array::from_fn(|token| &tokens[T::CHUNK_BLOCKS * token..][..blocks.len()]);
    for lane in (0..PANEL_ROWS).step_by(S::LANES) {
        let mut start = 0;
        for blocks in blocks.chunks(T::SUM_BLOCKS) {
            let mut sums = [simd.zero(); N];
            let tokens = tokens.map(|token| &token[start..][..blocks.len()]);
            for (index, block) in blocks.iter().enumerate() {
                simd.accumulate(&mut sums, block, lane, tokens.map(|token| &token[index]));
            }
            for (sums, memory) in sums.into_iter().zip(&mut *memory) {
                simd.add_to(sums, &mut memory[lane..lane + S::LANES]);
            }
            start += blocks.len();
        }
    }
}
