//! The main loop of a warpgroup: stages of weights, decoded in registers, times buffers of tokens → sums.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::manual_memcpy, clippy::needless_range_loop)]

use bytemuck::Zeroable;
use cuda_std::{
    fence::fence_proxy_async_shared,
    mbarrier::Mbarrier,
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    shared::SharedAddress,
    warp::lane_id,
    wgmma::{self, MatrixDescriptor, MmaAsync, Number},
};

use super::PingPong;
use crate::{
    decoding::{
        CORE_MATRIX_BYTES, CORE_MATRIX_ROWS, Fragment, LANE_WORDS, MAX_TILE_TOKENS, STRIP_BYTES, Sums, WORD_PAIRS,
        Written, pad, registers,
    },
    ring::Ring,
};

/// Sums of a thread of a strip of tokens.
const STRIP_REGISTERS: usize = registers(CORE_MATRIX_ROWS as usize);

/// How a kernel's weights lie in a stage, and what they are multiplied with. A thread has `P` parts of a stage: one of each panel,
/// or in a narrow tile one alone.
pub trait Kind<const P: usize>: Written<P> {
    /// Whether threads have copied tokens to the buffers, through the generic proxy.
    const COPIED_BY_THREADS: bool;
    /// Whether each warp multiplies its rows by itself (`mma.sync`), and not the warpgroup (`wgmma`): for few tokens.
    const BY_WARPS: bool = false;
    /// The numbers that are multiplied.
    type Number: Number;
    /// A thread's words of two rows of weights, and their scales.
    type Part: Copy;

    /// The address of a stage.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress;

    /// The address of a buffer of tokens.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress;

    /// How tokens lie in a buffer: as rows of core matrices, if the kernel does not say otherwise.
    #[inline(always)]
    fn tokens(buffer: SharedAddress) -> MatrixDescriptor {
        MatrixDescriptor::new(buffer, CORE_MATRIX_BYTES, STRIP_BYTES)
    }

    /// How many bytes further on the tokens of a k-block's product lie, of its 16 columns of K.
    #[inline(always)]
    fn token_offset(product: u32) -> u32 {
        product * 2 * CORE_MATRIX_BYTES
    }

    /// Loads a thread's parts of the k-block that lies in a stage.
    ///
    /// # Safety
    /// The stage is full of this k-block.
    unsafe fn load(&self, stage: SharedAddress, fragment: &Fragment, k_block: u32) -> [Self::Part; P];

    /// The A fragments of the two products that a word serves.
    fn decode(part: &Self::Part, word: usize) -> [[u32; 4]; 2];
}

/// A warpgroup that multiplies, as one thread has it.
pub struct Consumer<K, const P: usize> {
    /// How weights lie.
    pub kind: K,
    /// The start of shared memory.
    pub shared: SharedAddress,
    /// Which part of a panel is the thread's.
    pub fragment: Fragment,
    /// The stages of weights.
    pub stages: Ring,
    /// The buffers of tokens.
    pub buffers: Ring,
    /// The warpgroup's turns, if it has any.
    pub turns: PingPong,
}

impl<K: Kind<P>, const P: usize> Consumer<K, P> {
    /// Whether three of four words are decoded in one go, after the products of three, and not two. Of one part, with little else to do
    /// between the waits, that is faster; four warpgroups have no registers for it.
    const DECODES_THREE: bool = P == 1 && K::SHAPE.ping_pong();

    /// Whether two k-blocks are multiplied in a turn: there are registers for the fragments of both. 4 % faster for gate and up on an H200;
    /// of a plain matrix it is not with 128 tokens.
    const TWO_A_TURN: bool = Self::DECODES_THREE && K::SHAPE.matrices == 2;

    /// The `consumer`-th of the warpgroups that multiply.
    #[inline(always)]
    pub fn new(
        kind: K,
        shared: SharedAddress,
        consumer: u32,
        stages: Ring,
        buffers: Ring,
        turn_barriers: Mbarrier,
    ) -> Self {
        let turns = PingPong::new(turn_barriers, consumer);
        Self { kind, shared, fragment: Fragment::new(consumer), stages, buffers, turns }
    }

    /// The sums of all products of a tile of so many tokens. `wgmma`'s N is part of the instruction, so that there is a main loop
    /// for each N.
    ///
    /// # Safety
    /// The barriers have been initialized. The whole warpgroup calls it together, for each of the block's tiles in order.
    /// `tokens` is not more than the shape's, and `k_blocks` not 0.
    #[inline(always)]
    pub unsafe fn sum_tile<const ROUNDS: usize>(&mut self, tokens: u32, k_blocks: u32) -> Sums<P, ROUNDS> {
        let n = K::SHAPE.mma_n(tokens);
        macro_rules! main_loops {
            ($($n:literal)*) => {$(
                if const { K::SHAPE.mma_n($n) == $n && $n <= K::SHAPE.tile_tokens } && n == $n {
                    // SAFETY: the barriers are initialized, the whole warpgroup is here for each tile in order, and
                    // `$n` is at least `tokens`.
                    return pad(&unsafe {
                        if K::BY_WARPS {
                            self.sum_by_warps::<{ registers($n) }>(k_blocks)
                        } else {
                            self.sum::<{ registers($n) }>(k_blocks)
                        }
                    });
                }
            )*};
        }
        main_loops!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 144 160 176 192 208 224 240 256);
        // SAFETY: a tile has no more tokens than its shape, which has no more than `MAX_TILE_TOKENS`.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// The main loop: the sums of all products of a tile.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(&mut self, k_blocks: u32) -> [[f32; REGISTERS]; P]
    where
        [f32; REGISTERS]: MmaAsync,
    {
        const { assert!(K::SHAPE.tile_tokens <= MAX_TILE_TOKENS && K::SHAPE.parts() == P) };
        // Not `[0.0; REGISTERS]`: of many the compiler makes a loop, and an array that a loop writes is not in registers.
        let mut sums: [[f32; REGISTERS]; P] = Zeroable::zeroed();
        if Self::TWO_A_TURN && k_blocks.is_multiple_of(2) {
            // SAFETY: the barriers are initialized, and the whole warpgroup is here for each tile in order.
            unsafe { self.sum_two_a_turn(&mut sums, k_blocks) };
            return sums;
        }
        // SAFETY: the whole warpgroup is here. A buffer is read while it is full, and released when its products are complete.
        unsafe {
            let decode = |parts: &[K::Part; P], word| parts.map(|part| K::decode(&part, word));
            let mut parts = self.take(0);
            let mut a: [_; LANE_WORDS] = [decode(&parts, 0), decode(&parts, 1), decode(&parts, 2), decode(&parts, 3)];
            for k_block in 0..k_blocks {
                let b = self.full_buffer(self.buffers);
                if K::SHAPE.ping_pong() {
                    self.turns.wait();
                }
                wgmma::fence();
                macro_rules! products_of_words {
                    ($($word:literal)*) => {
                        $(for half in 0..2 {
                            let b = b.advance(K::token_offset((2 * $word + half) as u32));
                            for part in 0..P {
                                sums[part].mma_async::<K::Number>(a[$word][part][half], b, true);
                            }
                        })*
                        wgmma::commit_group();
                    };
                }
                if Self::DECODES_THREE {
                    products_of_words!(0 1 2);
                    products_of_words!(3);
                } else {
                    products_of_words!(0 1);
                    products_of_words!(2 3);
                }
                if K::SHAPE.ping_pong() {
                    self.turns.pass(&self.fragment);
                }
                // The next k-block's fragments take the registers of those that have been multiplied: first those of the first
                // group of products, while the second group still runs.
                let more = k_block + 1 < k_blocks;
                if more {
                    // Four warpgroups lack the registers to load before the first group is complete.
                    if K::SHAPE.ping_pong() {
                        parts = self.take(k_block + 1);
                        wgmma::wait_group::<1>();
                    } else {
                        wgmma::wait_group::<1>();
                        parts = self.take(k_block + 1);
                    }
                    a[0] = decode(&parts, 0);
                    a[1] = decode(&parts, 1);
                    if Self::DECODES_THREE {
                        a[2] = decode(&parts, 2);
                    }
                }
                wgmma::wait_group::<0>();
                sums.iter_mut().for_each(MmaAsync::settle);
                self.release_buffer();
                if more {
                    if !Self::DECODES_THREE {
                        a[2] = decode(&parts, 2);
                    }
                    a[3] = decode(&parts, 3);
                }
            }
        }
        sums
    }

    /// As [`Self::sum`], two k-blocks a turn.
    ///
    /// # Safety
    /// As [`Self::sum_tile`], with turns, and `k_blocks` even.
    #[inline(always)]
    unsafe fn sum_two_a_turn<const REGISTERS: usize>(&mut self, sums: &mut [[f32; REGISTERS]; P], k_blocks: u32)
    where
        [f32; REGISTERS]: MmaAsync,
    {
        // SAFETY: as in `sum`, for two buffers.
        unsafe {
            let word = |parts: &[K::Part; P], word| parts.map(|part| K::decode(&part, word));
            let decode = |parts: &[K::Part; P]| [word(parts, 0), word(parts, 1), word(parts, 2), word(parts, 3)];
            macro_rules! products {
                ($a:ident, $b:ident: $($product:literal)*) => {
                    $(for part in 0..P {
                        let b = $b.advance(K::token_offset($product as u32));
                        sums[part].mma_async::<K::Number>($a[$product / 2][part][$product % 2], b, true);
                    })*
                    wgmma::commit_group();
                };
            }
            let parts = self.take_two(0);
            let mut first = decode(&parts[0]);
            let mut second = decode(&parts[1]);
            let mut done = 0;
            loop {
                let of_first = self.full_buffer(self.buffers);
                let of_second = self.full_buffer(self.buffers.next());
                self.turns.wait();
                wgmma::fence();
                products!(first, of_first: 0 1 2 3 4 5 6 7);
                products!(second, of_second: 0 1 2 3 4 5 6 7);
                self.turns.pass(&self.fragment);
                done += 2;
                let more = done < k_blocks;
                let mut parts = parts;
                if more {
                    parts = self.take_two(done);
                    wgmma::wait_group::<1>();
                    first = decode(&parts[0]);
                }
                wgmma::wait_group::<0>();
                sums.iter_mut().for_each(MmaAsync::settle);
                self.release_buffer();
                self.release_buffer();
                if !more {
                    return;
                }
                second = decode(&parts[1]);
            }
        }
    }

    /// What a product takes of a buffer of tokens, when it is full.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn full_buffer(&self, buffers: Ring) -> MatrixDescriptor {
        // SAFETY: the barriers have been initialized.
        unsafe { buffers.wait_full() };
        if K::COPIED_BY_THREADS {
            // wgmma reads B through the asynchronous proxy.
            fence_proxy_async_shared();
        }
        K::tokens(K::buffer(self.shared, buffers))
    }

    /// Releases a buffer, and goes on to the next one.
    ///
    /// # Safety
    /// As [`Self::sum_tile`], and its products are complete.
    #[inline(always)]
    unsafe fn release_buffer(&mut self) {
        // SAFETY: the buffer's products are complete, and its empty barrier's phase lacks this warp's arrival.
        unsafe { self.fragment.arrive(self.buffers.empty()) };
        self.buffers.advance();
    }

    /// As [`Self::sum`], with products of a warp: no warp waits for the others of its warpgroup. K has the same order, and `mma.sync` adds
    /// up as `wgmma` does, to the bit (seen on an H200).
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum_by_warps<const REGISTERS: usize>(&mut self, k_blocks: u32) -> [[f32; REGISTERS]; P] {
        let mut sums = [[0.0; REGISTERS]; P];
        // Where the lane's row of four core matrices lies.
        let row = lane_id() / CORE_MATRIX_ROWS * CORE_MATRIX_BYTES + lane_id() % CORE_MATRIX_ROWS * 16;
        // SAFETY: the whole warp is here. A buffer is read while it is full, and released when the loads from it are complete.
        unsafe {
            let decode = |parts: &[K::Part; P], word| parts.map(|part| K::decode(&part, word));
            let mut parts = self.take(0);
            let mut a: [_; LANE_WORDS] = [decode(&parts, 0), decode(&parts, 1), decode(&parts, 2), decode(&parts, 3)];
            for k_block in 0..k_blocks {
                self.buffers.wait_full();
                if k_block + 1 < k_blocks {
                    parts = self.take(k_block + 1);
                }
                let buffer = K::buffer(self.shared, self.buffers) + row;
                macro_rules! products_of_words {
                    ($($word:literal)*) => {$(
                        for strip in 0..REGISTERS / STRIP_REGISTERS {
                            let cores = strip as u32 * STRIP_BYTES + ($word * WORD_PAIRS) as u32 * CORE_MATRIX_BYTES;
                            let b = ldmatrix_x4_b16(buffer + cores);
                            for part in 0..P {
                                let first = strip * STRIP_REGISTERS;
                                let mut of_strip = [0, 1, 2, 3].map(|register| sums[part][first + register]);
                                mma_m16n8k16::<K::Number>(&mut of_strip, a[$word][part][0], [b[0], b[1]]);
                                mma_m16n8k16::<K::Number>(&mut of_strip, a[$word][part][1], [b[2], b[3]]);
                                for register in 0..STRIP_REGISTERS {
                                    sums[part][first + register] = of_strip[register];
                                }
                            }
                        }
                        // The next k-block's.
                        a[$word] = decode(&parts, $word);
                    )*};
                }
                products_of_words!(0 1 2 3);
                self.release_buffer();
            }
        }
        sums
    }

    /// As [`Self::take`], of two k-blocks.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take_two(&mut self, k_block: u32) -> [[K::Part; P]; 2] {
        // SAFETY: as in `take`.
        unsafe {
            let next = self.stages.next();
            self.stages.wait_full();
            let first = self.kind.load(K::stage(self.shared, self.stages), &self.fragment, k_block);
            next.wait_full();
            let second = self.kind.load(K::stage(self.shared, next), &self.fragment, k_block + 1);
            fence_proxy_async_shared();
            self.fragment.arrive(self.stages.empty());
            self.fragment.arrive(next.empty());
            self.stages = next.next();
            [first, second]
        }
    }

    /// Takes a thread's parts of the next stage's weights to registers, so that the stage is free again.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take(&mut self, k_block: u32) -> [K::Part; P] {
        // SAFETY: the stage is read after it is full and before this warp says that it is empty.
        unsafe {
            self.stages.wait_full();
            let parts = self.kind.load(K::stage(self.shared, self.stages), &self.fragment, k_block);
            // Without it, a bulk copy overwrites the stage while loads are still under way: seen on an H200.
            fence_proxy_async_shared();
            self.fragment.arrive(self.stages.empty());
            self.stages.advance();
            parts
        }
    }
}
