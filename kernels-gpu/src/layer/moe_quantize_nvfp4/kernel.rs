//! One warp per token. A lane reads one block of the token at a time, and quantizes it for each of the token's rows,
//! since experts may have different input scales. If an expert has no input scale, the warp first reads the token for
//! its largest magnitude.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{
        GlobalAddress, ld_global_b32, ld_global_b32_or_zero, ld_global_v4_b32_or_zero, st_global_b8,
        st_global_b32_where, st_global_b64,
    },
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel, thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_reduce_max_u32, warp_shuffle_idx, warp_vote_ballot},
};

use super::abi::{LARGEST, LEAST_GLOBAL, Quantize};
use crate::{
    epilogue::{convert, decode},
    format::{BLOCK, OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_COLUMNS},
    lists::{NO_ROW, tile_size},
    nvfp4_blocks::{BlockScale, largest_magnitude},
    nvfp4_rows::{TOKEN_STEP, row_bytes, scale_tiles, token_scale},
    schedule::last_begun,
};

/// Bytes per element.
const ELEMENT_BYTES: u32 = 2;

/// Bytes per number of a list, and per global scale.
pub(super) const NUMBER: u64 = size_of::<u32>() as u64;

/// Words of a block of 16-bit numbers.
const BLOCK_WORDS: usize = (BLOCK * ELEMENT_BYTES / 4) as usize;

/// Quantizes f16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_f16(launch: Quantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_F16>(&launch) }
}

/// Quantizes bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_bf16(launch: Quantize) {
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
    // SAFETY: the previous grids have ended. Lists have one number per expert and one more. Each row belongs to one
    // warp.
    unsafe {
        let is_known = launch.places != 0 || launch.firsts == 0;
        let tokens = if is_known { launch.token_count } else { number(launch.firsts, launch.experts) };
        if warp < tokens {
            Token::<FORMAT>::new(launch, warp).quantize(launch);
        }
    }
}

/// Returns a number of a list.
///
/// # Safety
/// The list has this number, and nobody writes it during the launch.
#[inline(always)]
pub(super) unsafe fn number(list: u64, index: u32) -> u32 {
    // SAFETY: the caller guarantees that the list has this number and that nothing writes it during the launch.
    unsafe { ld_global_b32(GlobalAddress::new(list) + u64::from(index) * NUMBER) }
}

/// A row of a token, in the lane that handles the row's choice.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Index of the row, or [`NO_ROW`].
    pub(super) index: u32,
    /// Tile of tokens that contains the row, and the row's index in the tile.
    tile: u32,
    in_tile: u32,
    /// For the last row of a tile: the tile's number of rows, rounded up to a multiple of [`TOKEN_STEP`]. Otherwise the
    /// index of the next row in the tile.
    end: u32,
    /// Global scale of the row, or 0 if it is not known yet.
    pub(super) global: f32,
}

impl Row {
    /// No row.
    pub(super) const NONE: Self = Self { index: NO_ROW, tile: 0, in_tile: 0, end: 0, global: 1.0 };

    /// Returns the row with this index.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the row exists.
    #[inline(always)]
    unsafe fn new(launch: &Quantize, index: u32) -> Self {
        // SAFETY: the indices are at most `experts`. Lists, if there are any, have one number more than experts, and
        // there is one input scale per expert.
        unsafe {
            let (mut expert, mut of_rows, mut of_tiles) = (0, [0, launch.token_count], [0, launch.token_tiles]);
            if launch.firsts != 0 {
                expert = last_begun(launch.experts, index, |expert| number(launch.firsts, expert));
                of_rows = [0, 1].map(|after| number(launch.firsts, expert + after));
                of_tiles = [0, 1].map(|after| number(launch.tile_firsts, expert + after));
            }
            Self::of_lists(index, of_rows, of_tiles, f32::from_bits(number(launch.input_scales, expert)))
        }
    }

    /// Returns the row with this index. Its expert has these rows and tiles, each given by its first index and the index
    /// behind its last, and this global scale.
    ///
    /// # Safety
    /// The row is one of the expert's.
    #[inline(always)]
    pub(super) unsafe fn of_lists(
        index: u32,
        [first, next]: [u32; 2],
        [first_tile, next_tile]: [u32; 2],
        global: f32,
    ) -> Self {
        // SAFETY: the expert has a row, and therefore a tile.
        unsafe { assert_unchecked(next_tile > first_tile) };
        let (rows, size) = (next - first, tile_size(next - first, next_tile - first_tile));
        // SAFETY: the expert has a row.
        unsafe { assert_unchecked(size > 0) };
        let (tile, in_tile) = ((index - first) / size, (index - first) % size);
        let of_tile = (rows - tile * size).min(size);
        let end = if in_tile + 1 == of_tile { of_tile.next_multiple_of(TOKEN_STEP) } else { in_tile + 1 };
        Self { index, tile: first_tile + tile, in_tile, end, global }
    }

    /// Returns the row of lane `lane`.
    ///
    /// # Safety
    /// The whole warp calls this together.
    #[inline(always)]
    unsafe fn of_lane(self, lane: u32) -> Self {
        // SAFETY: the caller guarantees that all 32 lanes execute the shuffles together.
        let of = |value: u32| unsafe { warp_shuffle_idx(ALL_LANES, value, lane, WARP_SIZE).0 };
        Self {
            index: of(self.index),
            tile: of(self.tile),
            in_tile: of(self.in_tile),
            end: of(self.end),
            global: f32::from_bits(of(self.global.to_bits())),
        }
    }
}

/// A token, as its warp handles it.
pub(super) struct Token<const FORMAT: u32> {
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
    pub(super) unsafe fn new(launch: &Quantize, index: u32) -> Self {
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
            let (mut place, mut copies) = (if lane_id() == 0 { self.index } else { NO_ROW }, 1);
            if launch.places != 0 {
                assert_unchecked(launch.top_k > 0);
                copies = launch.top_k;
                let choice = u64::from(self.index) * u64::from(copies) + u64::from(lane_id());
                let number = GlobalAddress::new(launch.places) + choice * NUMBER;
                place = if lane_id() < copies { ld_global_b32(number) } else { NO_ROW };
            }
            let mut row = if place == NO_ROW { Row::NONE } else { Row::new(launch, place) };
            if warp_vote_ballot(ALL_LANES, row.global == 0.0) != 0 {
                let own = self.global(launch.k);
                row.global = if row.global == 0.0 { own } else { row.global };
            }
            let of_row =
                GlobalAddress::new(launch.globals) + u64::from(if place == NO_ROW { 0 } else { place }) * NUMBER;
            st_global_b32_where(place != NO_ROW, of_row, row.global.to_bits());
            // All lanes run every iteration, since they exchange rows by shuffles.
            let blocks = scale_tiles(launch.k) * SCALE_TILE_COLUMNS;
            let mut first = 0;
            while first < blocks {
                let block = first + lane_id();
                let numbers = self.block(block, block < launch.k / BLOCK);
                for copy in 0..copies {
                    let row = row.of_lane(copy);
                    if row.index != NO_ROW && block < blocks {
                        numbers.store(launch, row, block);
                    }
                }
                first += WARP_SIZE;
            }
        }
    }

    /// Returns two elements of a word, multiplied by the token's factor.
    #[inline(always)]
    fn weighted(&self, word: u32) -> [f32; 2] {
        let [low, high] = decode(FORMAT, word);
        let weighted = |weight| decode(FORMAT, convert(FORMAT, low * weight, high * weight));
        self.weight.map_or([low, high], weighted)
    }

    /// Returns the global scale of the token itself, which has `k` elements.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
    #[inline(always)]
    unsafe fn global(&self, k: u32) -> f32 {
        let mut amax = (LARGEST * LEAST_GLOBAL).to_bits();
        let mut block = lane_id();
        while block < k / BLOCK {
            // SAFETY: the token has the blocks below the loop's end, and lies in global memory that nothing writes
            // during the launch.
            amax = amax.max(unsafe { self.block(block, true) }.amax);
            block += WARP_SIZE;
        }
        // SAFETY: the whole warp is here.
        f32::from_bits(unsafe { warp_reduce_max_u32(ALL_LANES, amax) }) / LARGEST
    }

    /// Returns a block of the token, or zeros if `is_there` is `false`.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. If `is_there`, the token has this block.
    #[inline(always)]
    pub(super) unsafe fn block(&self, block: u32, is_there: bool) -> Block {
        let at = self.at + u64::from(block * BLOCK * ELEMENT_BYTES);
        // SAFETY: if `is_there`, the token has this block, 32 bytes at a multiple of 16; otherwise nothing is read.
        let halves = unsafe { [ld_global_v4_b32_or_zero(is_there, at), ld_global_v4_b32_or_zero(is_there, at + 16)] };
        let words: [u32; BLOCK_WORDS] = core::array::from_fn(|word| halves[word / 4][word % 4]);
        let numbers = words.map(|word| self.weighted(word));
        Block { numbers, amax: largest_magnitude(&numbers), is_there }
    }
}

/// A block of a token: 16 numbers, two per word, and the bits of their largest magnitude.
pub(super) struct Block {
    numbers: [[f32; 2]; BLOCK_WORDS],
    pub(super) amax: u32,
    /// Whether the token has the block. Otherwise the block is padding of the last scale tile.
    is_there: bool,
}

impl Block {
    /// Quantizes the block for a row, and writes it there.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds. The row belongs to the warp, and the block to the lane.
    #[inline(always)]
    pub(super) unsafe fn store(&self, launch: &Quantize, row: Row, block: u32) {
        let (values, scale) = self.codes(row.global);
        let scale_at =
            |in_tile: u32| GlobalAddress::new(launch.scales) + token_scale(row.tile, in_tile, block, launch.k);
        let of_row = u64::from(row.index) * u64::from(row_bytes(launch.k)) + u64::from(block * (BLOCK / 2));
        // SAFETY: the row is this warp's and the block this lane's, so no other lane writes these bytes. Padding rows
        // of a tile belong to the warp of the tile's last row.
        unsafe {
            if self.is_there {
                st_global_b64(GlobalAddress::new(launch.values) + of_row, values);
            }
            st_global_b8(scale_at(row.in_tile), scale);
            for in_tile in row.in_tile + 1..row.end {
                st_global_b8(scale_at(in_tile), 0);
            }
        }
    }

    /// Returns the block's codes, values and scale, in a row with this global scale.
    #[inline(always)]
    fn codes(&self, global: f32) -> (u64, u8) {
        let scale = BlockScale::new(self.amax, global);
        let values = u64::from_le_bytes(self.numbers.map(|numbers| scale.byte(numbers)));
        (values, if self.is_there { scale.code } else { 0 })
    }
}
