//! One warp per token. The warp reads the token twice: for its largest magnitude, and to round it. A lane rounds 16
//! elements at a time, in two groups of eight contiguous elements. Four lanes exchange their codes so that each has a
//! chunk of a line, and store it to each of the token's rows. The columns past the last multiple of 64 are rounded
//! chunk by chunk.

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::hint::assert_unchecked;

use cuda_std::{
    convert::cvt_rn_satfinite_e4m3x2_f32,
    global::{
        GlobalAddress, ld_global_b32, ld_global_b32_or_zero, ld_global_b64_or_zero, ld_global_v4_b32_or_zero,
        st_global_b32_where, st_global_v4_b32,
    },
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel, thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_reduce_max_u32, warp_shuffle_idx, warp_shuffle_xor},
};

use super::abi::{LARGEST, LEAST_AMAX, Quantize};
use crate::{
    epilogue::{convert, decode},
    format::{OUTPUT_BF16, OUTPUT_F16},
    lists::NO_ROW,
    sorted::{LINE_CHUNKS, ROW_MULTIPLE, chunk, line},
    units::{K_BLOCK, ROW_LANES, WORD_ELEMENTS, block_columns, block_start, element, k_blocks},
};

/// Bytes per element.
const ELEMENT_BYTES: u32 = 2;

/// Bytes per number of a list, and per scale.
const NUMBER: u64 = size_of::<u32>() as u64;

/// Bytes that a lane reads at a time.
const PIECE_BYTES: u32 = 16;

/// Words per piece.
const WORDS: usize = PIECE_BYTES as usize / size_of::<u32>();

/// Bytes of a warp's pieces.
const WARP_BYTES: u32 = WARP_SIZE * PIECE_BYTES;

/// Whole k-blocks that a warp rounds at a time: two pieces per lane.
const ROUND: u32 = 2 * WARP_BYTES / (K_BLOCK * ELEMENT_BYTES);

/// Number of columns for which each of the four lanes of a row has two words of weights.
const WHOLE: u32 = K_BLOCK / 2;

/// Quantizes f16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_f16(launch: Quantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_F16>(&launch) }
}

/// Quantizes bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_bf16(launch: Quantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_BF16>(&launch) }
}

/// A warp's part of the kernel, for tokens of format `FORMAT`.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this, in whole warps.
#[inline(always)]
unsafe fn run<const FORMAT: u32>(launch: &Quantize) {
    let warp = thread::block_idx_x() * Quantize::WARPS + thread::thread_idx_x() / WARP_SIZE;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    // SAFETY: the previous grids have ended. Lists have one number per expert and one more, or one number per row. Each
    // row belongs to one warp.
    unsafe {
        let first_of = |expert: u32| {
            let number = GlobalAddress::new(launch.firsts) + u64::from(expert) * NUMBER;
            ld_global_b32(number)
        };
        let is_known = launch.rows != 0 || launch.firsts == 0;
        let tokens = if is_known { launch.token_count } else { first_of(launch.experts) };
        if warp < tokens {
            Token::<FORMAT>::new(launch, warp).quantize(launch);
        } else if launch.firsts == 0 {
            if warp < launch.row_capacity {
                clear(launch, warp);
            }
        } else if launch.rows != 0 && warp - tokens < launch.experts {
            let (first, end) = (first_of(warp - tokens), first_of(warp - tokens + 1));
            if first < end {
                fill_up(launch, end - ROW_MULTIPLE);
            }
        }
    }
}

/// Writes zeros to the padding rows among [`ROW_MULTIPLE`] rows of an expert, from row `first` on.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds, and the rows exist. The whole warp calls this together.
#[inline(always)]
unsafe fn fill_up(launch: &Quantize, first: u32) {
    for row in first..first + ROW_MULTIPLE {
        // SAFETY: the list has this row, and the row belongs to this warp.
        unsafe {
            let number = GlobalAddress::new(launch.rows) + u64::from(row) * NUMBER;
            if ld_global_b32(number) == NO_ROW {
                clear(launch, row);
            }
        }
    }
}

/// Writes zeros to a row.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds, and the row belongs to this warp. The whole warp calls this together.
#[inline(always)]
unsafe fn clear(launch: &Quantize, row: u32) {
    // SAFETY: the addresses are of the row's lines and scale.
    unsafe {
        let mut core = lane_id();
        while core < k_blocks(launch.k) * LINE_CHUNKS {
            store(launch, row, core, [0; 4]);
            core += WARP_SIZE;
        }
        let scale = GlobalAddress::new(launch.scales) + u64::from(row) * NUMBER;
        st_global_b32_where(lane_id() == 0, scale, 0);
    }
}

/// Stores chunk `core` of a row, counted through all of its lines.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds, and the row has this chunk. No other lane writes it.
#[inline(always)]
unsafe fn store(launch: &Quantize, row: u32, core: u32, codes: [u32; 4]) {
    let at = line(launch.row_capacity, core / LINE_CHUNKS, row) + u64::from(chunk(row, core % LINE_CHUNKS));
    // SAFETY: the row has this chunk, at a multiple of 16 bytes, and only this lane writes it.
    unsafe { st_global_v4_b32(GlobalAddress::new(launch.codes) + at, codes) };
}

/// A token, as its warp handles it.
struct Token<const FORMAT: u32> {
    index: u32,
    /// Address of the token's first element.
    at: GlobalAddress,
    /// Factor that is applied to the token first, if there are factors.
    weight: Option<f32>,
}

impl<const FORMAT: u32> Token<FORMAT> {
    /// Returns the token with this index.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the token exists.
    #[inline(always)]
    unsafe fn new(launch: &Quantize, index: u32) -> Self {
        let at = GlobalAddress::new(launch.input) + u64::from(index) * launch.input_pitch;
        let weight = GlobalAddress::new(launch.input_weights) + u64::from(index) * NUMBER;
        // SAFETY: if there are factors, `weight` is the address of this token's factor; otherwise nothing is read.
        let bits = unsafe { ld_global_b32_or_zero(launch.input_weights != 0, weight) };
        Self { index, at, weight: (launch.input_weights != 0).then(|| f32::from_bits(bits)) }
    }

    /// Quantizes the token and writes it to its rows.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
    #[inline(always)]
    unsafe fn quantize(&self, launch: &Quantize) {
        // SAFETY: the addresses are of the token's elements, places and rows. The whole warp is here.
        unsafe {
            let scale = self.scale(launch.k);
            let inverse = 1.0 / scale;
            // Row of the lane's choice.
            let (mut place, mut copies) = (self.index, 1);
            if launch.places != 0 {
                assert_unchecked(launch.top_k > 0);
                copies = launch.top_k;
                let choice = u64::from(self.index) * u64::from(copies) + u64::from(lane_id());
                let number = GlobalAddress::new(launch.places) + choice * NUMBER;
                place = ld_global_b32_or_zero(lane_id() < copies, number);
            }
            let has_row = lane_id() < copies && place != NO_ROW;
            let of_row = GlobalAddress::new(launch.scales) + u64::from(if has_row { place } else { 0 }) * NUMBER;
            st_global_b32_where(has_row, of_row, scale.to_bits());
            let store_to_rows = |core: u32, is_there: bool, codes: [u32; 4]| {
                for copy in 0..copies {
                    let (row, _) = warp_shuffle_idx(ALL_LANES, place, copy, WARP_SIZE);
                    if row != NO_ROW && is_there {
                        store(launch, row, core, codes);
                    }
                }
            };
            // All lanes run every iteration, since they exchange rows by shuffles.
            let k_blocks = k_blocks(launch.k);
            let whole = if launch.k.is_multiple_of(WHOLE) { k_blocks } else { launch.k / K_BLOCK };
            let mut first = 0;
            while first < whole {
                let (k_block, core, codes) = self.whole_chunk(launch.k, first, inverse);
                store_to_rows(k_block * LINE_CHUNKS + core, k_block < whole, codes);
                first += ROUND;
            }
            if whole < k_blocks {
                let core = whole * LINE_CHUNKS + lane_id();
                let is_there = core < k_blocks * LINE_CHUNKS;
                store_to_rows(core, is_there, self.ragged_chunk(launch.k, core, is_there, inverse));
            }
        }
    }

    /// Returns a word of two elements, multiplied by the token's factor.
    #[inline(always)]
    fn weighted(&self, word: u32) -> u32 {
        self.weight.map_or(word, |weight| {
            let [low, high] = decode(FORMAT, word);
            convert(FORMAT, low * weight, high * weight)
        })
    }

    /// Returns the codes of four elements.
    #[inline(always)]
    fn codes(&self, words: [u32; 2], inverse: f32) -> u32 {
        let [low, high] = words.map(|word| {
            let [low, high] = decode(FORMAT, self.weighted(word));
            u32::from(cvt_rn_satfinite_e4m3x2_f32(low * inverse, high * inverse))
        });
        low | high << 16
    }

    /// Returns the scale of a token of `k` elements.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
    #[inline(always)]
    unsafe fn scale(&self, k: u32) -> f32 {
        let (mut largest, mut at) = ([0; 2], 0);
        // SAFETY: the token has `k` elements in global memory that nobody writes during the launch. The whole warp is
        // here.
        let amax = unsafe {
            // Many pieces are in flight at once; short tokens have few.
            while at < k * ELEMENT_BYTES {
                if k * ELEMENT_BYTES - at > 4 * WARP_BYTES {
                    self.largest_of::<8>(k, at, &mut largest);
                    at += 8 * WARP_BYTES;
                } else {
                    self.largest_of::<4>(k, at, &mut largest);
                    at += 4 * WARP_BYTES;
                }
            }
            warp_reduce_max_u32(ALL_LANES, largest[0].max(largest[1] >> 16))
        };
        let [amax, _] = decode(FORMAT, amax);
        f32::from_bits(amax.to_bits().max(LEAST_AMAX.to_bits())) / LARGEST
    }

    /// Updates the largest magnitudes of the lower and the upper halves of words with each lane's next pieces, from
    /// byte `first` on. The bits of magnitudes have the order of magnitudes.
    ///
    /// # Safety
    /// The requirements of [`Self::scale`].
    #[inline(always)]
    unsafe fn largest_of<const PIECES: usize>(&self, k: u32, first: u32, largest: &mut [u32; 2]) {
        let mut pieces = [[0; WORDS]; PIECES];
        for piece in 0..PIECES {
            let at = first + piece as u32 * WARP_BYTES + lane_id() * PIECE_BYTES;
            // Reading a piece twice does not change the largest magnitude.
            let at = at.min(k * ELEMENT_BYTES - PIECE_BYTES);
            // SAFETY: the address is of elements of the token, which has a multiple of 16.
            pieces[piece] = unsafe { ld_global_v4_b32_or_zero(true, self.at + u64::from(at)) };
        }
        for piece in 0..PIECES {
            for word in 0..WORDS {
                let word = self.weighted(pieces[piece][word]);
                *largest = [largest[0].max(word & 0x7fff), largest[1].max(word & 0x7fff_0000)];
            }
        }
    }

    /// Returns the lane's chunk of [`ROUND`] k-blocks: its k-block, its index in the k-block, and its codes. Columns
    /// come in multiples of [`WHOLE`]. Codes are zeros where the token has no elements.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
    #[inline(always)]
    unsafe fn whole_chunk(&self, k: u32, first: u32, inverse: f32) -> (u32, u32, [u32; 4]) {
        let lane = lane_id();
        // Eight columns of a k-block are one word of weights: the first or the second word of lane `owner` in `half`.
        let (half, owner, odd) = (lane / 8 % 2, lane / 2 % ROW_LANES, lane % 2);
        const { assert!(WORD_ELEMENTS * ELEMENT_BYTES == PIECE_BYTES) };
        // Codes of two words, first four and last four elements each: this owner's part of four chunks.
        let [[a, b], [c, d]] = [0, 1].map(|piece| {
            let column = first * K_BLOCK + (piece * WARP_SIZE + lane) * WORD_ELEMENTS;
            let source = self.at + u64::from(column * ELEMENT_BYTES);
            // SAFETY: if `column < k`, the address is of elements of the token; otherwise nothing is read.
            let [s, t, u, v] = unsafe { ld_global_v4_b32_or_zero(column < k, source) };
            [self.codes([s, t], inverse), self.codes([u, v], inverse)]
        });
        // The four owners exchange parts of chunks, so that each has a whole chunk. SAFETY: the whole warp is here.
        let exchange = |is_upper: bool, mask: u32, [low, high]: [u32; 2]| unsafe {
            let (kept, given) = if is_upper { (high, low) } else { (low, high) };
            let (got, _) = warp_shuffle_xor(ALL_LANES, given, mask, WARP_SIZE);
            if is_upper { [got, kept] } else { [kept, got] }
        };
        let (is_second, is_odd) = (owner / 2 != 0, owner % 2 != 0);
        let [[a, c], [b, d]] = [[a, c], [b, d]].map(|two| exchange(is_second, 4, two));
        let [[a, b], [c, d]] = [[a, b], [c, d]].map(|two| exchange(is_odd, 2, two));
        let k_block = first + owner / 2 * (ROUND / 2) + lane / 16;
        (k_block, 2 * (2 * half + odd) + owner % 2, [a, b, c, d])
    }

    /// Returns the codes of chunk `core` of any k-block, counted through all lines: half a word of each of four lanes
    /// of the weights ([`e4m3_position`](crate::units::e4m3_position)). Codes are zeros where the token has no
    /// elements, or if `is_there` is `false`.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds.
    #[inline(always)]
    unsafe fn ragged_chunk(&self, k: u32, core: u32, is_there: bool, inverse: f32) -> [u32; 4] {
        let (k_block, core) = (core / LINE_CHUNKS, core % LINE_CHUNKS);
        let (start, columns) = if is_there { (block_start(k, k_block), block_columns(k, k_block)) } else { (0, 0) };
        let (word, half) = (core / 2, core % 2);
        core::array::from_fn(|lane| {
            let lane = lane as u32 % ROW_LANES;
            let first = element(columns, lane, word, half * (WORD_ELEMENTS / 2));
            let is_whole = element(columns, lane, word, WORD_ELEMENTS - 1).is_some();
            let source = self.at + u64::from((start + first.unwrap_or(0)) * ELEMENT_BYTES);
            // SAFETY: the predicates hold only for addresses of the token's elements; otherwise nothing is read.
            let elements = unsafe {
                let whole = ld_global_b64_or_zero(is_whole, source);
                // Half a word has half of the elements.
                let few = ld_global_b32_or_zero(first.is_some() && !is_whole, source);
                [whole as u32 | few, (whole >> 32) as u32]
            };
            self.codes(elements, inverse)
        })
    }
}
