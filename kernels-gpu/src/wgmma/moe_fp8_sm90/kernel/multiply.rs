//! The warpgroups that multiply: stages of weights × buffers of tokens → sums.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use bytemuck::Zeroable;
use cuda_std::{
    fence::fence_proxy_async_shared,
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    wgmma::{self, MatrixDescriptor, MmaAsync},
};

use super::{Product, table, write::Target};
use crate::{
    decoding::{BIAS_BYTES, Fragment, LANE_WORDS, Tile},
    ring::Ring,
    units::{
        K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales, lane_words, row_bytes,
        row_scale_bytes, scale_place, unit_bytes,
    },
    wgmma::{PingPong, moe_fp8_sm90::abi::Launch},
};

/// Sums that a thread has of a panel of a product with this N.
pub(super) const fn registers(n: u32) -> usize {
    n as usize / 2
}

/// Bytes of a line that a product takes.
const PRODUCT_BYTES: u32 = 32;

/// A thread's words of two rows of a panel, and their scales, two for each row.
#[derive(Clone, Copy)]
struct Part {
    words: [[u32; LANE_WORDS]; 2],
    scales: [u32; 2],
}

impl Part {
    /// Keeps the compiler from decoding before here.
    #[inline(always)]
    fn settle(&mut self) {
        wgmma::settle_words(&mut self.words[0]);
        wgmma::settle_words(&mut self.words[1]);
    }
}

/// The A fragments of half a k-block: of two products.
type Half = [[u32; 4]; 2];

/// A warpgroup that multiplies, as one thread has it.
struct Consumer<'p, const INDEX: usize, const R: usize> {
    product: &'p Product<INDEX, R>,
    fragment: Fragment,
    /// Where the words of the thread's first row lie in a stage, of a whole k-block.
    words: u32,
    /// Where that row's scales lie, as `words`.
    scales: u32,
    /// The lane's copy of the table.
    table: SharedAddress,
    stages: Ring,
    buffers: Ring,
    turns: PingPong,
}

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    /// Multiplies and writes the block's tiles. One warpgroup, the `consumer`-th of those that multiply.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialized, and the table has been made. The whole warpgroup
    /// calls it together, and so does the other one that multiplies, with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, consumer: u32) {
        let (mut tiles, mut scales) = (self.tiles(), self.scales());
        let mut consumer = Consumer::new(self, consumer);
        // SAFETY: the whole warpgroup is here and takes the same way. The tile is the block's.
        unsafe {
            loop {
                let tokens = tiles.wait();
                if tokens == 0 {
                    return;
                }
                let sums = consumer.sum_tile(tokens);
                let (Tile { first_column, first_row, tokens, expert, alpha }, empty) = tiles.read();
                consumer.fragment.arrive(empty);
                let Launch { c, n, bias, activation, output, .. } = self.launch;
                // Opaque, so that no register holds a multiple of it over the main loop.
                let n = opaque_b32(n);
                let of_expert = u64::from(expert) * u64::from(n) * BIAS_BYTES;
                scales.wait_full();
                // Opaque, too.
                let known_rows = if Self::INSTANCE.matrices == 2 { 0 } else { opaque_b32(self.known_rows()) };
                let target: Target<INDEX, R> = Target {
                    c,
                    n,
                    output,
                    scales: self.tile_scales(scales),
                    alpha: alpha.map(f32::from_bits),
                    column_alpha: if known_rows == 0 { 0 } else { self.launch.alpha[0] },
                    bias: bias.map(|bias| if bias == 0 { 0 } else { bias + of_expert }),
                    activation,
                    first_column,
                    first_row,
                    end_row: if known_rows == 0 { u32::MAX } else { known_rows },
                    tokens,
                };
                target.write(&Self::rows_of(Fragment::anew()), sums);
                consumer.fragment.arrive(scales.empty());
                scales.advance();
            }
        }
    }

    /// Whether a thread's two rows are one row of gate and the same of up; else they are neighbors in one panel.
    pub(super) const ROW_OF_BOTH: bool = Self::INSTANCE.matrices == 2;

    /// Which rows of a piece are a thread's.
    #[inline(always)]
    fn rows_of(fragment: Fragment) -> Fragment {
        if Self::ROW_OF_BOTH { fragment.narrow() } else { fragment }
    }
}

impl<'p, const INDEX: usize, const R: usize> Consumer<'p, INDEX, R> {
    const PIECE_BYTES: u32 = Product::<INDEX, R>::INSTANCE.piece_bytes();

    /// The `consumer`-th of the warpgroups.
    #[inline(always)]
    fn new(product: &'p Product<INDEX, R>, consumer: u32) -> Self {
        let fragment = Product::<INDEX, R>::rows_of(Fragment::new(consumer));
        let (unit, row) = (fragment.rows[0] / UNIT_ROWS * UNIT_BYTES, fragment.rows[0] % UNIT_ROWS);
        Self {
            product,
            words: unit + lane_place(K_BLOCK, row, fragment.lane),
            scales: unit + scale_place(K_BLOCK, row, fragment.lane),
            table: table::of_lane(product.shared + Product::<INDEX, R>::TABLE),
            stages: product.stages(),
            buffers: product.buffers(),
            turns: PingPong::new(product.turn_barriers(), consumer),
            fragment,
        }
    }

    /// The sums of all products of a tile of so many tokens. `wgmma`'s N is part of the instruction, so that there is a main loop
    /// for each N.
    ///
    /// # Safety
    /// The barriers have been initialized. The whole warpgroup calls it together, for each of the block's tiles in order.
    /// `tokens` is a multiple of 8, and not more than the instance's.
    #[inline(always)]
    unsafe fn sum_tile(&mut self, tokens: u32) -> [f32; R] {
        let n = Product::<INDEX, R>::INSTANCE.mma_n(tokens);
        macro_rules! main_loops {
            ($($n:literal)*) => {$(
                if const {
                    let instance = Product::<INDEX, R>::INSTANCE;
                    $n <= instance.tile_tokens && instance.mma_n($n) == $n
                } && n == $n
                {
                    // SAFETY: the barriers are initialized, the whole warpgroup is here for each tile in order, and
                    // `$n` is `tokens`.
                    return unsafe { self.sum::<{ registers($n) }>() };
                }
            )*};
        }
        main_loops!(8 16 24 32 40 48 56 64 80 96 112 128 160 192 224 256);
        // SAFETY: a tile has no more tokens than its instance, and these are all that `mma_n` can be.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// Whether a thread with so many sums has registers to load words before its first products are complete: beside the sums, the
    /// words and what they were decoded to, it has some 24 others.
    const fn loads_ahead(sums: usize) -> bool {
        sums + 48 < Product::<INDEX, R>::INSTANCE.registers().consumer as usize
    }

    /// The main loop: the sums of all products of a tile, behind those of a narrow one zeros.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const N: usize>(&mut self) -> [f32; R]
    where
        [f32; N]: MmaAsync,
    {
        let k = self.product.launch.k;
        let k_blocks = k_blocks(k);
        // Not `[0.0; N]`: the compiler makes a loop of it, and an array that a loop writes is not in registers.
        let mut sums: [f32; N] = Zeroable::zeroed();
        // SAFETY: the whole warpgroup is here. A buffer is read while it is full, and released when its products are complete.
        unsafe {
            let mut part = self.take(0);
            let mut a: [Half; 2] = [0, 1].map(|half| self.decode(&part, half));
            for k_block in 0..k_blocks {
                self.buffers.wait_full();
                let b = MatrixDescriptor::swizzled_128(self.product.buffer(self.buffers));
                if Product::<INDEX, R>::INSTANCE.ping_pong() {
                    self.turns.wait();
                }
                wgmma::fence();
                macro_rules! products_of_half {
                    ($half:literal) => {
                        for product in 0..2 {
                            let b = b.advance(($half * 2 + product as u32) * PRODUCT_BYTES);
                            sums.mma_async_e4m3(a[$half][product], b, true);
                        }
                        wgmma::commit_group();
                    };
                }
                products_of_half!(0);
                products_of_half!(1);
                if Product::<INDEX, R>::INSTANCE.ping_pong() {
                    self.turns.pass(&self.fragment);
                }
                // The next k-block's fragments take the registers of those that have been multiplied: first those of the first
                // group of products, while the second group still runs.
                let more = k_block + 1 < k_blocks;
                if more {
                    if Self::loads_ahead(N) {
                        part = self.take(k_block + 1);
                        wgmma::wait_group::<1>();
                        part.settle();
                    } else {
                        wgmma::wait_group::<1>();
                        part = self.take(k_block + 1);
                    }
                    a[0] = self.decode(&part, 0);
                }
                wgmma::wait_group::<0>();
                sums.settle();
                self.fragment.arrive(self.buffers.empty());
                self.buffers.advance();
                if more {
                    part.settle();
                    a[1] = self.decode(&part, 1);
                }
            }
        }
        let mut padded: [f32; R] = Zeroable::zeroed();
        padded[..N].copy_from_slice(&sums);
        padded
    }

    /// The A fragments of the words `2·half` and `2·half + 1` of a part, which share a scale in each row.
    ///
    /// # Safety
    /// The table has been made.
    #[inline(always)]
    unsafe fn decode(&self, part: &Part, half: usize) -> Half {
        let [first, second] = [0, 1].map(|row| {
            // SAFETY: the table is made, so it has an entry per scale.
            let entry = unsafe { table::entry(self.table, part.scales[row], half) };
            [0, 1].map(|word| table::decode(part.words[row][2 * half + word], entry))
        });
        [0, 1].map(|word| [first[word][0], second[word][0], first[word][1], second[word][1]])
    }

    /// Takes a thread's part of the next stage's weights to registers, so that the stage is free again.
    ///
    /// # Safety
    /// As [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take(&mut self, k_block: u32) -> Part {
        let k = self.product.launch.k;
        // SAFETY: the stage is read after it is full and before this warp says that it is empty.
        unsafe {
            self.stages.wait_full();
            let stage = self.product.stage(self.stages);
            let part = if k_block < k / K_BLOCK {
                self.load_whole(stage)
            } else {
                // Opaque, so that no register holds over the main loop what follows from it.
                let (fragment, k) = (Product::<INDEX, R>::rows_of(Fragment::anew()), opaque_b32(k));
                Self::load_ragged(stage, &fragment, block_columns(k, k_block))
            };
            // Without it, a bulk copy overwrites the stage while loads are still under way: seen on an H200.
            fence_proxy_async_shared();
            self.fragment.arrive(self.stages.empty());
            self.stages.advance();
            part
        }
    }

    /// Loads a thread's rows of the stage at this address, which holds a whole k-block.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn load_whole(&self, stage: SharedAddress) -> Part {
        const WORDS: u32 = row_bytes(K_BLOCK);
        const SCALES: u32 = row_scale_bytes(K_BLOCK);
        // A row and its neighbor differ in one bit of their places.
        const { assert!(UNIT_BYTES.is_multiple_of(2 * WORDS) && WORDS.is_power_of_two() && SCALES.is_power_of_two()) };
        // Opaque, so that no register holds it over the main loop.
        let second = |place: u32, row_bytes: u32| {
            if Product::<INDEX, R>::ROW_OF_BOTH { place + Self::PIECE_BYTES } else { opaque_b32(place) ^ row_bytes }
        };
        // SAFETY: inside of the stage, which is full; a unit lies at a multiple of 16.
        unsafe {
            Part {
                words: [self.words, second(self.words, WORDS)].map(|place| ld_shared_v4_b32(stage + place)),
                scales: [self.scales, second(self.scales, SCALES)].map(|place| ld_shared_b16(stage + place).into()),
            }
        }
    }

    /// As [`Self::load_whole`], of a k-block of so many columns, fewer than a whole one. Words that a lane lacks are zero.
    ///
    /// # Safety
    /// As [`Self::load_whole`].
    #[inline(always)]
    unsafe fn load_ragged(stage: SharedAddress, fragment: &Fragment, columns: u32) -> Part {
        let (lane, words) = (fragment.lane, lane_words(columns));
        let piece_rows = Product::<INDEX, R>::INSTANCE.piece_rows();
        let unit = |index: usize| {
            let row = fragment.rows[index];
            // A piece begins where it does of whole k-blocks.
            let pieces = if Product::<INDEX, R>::ROW_OF_BOTH { index as u32 } else { row / piece_rows };
            stage + pieces * Self::PIECE_BYTES + row % piece_rows / UNIT_ROWS * unit_bytes(columns)
        };
        // SAFETY: inside of the stage, as in `load_whole`.
        unsafe {
            Part {
                words: [0, 1].map(|index| {
                    let place = unit(index) + lane_place(columns, fragment.rows[index] % UNIT_ROWS, lane);
                    core::array::from_fn(
                        |word| {
                            if (word as u32) < words { ld_shared_b32(place + word as u32 * 4) } else { 0 }
                        },
                    )
                }),
                scales: [0, 1].map(|index| {
                    let place = scale_place(columns, fragment.rows[index] % UNIT_ROWS, lane);
                    let pair = u32::from(ld_shared_b16(unit(index) + (place & !1)));
                    // With one scale a lane, two lanes share the pair.
                    if lane_scales(columns) == 1 { pair >> (place % 2 * 8) & 0xff } else { pair }
                }),
            }
        }
    }
}
