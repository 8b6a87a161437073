//! How a linear layer works with the products of a warp.
//!
//! A block computes a tile of C. A warp has eight columns of it: it decodes their weights in registers, straight into the B fragments of
//! its products, and takes tokens from shared memory as their A. Products follow one another along K, and each waits for the one
//! before, 24 cycles; decoding fits between them. Beside that the first warp loads k-blocks to the stages of a ring.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use cuda_std::{
    fence::{fence_mbarrier_init, fence_proxy_async_shared},
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    integer::opaque_b32,
    kernel,
    mbarrier::{mbarrier_arrive, mbarrier_arrive_expect_tx},
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_v2_b32, ld_shared_v4_b32},
    tensor_map_of_parameter, thread,
    tma::{TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx},
};

use super::abi::{INSTANCES, Index, Instance, PRODUCT_TOKENS, STRIP_ROWS, STRIP_SCALES, STRIP_VALUES, instances};
use crate::{
    epilogue::convert,
    format::{OUTPUT_BF16, OUTPUT_F16},
    linear_sm90::{
        abi::{
            BOX_BYTES, LANE_BYTES, Launch, PANEL_BYTES, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_LANES, ROW_SCALES,
            k_blocks, panel_offset,
        },
        kernel::multiply::{Decode, Packed},
    },
    ring::{Ring, ring_bytes},
    sm90::{BIAS_BYTES, CORE_MATRIX_ROWS, K_BLOCK, LANE_WORDS},
    units::TokenType,
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in `linear_sm90/mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.token_type, TokenType::Bf16);
            // SAFETY: the contract is this function's too.
            unsafe {
                let token_map = tensor_map_of_parameter!($entry);
                ByWarp::<{ Index::$entry as usize }, IS_BF16, { INSTANCE.products() }>::run(launch, token_map);
            }
        }
    )*};
}
instances!(entries);

/// Boxes of tokens of a stage: the first 64 columns of the k-block, and the others.
const BOXES: u32 = 2 * K_BLOCK / BOX_BYTES;

/// Bytes that a lane gives the address of to `ldmatrix`: the swizzle moves such pieces.
const CHUNK_BYTES: u32 = 16;

/// Chunks of a token in a product.
const PRODUCT_CHUNKS: u32 = 2;

/// Products along K of a box.
const BOX_PRODUCTS: usize = (BOX_BYTES / CHUNK_BYTES / PRODUCT_CHUNKS) as usize;

/// The kernel as one of [`INSTANCES`], whose tokens are bf16 or f16. A warp has `P` products for 16 columns of K, of 16 tokens each.
struct ByWarp<const INDEX: usize, const BF16: bool, const P: usize> {
    launch: Launch,
    token_map: TensorMapAddress,
    shared: SharedAddress,
    /// The tile's first column.
    first_column: u32,
    /// The tile's first token.
    first_token: u32,
    /// The warp, whose strip has the same number.
    warp: u32,
}

/// Where a lane's part of a stage lies, in bytes from its weights, and from its tokens.
struct Lane {
    /// The words of its column of C.
    words: u32,
    /// Their scales.
    scales: u32,
    /// What it gives to `ldmatrix` for the four products along K of a box.
    tokens: [u32; 4],
    /// Whether it arrives at barriers for its warp.
    leads: bool,
}

/// What a lane has of a k-block before it is multiplied: words of its column, and their scales.
#[derive(Clone, Copy)]
struct Operands {
    words: [u32; LANE_WORDS],
    scales: [u32; LANE_WORDS / 2],
}

impl<const INDEX: usize, const BF16: bool, const P: usize> ByWarp<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = INSTANCES[INDEX];
    const WARPS: u32 = Self::INSTANCE.warps();

    // Offsets from the start of shared memory: tokens of all stages, their weights, and the barriers.
    const TOKEN_BYTES: u32 = Self::INSTANCE.token_bytes();
    const WEIGHTS: u32 = Self::INSTANCE.stages * Self::TOKEN_BYTES;
    const BARRIERS: u32 = Self::WEIGHTS + Self::INSTANCE.stages * Self::INSTANCE.weight_bytes();
    const END: u32 = Self::BARRIERS + ring_bytes(Self::INSTANCE.stages);

    /// Where scales begin in a stage's weights.
    const SCALES: u32 = Self::INSTANCE.strips * STRIP_VALUES;

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs`.
    #[inline(always)]
    unsafe fn run(launch: Launch, token_map: TensorMapAddress) {
        const { assert!(Self::INSTANCE.products() == P && Self::END == Self::INSTANCE.shared_bytes()) };
        let columns = launch.n.div_ceil(Self::INSTANCE.columns());
        // SAFETY: C has columns.
        unsafe { core::hint::assert_unchecked(columns > 0) };
        let (column, row) = (thread::block_idx_x() % columns, thread::block_idx_x() / columns);
        // The same value in all lanes; through the shuffle the compiler knows that it is.
        // SAFETY: all lanes are here.
        let (warp, _) = unsafe { warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE) };
        let this = Self {
            launch,
            token_map,
            shared: dynamic_shared_address(),
            first_column: column * Self::INSTANCE.columns(),
            first_token: row * Self::INSTANCE.tile_tokens,
            warp,
        };
        // SAFETY: the contract is this function's too. Barriers are initialised before any thread passes `sync_threads`; each role is
        // a warp's.
        unsafe {
            if thread::thread_idx_x() == 0 {
                this.stages().init(1, Self::WARPS);
                fence_mbarrier_init();
            }
            thread::sync_threads();
            this.write(&this.sums());
        }
    }

    /// The ring of stages. One is full when its copies have arrived, and empty when every warp that multiplies has.
    #[inline(always)]
    fn stages(&self) -> Ring {
        Ring::new(self.shared + Self::BARRIERS, Self::INSTANCE.stages)
    }

    /// Where a stage's weights lie.
    #[inline(always)]
    fn weights(&self, stage: Ring) -> SharedAddress {
        self.shared + (Self::WEIGHTS + stage.index() * Self::INSTANCE.weight_bytes())
    }

    /// Where a stage's tokens lie.
    #[inline(always)]
    fn tokens(&self, stage: Ring) -> SharedAddress {
        self.shared + stage.index() * Self::TOKEN_BYTES
    }

    /// Loads the first k-blocks, as many as there are stages: weights before the grid before has ended, tokens after it. One warp.
    ///
    /// # Safety
    /// The contract. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    unsafe fn load_first(&self) {
        let count = k_blocks(self.launch.k).min(Self::INSTANCE.stages);
        // SAFETY: stages are empty, and a full barrier expects the bytes of every copy. Tokens are complete after the wait.
        unsafe {
            let mut stages = self.stages();
            for k_block in 0..count {
                self.load_weights(stages, k_block);
                stages.advance();
            }
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            let mut stages = self.stages();
            for k_block in 0..count {
                self.load_tokens(stages, k_block);
                stages.advance();
            }
        }
    }

    /// Starts to load the weights of a k-block to a stage, whose barrier then expects the tokens too.
    ///
    /// # Safety
    /// The contract. The stage is empty. The whole warp calls it together.
    #[inline(always)]
    unsafe fn load_weights(&self, stage: Ring, k_block: u32) {
        let (panel, first_row) = (self.first_column / PANEL_ROWS, self.first_column % PANEL_ROWS);
        let panel = panel_offset(panel, 0, self.launch.k) + u64::from(k_block) * u64::from(PANEL_BYTES);
        let panel = GlobalAddress::new(self.launch.panels) + panel;
        let (weights, full) = (self.weights(stage), stage.full());
        // SAFETY: what `# Safety` above asks; the tile's strips lie one behind the other in their panel, and so do their scales.
        unsafe {
            if lane_id() == 0 {
                mbarrier_arrive_expect_tx(full, Self::INSTANCE.weight_bytes() + Self::TOKEN_BYTES);
                let values = panel + u64::from(first_row * ROW_BYTES);
                cp_async_bulk_shared_global(weights, values, Self::SCALES, full);
                let scales = panel + u64::from(PANEL_SCALES + first_row * ROW_SCALES);
                cp_async_bulk_shared_global(weights + Self::SCALES, scales, Self::INSTANCE.strips * STRIP_SCALES, full);
            }
            sync_warp(ALL_LANES);
        }
    }

    /// Starts to load the tokens of a k-block to a stage. What lies outside of the tokens comes as zeros.
    ///
    /// # Safety
    /// The contract; the grid before has ended. The stage's weights are on their way. The whole warp calls it together.
    #[inline(always)]
    unsafe fn load_tokens(&self, stage: Ring, k_block: u32) {
        let (tokens, full) = (self.tokens(stage), stage.full());
        // SAFETY: what `# Safety` above asks.
        unsafe {
            if lane_id() == 0 {
                for part in 0..BOXES {
                    let at = [(k_block * BOXES + part) * BOX_BYTES, self.first_token].map(|place| place as i32);
                    let target = tokens + part * (Self::TOKEN_BYTES / BOXES);
                    cp_async_bulk_tensor_2d_shared_global(target, self.token_map, at, full);
                }
            }
            sync_warp(ALL_LANES);
        }
    }

    /// The warp's sums.
    ///
    /// # Safety
    /// The contract. The barriers have been initialised. The whole block calls it together.
    #[inline(always)]
    unsafe fn sums(&self) -> [[f32; 4]; P] {
        let k_blocks = k_blocks(self.launch.k);
        let mut sums = [[0.0; 4]; P];
        // The stage that is multiplied, and the one that is filled next, a round later.
        let (mut stage, mut refilled) = (self.stages(), self.stages());
        let lane = self.lane();
        let loads = self.warp == 0;
        // SAFETY: a stage is read while it is full, and released behind its last load. It is filled while it is empty.
        unsafe {
            if loads {
                self.load_first();
            }
            for _ in 0..Self::INSTANCE.stages {
                refilled.advance();
            }
            stage.wait_full();
            let mut operands = self.operands(&lane, stage);
            for k_block in 0..k_blocks {
                let mut next = stage;
                next.advance();
                let mut coming = operands;
                if k_block + 1 < k_blocks {
                    next.wait_full();
                    coming = self.operands(&lane, next);
                }
                self.multiply(&mut sums, &operands, &lane, stage);
                // Without it, a copy overwrites the stage while loads are still under way: seen on an H200.
                fence_proxy_async_shared();
                sync_warp(ALL_LANES);
                if lane.leads {
                    mbarrier_arrive(stage.empty());
                }
                // The stage before this one, which the other warps have long released.
                let refill = k_block + Self::INSTANCE.stages - 1;
                if loads && k_block > 0 && refill < k_blocks {
                    refilled.wait_empty();
                    self.load_weights(refilled, refill);
                    self.load_tokens(refilled, refill);
                    refilled.advance();
                }
                (operands, stage) = (coming, next);
            }
        }
        sums
    }

    /// This lane's places, computed once: the compiler is not to compute them anew in each k-block.
    #[inline(always)]
    fn lane(&self) -> Lane {
        let lane_id = opaque_b32(lane_id());
        let (lane, row) = (lane_id % ROW_LANES, lane_id / ROW_LANES);
        // Two matrices of eight tokens, then the same tokens' next 16 bytes. The 128-byte swizzle moves these (PTX ISA, "Tensor swizzle
        // modes").
        let (token, chunk) = (lane_id % PRODUCT_TOKENS, lane_id / PRODUCT_TOKENS);
        let tokens = |product: u32| {
            let chunk = (product * PRODUCT_CHUNKS + chunk) ^ (token % CORE_MATRIX_ROWS);
            opaque_b32(token * BOX_BYTES + chunk * CHUNK_BYTES)
        };
        Lane {
            words: opaque_b32(self.warp * STRIP_VALUES + row * ROW_BYTES + lane * LANE_BYTES),
            scales: opaque_b32(Self::SCALES + self.warp * STRIP_SCALES + row * ROW_SCALES),
            tokens: [tokens(0), tokens(1), tokens(2), tokens(3)],
            leads: lane_id == 0,
        }
    }

    /// A lane's operands of a stage.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn operands(&self, lane: &Lane, stage: Ring) -> Operands {
        let weights = self.weights(stage);
        // SAFETY: inside of the stage.
        unsafe {
            Operands { words: ld_shared_v4_b32(weights + lane.words), scales: ld_shared_v2_b32(weights + lane.scales) }
        }
    }

    /// A of the products of 16 columns of K.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn a(&self, lane: &Lane, stage: Ring, product: usize) -> [[u32; 4]; P] {
        let of_box = product / BOX_PRODUCTS;
        let first =
            self.tokens(stage) + (of_box as u32 * (Self::TOKEN_BYTES / BOXES) + lane.tokens[product % BOX_PRODUCTS]);
        // SAFETY: inside of the stage.
        core::array::from_fn(|part| unsafe { ldmatrix_x4_b16(first + part as u32 * (PRODUCT_TOKENS * BOX_BYTES)) })
    }

    /// Adds the products of a k-block.
    ///
    /// # Safety
    /// The stage is full, and operands are its. The whole warp calls it together.
    #[inline(always)]
    unsafe fn multiply(&self, sums: &mut [[f32; 4]; P], operands: &Operands, lane: &Lane, stage: Ring) {
        // Straight-line code: arrays stay in registers only if all their indices are constants.
        macro_rules! words {
            ($($word:literal)*) => {$({
                let scales = (operands.scales[$word / 2] >> ($word % 2 * 16)) as u16;
                let b = Packed::<BF16>::decode(operands.words[$word], scales);
                for half in 0..2 {
                    // SAFETY: what `# Safety` above asks.
                    unsafe {
                        let a = self.a(lane, stage, 2 * $word + half);
                        for part in 0..P {
                            let b = [b[2 * half], b[2 * half + 1]];
                            mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut sums[part], a[part], b);
                        }
                    }
                }
            })*};
        }
        words!(0 1 2 3);
    }

    /// Writes the warp's elements of C. A lane has two neighbouring columns of two tokens of each product.
    ///
    /// # Safety
    /// The contract. Sums are the warp's.
    #[inline(always)]
    unsafe fn write(&self, sums: &[[f32; 4]; P]) {
        let Launch { n, m, .. } = self.launch;
        let (lane, row) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let column = self.first_column + self.warp * STRIP_ROWS + 2 * lane;
        let of_column = |array: u64, column: u32, otherwise: f32| {
            let is_there = array != 0 && column < n;
            let address = GlobalAddress::new(array) + u64::from(column) * BIAS_BYTES;
            // SAFETY: that of a column that C has.
            let bits = unsafe { ld_global_b32_or_zero(is_there, address) };
            if is_there { f32::from_bits(bits) } else { otherwise }
        };
        let alphas = [0, 1].map(|next| Packed::<BF16>::UNSCALE * of_column(self.launch.alpha, column + next, 0.0));
        // −0 leaves a sum as it is, its sign too.
        let biases = [0, 1].map(|next| of_column(self.launch.bias, column + next, -0.0));
        let output = if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 };
        for part in 0..P {
            for half in 0..2 {
                let token = self.first_token + part as u32 * PRODUCT_TOKENS + half as u32 * CORE_MATRIX_ROWS + row;
                let scaled = |next: usize| fma_rn_f32(alphas[next], sums[part][2 * half + next], biases[next]);
                let elements = convert(output, scaled(0), scaled(1));
                let element = u64::from(token) * u64::from(n) + u64::from(column);
                let address = GlobalAddress::new(self.launch.c) + element * 2;
                // SAFETY: two elements of C that are this lane's alone; N and the column are even.
                unsafe { st_global_b32_where(token < m && column < n, address, elements) };
            }
        }
    }
}
