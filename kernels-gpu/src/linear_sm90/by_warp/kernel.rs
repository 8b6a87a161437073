//! How a linear layer works with the products of a warp.
//!
//! A block computes a tile of C. Its last warp loads weights and tokens of a k-block to the next stage of a ring. Each other warp has
//! 16 columns of C, with the lanes as in a warp of `wgmma`: it decodes weights in registers and multiplies. Its products follow one
//! another along K, and each waits for the one before, 24 cycles; decoding fits between them.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::marker::PhantomData;

use cuda_std::{
    fence::{fence_mbarrier_init, fence_proxy_async_shared},
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    integer::opaque_b32,
    mbarrier::{mbarrier_arrive, mbarrier_arrive_expect_tx},
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_v4_b32},
    thread,
    tma::{
        TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_cta_global,
        cp_async_bulk_tensor_2d_shared_global,
    },
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx},
};

use super::abi::{Instance, PRODUCT_TOKENS, STRIP_ROWS, STRIP_SCALES, STRIP_VALUES};
use crate::{
    epilogue::convert,
    format::{OUTPUT_BF16, OUTPUT_F16},
    linear_sm90::{
        abi::{
            BOX_BYTES, LANE_BYTES, Launch, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_LANES, ROW_SCALES, k_blocks,
            panel_offset,
        },
        decode::{Decode, Packed},
    },
    ring::{Ring, ring_bytes},
    sm90::{BIAS_BYTES, K_BLOCK, LANE_WORDS},
};

/// An instance, as a type.
pub(crate) trait Built {
    const INSTANCE: Instance;
}

/// Makes the entries of a list of instances, each a type of its own.
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
            struct This;
            impl Built for This {
                const INSTANCE: Instance = INSTANCE;
            }
            // SAFETY: the contract is this function's too.
            unsafe {
                let token_map = tensor_map_of_parameter!($entry);
                ByWarp::<This, IS_BF16, { INSTANCE.products() }>::run(launch, token_map);
            }
        }
    )*};
}
pub(crate) use entries;

/// Boxes of tokens of a stage: the first 64 columns of the k-block, and the others.
const BOXES: u32 = 2 * K_BLOCK / BOX_BYTES;

/// Bytes that a lane gives the address of to `ldmatrix`: the swizzle moves such pieces.
const CHUNK_BYTES: u32 = 16;

/// Chunks of a row of a box.
const BOX_CHUNKS: u32 = BOX_BYTES / CHUNK_BYTES;

/// The kernel as an instance, whose tokens are bf16 or f16. A warp has `P` products for 16 columns of K.
pub(crate) struct ByWarp<I, const BF16: bool, const P: usize> {
    launch: Launch,
    token_map: TensorMapAddress,
    shared: SharedAddress,
    /// The tile's first column.
    first_column: u32,
    /// The tile's first token.
    first_token: u32,
    /// The warp's strip.
    strip: u32,
    /// The first of the warp's tokens in the tile.
    warp_token: u32,
    instance: PhantomData<I>,
}

/// Where a lane's part of a stage lies, in bytes from its weights, and from its tokens.
struct Lane {
    /// The words of its first row; those of the second are the next row's.
    words: u32,
    /// The scales of both rows.
    scales: u32,
    /// What it gives to `ldmatrix` for the words 0 and 2, and for 1 and 3.
    tokens: [u32; 2],
    /// Whether it arrives at barriers for its warp.
    leads: bool,
}

/// What a lane has of a k-block before it is multiplied: words of two rows, the scales of both, and B of the first words.
#[derive(Clone, Copy)]
struct Operands<const P: usize> {
    words: [[u32; LANE_WORDS]; 2],
    scales: [[u32; LANE_WORDS / 2]; 2],
    b: [[u32; 4]; P],
}

impl<I: Built, const BF16: bool, const P: usize> ByWarp<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;
    const WARPS: u32 = Self::INSTANCE.multiplying_warps();

    // Offsets from the start of shared memory: tokens of all stages, their weights, and the barriers.
    const TOKEN_BYTES: u32 = Self::INSTANCE.token_bytes();
    const WEIGHTS: u32 = Self::INSTANCE.stages * Self::TOKEN_BYTES;
    const BARRIERS: u32 = Self::WEIGHTS + Self::INSTANCE.stages * Self::INSTANCE.weight_bytes();
    const END: u32 = Self::BARRIERS + ring_bytes(Self::INSTANCE.stages);

    /// Where scales begin in a stage's weights.
    const SCALES: u32 = Self::INSTANCE.strips * STRIP_VALUES;

    /// Strips of a panel that a tile has.
    const PANEL_STRIPS: u32 = Self::INSTANCE.strips / Self::INSTANCE.panels();

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs`.
    #[inline(always)]
    pub(crate) unsafe fn run(launch: Launch, token_map: TensorMapAddress) {
        const { assert!(Self::INSTANCE.products() == P && P <= 8 && Self::END == Self::INSTANCE.shared_bytes()) };
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
            strip: warp % Self::INSTANCE.strips,
            warp_token: warp / Self::INSTANCE.strips * Self::INSTANCE.warp_tokens(),
            instance: PhantomData,
        };
        // SAFETY: the contract is this function's too. Barriers are initialised before any thread passes `sync_threads`; each role is
        // a warp's.
        unsafe {
            if thread::thread_idx_x() == 0 {
                this.stages().init(1, Self::WARPS);
                fence_mbarrier_init();
            }
            thread::sync_threads();
            if warp == Self::WARPS {
                this.load();
            } else {
                this.write(&this.sums());
            }
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

    /// Loads the tile's k-blocks: weights of the first round of stages before the grid before has ended, the rest after it. One warp.
    ///
    /// # Safety
    /// The contract. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    unsafe fn load(&self) {
        let k_blocks = k_blocks(self.launch.k);
        let first_round = k_blocks.min(Self::INSTANCE.stages);
        let (mut stages, mut with_tokens) = (self.stages(), self.stages());
        // SAFETY: a stage is written while it is empty, and its full barrier expects the bytes of every copy. Tokens are complete
        // after the wait.
        unsafe {
            for k_block in 0..first_round {
                self.load_weights(stages, k_block);
                stages.advance();
            }
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            for k_block in 0..first_round {
                self.load_tokens(with_tokens, k_block);
                with_tokens.advance();
            }
            for k_block in first_round..k_blocks {
                stages.wait_empty();
                self.load_weights(stages, k_block);
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
        let (first_panel, first_row) = (self.first_column / PANEL_ROWS, self.first_column % PANEL_ROWS);
        let last_panel = (self.launch.n - 1) / PANEL_ROWS;
        let (weights, full) = (self.weights(stage), stage.full());
        // SAFETY: what `# Safety` above asks; strips lie one behind the other in their panel, and so do their scales.
        unsafe {
            if lane_id() == 0 {
                mbarrier_arrive_expect_tx(full, Self::INSTANCE.weight_bytes() + Self::TOKEN_BYTES);
                for index in 0..Self::INSTANCE.panels() {
                    // If the matrix has no such panel, its last one stands in: what becomes of it is not written to C.
                    let panel = panel_offset((first_panel + index).min(last_panel), k_block, self.launch.k);
                    let panel = GlobalAddress::new(self.launch.panels) + panel;
                    let values = panel + u64::from(first_row * ROW_BYTES);
                    let target = weights + index * Self::PANEL_STRIPS * STRIP_VALUES;
                    cp_async_bulk_shared_global(target, values, Self::PANEL_STRIPS * STRIP_VALUES, full);
                    let scales = panel + u64::from(PANEL_SCALES + first_row * ROW_SCALES);
                    let target = weights + (Self::SCALES + index * Self::PANEL_STRIPS * STRIP_SCALES);
                    cp_async_bulk_shared_global(target, scales, Self::PANEL_STRIPS * STRIP_SCALES, full);
                }
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
                    // For sm_120 ptxas makes a stack for the form that Hopper's oldest drivers know.
                    if cfg!(feature = "linear_sm120") {
                        cp_async_bulk_tensor_2d_shared_cta_global(target, self.token_map, at, full);
                    } else {
                        cp_async_bulk_tensor_2d_shared_global(target, self.token_map, at, full);
                    }
                }
            }
            sync_warp(ALL_LANES);
        }
    }

    /// The warp's sums.
    ///
    /// # Safety
    /// The contract. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    unsafe fn sums(&self) -> [[f32; 4]; P] {
        let mut sums = [[0.0; 4]; P];
        let mut stage = self.stages();
        let lane = self.lane();
        // SAFETY: a stage is read while it is full, and released behind its last load.
        unsafe {
            stage.wait_full();
            let mut operands = self.operands(&lane, stage);
            for left in (0..k_blocks(self.launch.k)).rev() {
                let mut next = stage;
                next.advance();
                let mut coming = operands;
                if left > 0 {
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
                (operands, stage) = (coming, next);
            }
        }
        sums
    }

    /// This lane's places, computed once: the compiler is not to compute them anew in each k-block.
    #[inline(always)]
    fn lane(&self) -> Lane {
        let lane_id = opaque_b32(lane_id());
        let (lane, pair) = (lane_id % ROW_LANES, lane_id / ROW_LANES);
        let (token, chunk) = (lane_id % PRODUCT_TOKENS, lane_id / PRODUCT_TOKENS);
        // The 128-byte swizzle (PTX ISA, "Tensor swizzle modes"): rows are tokens.
        let tokens = |half: u32| {
            let chunk = (half * (BOX_CHUNKS / 2) + chunk) ^ token;
            opaque_b32((self.warp_token + token) * BOX_BYTES + chunk * CHUNK_BYTES)
        };
        Lane {
            words: opaque_b32(self.strip * STRIP_VALUES + 2 * pair * ROW_BYTES + lane * LANE_BYTES),
            scales: opaque_b32(Self::SCALES + self.strip * STRIP_SCALES + 2 * pair * ROW_SCALES),
            tokens: [tokens(0), tokens(1)],
            leads: lane_id == 0,
        }
    }

    /// A lane's operands of a stage.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn operands(&self, lane: &Lane, stage: Ring) -> Operands<P> {
        let weights = self.weights(stage);
        // SAFETY: inside of the stage.
        unsafe {
            let words = [0, ROW_BYTES].map(|row| ld_shared_v4_b32(weights + (lane.words + row)));
            let [a, b, c, d] = ld_shared_v4_b32(weights + lane.scales);
            Operands { words, scales: [[a, b], [c, d]], b: self.b(lane, stage, 0) }
        }
    }

    /// B of the products of a word, 32 columns of K.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn b(&self, lane: &Lane, stage: Ring, word: usize) -> [[u32; 4]; P] {
        let first = self.tokens(stage) + (word as u32 / 2 * (Self::TOKEN_BYTES / BOXES) + lane.tokens[word % 2]);
        // SAFETY: inside of the stage.
        core::array::from_fn(|product| unsafe {
            ldmatrix_x4_b16(first + product as u32 * (PRODUCT_TOKENS * BOX_BYTES))
        })
    }

    /// Adds the products of a k-block.
    ///
    /// # Safety
    /// The stage is full, and operands are its.
    #[inline(always)]
    unsafe fn multiply(&self, sums: &mut [[f32; 4]; P], operands: &Operands<P>, lane: &Lane, stage: Ring) {
        // Straight-line code: arrays stay in registers only if all their indices are constants.
        macro_rules! words {
            ($($word:literal)*) => {$({
                // SAFETY: the stage is full.
                let b = if $word == 0 { operands.b } else { unsafe { self.b(lane, stage, $word) } };
                let [first, second] = [0, 1].map(|row| {
                    let scales = (operands.scales[row][$word / 2] >> ($word % 2 * 16)) as u16;
                    Packed::<BF16>::decode(operands.words[row][$word], scales)
                });
                for half in 0..2 {
                    let a = [first[2 * half], second[2 * half], first[2 * half + 1], second[2 * half + 1]];
                    for product in 0..P {
                        let b = [b[product][2 * half], b[product][2 * half + 1]];
                        // SAFETY: the whole warp is here.
                        unsafe { mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut sums[product], a, b) };
                    }
                }
            })*};
        }
        words!(0 1 2 3);
    }

    /// Writes the warp's elements of C. A lane has two neighbouring columns of two neighbouring tokens of each product.
    ///
    /// # Safety
    /// The contract. Sums are the warp's.
    #[inline(always)]
    unsafe fn write(&self, sums: &[[f32; 4]; P]) {
        let Launch { n, m, .. } = self.launch;
        let (lane, pair) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let column = self.first_column + self.strip * STRIP_ROWS + 2 * pair;
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
        let token = self.first_token + self.warp_token + 2 * lane;
        let write = |token: u32, low: f32, high: f32| {
            let output = if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 };
            let elements =
                convert(output, fma_rn_f32(alphas[0], low, biases[0]), fma_rn_f32(alphas[1], high, biases[1]));
            let element = u64::from(token) * u64::from(n) + u64::from(column);
            let address = GlobalAddress::new(self.launch.c) + element * 2;
            // SAFETY: two elements of C that are this lane's alone; N and the column are even.
            unsafe { st_global_b32_where(token < m && column < n, address, elements) };
        };
        // Straight-line code, as above.
        macro_rules! products {
            ($($product:literal)*) => {$(
                if $product < P {
                    let [a, b, c, d] = sums[$product];
                    write(token + $product * PRODUCT_TOKENS, a, c);
                    write(token + $product * PRODUCT_TOKENS + 1, b, d);
                }
            )*};
        }
        products!(0 1 2 3 4 5 6 7);
    }
}
