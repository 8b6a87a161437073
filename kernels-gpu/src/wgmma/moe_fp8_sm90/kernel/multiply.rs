//! Warpgroups that multiply stages of weights by buffers of tokens.

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use bytemuck::Zeroable;
use cuda_std::{
    fence::fence_proxy_async_shared,
    integer::opaque_b32,
    shared::{SharedAddress, ld_shared_b16, ld_shared_b32, ld_shared_v4_b32},
    wgmma::{self, MatrixDescriptor, MmaAsync},
};

use super::{product::Product, table, write::Target};
use crate::{
    decoding::{BIAS_BYTES, Fragment, LANE_WORDS, Tile},
    ring::Ring,
    units::{
        K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, lane_place, lane_scales, lane_words, row_bytes,
        row_scale_bytes, scale_place, unit_bytes,
    },
    wgmma::{PingPong, moe_fp8_sm90::abi::Launch},
};

/// Number of a thread's sums for a panel of a product with this N.
pub(super) const fn registers(n: u32) -> usize {
    n as usize / 2
}

/// Bytes of a line per product.
const PRODUCT_BYTES: u32 = 32;

/// A thread's words of two rows of a panel, and their scales, two per row.
#[derive(Clone, Copy)]
struct Part {
    words: [[u32; LANE_WORDS]; 2],
    scales: [u32; 2],
}

impl Part {
    /// Prevents the compiler from decoding before this point.
    #[inline(always)]
    fn settle(&mut self) {
        wgmma::settle_words(&mut self.words[0]);
        wgmma::settle_words(&mut self.words[1]);
    }
}

/// A fragments of half a k-block, which has two products.
type Half = [[u32; 4]; 2];

/// State of one thread of a warpgroup that multiplies.
struct Consumer<'p, const INDEX: usize, const R: usize> {
    product: &'p Product<INDEX, R>,
    fragment: Fragment,
    /// Offset in a stage of the words of the thread's first row, in a whole k-block.
    words: u32,
    /// Offset in a stage of the scales of the thread's first row, in a whole k-block.
    scales: u32,
    /// The lane's copy of the table.
    table: SharedAddress,
    stages: Ring,
    buffers: Ring,
    turns: PingPong,
}

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    /// Multiplies and writes the CTA's tiles. Runs in one warpgroup, the `consumer`-th that multiplies.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, the barriers are initialized, and the table is complete. The whole
    /// warpgroup calls this together. Every other warpgroup that multiplies calls it with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, consumer: u32) {
        let (mut tiles, mut scales) = (self.tiles(), self.scales());
        let mut consumer = Consumer::new(self, consumer);
        // SAFETY: the whole warpgroup is here and follows the same path. The barriers are initialized, and only this
        // CTA has this tile. `read` follows a `wait` for the same tile.
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
                // Opaque, so that no register holds a multiple of it during the mainloop.
                let n = opaque_b32(n);
                let of_expert = u64::from(expert) * u64::from(n) * BIAS_BYTES;
                scales.wait_full();
                // Opaque for the same reason.
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

    /// `true`: a thread has the same row of gate and of up. `false`: it has two neighboring rows of one panel.
    pub(super) const ROW_OF_BOTH: bool = Self::INSTANCE.matrices == 2;

    /// Returns the fragment with the thread's rows of a piece.
    #[inline(always)]
    fn rows_of(fragment: Fragment) -> Fragment {
        if Self::ROW_OF_BOTH { fragment.narrow() } else { fragment }
    }
}

impl<'p, const INDEX: usize, const R: usize> Consumer<'p, INDEX, R> {
    const PIECE_BYTES: u32 = Product::<INDEX, R>::INSTANCE.piece_bytes();

    /// Returns the state of the `consumer`-th warpgroup that multiplies.
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

    /// Returns the sums of all products of a tile of `tokens` tokens. `wgmma`'s N is part of the instruction, so each N
    /// has its own mainloop.
    ///
    /// # Safety
    /// The barriers are initialized, and the table is complete. The whole warpgroup calls this together, for each of
    /// the CTA's tiles in order. `tokens` is a multiple of 8, and at most the instance's number of tokens per tile.
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
                    // `$n` is at least `tokens`.
                    return unsafe { self.sum::<{ registers($n) }>() };
                }
            )*};
        }
        main_loops!(8 16 24 32 40 48 56 64 80 96 112 128 160 192 224 256);
        // SAFETY: a tile has at most the instance's number of tokens, and the list above has all values of `mma_n`.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// Whether a thread with `sums` sums has the registers to load words before its first products are complete. In
    /// addition to the sums, the words and their decoded form, the thread has about 24 other registers.
    const fn loads_ahead(sums: usize) -> bool {
        sums + 48 < Product::<INDEX, R>::INSTANCE.registers().consumer as usize
    }

    /// Mainloop: returns the sums of all products of a tile, padded with zeros in a narrow tile.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const N: usize>(&mut self) -> [f32; R]
    where
        [f32; N]: MmaAsync,
    {
        let k = self.product.launch.k;
        let k_blocks = k_blocks(k);
        // `zeroed` instead of `[0.0; N]`: the compiler makes a loop of `[0.0; N]`, and an array that a loop writes is
        // not in registers.
        let mut sums: [f32; N] = Zeroable::zeroed();
        // SAFETY: the whole warpgroup is here, and the barriers are initialized. A buffer is read while it is full, and
        // released when its products are complete.
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
                // The next k-block's fragments reuse the registers of multiplied fragments. The first group's
                // registers come first, while the second group of products still runs.
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

    /// Returns the A fragments of the words `2·half` and `2·half + 1` of a part, which share a scale per row.
    ///
    /// # Safety
    /// The table is complete.
    #[inline(always)]
    unsafe fn decode(&self, part: &Part, half: usize) -> Half {
        let [first, second] = [0, 1].map(|row| {
            // SAFETY: the table is made, so it has an entry per scale.
            let entry = unsafe { table::entry(self.table, part.scales[row], half) };
            [0, 1].map(|word| table::decode(part.words[row][2 * half + word], entry))
        });
        [0, 1].map(|word| [first[word][0], second[word][0], first[word][1], second[word][1]])
    }

    /// Loads a thread's part of the next stage's weights to registers, and releases the stage.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn take(&mut self, k_block: u32) -> Part {
        let k = self.product.launch.k;
        // SAFETY: the stage is read after it is full and before this warp arrives at its empty barrier.
        unsafe {
            self.stages.wait_full();
            let stage = self.product.stage(self.stages);
            let part = if k_block < k / K_BLOCK {
                self.load_whole(stage)
            } else {
                // Opaque, so that no register holds a value of this branch during the mainloop.
                let (fragment, k) = (Product::<INDEX, R>::rows_of(Fragment::anew()), opaque_b32(k));
                Self::load_ragged(stage, &fragment, block_columns(k, k_block))
            };
            // Without this fence, a bulk copy overwrites the stage while loads are still in flight (seen on an H200).
            fence_proxy_async_shared();
            self.fragment.arrive(self.stages.empty());
            self.stages.advance();
            part
        }
    }

    /// Loads a thread's rows from the stage at `stage`, which holds a whole k-block.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn load_whole(&self, stage: SharedAddress) -> Part {
        const WORDS: u32 = row_bytes(K_BLOCK);
        const SCALES: u32 = row_scale_bytes(K_BLOCK);
        // The offsets of a row and its neighbor differ in one bit.
        const { assert!(UNIT_BYTES.is_multiple_of(2 * WORDS) && WORDS.is_power_of_two() && SCALES.is_power_of_two()) };
        // Opaque, so that no register holds it during the mainloop.
        let second = |place: u32, row_bytes: u32| {
            if Product::<INDEX, R>::ROW_OF_BOTH { place + Self::PIECE_BYTES } else { opaque_b32(place) ^ row_bytes }
        };
        // SAFETY: the addresses are inside the stage, and the caller guarantees that the stage is full; a unit lies at
        // a multiple of 16.
        unsafe {
            Part {
                words: [self.words, second(self.words, WORDS)].map(|place| ld_shared_v4_b32(stage + place)),
                scales: [self.scales, second(self.scales, SCALES)].map(|place| ld_shared_b16(stage + place).into()),
            }
        }
    }

    /// Same as [`Self::load_whole`], for a k-block of `columns` columns, fewer than a whole one. Words that a lane does
    /// not have are zero.
    ///
    /// # Safety
    /// The stage is full.
    #[inline(always)]
    unsafe fn load_ragged(stage: SharedAddress, fragment: &Fragment, columns: u32) -> Part {
        let (lane, words) = (fragment.lane, lane_words(columns));
        let piece_rows = Product::<INDEX, R>::INSTANCE.piece_rows();
        let unit = |index: usize| {
            let row = fragment.rows[index];
            // A piece begins at the same offset as for whole k-blocks.
            let pieces = if Product::<INDEX, R>::ROW_OF_BOTH { index as u32 } else { row / piece_rows };
            stage + pieces * Self::PIECE_BYTES + row % piece_rows / UNIT_ROWS * unit_bytes(columns)
        };
        // SAFETY: the addresses are inside the stage, and the caller guarantees that the stage is full.
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
                    // With one scale per lane, two lanes share the pair.
                    if lane_scales(columns) == 1 { pair >> (place % 2 * 8) & 0xff } else { pair }
                }),
            }
        }
    }
}
