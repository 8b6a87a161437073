//! A warp's work on full stages: a strip of 16 columns of C, with some of a tile's tokens. This file does not know how
//! stages are filled.
//!
//! Lanes have the same elements as in a warp of `wgmma`: the warp decodes weights in registers and multiplies. Each
//! product along K waits for the product before it, 24 cycles on an H200. Decoding fits between them.

// Loops go over indices, not iterators: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::marker::PhantomData;

use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    integer::opaque_b32,
    mma::{ldmatrix_x4_b16, mma_m16n8k16},
    shared::{SharedAddress, dynamic_shared_address, ld_shared_v2_b32, ld_shared_v4_b32},
    thread,
    warp::lane_id,
};

use super::{CHUNK_BYTES, Instance, PRODUCT_TOKENS, STRIP_ROWS, STRIP_SCALES, STRIP_VALUES};
use crate::{
    decoding::{BIAS_BYTES, K_BLOCK, LANE_WORDS},
    epilogue::convert,
    format::{OUTPUT_BF16, OUTPUT_F16},
    linear::{
        BOX_BYTES, LANE_BYTES, Launch, ROW_BYTES, ROW_LANES, ROW_SCALES,
        decode::{Decode, Packed},
        split::Inbox,
    },
};

/// An instance, as a type.
pub(crate) trait Built {
    const INSTANCE: Instance;
}

/// Boxes of tokens per stage: one box has the first 64 columns of the k-block, the other the rest.
pub(crate) const BOXES: u32 = 2 * K_BLOCK / BOX_BYTES;

/// Chunks in a row of a box.
const BOX_CHUNKS: u32 = BOX_BYTES / CHUNK_BYTES;

/// A warp's part of a tile of C, for an instance with bf16 or f16 tokens. It has `P` products per 16 columns of K.
pub(crate) struct Strip<I, const BF16: bool, const P: usize> {
    pub(crate) launch: Launch,
    pub(crate) shared: SharedAddress,
    /// The tile's first column.
    pub(crate) first_column: u32,
    /// The tile's first token.
    pub(crate) first_token: u32,
    /// Index of the warp's strip in the tile.
    strip: u32,
    /// The first of the warp's tokens in the tile.
    warp_token: u32,
    instance: PhantomData<I>,
}

/// Offsets of a lane's part of a stage, in bytes from the stage's weights and tokens.
pub(crate) struct Lane {
    /// Offsets of the words of the lane's rows.
    words: [u32; 2],
    /// Offsets of the scales of the lane's rows.
    scales: [u32; 2],
    /// Offsets that the lane passes to `ldmatrix` for words 0 and 2, and for words 1 and 3.
    tokens: [u32; 2],
}

/// A lane's operands of a k-block before they are multiplied: words of two rows, the scales of both rows, and B of the
/// first words.
#[derive(Clone, Copy)]
pub(crate) struct Operands<const P: usize> {
    words: [[u32; LANE_WORDS]; 2],
    scales: [[u32; LANE_WORDS / 2]; 2],
    b: [[u32; 4]; P],
}

impl<I: Built, const BF16: bool, const P: usize> Strip<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;

    /// Whether K has two parts.
    pub(crate) const SPLIT: bool = Self::INSTANCE.parts > 1;

    // Layout of shared memory: tokens of all stages, weights of all stages, then further data of the instance.
    const WEIGHTS: u32 = Self::INSTANCE.stages * Self::INSTANCE.token_bytes();
    pub(crate) const STAGES_END: u32 = Self::WEIGHTS + Self::INSTANCE.stages * Self::INSTANCE.weight_bytes();

    /// This warp's part of the CTA's tile.
    #[inline(always)]
    pub(crate) fn new(launch: Launch, warp: u32) -> Self {
        const { assert!(Self::INSTANCE.products() == P && P <= 8) };
        let columns = launch.n.div_ceil(Self::INSTANCE.columns());
        // SAFETY: N is not 0, so C has columns.
        unsafe { core::hint::assert_unchecked(columns > 0) };
        // The CTAs of a cluster have the parts of one tile.
        let tile = thread::block_idx_x() / Self::INSTANCE.parts;
        let (column, row) = (tile % columns, tile / columns);
        Self {
            launch,
            shared: dynamic_shared_address(),
            first_column: column * Self::INSTANCE.columns(),
            first_token: row * Self::INSTANCE.tile_tokens,
            strip: warp % Self::INSTANCE.strips,
            warp_token: warp / Self::INSTANCE.strips * Self::INSTANCE.warp_tokens(),
            instance: PhantomData,
        }
    }

    /// Address of a stage's weights.
    #[inline(always)]
    pub(crate) fn weights(&self, stage: u32) -> SharedAddress {
        self.shared + (Self::WEIGHTS + stage * Self::INSTANCE.weight_bytes())
    }

    /// Address of a stage's tokens.
    #[inline(always)]
    pub(crate) fn tokens(&self, stage: u32) -> SharedAddress {
        self.shared + stage * Self::INSTANCE.token_bytes()
    }

    /// The rows of the strip that a pair of lanes has: two neighbors. Every second pair has them in reverse order, so
    /// that loads of words have no bank conflicts.
    #[inline(always)]
    const fn rows(pair: u32) -> [u32; 2] {
        [2 * pair + pair % 2, 2 * pair + 1 - pair % 2]
    }

    /// This lane's offsets. They are opaque, so that the compiler computes them once and not in each k-block.
    #[inline(always)]
    pub(crate) fn lane(&self) -> Lane {
        let lane_id = opaque_b32(lane_id());
        let (lane, pair) = (lane_id % ROW_LANES, lane_id / ROW_LANES);
        let (token, chunk) = (lane_id % PRODUCT_TOKENS, lane_id / PRODUCT_TOKENS);
        let rows = Self::rows(pair);
        // The 128-byte swizzle (PTX ISA, "Tensor swizzle modes"): rows are tokens.
        let tokens = |half: u32| {
            let chunk = (half * (BOX_CHUNKS / 2) + chunk) ^ token;
            opaque_b32((self.warp_token + token) * BOX_BYTES + chunk * CHUNK_BYTES)
        };
        Lane {
            words: rows.map(|row| opaque_b32(self.strip * STRIP_VALUES + row * ROW_BYTES + lane * LANE_BYTES)),
            scales: rows
                .map(|row| opaque_b32(Self::INSTANCE.value_bytes() + self.strip * STRIP_SCALES + row * ROW_SCALES)),
            tokens: [tokens(0), tokens(1)],
        }
    }

    /// Reads a lane's operands from a stage.
    ///
    /// # Safety
    /// The stage is full. The whole warp makes this call together.
    #[inline(always)]
    pub(crate) unsafe fn operands(&self, lane: &Lane, stage: u32) -> Operands<P> {
        let weights = self.weights(stage);
        // SAFETY: the stage is full, and the offsets lie inside of it.
        unsafe {
            Operands {
                words: lane.words.map(|row| ld_shared_v4_b32(weights + row)),
                scales: lane.scales.map(|row| ld_shared_v2_b32(weights + row)),
                b: self.b(lane, stage, 0),
            }
        }
    }

    /// Reads B of the products of a word, 32 columns of K.
    ///
    /// # Safety
    /// The requirements of [`Self::operands`].
    #[inline(always)]
    unsafe fn b(&self, lane: &Lane, stage: u32, word: usize) -> [[u32; 4]; P] {
        let first =
            self.tokens(stage) + (word as u32 / 2 * (Self::INSTANCE.token_bytes() / BOXES) + lane.tokens[word % 2]);
        // SAFETY: the stage is full, and the offsets lie inside of it.
        core::array::from_fn(|product| unsafe {
            ldmatrix_x4_b16(first + product as u32 * (PRODUCT_TOKENS * BOX_BYTES))
        })
    }

    /// Adds the products of a k-block.
    ///
    /// # Safety
    /// The requirements of [`Self::operands`], which returned these operands for this stage.
    #[inline(always)]
    pub(crate) unsafe fn multiply(&self, sums: &mut [[f32; 4]; P], operands: &Operands<P>, lane: &Lane, stage: u32) {
        // Straight-line code: arrays stay in registers only if all their indices are constants.
        macro_rules! words {
            ($($word:literal)*) => {$({
                // SAFETY: the stage is full, and the whole warp executes the load together.
                let b = if $word == 0 { operands.b } else { unsafe { self.b(lane, stage, $word) } };
                let [first, second] = [0, 1].map(|row| {
                    Packed::<BF16>::decode(operands.words[row][$word], operands.scales[row][$word / 2], $word % 2)
                });
                for half in 0..2 {
                    let a = [first[2 * half], second[2 * half], first[2 * half + 1], second[2 * half + 1]];
                    for product in 0..P {
                        let b = [b[product][2 * half], b[product][2 * half + 1]];
                        // SAFETY: the whole warp executes the product together.
                        unsafe { mma_m16n8k16::<<Packed<BF16> as Decode>::Number>(&mut sums[product], a, b) };
                    }
                }
            })*};
        }
        words!(0 1 2 3);
    }

    /// Returns a product's sums of one of the lane's two tokens: one sum per row of the lane.
    #[inline(always)]
    pub(crate) const fn of_token([a, b, c, d]: [f32; 4], token: u32) -> [f32; 2] {
        if token == 0 { [a, c] } else { [b, d] }
    }

    /// Writes the warp's elements of C. A lane has two neighboring columns of two neighboring tokens of each product.
    /// With an inbox, it writes one of the two tokens, with the sums of both parts of K.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. `sums` are this warp's. If the instance has two parts of K, there is an
    /// inbox, and the other CTA sends its sums in the order of [`Self::of_token`].
    #[inline(always)]
    pub(crate) unsafe fn write(&self, sums: &[[f32; 4]; P], inbox: Option<&Inbox>) {
        let Launch { n, m, .. } = self.launch;
        let (lane, pair) = (lane_id() % ROW_LANES, lane_id() / ROW_LANES);
        let column = self.first_column + self.strip * STRIP_ROWS + 2 * pair;
        let of_column = |array: u64, column: u32, otherwise: f32| {
            let is_there = array != 0 && column < n;
            let address = GlobalAddress::new(array) + u64::from(column) * BIAS_BYTES;
            // SAFETY: the load is predicated: it reads the f32 of a column that C has, from an array that is there.
            let bits = unsafe { ld_global_b32_or_zero(is_there, address) };
            if is_there { f32::from_bits(bits) } else { otherwise }
        };
        let alphas = [0, 1].map(|next| Packed::<BF16>::UNSCALE * of_column(self.launch.alpha, column + next, 0.0));
        // Adding −0 keeps the sum and its sign.
        let biases = [0, 1].map(|next| of_column(self.launch.bias, column + next, -0.0));
        let token = self.first_token + self.warp_token + 2 * lane;
        let exchanged = Self::rows(pair)[0] > Self::rows(pair)[1];
        let write = |token: u32, first: f32, second: f32| {
            let (low, high) = if exchanged { (second, first) } else { (first, second) };
            let output = if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 };
            let elements =
                convert(output, fma_rn_f32(alphas[0], low, biases[0]), fma_rn_f32(alphas[1], high, biases[1]));
            let element = u64::from(token) * u64::from(n) + u64::from(column);
            let address = GlobalAddress::new(self.launch.c) + element * 2;
            // SAFETY: two elements of C that are this lane's alone; N and the column are even.
            unsafe { st_global_b32_where(token < m && column < n, address, elements) };
        };
        // Testing the constant first keeps the code of the exchange out of instances with one part of K.
        if Self::SPLIT
            && let Some(inbox) = inbox
        {
            // SAFETY: the inbox's barrier was initialized before a barrier of the CTA.
            unsafe { inbox.wait_full() };
        }
        // Straight-line code, so that `sums` stay in registers.
        macro_rules! products {
            ($($product:literal)*) => {$(
                if Self::SPLIT && $product < P && let Some(inbox) = inbox {
                    // SAFETY: all sums have arrived.
                    let [first, second] = unsafe { inbox.received_pair(thread::thread_idx_x(), $product) };
                    let own = Self::of_token(sums[$product], inbox.rank);
                    write(token + $product * PRODUCT_TOKENS + inbox.rank, own[0] + first, own[1] + second);
                } else if $product < P {
                    let [a, b, c, d] = sums[$product];
                    write(token + $product * PRODUCT_TOKENS, a, c);
                    write(token + $product * PRODUCT_TOKENS + 1, b, d);
                }
            )*};
        }
        products!(0 1 2 3 4 5 6 7);
    }
}
