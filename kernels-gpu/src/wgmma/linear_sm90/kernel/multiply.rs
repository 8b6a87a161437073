//! Warpgroups that multiply stages of weights by buffers of tokens and write C. The mainloop is in
//! [`Consumer`](crate::wgmma::Consumer), the epilogue in [`decoding`](crate::decoding). This file defines the layout of
//! weights in a stage.

use core::marker::PhantomData;

use cuda_std::{
    global::{GlobalAddress, prefetch_l1},
    shared::{SharedAddress, ld_shared_v4_b32},
    wgmma::{self, MatrixDescriptor},
};

use super::{Linear, parts::Kept, tiles::Tile};
use crate::{
    decoding::{Alpha, BIAS_BYTES, Fragment, LANE_WORDS, Shape, Sums, Target, Written},
    epilogue::Activation,
    format::{OUTPUT_BF16, OUTPUT_F16},
    linear::{
        BOX_BYTES, LANE_BYTES, PANEL_BYTES, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_SCALES,
        decode::{Decode, Packed},
        k_blocks, part_begin,
    },
    ring::Ring,
    wgmma::{Consumer, Kind},
};

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// Multiplies and writes the CTA's tiles. Runs in one warpgroup, the `consumer`-th that multiplies.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the barriers are initialized. The whole warpgroup calls this
    /// together. Every other warpgroup that multiplies calls it with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply<const ROUNDS: usize>(&self, consumer: u32) {
        let kind: Panels<INDEX, BF16, P> = Panels::new(&Fragment::new(consumer));
        let mut tiles = self.tiles();
        let mut consumer: Consumer<_, P> =
            Consumer::new(kind, self.shared, consumer, self.stages(), self.buffers(), self.turn_barriers());
        while let Some(tile) = self.next(&mut tiles) {
            self.fetch_ahead(&tile, &consumer.fragment);
            // SAFETY: the whole warpgroup is here and follows the same path. The barriers are initialized, and only
            // this CTA has this tile.
            unsafe {
                if Self::INSTANCE.parts == 1 {
                    let sums: Sums<P, ROUNDS> = consumer.sum_tile(tile.tokens, k_blocks(self.launch.k));
                    self.write(&tile, sums);
                } else {
                    self.multiply_parts::<ROUNDS>(&tile, &mut consumer);
                }
            }
        }
    }

    /// Multiplies and writes a tile, one part of K after the other.
    ///
    /// # Safety
    /// The requirements of [`Self::multiply`], which calls this for each of the CTA's tiles in order.
    #[inline(always)]
    unsafe fn multiply_parts<const ROUNDS: usize>(
        &self,
        tile: &Tile,
        consumer: &mut Consumer<Panels<INDEX, BF16, P>, P>,
    ) {
        let mut kept: Kept<P, ROUNDS> = Kept::new();
        let (parts, k) = (Self::INSTANCE.parts, self.launch.k);
        for part in 0..parts {
            let of_part = part_begin(part + 1, parts, k) - part_begin(part, parts, k);
            // SAFETY: the whole warpgroup is here and follows the same path. Each part has k-blocks, because a plan
            // splits long K only. The first part's sums are stored when the second part's are added.
            unsafe {
                let sums: Sums<P, ROUNDS> = consumer.sum_tile(tile.tokens, of_part);
                if part == 0 {
                    kept.store(tile.tokens, &sums);
                } else {
                    self.write(tile, kept.add(tile.tokens, sums));
                }
            }
        }
    }

    /// Prefetches the factors and biases of a tile's epilogue to the cache, because a load in the epilogue would wait
    /// for memory.
    #[inline(always)]
    pub(super) fn fetch_ahead(&self, tile: &Tile, fragment: &Fragment) {
        for part in 0..P as u32 {
            let column = tile.first_column + fragment.rows[0] + part * Self::INSTANCE.shape().panel_rows();
            let offset = u64::from(column.min(self.launch.n - 1)) * BIAS_BYTES;
            // SAFETY: the addresses are of a column of C, and nobody writes α and biases while the kernel runs.
            unsafe {
                prefetch_l1(GlobalAddress::new(self.launch.alpha) + offset);
                if self.launch.bias != 0 {
                    prefetch_l1(GlobalAddress::new(self.launch.bias) + offset);
                }
            }
        }
    }

    /// Writes a tile of C. Runs in one warpgroup.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. The whole warpgroup calls this together, with the sums of one of the
    /// CTA's tiles.
    #[inline(always)]
    pub(super) unsafe fn write<const ROUNDS: usize>(&self, tile: &Tile, sums: Sums<P, ROUNDS>) {
        let target: Target<Panels<INDEX, BF16, P>> = Target {
            c: self.launch.c,
            n: self.launch.n,
            alpha: Alpha::OfColumns(self.launch.alpha),
            bias: [self.launch.bias; 2],
            activation: Activation::NONE,
            first_column: tile.first_column,
            first_row: tile.first_row,
            tokens: tile.tokens,
            kind: PhantomData,
        };
        // SAFETY: the whole warpgroup is here. The sums belong to this tile, and C has the tile's rows and columns.
        unsafe { target.write(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, &Fragment::anew(), sums) };
    }
}

/// Layout of a stage of panels.
pub(super) struct Panels<const INDEX: usize, const BF16: bool, const P: usize> {
    /// Offsets in a stage of the words of the thread's rows, for the first part.
    words: [u32; 2],
    /// Offset of the scales of both rows, which are neighbors: the even row's scales come first.
    scales: u32,
    /// Whether the thread's first row is odd.
    exchanged: bool,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Panels<INDEX, BF16, P> {
    #[inline(always)]
    pub(super) fn new(fragment: &Fragment) -> Self {
        let panel = fragment.rows[0] / PANEL_ROWS * PANEL_BYTES;
        let rows = fragment.rows.map(|row| row % PANEL_ROWS);
        Self {
            words: rows.map(|row| panel + row * ROW_BYTES + fragment.lane * LANE_BYTES),
            scales: panel + PANEL_SCALES + rows[0] / 2 * (2 * ROW_SCALES),
            exchanged: rows[0] % 2 == 1,
        }
    }
}

/// A thread's words of two rows of a panel, and their scales. Words 2i and 2i + 1 have the scales with index i.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    words: [[u32; LANE_WORDS]; 2],
    scales: [[u32; LANE_WORDS / 2]; 2],
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Written<P> for Panels<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    const SHAPE: Shape = Linear::<INDEX, BF16, P>::INSTANCE.shape();
    const UNSCALE: f32 = Packed::<BF16>::UNSCALE;
    const ANY_ACTIVATION: bool = false;
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Kind<P> for Panels<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    const COPIED_BY_THREADS: bool = false;
    type Number = <Packed<BF16> as Decode>::Number;
    type Part = Rows;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Linear::<INDEX, BF16, P>::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Linear::<INDEX, BF16, P>::buffer(shared, buffers)
    }

    #[inline(always)]
    fn tokens(buffer: SharedAddress) -> MatrixDescriptor {
        MatrixDescriptor::swizzled_128(buffer)
    }

    #[inline(always)]
    fn token_offset(product: u32) -> u32 {
        /// Bytes per token and product.
        const BYTES: u32 = wgmma::K * 2;
        const PRODUCTS: u32 = BOX_BYTES / BYTES;
        product / PRODUCTS * Linear::<INDEX, BF16, P>::BOX_PITCH + product % PRODUCTS * BYTES
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, _fragment: &Fragment, _k_block: u32) -> [Rows; P] {
        let part_bytes = Self::SHAPE.panel_rows() / PANEL_ROWS * PANEL_BYTES;
        core::array::from_fn(|part| {
            let part = stage + part as u32 * part_bytes;
            // SAFETY: the addresses are inside the stage, which is full; words and pairs of scales lie at multiples of
            // 16.
            let (words, [a, b, c, d]) = unsafe {
                (self.words.map(|place| ld_shared_v4_b32(part + place)), ld_shared_v4_b32(part + self.scales))
            };
            let (even, odd) = ([a, b], [c, d]);
            Rows { words, scales: if self.exchanged { [odd, even] } else { [even, odd] } }
        })
    }

    #[inline(always)]
    fn decode(part: &Rows, word: usize) -> [[u32; 4]; 2] {
        let [first, second] =
            [0, 1].map(|row| Packed::<BF16>::decode(part.words[row][word], part.scales[row][word / 2], word % 2));
        [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]
    }
}
