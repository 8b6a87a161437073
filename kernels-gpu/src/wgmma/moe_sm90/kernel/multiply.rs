//! Warpgroups that multiply stages of weights by buffers of tokens and write C. The mainloop is in
//! [`Consumer`](crate::wgmma::Consumer), the epilogue in [`decoding`](crate::decoding). This file defines the layout of
//! weights in a stage.

use core::marker::PhantomData;

use cuda_std::{
    integer::opaque_b32,
    shared::SharedAddress,
    wgmma::{self, MatrixDescriptor},
};

use super::{Built, Moe};
use crate::{
    decoding::{
        Alpha, BIAS_BYTES, CORE_MATRIX_BYTES, Decode, Fragment, Packed, Placing, Rows, STRIP_BYTES, Shape, StagedRows,
        Sums, Target, Tile, Written,
    },
    format::{OUTPUT_BF16, OUTPUT_F16},
    moe::Launch,
    ring::Ring,
    sorted::LINE_BYTES,
    units::{K_BLOCK, k_blocks},
    wgmma::{Consumer, Kind},
};

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// Multiplies and writes the CTA's tiles. Runs in one warpgroup, the `consumer`-th that multiplies.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warpgroup calls this
    /// together. Every other warpgroup that multiplies calls it with its own number.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, consumer: u32) {
        let k = self.launch.k;
        let kind: Units<I, BF16, P> = Units::new(k, &Self::rows_of(Fragment::new(consumer)));
        let (stages, buffers, mut tiles) = (self.stages(), self.buffers(), self.tiles());
        let mut consumer: Consumer<_, P> =
            Consumer::new(kind, self.shared, consumer, stages, buffers, self.turn_barriers());
        // SAFETY: the whole warpgroup is here and follows the same path. The barriers are initialized, and only this
        // CTA has this tile. `read` follows a `wait` for the same tile.
        unsafe {
            loop {
                let tokens = tiles.wait();
                if tokens == 0 {
                    return;
                }
                let sums: Sums<P> = consumer.sum_tile(tokens, k_blocks(k));
                let (Tile { first_column, first_row, tokens, expert, alpha }, empty) = tiles.read();
                consumer.fragment.arrive(empty);
                let Launch { c, n, bias, activation, row_capacity, c_is_sorted, .. } = self.launch;
                // `n` is opaque, so that no register holds a multiple of it during the mainloop.
                let of_expert = u64::from(expert) * u64::from(opaque_b32(n)) * BIAS_BYTES;
                let target: Target<Units<I, BF16, P>> = Target {
                    c,
                    n,
                    alpha: Alpha::OfMatrices(alpha.map(f32::from_bits)),
                    bias: bias.map(|bias| if bias == 0 { 0 } else { bias + of_expert }),
                    activation,
                    first_column,
                    first_row,
                    tokens,
                    kind: PhantomData,
                };
                let rows = Self::rows_of(Fragment::anew());
                let placing = if Self::INSTANCE.sorted && c_is_sorted != 0 {
                    Placing::Sorted { rows: row_capacity }
                } else {
                    Placing::Rows
                };
                target.write_placed(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, placing, &rows, sums);
            }
        }
    }

    /// Returns the fragment with the thread's rows in a tile of this instance.
    #[inline(always)]
    fn rows_of(fragment: Fragment) -> Fragment {
        if Self::INSTANCE.narrow && Self::INSTANCE.matrices == 2 { fragment.narrow() } else { fragment }
    }
}

/// Layout of a stage of [`units`](crate::units).
struct Units<I, const BF16: bool, const P: usize> {
    k: u32,
    rows: StagedRows,
    instance: PhantomData<I>,
}

impl<I: Built, const BF16: bool, const P: usize> Units<I, BF16, P> {
    /// Returns the layout for sums over `k` elements.
    #[inline(always)]
    fn new(k: u32, fragment: &Fragment) -> Self {
        let instance = Moe::<I, BF16, P>::INSTANCE;
        // In a narrow gated tile, a thread's two rows are one row of each panel.
        let of_both = instance.narrow && instance.matrices == 2;
        let second_panel = if of_both { Moe::<I, BF16, P>::panel(1) } else { 0 };
        Self { k, rows: StagedRows::new(fragment, second_panel, instance.piece_rows()), instance: PhantomData }
    }
}

impl<I: Built, const BF16: bool, const P: usize> Written<P> for Units<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const SHAPE: Shape = Moe::<I, BF16, P>::INSTANCE.shape();
    const UNSCALE: f32 = Packed::<BF16>::UNSCALE;
    const ANY_ACTIVATION: bool = true;
    const CURVES: bool = Moe::<I, BF16, P>::INSTANCE.curves;
}

impl<I: Built, const BF16: bool, const P: usize> Kind<P> for Units<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const COPIED_BY_THREADS: bool = !Moe::<I, BF16, P>::INSTANCE.sorted;
    const BY_WARPS: bool = Moe::<I, BF16, P>::INSTANCE.by_warps;
    type Number = <Packed<BF16> as Decode>::Number;
    type Part = Rows<Packed<BF16>>;

    #[inline(always)]
    fn stage(shared: SharedAddress, stages: Ring) -> SharedAddress {
        Moe::<I, BF16, P>::stage(shared, stages)
    }

    #[inline(always)]
    fn buffer(shared: SharedAddress, buffers: Ring) -> SharedAddress {
        Moe::<I, BF16, P>::buffer(shared, buffers)
    }

    #[inline(always)]
    fn tokens(buffer: SharedAddress) -> MatrixDescriptor {
        if Moe::<I, BF16, P>::INSTANCE.sorted {
            MatrixDescriptor::swizzled_128(buffer)
        } else {
            MatrixDescriptor::new(buffer, CORE_MATRIX_BYTES, STRIP_BYTES)
        }
    }

    #[inline(always)]
    fn token_offset(product: u32) -> u32 {
        /// Bytes per token and product.
        const BYTES: u32 = wgmma::K * 2;
        /// Products per line.
        const LINE_PRODUCTS: u32 = LINE_BYTES / BYTES;
        let instance = Moe::<I, BF16, P>::INSTANCE;
        if instance.sorted {
            product / LINE_PRODUCTS * instance.lines_bytes() + product % LINE_PRODUCTS * BYTES
        } else {
            product * 2 * CORE_MATRIX_BYTES
        }
    }

    #[inline(always)]
    unsafe fn load(&self, stage: SharedAddress, _fragment: &Fragment, k_block: u32) -> [Rows<Packed<BF16>>; P] {
        let panel = |part: usize| stage + Moe::<I, BF16, P>::panel(part as u32);
        // SAFETY: the addresses are in the panels of the stage, and the caller guarantees that it is full. Panels are
        // contiguous, and so are the rows of a narrow plain tile.
        unsafe {
            if k_block < self.k / K_BLOCK {
                core::array::from_fn(|part| self.rows.load(panel(part)))
            } else {
                let fragment = Moe::<I, BF16, P>::rows_of(Fragment::anew());
                core::array::from_fn(|part| self.rows.load_ragged(panel(part), &fragment, self.k, k_block))
            }
        }
    }

    #[inline(always)]
    fn decode(part: &Rows<Packed<BF16>>, word: usize) -> [[u32; 4]; 2] {
        part.decode(word)
    }
}
