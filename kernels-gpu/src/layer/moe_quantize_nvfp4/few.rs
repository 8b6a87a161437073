//! Few tokens: a token is spread over CTAs, one block per thread. Each CTA reads the whole token for its largest
//! magnitude, so no CTA waits for another one.

use cuda_std::{
    global::{GlobalAddress, ld_global_b32, st_global_b8, st_global_b32, st_global_b32_where, st_global_b64},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel,
    shared::{dynamic_shared_address, ld_shared_v4_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_reduce_max_u32, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    abi::{LARGEST, LEAST_GLOBAL, Quantize},
    kernel::{Block, Loaded, NUMBER, Row, Token, number},
};
use crate::{
    format::{BLOCK, OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_BYTES, SCALE_TILE_COLUMNS, scale_row},
    lists::NO_ROW,
    nvfp4_rows::{row_bytes, scale_tiles},
};

const _: () = assert!(Quantize::FEW_SHARED_BYTES == 16, "the warps' magnitudes are one load");

/// Quantizes few tokens of f16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::FEW_THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_few_f16(launch: Quantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_F16>(&launch) }
}

/// Quantizes few tokens of bf16.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds.
#[kernel(threads = Quantize::FEW_THREADS, min_blocks = 4)]
pub unsafe fn moe_quantize_nvfp4_few_bf16(launch: Quantize) {
    // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
    unsafe { run::<OUTPUT_BF16>(&launch) }
}

/// A thread's part of the kernel, for tokens of format `FORMAT`.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this.
#[inline(always)]
unsafe fn run<const FORMAT: u32>(launch: &Quantize) {
    let pieces = launch.few_pieces();
    if launch.places == 0 {
        griddepcontrol_launch_dependents();
        griddepcontrol_wait();
    } else {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
    // SAFETY: the previous grids have ended. Lists have one number per expert and one more. All threads of a CTA have
    // the same token, so they take the same branch. Each block of a row belongs to one thread.
    unsafe {
        let (index, piece) =
            (thread::block_idx_x().checked_div(pieces).unwrap_or(0), thread::block_idx_x() % pieces.max(1));
        let is_known = launch.places != 0 || launch.firsts == 0;
        let tokens = if is_known { launch.token_count } else { number(launch.firsts, launch.experts) };
        if index >= tokens {
            return;
        }
        let mut place = if lane_id() == 0 { index } else { NO_ROW };
        let mut copies = 1;
        if launch.places != 0 {
            copies = launch.top_k;
            let choice = u64::from(index) * u64::from(copies) + u64::from(lane_id());
            let address = GlobalAddress::new(launch.places) + choice * NUMBER;
            place = if lane_id() < copies { ld_global_b32(address) } else { NO_ROW };
        }
        let token = Token::<FORMAT>::new(launch, index);
        let loaded = load_first(launch.k, &token);
        let block = piece * Quantize::FEW_THREADS + thread::thread_idx_x();
        let numbers = token.block(block, block < launch.k / BLOCK);
        let mut row = rows(launch, place, copies);
        // All warps of the CTA have the same rows.
        if warp_vote_ballot(ALL_LANES, row.global == 0.0) != 0 {
            let own = global(launch.k, &token, loaded);
            row.global = if row.global == 0.0 { own } else { row.global };
        }
        let is_first = piece == 0 && thread::thread_idx_x() < WARP_SIZE;
        let of_row = GlobalAddress::new(launch.globals) + u64::from(if place == NO_ROW { 0 } else { place }) * NUMBER;
        st_global_b32_where(is_first && place != NO_ROW, of_row, row.global.to_bits());
        store(launch, &numbers, block, row, copies);
    }
}

/// Writes a thread's block to the token's rows, which are in the lanes. Rows with the same global scale have the same
/// codes. The four threads with a word of scales share the zeros behind a tile's last row.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
#[inline(always)]
pub(super) unsafe fn store(launch: &Quantize, numbers: &Block, block: u32, rows: Row, copies: u32) {
    let blocks = scale_tiles(launch.k) * SCALE_TILE_COLUMNS;
    let (word, in_word) = (block / SCALE_TILE_COLUMNS, block % SCALE_TILE_COLUMNS);
    let scales = GlobalAddress::new(launch.scales) + u64::from(word * SCALE_TILE_BYTES);
    let values = GlobalAddress::new(launch.values) + u64::from(block * (BLOCK / 2));
    let (row_step, tile_step) = (row_bytes(launch.k), scale_tiles(launch.k) * SCALE_TILE_BYTES);
    // SAFETY: the whole warp is here. The rows are the token's, and the block is this thread's. Padding rows of a tile
    // belong to the tile's last row.
    unsafe {
        let mut known = rows.of_lane(0).global;
        let mut codes = numbers.codes(known);
        for copy in 0..copies {
            let row = rows.of_lane(copy);
            if row.index == NO_ROW || block >= blocks {
                continue;
            }
            if row.global.to_bits() != known.to_bits() {
                known = row.global;
                codes = numbers.codes(known);
            }
            let of_tile = scales + u64::from(row.tile) * u64::from(tile_step);
            if numbers.is_there {
                st_global_b64(values + u64::from(row.index) * u64::from(row_step), codes.values);
            }
            st_global_b8(of_tile + u64::from(scale_row(0_u32, row.in_tile) + in_word), codes.scale);
            let mut padding = row.in_tile + 1 + in_word;
            while padding < row.end {
                st_global_b32(of_tile + u64::from(scale_row(0_u32, padding)), 0);
                padding += SCALE_TILE_COLUMNS;
            }
        }
    }
}

/// Returns the row of this lane, whose index is `place`. The first `copies` lanes have rows. The warp counts the
/// experts that begin at a row or before it: one load per 32 experts, where a search would wait for one load after
/// another.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
#[inline(always)]
unsafe fn rows(launch: &Quantize, place: u32, copies: u32) -> Row {
    let mut begun: u32 = 0;
    let mut first_expert = 0;
    // SAFETY: the list has a number per expert. The whole warp is here. A row belongs to the last expert that begins at
    // it or before it, and the first expert begins at the first row.
    unsafe {
        while launch.firsts != 0 && first_expert < launch.experts {
            let expert = first_expert + lane_id();
            let first = if expert < launch.experts { number(launch.firsts, expert) } else { u32::MAX };
            for copy in 0..copies {
                let of_copy = warp_shuffle_idx(ALL_LANES, place, copy, WARP_SIZE).0;
                let votes = warp_vote_ballot(ALL_LANES, expert < launch.experts && first <= of_copy);
                begun += if lane_id() == copy { votes.count_ones() } else { 0 };
            }
            first_expert += WARP_SIZE;
        }
        if place == NO_ROW {
            return Row::NONE;
        }
        let expert = begun.saturating_sub(1);
        let (mut of_rows, mut of_tiles) = ([0, launch.token_count], [0, launch.token_tiles]);
        if launch.firsts != 0 {
            of_rows = [0, 1].map(|after| number(launch.firsts, expert + after));
            of_tiles = [0, 1].map(|after| number(launch.tile_firsts, expert + after));
        }
        Row::of_lists(place, of_rows, of_tiles, f32::from_bits(number(launch.input_scales, expert)))
    }
}

/// Number of a token's blocks that a thread loads at a time, so that it does not wait for one after another.
const AT_ONCE: u32 = 4;

/// Loads the thread's first blocks of the CTA's token.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds, and the token exists.
#[inline(always)]
pub(super) unsafe fn load_first<const FORMAT: u32>(k: u32, token: &Token<FORMAT>) -> [Loaded; AT_ONCE as usize] {
    // SAFETY: the caller guarantees that the token exists.
    unsafe { load(k, token, 0) }
}

/// Loads the thread's blocks of the token's blocks from `first` on.
///
/// # Safety
/// The requirements of [`load_first`].
#[inline(always)]
unsafe fn load<const FORMAT: u32>(k: u32, token: &Token<FORMAT>, first: u32) -> [Loaded; AT_ONCE as usize] {
    core::array::from_fn(|index| {
        let block = first + index as u32 * Quantize::FEW_THREADS + thread::thread_idx_x();
        // SAFETY: only blocks of the token are read, and nothing writes the token during the launch.
        unsafe { token.load(block, block < k / BLOCK) }
    })
}

/// Returns the global scale of the CTA's token, which has `k` elements. `loaded`: the thread's [first](load_first)
/// blocks.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this.
#[inline(always)]
pub(super) unsafe fn global<const FORMAT: u32>(
    k: u32,
    token: &Token<FORMAT>,
    mut loaded: [Loaded; AT_ONCE as usize],
) -> f32 {
    let (warps, warp) = (dynamic_shared_address(), thread::thread_idx_x() / WARP_SIZE);
    let mut amax = (LARGEST * LEAST_GLOBAL).to_bits();
    let mut first = 0;
    // SAFETY: the token exists. All threads are here: each warp has its own number in shared memory, and the barrier is
    // between writes and reads.
    unsafe {
        loop {
            for (index, halves) in (0..).zip(loaded) {
                let is_there = first + index * Quantize::FEW_THREADS + thread::thread_idx_x() < k / BLOCK;
                let of_block = token.block_of(halves, true).amax;
                amax = amax.max(if is_there { of_block } else { 0 });
            }
            first += AT_ONCE * Quantize::FEW_THREADS;
            if first >= k / BLOCK {
                break;
            }
            loaded = load(k, token, first);
        }
        let of_warp = warp_reduce_max_u32(ALL_LANES, amax);
        if lane_id() == 0 {
            st_shared_b32(warps + warp * size_of::<u32>() as u32, of_warp);
        }
        thread::sync_threads();
        let [a, b, c, d] = ld_shared_v4_b32(warps);
        f32::from_bits(a.max(b).max(c.max(d))) / LARGEST
    }
}
