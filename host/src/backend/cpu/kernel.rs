//! The one algorithm, over any instruction set and both kinds of tokens: weights are decoded a chunk of K at a time, into
//! the first cache, and multiplied with tokens into f32 sums.
//!
//! The order of every sum is fixed, so all instruction sets, any number of threads and any batch give the same bits:
//!
//! * **NVFP4 tokens**: exact integer dot products of blocks of 16. A product of two block scales and a dot product has at
//!   most 20 significant bits, so f32 holds it exactly, and adding it, fused or not, rounds once. Block after block within a
//!   chunk of K, then chunk after chunk.
//! * **16-bit tokens**: 32 columns at a time, fused multiply-adds of the even columns, column after column from zero, and of
//!   the odd ones likewise; both sums are added, and that is added to the sum of all columns before. So does Intel's AMX (Intel
//!   Architecture Instruction Set Extensions Programming Reference, TDPBF16PS), and AVX-512 BF16 where a pair's columns are both even or
//!   both odd (`avx512_bf16`). A product of a token (11 bits at most) and a weight (6) is
//!   exact in f32, subnormal ones too, so an instruction set without fused multiply-adds gives the same bits, unless a product
//!   overflows (see `portable`). That loses less than [`crate::moe::oracle`] lets a device lose.

use std::ops::Range;

use super::epilogue::{self, Epilogue};
use super::layout::{PANEL_ROWS, PackedBlock, PackedScales, Panels, Tokens};

/// An instruction set. A value of such a type exists only on a machine that has it.
pub(super) trait Simd<T: Tokens>: Copy {
    /// Rows of a panel that are computed together; divides [`PANEL_ROWS`].
    const LANES: usize;
    /// How many tokens' sums fit in the registers at a time: 1, 2, 4 or 8.
    const TOKENS: usize;
    /// A sum for each of the rows.
    type Sums: Copy;

    /// Decodes a block of a panel.
    fn unpack(self, values: &PackedBlock, scales: &PackedScales, out: &mut T::Block);

    /// Zeros.
    fn zero(self) -> Self::Sums;

    /// Adds the products of a block of 16 of some tokens and rows `lane..lane + LANES`.
    fn accumulate<const N: usize>(
        self,
        sums: &mut [Self::Sums; N],
        block: &T::Block,
        lane: usize,
        tokens: [&T::Block16; N],
    );

    /// Adds the sums to those in memory.
    fn add_to(self, sums: Self::Sums, memory: &mut [f32]);

    /// Runs [`compute`], compiled for this instruction set.
    fn compute(self, tile: &Tile<'_, T>, scratch: &mut Scratch<T>);
}

/// The most tokens of a tile.
pub(super) const TILE_TOKENS: usize = 256;

/// The most panels of a tile. Each panel reads a chunk of the tile's tokens from the L2 cache once.
pub(super) const TILE_PANELS: usize = 4;

/// Sums of a panel, of the tokens of a tile.
pub(super) type PanelSums = [[f32; PANEL_ROWS]; TILE_TOKENS];

/// What a thread works on.
pub(super) struct Scratch<T: Tokens> {
    pub panel: Vec<T::Block>,
    pub sums: Box<[PanelSums]>,
}

impl<T: Tokens> Scratch<T> {
    pub fn new() -> Self {
        Self {
            panel: vec![T::ZERO_BLOCK; T::CHUNK_BLOCKS],
            sums: vec![[[0.0; PANEL_ROWS]; TILE_TOKENS]; TILE_PANELS].into(),
        }
    }
}

/// A rectangle of a product's output.
pub(super) struct Tile<'a, T: Tokens> {
    pub weights: &'a Panels,
    /// At most [`TILE_PANELS`].
    pub panels: Range<usize>,
    /// The product's tokens, as [`super::layout`] has them: the first chunk of K of all M, then the next chunk.
    pub tokens: &'a [T::Block16],
    /// As [`Tokens::are_ordinary`] says of them.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 asks"))]
    pub are_ordinary: bool,
    pub m: usize,
    /// At most [`TILE_TOKENS`].
    pub rows: Range<usize>,
    pub epilogue: Epilogue<'a>,
    /// The product's output, `[M, N]`. Nobody else reads or writes the tile's rows and columns of it.
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

/// Writes the outputs of a tile's sums.
pub(super) fn write<T: Tokens>(tile: &Tile<'_, T>, sums: &[PanelSums]) {
    let weights = tile.weights;
    for (panel, sums) in tile.panels.clone().zip(sums) {
        let column = panel * weights.features;
        let columns = weights.features.min(weights.n - column);
        for (row, sums) in tile.rows.clone().zip(sums) {
            // SAFETY: row < M and column + columns ≤ N, so these elements are of the product's output; nobody else reads
            // or writes them, by the contract of `Tile::output`.
            let out = unsafe { std::slice::from_raw_parts_mut(tile.output.add(row * weights.n + column), columns) };
            epilogue::write(sums, &tile.epilogue, weights.features, column, out);
        }
    }
}

/// Prefetches what lies a page of values further on. Processors prefetch by themselves only to the end of a page, and
/// with few tokens memory is the limit.
#[inline(always)]
pub(super) fn prefetch_after<T>(item: &T) {
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

/// As [`add_products`] for the few tokens of a tile, block by block as weights come from memory: nothing is written, and
/// there is no pause in which memory has nothing to do.
#[inline(always)]
fn stream<S: Simd<T>, T: Tokens, const N: usize>(
    simd: S,
    (values, scales): (&[PackedBlock], &[PackedScales]),
    tokens: &[T::Block16],
    sums: &mut [[f32; PANEL_ROWS]],
) {
    const { assert!(N <= 8) }
    let memory: &mut [[f32; PANEL_ROWS]; N] = sums.first_chunk_mut().expect("the caller counted the sums");
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
    // Tokens that are computed together share the loads of weights. The last few are taken in powers of two.
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
    let memory: &mut [[f32; PANEL_ROWS]; N] = sums.first_chunk_mut().expect("the caller counted the sums");
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
