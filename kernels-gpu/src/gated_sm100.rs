//! The Blackwell kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of B200 and B300.
//!
//! # Contract
//!
//! * Computes what [`Group`] says for every tile of the list, in one launch: a grid of at most as many blocks as there
//!   are tiles, [`THREADS`] threads each, [`Instance::shared_bytes`] of dynamic shared memory. Tiles cover each
//!   group's C once, and [`Instance::allows`] its M. M, N and K may end anywhere in a tile.
//! * Addresses and tensor maps are as [`Group`] says: K is a multiple of [`K_ALIGNMENT`], so that the rows of a map
//!   are of 16 bytes. Scales are finite (never 0x7f) and have no sign, in the padding of K too: it meets values that
//!   the maps fill with zeros.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Sums are f32, as the tensor core adds them. α·sum must be finite in f32. Overflow of the output format gives
//!   ±inf.
//!
//! # How
//!
//! Weights lie on the tensor core's M, of 128 rows, and tokens on its N, which each tile chooses for itself. One warp
//! loads by bulk copies, one issues MMAs, four turn accumulators into C; a block computes tiles until none are left,
//! and each role is ahead of the next by as much as the buffers between them hold:
//!
//! ```text
//! global ─ load warp ─▶ stages ─ MMA warp ─▶ accumulators ─ epilogue warps ─▶ C
//! ```

use cuda_std::{
    fence::{fence_mbarrier_init, fence_proxy_tensormap_acquire},
    global::st_global_v4_b32,
    kernel,
    mbarrier::{MBARRIER_BYTES, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity},
    shared::{dynamic_shared_address, ld_shared_b32, ld_shared_v4_b32, st_shared_b16},
    tcgen05::{
        MatrixSwizzle, TMEM_LANES, matrix_descriptor, mxf4nvf4_descriptor, tcgen05_alloc, tcgen05_commit,
        tcgen05_cp_32x128b_warpx4, tcgen05_dealloc, tcgen05_fence_after_thread_sync, tcgen05_fence_before_thread_sync,
        tcgen05_ld_32x32b_x8, tcgen05_ld_32x32b_x8_twice, tcgen05_mma_mxf4nvf4_block16,
        tcgen05_relinquish_alloc_permit, tmem_allocation, tmem_lane,
    },
    thread,
    tma::{cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
    warp::{ALL_LANES, WARP_SIZE, elect_sync, lane_id, sync_warp},
};

use crate::{
    abi::{
        SCALE_TILE_ROWS,
        sm100::{
            EPILOGUE_WARPS, Group, Instance, K_ALIGNMENT, Launch, MMA_K, MMAS_PER_STEP, SCALE_TILE_BYTES, STEP,
            STEP_BYTES, THREADS, TILE_ROWS, TOKEN_SCALE_ROWS, TOKEN_STEP, Tile,
        },
    },
    epilogue::{convert, silu},
    sm100_instances,
};

/// The warp that loads; those before it run the epilogue.
const LOAD_WARP: u32 = EPILOGUE_WARPS;

/// The warp that issues MMAs.
const MMA_WARP: u32 = LOAD_WARP + 1;

const _: () = {
    assert!(THREADS == (MMA_WARP + 1) * WARP_SIZE);
    assert!(TILE_ROWS == TMEM_LANES && TILE_ROWS == EPILOGUE_WARPS * WARP_SIZE, "a row of C a lane, a lane a thread");
    assert!(TILE_ROWS == SCALE_TILE_ROWS, "a weight tile's scales are whole tiles");
    assert!(K_ALIGNMENT / 2 == 16, "what a tensor map asks of a row, in bytes");
};

macro_rules! entries {
    ($($entry:ident = $matrices:literal, $tile_tokens:literal, $stages:literal;)*) => {$(
        /// An [`Instance`].
        ///
        /// # Safety
        /// The module's contract.
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the caller's promise.
            unsafe { Sm100::<$matrices, $tile_tokens, $stages>::run(launch) }
        }
    )*};
}
sm100_instances!(entries);

/// The kernel of one [`Instance`].
struct Sm100<const MATRICES: usize, const TILE_TOKENS: u32, const STAGES: u32>;

impl<const MATRICES: usize, const TILE_TOKENS: u32, const STAGES: u32> Sm100<MATRICES, TILE_TOKENS, STAGES> {
    const INSTANCE: Instance =
        Instance { entry: "", matrices: MATRICES as u32, tile_tokens: TILE_TOKENS, stages: STAGES };
    const CHECK: () = Self::INSTANCE.check();

    // Shared memory: stages, the epilogue warps' buffers, barriers, the address of the tensor memory. Offsets from its
    // start; inside of a stage, from the stage's.
    const STAGE_BYTES: u32 = Self::INSTANCE.stage_bytes();
    const STAGING: u32 = STAGES * Self::STAGE_BYTES;
    const STAGE_BARRIERS: u32 = Self::STAGING + EPILOGUE_WARPS * Instance::STAGING_BYTES;
    const ACCUMULATOR_BARRIERS: u32 = Self::STAGE_BARRIERS + 2 * STAGES * MBARRIER_BYTES;
    const TMEM_ADDRESS: u32 = Self::STAGE_BARRIERS + Self::INSTANCE.barriers() * MBARRIER_BYTES;
    const fn weights(matrix: usize) -> u32 {
        matrix as u32 * Instance::WEIGHT_BYTES
    }
    const TOKENS: u32 = Self::weights(MATRICES);
    const fn weight_scales(matrix: usize) -> u32 {
        Self::TOKENS + Self::INSTANCE.token_bytes() + matrix as u32 * Instance::SCALE_BYTES
    }
    const TOKEN_SCALES: u32 = Self::weight_scales(MATRICES);

    // Tensor memory: accumulators, each of all matrices, then the scales of the stage at hand. Columns from its start.
    const fn accumulator(index: u32, matrix: usize) -> u32 {
        index * Self::INSTANCE.accumulator_columns() + matrix as u32 * TILE_TOKENS
    }
    const fn weight_scale_column(matrix: usize, mma: u32) -> u32 {
        Self::accumulator(Self::INSTANCE.accumulators(), 0) + (matrix as u32 * MMAS_PER_STEP + mma) * SCALE_COLUMNS
    }
    /// Rows of scale tiles lie side by side, so that columns of 32 tokens follow each other.
    const fn token_scale_column(mma: u32, tile_row: u32) -> u32 {
        Self::weight_scale_column(MATRICES, 0) + (mma * Self::INSTANCE.token_scale_tiles() + tile_row) * SCALE_COLUMNS
    }
    const TMEM_COLUMNS: u32 = tmem_allocation(Self::INSTANCE.tmem_columns());

    /// Stages: full when the load warp and its copies have arrived, empty when the MMAs that read it have.
    const fn stages(shared: u32) -> Ring {
        Ring { barriers: shared + Self::STAGE_BARRIERS, count: STAGES, index: 0, parity: 0 }
    }

    /// Accumulators: full when the MMAs have arrived, empty when every epilogue warp has.
    const fn accumulators(shared: u32) -> Ring {
        let count = Self::INSTANCE.accumulators();
        Ring { barriers: shared + Self::ACCUMULATOR_BARRIERS, count, index: 0, parity: 0 }
    }

    #[inline(always)]
    unsafe fn run(launch: Launch) {
        const { Self::CHECK };
        let shared = dynamic_shared_address();
        let warp = thread::thread_idx_x() / WARP_SIZE;
        // SAFETY: barriers and the address of the tensor memory have places of their own in shared memory, and nobody
        // uses them before all have passed `sync_threads`; whole warps come here, and one thread is elected for
        // each role that has one. The MMA warp frees the tensor memory when the epilogue has read all of it.
        unsafe {
            if warp == LOAD_WARP && elect_sync(ALL_LANES) {
                Self::stages(shared).init(1, 1);
                Self::accumulators(shared).init(1, EPILOGUE_WARPS);
                fence_mbarrier_init();
            }
            if warp == MMA_WARP {
                tcgen05_alloc(shared + Self::TMEM_ADDRESS, Self::TMEM_COLUMNS);
                tcgen05_relinquish_alloc_permit();
                tcgen05_fence_before_thread_sync();
            }
            thread::sync_threads();
            tcgen05_fence_after_thread_sync();
            let tmem = ld_shared_b32(shared + Self::TMEM_ADDRESS);

            if warp == LOAD_WARP {
                if elect_sync(ALL_LANES) {
                    Self::load(launch, shared);
                }
            } else if warp == MMA_WARP {
                if elect_sync(ALL_LANES) {
                    Self::multiply(launch, shared, tmem);
                }
                sync_warp(ALL_LANES);
                tcgen05_dealloc(tmem, Self::TMEM_COLUMNS);
            } else {
                Self::epilogue(launch, shared, tmem, warp);
            }
        }
    }
}

/// Buffers used in turn, and the barriers that say which are full and which empty.
///
/// A role goes round on its own: the one that fills waits for a buffer to be empty, the one that empties it for it to be
/// full. All buffers are empty at first.
#[derive(Clone, Copy)]
struct Ring {
    /// Shared address of the barriers: full ones, then empty ones.
    barriers: u32,
    /// Buffers.
    count: u32,
    /// The buffer at hand.
    index: u32,
    /// The parity of its full phase.
    parity: u32,
}

impl Ring {
    #[inline(always)]
    unsafe fn init(self, full_arrivals: u32, empty_arrivals: u32) {
        for index in 0..self.count {
            let ring = Self { index, ..self };
            // SAFETY: the barriers' places, which nobody uses yet.
            unsafe {
                mbarrier_init(ring.full(), full_arrivals);
                mbarrier_init(ring.empty(), empty_arrivals);
            }
        }
    }

    #[inline(always)]
    const fn full(self) -> u32 {
        self.barriers + self.index * MBARRIER_BYTES
    }

    #[inline(always)]
    const fn empty(self) -> u32 {
        self.barriers + (self.count + self.index) * MBARRIER_BYTES
    }

    #[inline(always)]
    unsafe fn wait_full(self) {
        // SAFETY: a barrier; whoever fills is at most one round ahead.
        unsafe { mbarrier_wait_parity(self.full(), self.parity) }
    }

    #[inline(always)]
    unsafe fn wait_empty(self) {
        // SAFETY: a barrier; whoever empties is at most one round behind.
        unsafe { mbarrier_wait_parity(self.empty(), self.parity ^ 1) }
    }

    #[inline(always)]
    const fn advance(&mut self) {
        self.index += 1;
        if self.index == self.count {
            self.index = 0;
            self.parity ^= 1;
        }
    }
}

/// This block's tiles, each with its group.
#[derive(Clone, Copy)]
struct Tiles {
    launch: Launch,
    next: u32,
}

impl Tiles {
    #[inline(always)]
    fn new(launch: Launch) -> Self {
        Self { launch, next: thread::block_idx_x() }
    }
}

impl Iterator for Tiles {
    type Item = (Tile, &'static Group);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.launch.tile_count {
            return None;
        }
        // SAFETY: inside of the list, whose tiles name groups of the array; neither changes while the kernel runs.
        let item = unsafe {
            let tile = *(self.launch.tiles as *const Tile).add(self.next as usize);
            (tile, &*(self.launch.groups as *const Group).add(tile.group as usize))
        };
        self.next += thread::grid_dim_x();
        Some(item)
    }
}

impl Group {
    /// Stages that a tile takes.
    #[inline(always)]
    const fn steps(&self) -> u32 {
        self.k.div_ceil(STEP)
    }

    /// MMAs along K that a step takes: fewer in the last.
    #[inline(always)]
    const fn mmas(&self, step: u32) -> u32 {
        let left = (self.k - step * STEP).div_ceil(MMA_K);
        if left < MMAS_PER_STEP { left } else { MMAS_PER_STEP }
    }

    /// Bytes from the scales of 128 rows to those of the next.
    #[inline(always)]
    const fn scale_stride(&self) -> u64 {
        self.k.div_ceil(MMA_K) as u64 * SCALE_TILE_BYTES as u64
    }
}

impl Tile {
    /// Rows of scale tiles that its tokens meet, from the one with `first_token` on.
    #[inline(always)]
    const fn token_scale_tiles(&self) -> u32 {
        (self.first_token % SCALE_TILE_ROWS + self.tokens).div_ceil(SCALE_TILE_ROWS)
    }
}

// The load warp: global memory → stages.

impl<const MATRICES: usize, const TILE_TOKENS: u32, const STAGES: u32> Sm100<MATRICES, TILE_TOKENS, STAGES> {
    #[inline(always)]
    unsafe fn load(launch: Launch, shared: u32) {
        let mut stages = Self::stages(shared);
        let mut known = u32::MAX;
        for (tile, group) in Tiles::new(launch) {
            // SAFETY: the group's own maps and scales, of which the padding is whole tiles; a stage is written
            // while it is empty, and its full barrier expects each copy's bytes.
            unsafe {
                if tile.group != known {
                    known = tile.group;
                    fence_proxy_tensormap_acquire(group.a_map);
                    for matrix in 0..MATRICES {
                        fence_proxy_tensormap_acquire(group.b_maps[matrix]);
                    }
                }
                let scale_tiles = tile.token_scale_tiles();
                let row_scales = u64::from(tile.first_row / SCALE_TILE_ROWS) * group.scale_stride();
                let token_scales = u64::from(tile.first_token / SCALE_TILE_ROWS) * group.scale_stride();
                for step in 0..group.steps() {
                    let stage = shared + stages.index * Self::STAGE_BYTES;
                    let full = stages.full();
                    let scale_bytes = group.mmas(step) * SCALE_TILE_BYTES;
                    let scale_offset = u64::from(step) * u64::from(Instance::SCALE_BYTES);
                    let k_byte = (step * STEP_BYTES) as i32;

                    stages.wait_empty();
                    // A box counts whole, whatever of it lies outside of the tensor.
                    let values = MATRICES as u32 * Instance::WEIGHT_BYTES + Self::INSTANCE.token_bytes();
                    mbarrier_arrive_expect_tx(full, values + (MATRICES as u32 + scale_tiles) * scale_bytes);
                    for matrix in 0..MATRICES {
                        cp_async_bulk_tensor_2d_shared_global(
                            stage + Self::weights(matrix),
                            group.b_maps[matrix],
                            [k_byte, tile.first_row as i32],
                            full,
                        );
                        cp_async_bulk_shared_global(
                            stage + Self::weight_scales(matrix),
                            group.b_scales[matrix] + row_scales + scale_offset,
                            scale_bytes,
                            full,
                        );
                    }
                    cp_async_bulk_tensor_2d_shared_global(
                        stage + Self::TOKENS,
                        group.a_map,
                        [k_byte, tile.first_token as i32],
                        full,
                    );
                    for tile_row in 0..scale_tiles {
                        cp_async_bulk_shared_global(
                            stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES,
                            group.a_scales + token_scales + u64::from(tile_row) * group.scale_stride() + scale_offset,
                            scale_bytes,
                            full,
                        );
                    }
                    stages.advance();
                }
            }
        }
    }
}

// The MMA warp: stages → accumulators.

impl<const MATRICES: usize, const TILE_TOKENS: u32, const STAGES: u32> Sm100<MATRICES, TILE_TOKENS, STAGES> {
    #[inline(always)]
    unsafe fn multiply(launch: Launch, shared: u32, tmem: u32) {
        let mut stages = Self::stages(shared);
        let mut accumulators = Self::accumulators(shared);
        for (tile, group) in Tiles::new(launch) {
            let descriptor = mxf4nvf4_descriptor(TILE_ROWS, tile.tokens.next_multiple_of(TOKEN_STEP));
            // SAFETY: an accumulator is written while it is empty, a stage read while it is full; what was issued is
            // complete when their barriers say so. Scales in tensor memory are overwritten by copies that stand behind
            // the MMAs that read them.
            unsafe {
                accumulators.wait_empty();
                tcgen05_fence_after_thread_sync();
                for step in 0..group.steps() {
                    stages.wait_full();
                    tcgen05_fence_after_thread_sync();
                    let stage = shared + stages.index * Self::STAGE_BYTES;
                    for mma in 0..group.mmas(step) {
                        Self::copy_scales(stage, tmem, mma, tile.token_scale_tiles());
                        let tokens = values_descriptor(stage + Self::TOKENS, mma);
                        let token_column = tile.first_token % SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;
                        for matrix in 0..MATRICES {
                            tcgen05_mma_mxf4nvf4_block16(
                                tmem + Self::accumulator(accumulators.index, matrix),
                                values_descriptor(stage + Self::weights(matrix), mma),
                                tokens,
                                descriptor,
                                tmem + Self::weight_scale_column(matrix, mma),
                                tmem + Self::token_scale_column(mma, 0) + token_column,
                                step > 0 || mma > 0,
                            );
                        }
                    }
                    tcgen05_commit(stages.empty());
                    stages.advance();
                }
                tcgen05_commit(accumulators.full());
            }
            accumulators.advance();
        }
        // Nobody may read tensor memory when it is freed.
        for _ in 0..accumulators.count {
            // SAFETY: as above.
            unsafe { accumulators.wait_empty() };
            accumulators.advance();
        }
        tcgen05_fence_after_thread_sync();
    }

    /// Copies the scales of one MMA of each matrix to tensor memory.
    #[inline(always)]
    unsafe fn copy_scales(stage: u32, tmem: u32, mma: u32, token_scale_tiles: u32) {
        // SAFETY: the caller's promise: a full stage, columns of their own.
        unsafe {
            for matrix in 0..MATRICES {
                let source = scales_descriptor(stage + Self::weight_scales(matrix), mma);
                tcgen05_cp_32x128b_warpx4(tmem + Self::weight_scale_column(matrix, mma), source);
            }
            for tile_row in 0..token_scale_tiles {
                let source = scales_descriptor(stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES, mma);
                tcgen05_cp_32x128b_warpx4(tmem + Self::token_scale_column(mma, tile_row), source);
            }
        }
    }
}

/// Columns of tensor memory of a tile of the scale layout.
const SCALE_COLUMNS: u32 = SCALE_TILE_ROWS / TOKEN_SCALE_ROWS;

/// The values of the `mma`-th MMA of a stage's rows at `address`: as TMA has swizzled them, 8 rows after 8.
#[inline(always)]
const fn values_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * (MMA_K / 2), 8 * STEP_BYTES, MatrixSwizzle::B128)
}

/// The scales of the `mma`-th MMA of a stage's 128 rows at `address`: 32 rows of 16 bytes.
#[inline(always)]
const fn scales_descriptor(address: u32, mma: u32) -> u64 {
    matrix_descriptor(address + mma * SCALE_TILE_BYTES, 8 * 16, MatrixSwizzle::None)
}

// The epilogue warps: accumulators → C.

impl<const MATRICES: usize, const TILE_TOKENS: u32, const STAGES: u32> Sm100<MATRICES, TILE_TOKENS, STAGES> {
    /// Each lane has a column of C, in tensor memory a lane of all tokens. Through shared memory, 8 tokens at a time, four
    /// lanes come to have a token's 32 columns, in stores of 16 bytes.
    #[inline(always)]
    unsafe fn epilogue(launch: Launch, shared: u32, tmem: u32, warp: u32) {
        let lane = lane_id();
        let tmem = tmem_lane(tmem, warp * WARP_SIZE);
        let mut staging = shared + Self::STAGING + warp * Instance::STAGING_BYTES;
        let mut other_staging = staging + Instance::STAGING_BYTES / 2;
        let mut accumulators = Self::accumulators(shared);
        for (tile, group) in Tiles::new(launch) {
            let column = tile.first_row + warp * WARP_SIZE + lane % LANES_PER_TOKEN * ELEMENTS_PER_LANE;
            // SAFETY: an accumulator is read while it is full, by this warp's lanes alone; a buffer is this warp's, and
            // a store inside of C, each element once.
            unsafe {
                accumulators.wait_full();
                tcgen05_fence_after_thread_sync();
                for token in (0..tile.tokens).step_by(TOKEN_STEP as usize) {
                    let address = tmem + Self::accumulator(accumulators.index, 0) + token;
                    let sums = Self::load_sums(address);
                    if token + TOKEN_STEP >= tile.tokens {
                        // All is read: the next tile's MMAs may overwrite it while this one is stored.
                        tcgen05_fence_before_thread_sync();
                        sync_warp(ALL_LANES);
                        if lane == 0 {
                            mbarrier_arrive(accumulators.empty());
                        }
                    }
                    Self::stage(staging + lane * ELEMENT_BYTES, &sums, group, launch.output);
                    sync_warp(ALL_LANES);
                    let token = token + lane / LANES_PER_TOKEN;
                    let elements = ld_shared_v4_b32(staging + lane * LANE_BYTES);
                    // N is a multiple of 8, so a lane's columns are all inside or all outside.
                    if token < tile.tokens && column < group.n {
                        let row = u64::from(tile.first_token + token);
                        let element = row * u64::from(group.n) + u64::from(column);
                        st_global_v4_b32(group.c + element * u64::from(ELEMENT_BYTES), elements);
                    }
                    // The next 8 tokens do not wait until all lanes have read these.
                    (staging, other_staging) = (other_staging, staging);
                }
            }
            accumulators.advance();
        }
    }

    /// This lane's sums of 8 tokens, by matrix.
    #[inline(always)]
    unsafe fn load_sums(address: u32) -> [[f32; TOKEN_STEP as usize]; MATRICES] {
        // SAFETY: the caller's promise: a full accumulator, all lanes together.
        let sums = unsafe {
            if MATRICES == 2 {
                tcgen05_ld_32x32b_x8_twice([address, address + TILE_TOKENS])
            } else {
                [tcgen05_ld_32x32b_x8(address), [0; TOKEN_STEP as usize]]
            }
        };
        core::array::from_fn(|matrix| sums[matrix].map(f32::from_bits))
    }

    /// Scales and activates a lane's sums of 8 tokens, and writes them a token's row apart.
    #[inline(always)]
    unsafe fn stage(address: u32, sums: &[[f32; TOKEN_STEP as usize]; MATRICES], group: &Group, output: u32) {
        let value = |token: usize| {
            let gate = group.alpha[0] * sums[0][token];
            if MATRICES == 2 { silu(gate) * (group.alpha[1] * sums[MATRICES - 1][token]) } else { gate }
        };
        for token in (0..TOKEN_STEP).step_by(2) {
            let pair = convert(output, value(token as usize), value(token as usize + 1));
            let address = address + token * TOKEN_BYTES;
            // SAFETY: inside of this warp's buffer, which no lane reads now.
            unsafe {
                st_shared_b16(address, pair as u16);
                st_shared_b16(address + TOKEN_BYTES, (pair >> 16) as u16);
            }
        }
    }
}

/// Bytes of an element of C.
const ELEMENT_BYTES: u32 = 2;

/// Bytes of a warp's columns of a token.
const TOKEN_BYTES: u32 = WARP_SIZE * ELEMENT_BYTES;

/// Bytes that a lane stores at once.
const LANE_BYTES: u32 = 16;

/// Elements of them.
const ELEMENTS_PER_LANE: u32 = LANE_BYTES / ELEMENT_BYTES;

/// Lanes that store a token's columns.
const LANES_PER_TOKEN: u32 = TOKEN_BYTES / LANE_BYTES;

const _: () =
    assert!(WARP_SIZE / LANES_PER_TOKEN == TOKEN_STEP && 2 * TOKEN_STEP * TOKEN_BYTES == Instance::STAGING_BYTES);
