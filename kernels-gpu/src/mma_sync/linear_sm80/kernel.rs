//! The device code of a linear layer for any GPU that has `mma.sync` and `cp.async`.
//!
//! A CTA computes a tile of C. All of its warps do the same: they copy a k-block's tokens and weights to the next
//! stage, then multiply the oldest stage. A barrier of the CTA per k-block ensures that the oldest stage is full and
//! the stage before it is empty.

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
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { Linear::<This, IS_BF16, { INSTANCE.products() }>::run(launch) }
        }
    )*};
}
instances!(entries);

/// Chunks in a token's k-block. A thread copies one chunk at a time.
const TOKEN_CHUNKS: u32 = 2 * K_BLOCK / CHUNK_BYTES;

/// Chunks in a row of a box.
const BOX_CHUNKS: u32 = BOX_BYTES / CHUNK_BYTES;

/// Elements of a token in a chunk.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Offset of a chunk of a token's row in a box, in bytes: the 128-byte swizzle (PTX ISA, "Tensor swizzle modes"), in
/// which [`Strip`] reads the box.
#[inline(always)]
fn chunk_place(token: u32, chunk: u32) -> u32 {
    token * BOX_BYTES + (chunk ^ (token % PRODUCT_TOKENS)) * CHUNK_BYTES
}

/// The kernel as one instance, for bf16 or f16 tokens. A warp has `P` products per 16 columns of K.
struct Linear<I, const BF16: bool, const P: usize> {
    strip: Strip<I, BF16, P>,
    /// Address of the first panel of the tile's columns, at the next k-block.
    panel: GlobalAddress,
    /// Bytes from there to the second panel. 0 if the matrix has no second panel: the first panel is then copied twice,
    /// and the second half of the tile is not written to C.
    second_panel: u64,
    /// Address of the thread's chunk of its first token, at the next k-block.
    token: GlobalAddress,
    /// The next k-block, and its stage.
    k_block: u32,
    stage: u32,
}

impl<I: Built, const BF16: bool, const P: usize> Linear<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;
    const THREADS: u32 = Self::INSTANCE.threads();

    /// Distance between the tokens from which one thread copies chunks.
    const TOKEN_STEP: u32 = Self::THREADS / TOKEN_CHUNKS;

    /// One thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { assert!(Self::INSTANCE.panels() <= 2 && Strip::<I, BF16, P>::STAGES_END == Self::INSTANCE.shared_bytes()) };
        // All lanes hold the same value. The shuffle lets the compiler know that. SAFETY: all lanes of the warp execute
        // the shuffle together.
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
        // SAFETY: the caller fulfills the contract in `mod.rs`, and all threads of the CTA make this call.
        unsafe { this.compute(first_row) }
    }

    /// Index of the chunk that this thread copies of each of its tokens.
    #[inline(always)]
    fn chunk() -> u32 {
        thread::thread_idx_x() % TOKEN_CHUNKS
    }

    /// The tile's first token from which this thread copies a chunk.
    #[inline(always)]
    fn first_token() -> u32 {
        thread::thread_idx_x() / TOKEN_CHUNKS
    }

    /// Computes the tile, whose columns begin with row `first_row` of a panel.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. All threads of the CTA make this call together.
    #[inline(always)]
    unsafe fn compute(mut self, first_row: u32) {
        let (mut sums, mut stage) = ([[0.0; 4]; P], 0);
        let lane = self.strip.lane();
        // SAFETY: a stage is read after all threads have waited for their copies to it, and overwritten after all
        // threads have reached the next barrier. All lanes take the same branches.
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
            self.strip.write(&sums, None);
        }
    }

    /// The stage after this one.
    #[inline(always)]
    fn next(stage: u32) -> u32 {
        if stage + 1 == Self::INSTANCE.stages { 0 } else { stage + 1 }
    }

    /// Starts the copy of the next k-block, if there is one, as a group of copies. A thread has one group per k-block,
    /// empty after the last k-block.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. All threads of the CTA make this call, and no thread reads the
    /// next stage.
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

    /// Starts the thread's copies of weights. Each strip of the tile has `strip_bytes` bytes in a panel, from `offset`
    /// on. They go to `place` in the weights of the next stage.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`]. There is a next k-block.
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
                // SAFETY: no thread reads the next stage. Panels are padded to whole panels, so the source lies in a
                // panel even if the matrix has fewer rows, and the panel has the next k-block.
                unsafe { cp_async_16_or_zero(true, target + chunk * CHUNK_BYTES, source) };
            }
        }
    }

    /// Starts the thread's copies of tokens to the next stage. Chunks outside of the tokens become zeros.
    ///
    /// # Safety
    /// The requirements of [`Self::copy_weights`].
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
                // SAFETY: no thread reads the next stage. If the chunk lies outside of the tokens or their columns, the
                // copy does not read `source`.
                unsafe { cp_async_16_or_zero(is_there, in_box + chunk_place(token, chunk % BOX_CHUNKS), source) };
            }
        }
    }
}
