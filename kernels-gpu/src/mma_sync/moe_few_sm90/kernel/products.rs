//! The mainloop: a warp goes through its work, strip after strip, and multiplies each strip with its expert's tokens.

use cuda_std::{
    cp_async::cp_async_wait_group,
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32, ld_global_b32_or_zero},
    mma::mma_m16n8k16,
    shared::SharedAddress,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{
    lists::{Lists, Named, Row},
    tokens::{Elements, Tokens, pairs},
    weights::Weights,
    work::Work,
};
use crate::{
    decoding::{BIAS_BYTES, Decode, Packed, Rows},
    mma_sync::moe_few_sm90::abi::{Matrices, ONE_STAGES, STAGES, stages},
    units::{K_BLOCK, ROW_LANES, k_blocks},
};

/// A warp's weights before it multiplies them.
pub(super) struct Products<'l, const GATED: bool, const BF16: bool, const ONE: bool, W> {
    matrices: &'l Matrices,
    lists: Lists,
    work: &'l W,
    weights: Weights<'l, GATED, ONE, W>,
}

impl<'l, const GATED: bool, const BF16: bool, const ONE: bool, W: Work> Products<'l, GATED, BF16, ONE, W>
where
    Packed<BF16>: Decode,
{
    /// Starts the copies of the warp's first weights to the stages at this address.
    ///
    /// # Safety
    /// The contract in `moe_few_sm90/mod.rs` holds, and the lists are made. The stages belong to this warp. The whole
    /// warp makes this call together.
    #[inline(always)]
    pub(super) unsafe fn begin(matrices: &'l Matrices, lists: Lists, work: &'l W, stages: SharedAddress) -> Self {
        // SAFETY: the lists are made, the stages are this warp's, and the whole warp is here.
        let weights = unsafe { Weights::of(matrices, lists, work, stages) };
        Self { matrices, lists, work, weights }
    }

    /// Copies down's single token to the stages whose copies have started. Called once, before [`Self::run`].
    ///
    /// # Safety
    /// The requirements of [`Self::begin`]; the token is complete.
    #[inline(always)]
    pub(super) unsafe fn await_token(&mut self) {
        // SAFETY: the token is complete, the stages are this warp's, and the whole warp is here.
        unsafe { self.weights.await_token() }
    }

    /// Multiplies each strip with the tokens of its expert's rows; `token` gives a row's address. A lane has two
    /// columns of a strip: one of gate and one of up, or two of the only matrix. `column` gives their numbers in the
    /// matrices. `write` gets the piece of work, a row of the expert and the lane's two values of this row, times alpha
    /// and with their biases.
    ///
    /// # Safety
    /// The requirements of [`Self::begin`]. Tokens are complete and begin at multiples of 16; the matrices have the
    /// columns.
    #[inline(always)]
    pub(super) unsafe fn run(
        mut self,
        token: impl Fn(Row) -> GlobalAddress,
        column: impl Fn(u32) -> [u32; 2],
        mut write: impl FnMut(u32, Row, [f32; 2]),
    ) {
        let &Matrices { alpha, bias, n, k, .. } = self.matrices;
        let mut index = self.work.first();
        while index < self.work.end() {
            let (of, strip) = self.work.piece(index);
            // SAFETY: the lists name this expert and have its rows; tokens are complete; matrices, factors and biases
            // have the columns.
            unsafe {
                let Named { expert, rows } = self.lists.named(of);
                let address = |array: u64, element: u64| GlobalAddress::new(array) + element * BIAS_BYTES;
                let columns = column(strip);
                // Loaded here because they are needed after the sums.
                let factors_and_biases = [0, 1].map(|half| {
                    let matrix = if GATED { half } else { 0 };
                    let element = u64::from(expert) * u64::from(n) + u64::from(columns[half]);
                    let bias = (bias[matrix] != 0, address(bias[matrix], element));
                    (ld_global_b32(address(alpha[matrix], expert.into())), ld_global_b32_or_zero(bias.0, bias.1))
                });
                // Columns of the product beyond the expert's rows repeat its last row.
                let row = (lane_id() / ROW_LANES).min(rows - 1);
                let tokens = Tokens::at(token(self.lists.row(of, row)), k);
                let sums = self.sum(&tokens);
                for odd in 0..2 {
                    let row = lane_id() % ROW_LANES * 2 + odd;
                    if row < rows {
                        let number = |half: usize| {
                            let (factor, added) = factors_and_biases[half];
                            let bias = bias[if GATED { half } else { 0 }];
                            // Adding −0 keeps the sum and its sign.
                            let added = if bias != 0 { f32::from_bits(added) } else { -0.0 };
                            let sum = sums[2 * half + odd as usize];
                            fma_rn_f32(Packed::<BF16>::UNSCALE * f32::from_bits(factor), sum, added)
                        };
                        write(index, self.lists.row(of, row), [number(0), number(1)]);
                    }
                }
            }
            index += self.work.step();
        }
    }

    /// The sums of a strip: two rows of weights, each with two neighboring tokens.
    ///
    /// # Safety
    /// The requirements of [`Self::run`].
    #[inline(always)]
    unsafe fn sum(&mut self, tokens: &Tokens) -> [f32; 4] {
        let (whole, all) = (self.matrices.k / K_BLOCK, k_blocks(self.matrices.k));
        let mut sums = [0.0; 4];
        // SAFETY: tokens are complete and have the k-blocks; the stages are this warp's, and the whole warp is here.
        unsafe {
            let mut ahead = if whole > 0 { Self::load(tokens, 0) } else { Elements::default() };
            // While k-blocks before `same` are multiplied, whole k-blocks of the same strip are copied; from `next` on,
            // whole k-blocks of the next strip. In between, the copies are of partial k-blocks, or move on to the next
            // strip.
            let is_straight = GATED || ONE;
            let in_flight = stages(ONE) - 1;
            let (same, next) =
                if is_straight && whole >= in_flight { (whole - in_flight, all - in_flight + 1) } else { (0, whole) };
            if is_straight {
                self.add_whole::<true>(&mut sums, tokens, &mut ahead, [0, same]);
            }
            self.add_whole::<false>(&mut sums, tokens, &mut ahead, [same, next]);
            if is_straight {
                self.add_whole::<true>(&mut sums, tokens, &mut ahead, [next, whole]);
            }
            for k_block in whole..all {
                self.add::<false>(&mut sums, &tokens.load_ragged(k_block), Some(k_block), false);
            }
        }
        sums
    }

    /// Adds the products of the whole k-blocks `k_block..end`. `ahead` holds the token's elements of the next k-block.
    /// `STRAIGHT`: all k-blocks that are copied during this call are whole k-blocks of one strip.
    ///
    /// # Safety
    /// The requirements of [`Self::run`].
    #[inline(always)]
    unsafe fn add_whole<const STRAIGHT: bool>(
        &mut self,
        sums: &mut [f32; 4],
        tokens: &Tokens,
        ahead: &mut Elements,
        [mut k_block, end]: [u32; 2],
    ) {
        let last = (self.matrices.k / K_BLOCK).wrapping_sub(1);
        let is_there = STRAIGHT && self.weights.begin_straight(end - k_block);
        // SAFETY: tokens have the k-blocks up to `end`; the stages are this warp's, and the whole warp is here.
        unsafe {
            // Two k-blocks per iteration, because copying registers would wait for the elements that are loaded ahead.
            while k_block + 1 < end {
                let odd = Self::load(tokens, k_block + 1);
                self.add::<STRAIGHT>(sums, ahead, None, is_there);
                k_block += 2;
                *ahead = Self::load(tokens, k_block.min(last));
                self.add::<STRAIGHT>(sums, &odd, None, is_there);
            }
            if k_block < end {
                let next = Self::load(tokens, (k_block + 1).min(last));
                self.add::<STRAIGHT>(sums, ahead, None, is_there);
                *ahead = next;
            }
        }
    }

    /// Loads the lane's elements of a whole k-block, unless they come with the weights.
    ///
    /// # Safety
    /// The requirements of [`Tokens::load`].
    #[inline(always)]
    unsafe fn load(tokens: &Tokens, k_block: u32) -> Elements {
        // SAFETY: the token is complete, begins at a multiple of 16, and has the k-block.
        if ONE { Elements::default() } else { unsafe { tokens.load(k_block) } }
    }

    /// Adds the products of the next k-block: a whole one if `ragged` is `None`, otherwise k-block `ragged`.
    ///
    /// # Safety
    /// The requirements of [`Self::run`]; `elements` are the elements of this k-block.
    #[inline(always)]
    unsafe fn add<const STRAIGHT: bool>(
        &mut self,
        sums: &mut [f32; 4],
        elements: &Elements,
        ragged: Option<u32>,
        is_there: bool,
    ) {
        // SAFETY: a stage is read after all lanes have waited for their copies to it, and overwritten after all lanes
        // have reached the next k-block. All lanes take the same branches.
        unsafe {
            if ONE {
                cp_async_wait_group::<{ ONE_STAGES - 2 }>();
            } else {
                cp_async_wait_group::<{ STAGES - 2 }>();
            }
            sync_warp(ALL_LANES);
            let elements = if ONE && ragged.is_none() { &self.weights.token() } else { elements };
            let rows: Rows<Packed<BF16>> = match ragged {
                None => self.weights.take(),
                Some(k_block) => self.weights.take_ragged(k_block),
            };
            if STRAIGHT {
                self.weights.begin_whole(is_there);
            } else {
                self.weights.begin_next();
            }
            self.weights.advance();
            macro_rules! products_of_words {
                ($($word:literal)*) => {$({
                    let a = rows.decode($word);
                    let b = pairs(elements[$word]);
                    mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(sums, a[0], b[0]);
                    mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(sums, a[1], b[1]);
                })*};
            }
            products_of_words!(0 1 2 3);
        }
    }
}
