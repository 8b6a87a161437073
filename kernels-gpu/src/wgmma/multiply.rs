//! Mainloop of a warpgroup: multiplies stages of weights, decoded in registers, by buffers of tokens.

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
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

/// Number of sums per thread for a strip of tokens.
const STRIP_REGISTERS: usize = registers(CORE_MATRIX_ROWS as usize);

/// Layout of a kernel's weights in a stage, and the operation on them. A thread has `P` parts of a stage: one part per
/// panel, or one part in total in a narrow tile.
pub trait Kind<const P: usize>: Written<P> {
    /// Whether threads copy the tokens to the buffers, through the generic proxy.
    const COPIED_BY_THREADS: bool;
    /// Whether each warp multiplies its rows by itself (`mma.sync`) instead of the warpgroup (`wgmma`); for few tokens.
    const BY_WARPS: bool = false;
    /// Type of the operands.
    type Number: Number;
    /// A thread's words of two rows of weights, and their scales.
    type Part: Copy;

    /// Address of the current stage.
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress;

    /// Address of the current buffer of tokens.
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress;

    /// Descriptor of the tokens in a buffer. The default layout is rows of core matrices.
    #[inline(always)]
    fn tokens(buffer: SharedAddress) -> MatrixDescriptor {
        MatrixDescriptor::new(buffer, CORE_MATRIX_BYTES, STRIP_BYTES)
    }

    /// Offset in bytes of the tokens of product `product` of a k-block. A product covers 16 columns of K.
    #[inline(always)]
    fn token_offset(product: u32) -> u32 {
        product * 2 * CORE_MATRIX_BYTES
    }

    /// Loads a thread's parts of k-block `k_block` from a stage.
    ///
    /// # Safety
    /// The stage is full and holds this k-block.
    unsafe fn load(&self, stage: SharedAddress, fragment: &Fragment, k_block: u32) -> [Self::Part; P];

    /// Returns the A fragments of the two products that use a word.
    fn decode(part: &Self::Part, word: usize) -> [[u32; 4]; 2];
}

/// State of one thread of a warpgroup that multiplies.
pub struct Consumer<K, const P: usize> {
    /// Layout of weights.
    pub kind: K,
    /// Start of shared memory.
    pub shared: SharedAddress,
    /// The thread's part of a panel.
    pub fragment: Fragment,
    /// Stages of weights.
    pub stages: Ring,
    /// Buffers of tokens.
    pub buffers: Ring,
    /// Turns of the warpgroup. Used only with ping-pong.
    pub turns: PingPong,
}

impl<K: Kind<P>, const P: usize> Consumer<K, P> {
    /// Whether three of the four words are decoded together, after the products of three words instead of two. This is
    /// faster with one part per thread, where there is little other work between the waits. Four warpgroups lack the
    /// registers for it.
    const DECODES_THREE: bool = P == 1 && K::SHAPE.ping_pong();

    /// Whether a turn multiplies two k-blocks, where there are registers for the fragments of both. 4 % faster for gate
    /// and up on an H200. For a plain matrix with 128 tokens it is not faster.
    const TWO_A_TURN: bool = Self::DECODES_THREE && K::SHAPE.matrices == 2;

    /// Returns the state of the `consumer`-th warpgroup that multiplies.
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

    /// Returns the sums of all products of a tile of `tokens` tokens. `wgmma`'s N is part of the instruction, so each N
    /// has its own mainloop.
    ///
    /// # Safety
    /// The barriers are initialized. The whole warpgroup calls this together, for each of the CTA's tiles in order.
    /// `tokens` is at most the shape's number of tokens per tile, and `k_blocks` is not 0.
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

    /// Mainloop: returns the sums of all products of a tile.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(&mut self, k_blocks: u32) -> [[f32; REGISTERS]; P]
    where
        [f32; REGISTERS]: MmaAsync,
    {
        const { assert!(K::SHAPE.tile_tokens <= MAX_TILE_TOKENS && K::SHAPE.parts() == P) };
        // `zeroed` instead of `[0.0; REGISTERS]`: the compiler turns a long array expression into a loop, and an array
        // that a loop writes is not in registers.
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
                // The next k-block's fragments reuse the registers of multiplied fragments. The first group's
                // registers come first, while the second group of products still runs.
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

    /// Same as [`Self::sum`], with two k-blocks per turn.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`]. The warpgroups take turns, and `k_blocks` is even.
    #[inline(always)]
    unsafe fn sum_two_a_turn<const REGISTERS: usize>(&mut self, sums: &mut [[f32; REGISTERS]; P], k_blocks: u32)
    where
        [f32; REGISTERS]: MmaAsync,
    {
        // SAFETY: the barriers are initialized, and the whole warpgroup is here for each tile in order. Both buffers
        // are read while they are full, and released when their products are complete.
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

    /// Waits until a buffer of tokens is full, and returns its descriptor.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn full_buffer(&self, buffers: Ring) -> MatrixDescriptor {
        // SAFETY: the barriers are initialized.
        unsafe { buffers.wait_full() };
        if K::COPIED_BY_THREADS {
            // `wgmma` reads B through the asynchronous proxy.
            fence_proxy_async_shared();
        }
        K::tokens(K::buffer(self.shared, buffers))
    }

    /// Releases a buffer, and advances to the next one.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`]. The products of the buffer are complete.
    #[inline(always)]
    unsafe fn release_buffer(&mut self) {
        // SAFETY: the buffer's products are complete, and the current phase of its empty barrier still expects this
        // warp's arrival.
        unsafe { self.fragment.arrive(self.buffers.empty()) };
        self.buffers.advance();
    }

    /// Same as [`Self::sum`], with `mma.sync` per warp, so no warp waits for the others of its warpgroup. The order of
    /// K is the same. On an H200, `mma.sync` and `wgmma` gave bit-identical sums.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum_by_warps<const REGISTERS: usize>(&mut self, k_blocks: u32) -> [[f32; REGISTERS]; P] {
        let mut sums = [[0.0; REGISTERS]; P];
        // Offset of the lane's row in a group of four core matrices.
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
                        // Fragment of the next k-block.
                        a[$word] = decode(&parts, $word);
                    )*};
                }
                products_of_words!(0 1 2 3);
                self.release_buffer();
            }
        }
        sums
    }

    /// Same as [`Self::take`], for two k-blocks.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take_two(&mut self, k_block: u32) -> [[K::Part; P]; 2] {
        // SAFETY: the barriers are initialized. Both stages are read after they are full and before this warp arrives
        // at their empty barriers.
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

    /// Loads a thread's parts of the next stage's weights to registers, and releases the stage.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take(&mut self, k_block: u32) -> [K::Part; P] {
        // SAFETY: the stage is read after it is full and before this warp arrives at its empty barrier.
        unsafe {
            self.stages.wait_full();
            let parts = self.kind.load(K::stage(self.shared, self.stages), &self.fragment, k_block);
            // Without this fence, a bulk copy overwrites the stage while loads are still in flight (seen on an H200).
            fence_proxy_async_shared();
            self.fragment.arrive(self.stages.empty());
            self.stages.advance();
            parts
        }
    }
}
