//! Products of an MoE layer with few tokens.
//!
//! Every warp of a CTA iterates over K by itself. It waits only for its own copies of weights, which it starts some
//! k-blocks ahead. All warps copy the tile's tokens, and synchronize once per chunk, when one buffer is complete and
//! another one is free. A word is multiplied as soon as it is decoded: the next word is decoded while the product runs.

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::marker::PhantomData;

use cuda_std::{
    cp_async::{cp_async_commit_group, cp_async_wait_group},
    global::{GlobalAddress, atom_global_add_u32, ld_global_b32, ld_relaxed_gpu_global_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    abi::{BUFFERS, CHUNK, Instance, LIST_BYTES, STAGES},
    tokens::{K_BLOCK_BYTES, Tokens, token_place},
    weights::Weights,
};
use crate::{
    decoding::{
        Alpha, BIAS_BYTES, CORE_MATRIX_ROWS, Decode, Fragment, Packed, Rows, Shape, Sums, Target, Tile, WORD_PAIRS,
        Written, pad, registers,
    },
    format::{OUTPUT_BF16, OUTPUT_F16},
    lists::tile_size,
    moe::Launch,
    units::{K_BLOCK, UNIT_BYTES, k_blocks},
};

/// Number of sums per thread for the tokens of one product.
const PRODUCT_REGISTERS: usize = registers(CORE_MATRIX_ROWS as usize);

/// Bytes per number of a list.
const NUMBER: u32 = 4;

/// An instance as a type.
pub(super) trait Built {
    const INSTANCE: Instance;
}

/// Kernel of an instance, with bf16 or f16 tokens.
pub(super) struct Strips<I, const BF16: bool> {
    launch: Launch,
    shared: SharedAddress,
    /// Index of the thread's warp.
    warp: u32,
    instance: PhantomData<I>,
}

impl<I: Built, const BF16: bool> Written<1> for Strips<I, BF16>
where
    Packed<BF16>: Decode,
{
    const SHAPE: Shape = I::INSTANCE.shape();
    const UNSCALE: f32 = Packed::<BF16>::UNSCALE;
    const ANY_ACTIVATION: bool = true;
    const CURVES: bool = I::INSTANCE.curves;
}

impl<I: Built, const BF16: bool> Strips<I, BF16>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;

    // Shared memory: stages of each warp, buffers, lists, index of the next tile.
    const WARP_BYTES: u32 = STAGES * UNIT_BYTES;
    const BUFFERS: u32 = Self::INSTANCE.strips * Self::WARP_BYTES;
    const FIRSTS: u32 = Self::BUFFERS + BUFFERS * Self::INSTANCE.buffer_bytes();
    const TILE_FIRSTS: u32 = Self::FIRSTS + LIST_BYTES;
    const NEXT: u32 = Self::TILE_FIRSTS + LIST_BYTES;

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds.
    #[inline(always)]
    pub(super) unsafe fn run(launch: Launch) {
        const { assert!(Self::NEXT + 16 == Self::INSTANCE.shared_bytes()) };
        // SAFETY: all threads of the CTA follow the same path, in whole warps. Lists are read when they are complete,
        // and tokens after the previous grid has ended. Buffers are free when a tile's copies start. A barrier of the
        // mainloop lies between reading the next tile's index and writing the following one.
        unsafe {
            // The value is the same in all lanes; the shuffle shows this to the compiler.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            let this = Self { launch, shared: dynamic_shared_address(), warp, instance: PhantomData };
            if launch.lists_pending != 0 {
                griddepcontrol_wait();
            }
            this.copy_lists();
            thread::sync_threads();
            if Self::INSTANCE.run > 1 {
                return this.compute_runs();
            }
            let fragment = this.fragment();
            let (mut index, mut done, mut sums) = (thread::block_idx_x(), Tile::NONE, pad(&[[0.0; PRODUCT_REGISTERS]]));
            let mut await_tokens = launch.lists_pending == 0;
            // One iteration more than there are tiles, because a tile's sums are written after the next tile's copies
            // have started.
            loop {
                let tile = this.find(index);
                let mut weights = this.weights(&tile);
                if await_tokens {
                    griddepcontrol_wait();
                    await_tokens = false;
                }
                // CTAs of the next grid start as soon as there is room.
                griddepcontrol_launch_dependents();
                let tokens = Tokens::of(Self::INSTANCE, &launch, &tile, this.shared + Self::BUFFERS);
                if done.tokens > 0 {
                    this.write(&done, &fragment, sums);
                }
                if tile.tokens == 0 {
                    break;
                }
                let asked = this.ask();
                sums = this.sum_tile(&mut weights, &tokens, &tile, &fragment);
                done = tile;
                if thread::thread_idx_x() == 0 {
                    st_shared_b32(this.shared + Self::NEXT, asked);
                }
                thread::sync_threads();
                index = ld_shared_b32(this.shared + Self::NEXT);
            }
        }
    }

    /// Computes the CTA's runs of tiles. The tokens of a run stay in the buffers while its tiles are computed.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds, K is at most [`RUN_K`], and the lists are in shared memory. All threads
    /// of the CTA call this.
    #[inline(always)]
    unsafe fn compute_runs(&self) {
        // SAFETY: all threads of the CTA follow the same path, in whole warps. Tokens are read after the previous grid
        // has ended. The barrier at the end of a run lies between all reads of the buffers and the next run's copies,
        // and between writing and reading the next run's index.
        unsafe {
            let fragment = self.fragment();
            let (mut index, mut rest) = (thread::block_idx_x(), 0);
            let (mut tile, mut done, mut sums) = (Tile::NONE, Tile::NONE, pad(&[[0.0; PRODUCT_REGISTERS]]));
            let mut tokens = Tokens::none(Self::INSTANCE, self.shared + Self::BUFFERS);
            let mut await_tokens = self.launch.lists_pending == 0;
            let mut asked = 0;
            // One iteration more than there are tiles, because a tile's sums are written after the next tile's copies
            // have started.
            loop {
                let begins = rest == 0;
                if begins {
                    tile = self.find(index);
                    rest = self.tiles_from(tile.first_column);
                } else {
                    tile.first_column += Self::INSTANCE.columns();
                    // All lanes have read the stages, which the tile's copies overwrite.
                    sync_warp(ALL_LANES);
                }
                let mut weights = self.weights(&tile);
                if await_tokens {
                    griddepcontrol_wait();
                    await_tokens = false;
                }
                if begins {
                    // CTAs of the next grid start as soon as there is room.
                    griddepcontrol_launch_dependents();
                    tokens = Tokens::of(Self::INSTANCE, &self.launch, &tile, self.shared + Self::BUFFERS);
                }
                if done.tokens > 0 {
                    self.write(&done, &fragment, sums);
                }
                if tile.tokens == 0 {
                    break;
                }
                if begins {
                    asked = self.ask();
                }
                sums = self.sum_tile(&mut weights, &tokens, &tile, &fragment);
                done = tile;
                tokens = tokens.complete();
                rest -= 1;
                if rest == 0 {
                    if thread::thread_idx_x() == 0 {
                        st_shared_b32(self.shared + Self::NEXT, asked);
                    }
                    thread::sync_threads();
                    index = ld_shared_b32(self.shared + Self::NEXT);
                }
            }
        }
    }

    /// Number of tiles of the run that begins with column `first` of C.
    #[inline(always)]
    const fn tiles_from(&self, first: u32) -> u32 {
        let rest = (self.launch.n - first).div_ceil(Self::INSTANCE.columns());
        if rest < Self::INSTANCE.run { rest } else { Self::INSTANCE.run }
    }

    /// Copies the lists to shared memory.
    ///
    /// # Safety
    /// The lists are complete. All threads of the CTA call this.
    #[inline(always)]
    unsafe fn copy_lists(&self) {
        let Launch { firsts, tile_firsts, experts, .. } = self.launch;
        let mut index = thread::thread_idx_x();
        while index <= experts {
            let number = |list: u64| GlobalAddress::new(list) + u64::from(index) * u64::from(NUMBER);
            // SAFETY: both lists have one number per expert and one more, and `index` is at most `experts`. The shared
            // memory has room for them.
            unsafe {
                let (first, tile_first) =
                    (ld_relaxed_gpu_global_b32(number(firsts)), ld_relaxed_gpu_global_b32(number(tile_firsts)));
                st_shared_b32(self.shared + (Self::FIRSTS + index * NUMBER), first);
                st_shared_b32(self.shared + (Self::TILE_FIRSTS + index * NUMBER), tile_first);
            }
            index += Self::INSTANCE.threads();
        }
    }

    /// Takes a ticket for the CTA's next tile. The first thread returns the tile's index.
    ///
    /// # Safety
    /// `launch.ticket` is the address of a u32 in global memory that only atomics access during the launch.
    #[inline(always)]
    unsafe fn ask(&self) -> u32 {
        if thread::thread_idx_x() > 0 {
            return 0;
        }
        // SAFETY: `ticket` is the address of a u32 in global memory; only atomics access it during the launch.
        thread::grid_dim_x() + unsafe { atom_global_add_u32(GlobalAddress::new(self.launch.ticket), 1) }
    }

    /// Returns the tile with this index, or the first tile of the run with this index. Tiles of the same expert and
    /// columns share weights, and are neighbors.
    ///
    /// # Safety
    /// The lists are in shared memory. The whole warp calls this together, with the same index.
    #[inline(always)]
    unsafe fn find(&self, index: u32) -> Tile {
        let Launch { n, experts, .. } = self.launch;
        let columns = n.div_ceil(Self::INSTANCE.run_columns());
        let token_tile = index / columns;
        // SAFETY: the lists in shared memory have one number per expert and one more, and there is one factor per
        // expert and matrix.
        unsafe {
            let number = |list: u32, index: u32| ld_shared_b32(self.shared + (list + index * NUMBER));
            let (mut begun, mut first) = (0, 0);
            while first < experts {
                let expert = first + lane_id();
                let begins = number(Self::TILE_FIRSTS, expert.min(experts));
                begun += warp_vote_ballot(ALL_LANES, expert < experts && begins <= token_tile).count_ones();
                first += WARP_SIZE;
            }
            let expert = begun - 1;
            let [first_tile, next_tile] = [0, 1].map(|next| number(Self::TILE_FIRSTS, expert + next));
            if token_tile >= next_tile {
                return Tile::NONE;
            }
            let [first, next] = [0, 1].map(|next| number(Self::FIRSTS, expert + next));
            let alpha = [0, Self::INSTANCE.matrices as usize - 1].map(|matrix| {
                let factors = GlobalAddress::new(self.launch.alpha[matrix]);
                ld_global_b32(factors + u64::from(expert) * u64::from(NUMBER))
            });
            let (rows, tiles, of_expert) = (next - first, next_tile - first_tile, index - first_tile * columns);
            // Most experts have one tile of tokens, and divisions are slow.
            let (column, tile, size) = if tiles == 1 {
                (of_expert, 0, rows)
            } else {
                (of_expert / tiles, of_expert % tiles, tile_size(rows, tiles))
            };
            Tile {
                first_column: column * Self::INSTANCE.run_columns(),
                first_row: first + tile * size,
                tokens: (rows - tile * size).min(size),
                expert,
                alpha,
            }
        }
    }

    /// The thread's part of a tile.
    #[inline(always)]
    fn fragment(&self) -> Fragment {
        let fragment = Fragment::of(lane_id(), self.warp);
        if Self::INSTANCE.matrices == 2 { fragment.narrow() } else { fragment }
    }

    /// Returns the weights of the warp's strip of a tile, with the first k-blocks in flight.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds. No copy to the warp's stages is in flight.
    #[inline(always)]
    unsafe fn weights(&self, tile: &Tile) -> Weights {
        let stages = self.shared + self.warp * Self::WARP_BYTES;
        // SAFETY: nothing is in flight to the warp's stages, which lie at `stages`, and the tile is one of the launch's
        // or has no tokens.
        unsafe { Weights::of(Self::INSTANCE, &self.launch, tile, self.warp, stages) }
    }

    /// Returns the sums of all products of a tile, after its copies have started. There is one mainloop for 8 tokens,
    /// and one for 16.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds. All threads of the CTA call this, with their own fragments.
    #[inline(always)]
    unsafe fn sum_tile(&self, weights: &mut Weights, tokens: &Tokens, tile: &Tile, fragment: &Fragment) -> Sums<1> {
        // SAFETY: all threads of the CTA are here with their own fragments, and the tile's copies have begun.
        unsafe {
            if Self::INSTANCE.tile_tokens == CORE_MATRIX_ROWS || tile.tokens <= CORE_MATRIX_ROWS {
                pad(&self.sum::<{ registers(8) }>(weights, tokens, tile, fragment))
            } else {
                pad(&self.sum::<{ registers(16) }>(weights, tokens, tile, fragment))
            }
        }
    }

    /// Mainloop: returns the sums of all products of a tile.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        &self,
        weights: &mut Weights,
        tokens: &Tokens,
        tile: &Tile,
        fragment: &Fragment,
    ) -> [[f32; REGISTERS]; 1] {
        // Addresses of the lane's row of four pieces, for each product's tokens. Places without a token use another
        // token's row, and their sums are not written.
        let places = [0, CORE_MATRIX_ROWS].map(|first| {
            let row = (first + lane_id() % CORE_MATRIX_ROWS).min(tile.tokens - 1);
            self.shared + (Self::BUFFERS + token_place(row, lane_id() / CORE_MATRIX_ROWS))
        });
        let (whole, all) = (self.launch.k / K_BLOCK, k_blocks(self.launch.k));
        // Number of k-blocks that are processed in chunks: these k-blocks are whole, and so are all k-blocks whose
        // copies start while they are processed.
        let in_chunks = if whole == all { whole } else { whole.saturating_sub(STAGES - 1) } / CHUNK * CHUNK;
        let tokens_of = |k_block: u32, step: u32| {
            let place = k_block / CHUNK % BUFFERS * Self::INSTANCE.buffer_bytes() + step * K_BLOCK_BYTES;
            places.map(|lane| lane + place)
        };
        let mut sums = [[0.0; REGISTERS]; 1];
        let mut k_block = 0;
        // SAFETY: a buffer is read after all threads have waited for their copies to it, and written again after all of
        // them have reached the next barrier. All lanes follow the same path.
        unsafe {
            cp_async_commit_group();
            cp_async_wait_group::<0>();
            while k_block < in_chunks {
                macro_rules! steps {
                    ($($step:literal)*) => {$({
                        cp_async_wait_group::<{ STAGES - 2 }>();
                        sync_warp(ALL_LANES);
                        if $step == 0 && tokens.are_pending() {
                            thread::sync_threads();
                            tokens.begin(&self.launch, k_block + CHUNK);
                        }
                        let rows: Rows<Packed<BF16>> = weights.take(fragment, $step);
                        let is_there = k_block + ($step + STAGES - 1) < whole;
                        weights.begin_whole(is_there, ($step + STAGES - 1) % STAGES);
                        cp_async_commit_group();
                        Self::multiply(&mut sums[0], &rows, tokens_of(k_block, $step));
                    })*};
                }
                steps!(0 1 2 3);
                k_block += CHUNK;
            }
            while k_block < all {
                cp_async_wait_group::<{ STAGES - 2 }>();
                sync_warp(ALL_LANES);
                let step = k_block % CHUNK;
                if step == 0 && tokens.are_pending() {
                    thread::sync_threads();
                    tokens.begin(&self.launch, k_block + CHUNK);
                }
                let rows: Rows<Packed<BF16>> = weights.take_any(&self.launch, fragment, step, k_block);
                weights.begin(&self.launch, tile, k_block + STAGES - 1);
                cp_async_commit_group();
                Self::multiply(&mut sums[0], &rows, tokens_of(k_block, step));
                k_block += 1;
            }
        }
        sums
    }

    /// Adds the products of a k-block. `tokens[p]` is the shared address of the row that this lane passes to `ldmatrix`
    /// for product `p`.
    ///
    /// # Safety
    /// The whole warp calls this together. The copies of the tokens are complete.
    #[inline(always)]
    unsafe fn multiply<const REGISTERS: usize>(
        sums: &mut [f32; REGISTERS],
        rows: &Rows<Packed<BF16>>,
        tokens: [SharedAddress; 2],
    ) {
        macro_rules! products_of_words {
            ($($word:literal)*) => {$({
                let a = rows.decode($word);
                for product in 0..REGISTERS / PRODUCT_REGISTERS {
                    let first = product * PRODUCT_REGISTERS;
                    // SAFETY: the tokens have arrived, so the matrices lie there; the whole warp executes the MMAs
                    // together.
                    unsafe {
                        let b = ldmatrix_x4_b16(tokens[product] + token_place(0, $word * WORD_PAIRS as u32));
                        let mut of_product = [0, 1, 2, 3].map(|register| sums[first + register]);
                        mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut of_product, a[0], [b[0], b[1]]);
                        mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut of_product, a[1], [b[2], b[3]]);
                        for register in 0..PRODUCT_REGISTERS {
                            sums[first + register] = of_product[register];
                        }
                    }
                }
            })*};
        }
        products_of_words!(0 1 2 3);
    }

    /// Scales, activates and writes a tile's sums.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`]. The sums are its result for this tile.
    #[inline(always)]
    unsafe fn write(&self, tile: &Tile, fragment: &Fragment, sums: Sums<1>) {
        let Launch { c, n, bias, activation, .. } = self.launch;
        let of_expert = u64::from(tile.expert) * u64::from(n) * BIAS_BYTES;
        let target: Target<Self> = Target {
            c,
            n,
            alpha: Alpha::OfMatrices(tile.alpha.map(f32::from_bits)),
            bias: bias.map(|bias| if bias == 0 { 0 } else { bias + of_expert }),
            activation,
            first_column: tile.first_column,
            first_row: tile.first_row,
            tokens: tile.tokens,
            kind: PhantomData,
        };
        // SAFETY: the sums are the result of `sum_tile` for this tile, and C has the tile's rows and columns.
        unsafe { target.write(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, fragment, sums) }
    }
}
