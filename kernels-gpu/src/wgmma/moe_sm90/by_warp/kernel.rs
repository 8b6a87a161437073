//! How the layer's products work for few tokens.
//!
//! Every warp of a block goes through K by itself. It waits for nothing but its own copies of weights, which it begins some k-blocks
//! ahead. All warps copy the tile's tokens, and meet once a chunk, where one buffer has come and another one is free. A word is multiplied as soon
//! as it is decoded: the next one is decoded while the product runs.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
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

/// Sums of a thread of the tokens of one product.
const PRODUCT_REGISTERS: usize = registers(CORE_MATRIX_ROWS as usize);

/// Bytes of a number.
const NUMBER: u32 = 4;

/// An instance, as a type.
pub(super) trait Built {
    const INSTANCE: Instance;
}

/// The kernel as an instance, whose tokens are bf16 or f16.
pub(super) struct Strips<I, const BF16: bool> {
    launch: Launch,
    shared: SharedAddress,
    /// The thread's warp.
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
}

impl<I: Built, const BF16: bool> Strips<I, BF16>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;

    // Shared memory: stages of each warp, buffers, lists, the number of the next tile.
    const WARP_BYTES: u32 = STAGES * UNIT_BYTES;
    const BUFFERS: u32 = Self::INSTANCE.strips * Self::WARP_BYTES;
    const FIRSTS: u32 = Self::BUFFERS + BUFFERS * Self::INSTANCE.buffer_bytes();
    const TILE_FIRSTS: u32 = Self::FIRSTS + LIST_BYTES;
    const NEXT: u32 = Self::TILE_FIRSTS + LIST_BYTES;

    /// A thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs`.
    #[inline(always)]
    pub(super) unsafe fn run(launch: Launch) {
        const { assert!(Self::NEXT + 16 == Self::INSTANCE.shared_bytes()) };
        // SAFETY: all threads of the block go one way, whole warps. Lists are read when they are complete, tokens when the grid before
        // has ended. Buffers are free when a tile's copies begin. Between a reading of the next tile's number and the next writing
        // lies a barrier of the main loop.
        unsafe {
            // The same value in all lanes; through the shuffle the compiler knows that it is.
            let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
            let this = Self { launch, shared: dynamic_shared_address(), warp, instance: PhantomData };
            if launch.lists_pending != 0 {
                griddepcontrol_wait();
            }
            this.copy_lists();
            thread::sync_threads();
            let fragment = this.fragment();
            let (mut index, mut done, mut sums) = (thread::block_idx_x(), Tile::NONE, pad(&[[0.0; PRODUCT_REGISTERS]]));
            let mut await_tokens = launch.lists_pending == 0;
            // Once more than there are tiles: a tile's sums are written when the next one's copies have begun.
            loop {
                let tile = this.find(index);
                let mut weights = this.weights(&tile);
                if await_tokens {
                    griddepcontrol_wait();
                    await_tokens = false;
                }
                // The next grid's blocks come as soon as there is room.
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

    /// Copies the lists to shared memory.
    ///
    /// # Safety
    /// The contract: the lists are complete. All threads of the block call it.
    #[inline(always)]
    unsafe fn copy_lists(&self) {
        let Launch { firsts, tile_firsts, experts, .. } = self.launch;
        let mut index = thread::thread_idx_x();
        while index <= experts {
            let number = |list: u64| GlobalAddress::new(list) + u64::from(index) * u64::from(NUMBER);
            // SAFETY: lists have a number more than experts.
            unsafe {
                let (first, tile_first) =
                    (ld_relaxed_gpu_global_b32(number(firsts)), ld_relaxed_gpu_global_b32(number(tile_firsts)));
                st_shared_b32(self.shared + (Self::FIRSTS + index * NUMBER), first);
                st_shared_b32(self.shared + (Self::TILE_FIRSTS + index * NUMBER), tile_first);
            }
            index += Self::INSTANCE.threads();
        }
    }

    /// Asks for the index of the block's next tile. The answer is the first thread's.
    ///
    /// # Safety
    /// The contract: the ticket lies there.
    #[inline(always)]
    unsafe fn ask(&self) -> u32 {
        if thread::thread_idx_x() > 0 {
            return 0;
        }
        // SAFETY: `ticket` is the address of a u32 in global memory; only atomics access it during the launch.
        thread::grid_dim_x() + unsafe { atom_global_add_u32(GlobalAddress::new(self.launch.ticket), 1) }
    }

    /// The tile of this index; an expert's tiles of the same columns, which share weights, are neighbors.
    ///
    /// # Safety
    /// The lists lie in shared memory. The whole warp calls it together, with the same index.
    #[inline(always)]
    unsafe fn find(&self, index: u32) -> Tile {
        let Launch { n, experts, .. } = self.launch;
        let columns = n.div_ceil(Self::INSTANCE.columns());
        let token_tile = index / columns;
        // SAFETY: an expert's tiles and rows, and its factors, lie in lists that have one number more than experts.
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
            // Most experts have one tile of tokens, and divisions take long.
            let (column, tile, size) = if tiles == 1 {
                (of_expert, 0, rows)
            } else {
                (of_expert / tiles, of_expert % tiles, tile_size(rows, tiles))
            };
            Tile {
                first_column: column * Self::INSTANCE.columns(),
                first_row: first + tile * size,
                tokens: (rows - tile * size).min(size),
                expert,
                alpha,
            }
        }
    }

    /// Which part of a tile is the thread's.
    #[inline(always)]
    fn fragment(&self) -> Fragment {
        let fragment = Fragment::of(lane_id(), self.warp);
        if Self::INSTANCE.matrices == 2 { fragment.narrow() } else { fragment }
    }

    /// The weights of the warp's strip of a tile, of which the first are begun.
    ///
    /// # Safety
    /// The contract. The warp has taken all that was on its way.
    #[inline(always)]
    unsafe fn weights(&self, tile: &Tile) -> Weights {
        let stages = self.shared + self.warp * Self::WARP_BYTES;
        // SAFETY: nothing is in flight to the warp's stages, which lie at `stages`, and the tile is one of the launch's
        // or has no tokens.
        unsafe { Weights::of(Self::INSTANCE, &self.launch, tile, self.warp, stages) }
    }

    /// The sums of all products of a tile, whose copies have begun. There is a main loop for 8 tokens, and one for 16.
    ///
    /// # Safety
    /// The contract. All threads of the block call it, with their own fragments.
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

    /// The main loop: the sums of all products of a tile.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(
        &self,
        weights: &mut Weights,
        tokens: &Tokens,
        tile: &Tile,
        fragment: &Fragment,
    ) -> [[f32; REGISTERS]; 1] {
        // Where the lane's row of four pieces lies of each product's tokens. Where there is no token, it is another one's: what a product has
        // there is not written.
        let places = [0, CORE_MATRIX_ROWS].map(|first| {
            let row = (first + lane_id() % CORE_MATRIX_ROWS).min(tile.tokens - 1);
            self.shared + (Self::BUFFERS + token_place(row, lane_id() / CORE_MATRIX_ROWS))
        });
        let (whole, all) = (self.launch.k / K_BLOCK, k_blocks(self.launch.k));
        // Up to here k-blocks are taken chunk by chunk: they are whole ones, and so are those that copies begin of meanwhile.
        let in_chunks = if whole == all { whole } else { whole.saturating_sub(STAGES - 1) } / CHUNK * CHUNK;
        let tokens_of = |k_block: u32, step: u32| {
            let place = k_block / CHUNK % BUFFERS * Self::INSTANCE.buffer_bytes() + step * K_BLOCK_BYTES;
            places.map(|lane| lane + place)
        };
        let mut sums = [[0.0; REGISTERS]; 1];
        let mut k_block = 0;
        // SAFETY: a buffer is read after all threads have waited for their copies to it, and written again after all of them have
        // come to the next barrier. All lanes go one way.
        unsafe {
            cp_async_commit_group();
            cp_async_wait_group::<0>();
            while k_block < in_chunks {
                macro_rules! steps {
                    ($($step:literal)*) => {$({
                        cp_async_wait_group::<{ STAGES - 2 }>();
                        sync_warp(ALL_LANES);
                        if $step == 0 {
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
                if step == 0 {
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

    /// Adds the products of a k-block. The lane's rows of each product's tokens lie at these addresses.
    ///
    /// # Safety
    /// The whole warp calls it together; the tokens have come.
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
    /// As [`Self::sum_tile`], whose sums they are.
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
        // SAFETY: the sums are those of `sum_tile` for this tile, whose rows and columns C has.
        unsafe { target.write(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, fragment, sums) }
    }
}
