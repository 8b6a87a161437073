//! Weights decoded to shared memory: warpgroups decode k-blocks in turn, and another warpgroup multiplies, one k-block
//! ahead of the completed products. A warpgroup that decodes in registers alternates between decoding and products, and
//! with few tiles their sum is the time of a tile. Here the time of a tile is the time to read both operands from
//! shared memory and to hand over buffers.
//!
//! Decoded weights lie in core matrices of 8 rows × 16 bytes: first the core matrices of all the panel's rows, then the
//! core matrices of the next 8 columns.

use cuda_std::{
    fence::fence_proxy_async_shared,
    mbarrier::Mbarrier,
    mma::stmatrix_x4_b16,
    shared::SharedAddress,
    thread,
    warp::{WARP_SIZE, lane_id},
    wgmma::{self, MatrixDescriptor, MmaAsync},
};

use super::{Linear, multiply::Panels};
use crate::{
    decoding::{CORE_MATRIX_BYTES, CORE_MATRIX_ROWS, Fragment, K_BLOCK, LANE_WORDS, Sums, WARPS, pad, registers},
    linear::{
        PANEL_ROWS,
        decode::{Decode, Packed},
    },
    ring::Ring,
    wgmma::{Kind, linear_sm90::abi::DECODED_BYTES},
};

/// Bytes between core matrices that are neighbors along K.
const ALONG_K: u32 = PANEL_ROWS / CORE_MATRIX_ROWS * CORE_MATRIX_BYTES;

/// Bytes of a buffer that one product reads.
const PRODUCT_BYTES: u32 = 2 * ALONG_K;
const PRODUCTS: u32 = K_BLOCK / wgmma::K;
const _: () = assert!(PRODUCTS * PRODUCT_BYTES == DECODED_BYTES);

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P>
where
    Packed<BF16>: Decode,
{
    /// Address of the decoded weights that belong to the current buffer of tokens.
    fn decoded_buffer(&self, buffers: Ring) -> SharedAddress {
        self.shared + Self::DECODED + buffers.index() * DECODED_BYTES
    }

    /// Decodes every n-th k-block of the CTA's tiles, from the `decoder`-th k-block on. Runs in one warpgroup.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the barriers are initialized. The whole warpgroup calls this
    /// together. Every other warpgroup that decodes calls it with its own number.
    #[inline(always)]
    pub(super) unsafe fn decode(&self, decoder: u32) {
        let warp = thread::thread_idx_x() / WARP_SIZE % WARPS;
        let fragment = Fragment::of(lane_id(), warp);
        let kind: Panels<INDEX, BF16, P> = Panels::new(&fragment);
        let (mut stages, mut buffers, mut tiles) = (self.stages(), self.buffers(), self.tiles());
        // Row of this lane in a warp's four core matrices of a product: the second matrix is 8 rows further, the third
        // 8 columns.
        let (matrix, row) = (lane_id() / CORE_MATRIX_ROWS, lane_id() % CORE_MATRIX_ROWS);
        let place = (2 * warp + matrix % 2) * CORE_MATRIX_BYTES + matrix / 2 * ALONG_K + row * 16;
        let mut turn = 0;
        while self.next(&mut tiles).is_some() {
            let [first, end] = self.k_range();
            for k_block in first..end {
                if turn == decoder {
                    // SAFETY: the barriers are initialized. The stage is read after it is full and before this warp
                    // arrives at its empty barrier; the buffer is written while it is empty. Each warp stores its own
                    // core matrices of the buffer, 512 bytes per store.
                    unsafe {
                        stages.wait_full();
                        let parts = kind.load(Self::stage(self.shared, stages), &fragment, k_block);
                        buffers.wait_empty();
                        let buffer = self.decoded_buffer(buffers) + place;
                        for word in 0..LANE_WORDS {
                            let products = Panels::<INDEX, BF16, P>::decode(&parts[0], word);
                            let of_word = buffer + 2 * word as u32 * PRODUCT_BYTES;
                            stmatrix_x4_b16(of_word, products[0]);
                            stmatrix_x4_b16(of_word + PRODUCT_BYTES, products[1]);
                        }
                        // `wgmma` reads the buffer through the asynchronous proxy, and bulk copies overwrite the stage
                        // through it.
                        fence_proxy_async_shared();
                        fragment.arrive(buffers.full());
                        fragment.arrive(stages.empty());
                    }
                }
                turn = if turn + 1 == Self::INSTANCE.decoders { 0 } else { turn + 1 };
                stages.advance();
                buffers.advance();
            }
        }
    }

    /// Multiplies the weights that other warpgroups decode, and writes the CTA's tiles. Runs in one warpgroup, the
    /// first one after the loading warpgroup.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the barriers are initialized. The whole warpgroup calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn multiply_decoded(&self) {
        let (mut tiles, mut buffers) = (self.tiles(), self.buffers());
        let fragment = Fragment::new(0);
        while let Some(tile) = self.next(&mut tiles) {
            self.fetch_ahead(&tile, &fragment);
            // SAFETY: the whole warpgroup is here and follows the same path. The barriers are initialized, and only
            // this CTA has this tile.
            unsafe {
                let sums = self.sum_tile(tile.tokens, &fragment, &mut buffers);
                if Self::CLUSTER > 1 {
                    // A cluster has one tile.
                    return self.write_half(&tile, sums);
                }
                self.write(&tile, sums);
            }
        }
    }

    /// Returns the sums of all products of a tile of `tokens` tokens.
    ///
    /// # Safety
    /// The requirements of [`Self::multiply_decoded`]. The warpgroup calls this for each of the CTA's tiles in order.
    /// `tokens` is at most the instance's number of tokens per tile.
    #[inline(always)]
    unsafe fn sum_tile(&self, tokens: u32, fragment: &Fragment, buffers: &mut Ring) -> Sums<P> {
        let n = Self::INSTANCE.shape().mma_n(tokens);
        macro_rules! main_loops {
            ($($n:literal)*) => {$(
                if const { Self::INSTANCE.shape().mma_n($n) == $n && $n <= Self::INSTANCE.tile_tokens } && n == $n {
                    // SAFETY: the whole warpgroup is here for each tile in order, and `$n` is the tile's number of
                    // tokens, rounded up.
                    return pad(&unsafe { self.sum::<{ registers($n) }>(fragment, buffers) });
                }
            )*};
        }
        main_loops!(8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128);
        // SAFETY: a tile has at most the shape's number of tokens, and the list above has the N of each number up to
        // this one.
        unsafe { core::hint::unreachable_unchecked() }
    }

    /// Mainloop: returns the sums of all products of a tile.
    ///
    /// # Safety
    /// The requirements of [`Self::sum_tile`].
    #[inline(always)]
    unsafe fn sum<const REGISTERS: usize>(&self, fragment: &Fragment, buffers: &mut Ring) -> [[f32; REGISTERS]; P]
    where
        [f32; REGISTERS]: MmaAsync,
    {
        let mut sums = [[0.0; REGISTERS]; P];
        // SAFETY: the whole warpgroup is here, and the barriers are initialized. Buffers are read while they are full,
        // and released when their products are complete.
        unsafe {
            let mut before: Option<Mbarrier> = None;
            let [first, end] = self.k_range();
            for _ in first..end {
                buffers.wait_full();
                let place = buffers.uniform();
                let a = MatrixDescriptor::new(self.decoded_buffer(place), ALONG_K, CORE_MATRIX_BYTES);
                let b = Panels::<INDEX, BF16, P>::tokens(Self::buffer(self.shared, place));
                wgmma::fence();
                macro_rules! products {
                    ($($product:literal)*) => {$({
                        let a = a.advance($product * PRODUCT_BYTES);
                        let b = b.advance(Panels::<INDEX, BF16, P>::token_offset($product));
                        sums[0].mma_async_shared::<<Packed<BF16> as Decode>::Number>(a, b, true);
                    })*};
                }
                products!(0 1 2 3 4 5 6 7);
                wgmma::commit_group();
                wgmma::wait_group::<1>();
                if let Some(before) = before {
                    fragment.arrive(before);
                }
                before = Some(buffers.empty());
                buffers.advance();
            }
            wgmma::wait_group::<0>();
            sums[0].settle();
            if let Some(before) = before {
                fragment.arrive(before);
            }
        }
        sums
    }
}
