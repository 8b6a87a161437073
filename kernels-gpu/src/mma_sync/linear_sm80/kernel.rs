//! How a linear layer works on a card that is known to have `mma.sync` and `cp.async`, and no more.
//!
//! A block computes a tile of C. All of its warps do the same: they copy a k-block's tokens and weights to the next stage, then multiply
//! the oldest one. A barrier of the block at each k-block says that a stage is full, and that the one before it is empty.

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_commit_group, cp_async_wait_group},
    global::GlobalAddress,
    kernel, thread,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

use super::abi::{INSTANCES, Index, instances};
use crate::{
    decoding::K_BLOCK,
    linear::{
        BOX_BYTES, Launch, PANEL_BYTES, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_SCALES,
        decode::{Decode, Packed},
        k_blocks, panel_offset,
    },
    mma_sync::linear::{
        CHUNK_BYTES, Instance, PRODUCT_TOKENS, STRIP_SCALES, STRIP_VALUES,
        strip::{BOXES, Built, Strip},
    },
    units::OperandType,
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            struct This;
            impl Built for This {
                const INSTANCE: Instance = INSTANCE;
            }
            // SAFETY: the contract is this function's too.
            unsafe { Linear::<This, IS_BF16, { INSTANCE.products() }>::run(launch) }
        }
    )*};
}
instances!(entries);

/// Chunks of a token's k-block: what a thread copies at a time.
const TOKEN_CHUNKS: u32 = 2 * K_BLOCK / CHUNK_BYTES;

/// Chunks of a row of a box.
const BOX_CHUNKS: u32 = BOX_BYTES / CHUNK_BYTES;

/// Elements of a chunk of tokens.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Where a chunk of a token's row lies in a box, in bytes from its start: the 128-byte swizzle (PTX ISA, "Tensor swizzle modes"), as
/// [`Strip`] reads it.
#[inline(always)]
fn chunk_place(token: u32, chunk: u32) -> u32 {
    token * BOX_BYTES + (chunk ^ (token % PRODUCT_TOKENS)) * CHUNK_BYTES
}

/// The kernel as an instance, whose tokens are bf16 or f16. A warp has `P` products for 16 columns of K.
struct Linear<I, const BF16: bool, const P: usize> {
    strip: Strip<I, BF16, P>,
    /// The first panel of the tile's columns, at the next k-block.
    panel: GlobalAddress,
    /// From there to the second panel; the first once more if the matrix has no second: what becomes of it is not written to C.
    second_panel: u64,
    /// The thread's chunk of its first token, at the next k-block.
    token: GlobalAddress,
    /// The next k-block, and the stage that it goes to.
    k_block: u32,
    stage: u32,
}

impl<I: Built, const BF16: bool, const P: usize> Linear<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;
    const THREADS: u32 = Self::INSTANCE.threads();

    /// Tokens between two that a thread copies chunks of.
    const TOKEN_STEP: u32 = Self::THREADS / TOKEN_CHUNKS;

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { assert!(Self::INSTANCE.panels() <= 2 && Strip::<I, BF16, P>::STAGES_END == Self::INSTANCE.shared_bytes()) };
        // The same value in all lanes; through the shuffle the compiler knows that it is.
        // SAFETY: all lanes are here.
        let (warp, _) = unsafe { warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE) };
        let strip = Strip::<I, BF16, P>::new(launch, warp);
        let (first_panel, first_row) = (strip.first_column / PANEL_ROWS, strip.first_column % PANEL_ROWS);
        let panel_bytes = panel_offset(1, 0, launch.k);
        let token = u64::from(strip.first_token + Self::first_token()) * launch.token_pitch;
        let this = Self {
            panel: GlobalAddress::new(launch.panels) + u64::from(first_panel) * panel_bytes,
            second_panel: if (first_panel + 1) * PANEL_ROWS < launch.n { panel_bytes } else { 0 },
            token: GlobalAddress::new(launch.tokens) + token + u64::from(Self::chunk() * CHUNK_BYTES),
            k_block: 0,
            stage: 0,
            strip,
        };
        // SAFETY: the contract is this function's too, and all threads of the block are here.
        unsafe { this.compute(first_row) }
    }

    /// The thread's chunk of each token that it copies.
    #[inline(always)]
    fn chunk() -> u32 {
        thread::thread_idx_x() % TOKEN_CHUNKS
    }

    /// The first of these tokens in the tile.
    #[inline(always)]
    fn first_token() -> u32 {
        thread::thread_idx_x() / TOKEN_CHUNKS
    }

    /// Computes the tile, whose columns begin with this row of a panel.
    ///
    /// # Safety
    /// The contract. All threads of the block call it together.
    #[inline(always)]
    unsafe fn compute(mut self, first_row: u32) {
        let (mut sums, mut stage) = ([[0.0; 4]; P], 0);
        let lane = self.strip.lane();
        // SAFETY: a stage is read after all threads have waited for their copies to it, and written again after all of them have come to
        // the next barrier. All lanes go one way.
        unsafe {
            for _ in 1..Self::INSTANCE.stages {
                self.begin_next(first_row);
            }
            for _ in 0..k_blocks(self.strip.launch.k) {
                match Self::INSTANCE.stages {
                    3 => cp_async_wait_group::<1>(),
                    4 => cp_async_wait_group::<2>(),
                    _ => cp_async_wait_group::<4>(),
                }
                thread::sync_threads();
                self.begin_next(first_row);
                let operands = self.strip.operands(&lane, stage);
                self.strip.multiply(&mut sums, &operands, &lane, stage);
                stage = Self::next(stage);
            }
            self.strip.write(&sums);
        }
    }

    /// The stage after this one.
    #[inline(always)]
    fn next(stage: u32) -> u32 {
        if stage + 1 == Self::INSTANCE.stages { 0 } else { stage + 1 }
    }

    /// Begins to copy the next k-block, if there is one, and makes a group of it: the thread's groups are one a k-block, be it empty.
    ///
    /// # Safety
    /// The contract. All threads of the block call it, and none reads the next stage.
    #[inline(always)]
    unsafe fn begin_next(&mut self, first_row: u32) {
        if self.k_block < k_blocks(self.strip.launch.k) {
            // SAFETY: no thread reads the next stage; the k-block is one of the matrix, and all threads of the CTA copy
            // their parts.
            unsafe {
                self.copy_weights(0, STRIP_VALUES, first_row * ROW_BYTES);
                self.copy_weights(Self::INSTANCE.value_bytes(), STRIP_SCALES, PANEL_SCALES + first_row * ROW_SCALES);
                self.copy_tokens();
            }
            self.panel = self.panel + u64::from(PANEL_BYTES);
            self.token = self.token + u64::from(2 * K_BLOCK);
            self.k_block += 1;
            self.stage = Self::next(self.stage);
        }
        cp_async_commit_group();
    }

    /// Begins to copy the thread's chunks of what each of the tile's strips has `strip_bytes` of, from `offset` on in a panel. It goes to
    /// this place of the next stage's weights.
    ///
    /// # Safety
    /// As [`Self::begin_next`], and there is a next k-block.
    #[inline(always)]
    unsafe fn copy_weights(&self, place: u32, strip_bytes: u32, offset: u32) {
        let panel_chunks = Self::INSTANCE.panel_strips() * strip_bytes / CHUNK_BYTES;
        let chunks = Self::INSTANCE.panels() * panel_chunks;
        let target = self.strip.weights(self.stage) + place;
        for round in 0..chunks.div_ceil(Self::THREADS) {
            let chunk = thread::thread_idx_x() + round * Self::THREADS;
            if chunk < chunks {
                let (in_second, in_panel) = (chunk >= panel_chunks, chunk % panel_chunks);
                let source = self.panel + if in_second { self.second_panel } else { 0 };
                let source = source + u64::from(offset + in_panel * CHUNK_BYTES);
                // SAFETY: no thread reads the next stage; the panels have the rows that the matrix lacks, and the next
                // k-block.
                unsafe { cp_async_16_or_zero(true, target + chunk * CHUNK_BYTES, source) };
            }
        }
    }

    /// Begins to copy the thread's chunks of tokens to the next stage. What lies outside of the tokens becomes zeros.
    ///
    /// # Safety
    /// As [`Self::copy_weights`].
    #[inline(always)]
    unsafe fn copy_tokens(&self) {
        let Launch { m, k, token_pitch, .. } = self.strip.launch;
        let chunk = Self::chunk();
        let is_column = self.k_block * K_BLOCK + chunk * CHUNK_ELEMENTS < k;
        let in_box = self.strip.tokens(self.stage) + chunk / BOX_CHUNKS * (Self::INSTANCE.token_bytes() / BOXES);
        for round in 0..Self::INSTANCE.tile_tokens.div_ceil(Self::TOKEN_STEP) {
            let token = Self::first_token() + round * Self::TOKEN_STEP;
            if token < Self::INSTANCE.tile_tokens {
                let is_there = is_column && self.strip.first_token + token < m;
                let source = self.token + u64::from(round * Self::TOKEN_STEP) * token_pitch;
                // SAFETY: no thread reads the next stage; outside the tokens and columns nothing is read.
                unsafe { cp_async_16_or_zero(is_there, in_box + chunk_place(token, chunk % BOX_CHUNKS), source) };
            }
        }
    }
}
