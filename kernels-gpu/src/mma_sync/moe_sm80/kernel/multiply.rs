//! Stages → sums → C. [`decoding`](crate::decoding) decodes the weights and writes the sums.

// Loops go over indices, not iterators: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::marker::PhantomData;

use cuda_std::{
    cp_async::cp_async_wait_group,
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    thread,
    warp::lane_id,
};

use super::{
    copies::{Copies, token_place},
    moe::Moe,
};
use crate::{
    decoding::{
        Alpha, BIAS_BYTES, CORE_MATRIX_ROWS, Decode, Fragment, Packed, Rows, Shape, StagedRows, Sums, Target, Tile,
        WORD_PAIRS, Written, pad, registers,
    },
    format::{OUTPUT_BF16, OUTPUT_F16},
    moe::Launch,
    units::{K_BLOCK, UNIT_BYTES, k_blocks},
};

/// Sums per thread of the tokens of one product.
const PRODUCT_REGISTERS: usize = registers(CORE_MATRIX_ROWS as usize);

impl<const INDEX: usize, const BF16: bool, const P: usize> Written<P> for Moe<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    const SHAPE: Shape = Self::INSTANCE.shape();
    const UNSCALE: f32 = Packed::<BF16>::UNSCALE;
    const ANY_ACTIVATION: bool = true;
    const CURVES: bool = Self::INSTANCE.curves;
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Moe<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// `true` if a thread's two rows are the same row of both panels, so that gate and up meet in one thread; `false`
    /// if they are neighbors in one panel.
    pub(super) const ROW_OF_BOTH: bool = !Self::INSTANCE.of_32_rows && Self::INSTANCE.matrices == 2;

    /// Bytes of a panel in a stage.
    const PANEL_BYTES: u32 = Self::INSTANCE.panel_units() * UNIT_BYTES;

    /// The sums of all products of a tile of `tokens` tokens, whose copies have started. There is one mainloop per
    /// rounded number of tokens.
    ///
    /// # Safety
    /// The contract in `moe_sm80/mod.rs` holds. All threads of the CTA make this call, with their own fragments.
    #[inline(always)]
    pub(super) unsafe fn sum_tile(&self, copies: &mut Copies, fragment: &Fragment, tokens: u32) -> Sums<P> {
        macro_rules! main_loops {
            ($($n:literal)*) => {$(
                if const { $n <= Self::INSTANCE.tile_tokens && 2 * $n >= Self::INSTANCE.tile_tokens } && tokens <= $n {
                    // SAFETY: all threads of the CTA are here with their own fragments, and `$n` is the tile's number
                    // of tokens, rounded up.
                    return pad(&unsafe { self.sum::<{ registers($n) }>(copies, fragment) });
                }
            )*};
        }
        main_loops!(8 16 32 48 64);
        // SAFETY: a tile has no more tokens than its instance.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// The mainloop: the sums of all products of a tile.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(&self, copies: &mut Copies, fragment: &Fragment) -> [[f32; REGISTERS]; P] {
        let k = self.launch.k;
        let panel_rows = Self::INSTANCE.shape().panel_rows();
        let rows = StagedRows::new(fragment, if Self::ROW_OF_BOTH { Self::PANEL_BYTES } else { 0 }, panel_rows);
        // Place of the lane's row of four pieces, for the first two words. The pieces of the other words lie two words
        // further on.
        let (row, piece) = (lane_id() % CORE_MATRIX_ROWS, lane_id() / CORE_MATRIX_ROWS);
        let places = [token_place(row, piece), token_place(row, piece + WORD_PAIRS as u32)];
        let (mut sums, mut index) = ([[0.0; REGISTERS]; P], 0);
        // SAFETY: a stage is read after all threads have waited for their copies to it, and overwritten after all
        // threads have reached the next barrier. All lanes take the same branches.
        unsafe {
            for k_block in 0..k_blocks(k) {
                match Self::INSTANCE.stages {
                    2 => cp_async_wait_group::<0>(),
                    3 => cp_async_wait_group::<1>(),
                    _ => cp_async_wait_group::<2>(),
                }
                thread::sync_threads();
                copies.begin_next(self);
                let tokens = self.stage(index);
                let weights = tokens + Self::INSTANCE.token_bytes();
                let panel = |part: usize| weights + part as u32 * Self::PANEL_BYTES;
                let parts: [Rows<Packed<BF16>>; P] = if k_block < k / K_BLOCK {
                    core::array::from_fn(|part| rows.load(panel(part)))
                } else {
                    core::array::from_fn(|part| rows.load_ragged(panel(part), fragment, k, k_block))
                };
                macro_rules! products_of_words {
                    ($($word:literal)*) => {$({
                        let a = parts.map(|part| part.decode($word));
                        let tokens = tokens + (places[$word % 2] + token_place(0, $word / 2 * 2 * WORD_PAIRS as u32));
                        for product in 0..REGISTERS / PRODUCT_REGISTERS {
                            let b = ldmatrix_x4_b16(tokens + token_place(product as u32 * CORE_MATRIX_ROWS, 0));
                            let first = product * PRODUCT_REGISTERS;
                            for part in 0..P {
                                let mut of_product = [0, 1, 2, 3].map(|register| sums[part][first + register]);
                                mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut of_product, a[part][0], [b[0], b[1]]);
                                mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut of_product, a[part][1], [b[2], b[3]]);
                                for register in 0..PRODUCT_REGISTERS {
                                    sums[part][first + register] = of_product[register];
                                }
                            }
                        }
                    })*};
                }
                products_of_words!(0 1 2 3);
                index = if index + 1 == Self::INSTANCE.stages { 0 } else { index + 1 };
            }
        }
        sums
    }

    /// Scales, activates and writes a tile's sums.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`], which returned these sums for this tile.
    #[inline(always)]
    pub(super) unsafe fn write(&self, tile: &Tile, fragment: &Fragment, sums: Sums<P>) {
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
        // SAFETY: `sum_tile` returned these sums for this tile, and C has the tile's rows and columns.
        unsafe { target.write(if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 }, fragment, sums) }
    }
}
