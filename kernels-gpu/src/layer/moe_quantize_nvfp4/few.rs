//! Few tokens: a token is spread over CTAs, one block per thread. Each CTA reads the whole token for its largest
//! magnitude, so no CTA waits for another one.

use cuda_std::{
    global::{GlobalAddress, ld_global_b32, st_global_b32_where},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel,
    shared::{dynamic_shared_address, ld_shared_v4_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_reduce_max_u32, warp_shuffle_idx, warp_vote_ballot},
};

use super::{
    abi::{LARGEST, LEAST_GLOBAL, Quantize},
    kernel::{Block, NUMBER, Row, Token, number},
};
use crate::{
    format::{BLOCK, OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_COLUMNS},
    lists::NO_ROW,
    nvfp4_rows::scale_tiles,
};

const _: () =
    assert!(Quantize::FEW_SHARED_BYTES == 16, "the warps' magnitudes must be 16 bytes, so that one load reads them");

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
        let block = piece * Quantize::FEW_THREADS + thread::thread_idx_x();
        let numbers = token.block(block, block < launch.k / BLOCK);
        let mut row = rows(launch, place, copies);
        // All warps of the CTA have the same rows.
        if warp_vote_ballot(ALL_LANES, row.global == 0.0) != 0 {
            let own = global(launch, &token, block, &numbers);
            row.global = if row.global == 0.0 { own } else { row.global };
        }
        let is_first = piece == 0 && thread::thread_idx_x() < WARP_SIZE;
        let of_row = GlobalAddress::new(launch.globals) + u64::from(if place == NO_ROW { 0 } else { place }) * NUMBER;
        st_global_b32_where(is_first && place != NO_ROW, of_row, row.global.to_bits());
        store(launch, &numbers, block, row, copies);
    }
}

/// Writes a thread's block to the token's rows, which are in the lanes. Rows with the same global scale have the same
/// codes.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. The whole warp calls this together.
#[inline(always)]
pub(super) unsafe fn store(launch: &Quantize, numbers: &Block, block: u32, rows: Row, copies: u32) {
    let blocks = scale_tiles(launch.k) * SCALE_TILE_COLUMNS;
    // SAFETY: the whole warp is here. The rows are the token's, and the block is this thread's.
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
            numbers.write(launch, row, block, codes);
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

/// Returns the global scale of the CTA's token. `numbers` is the block of this thread, `block` its index.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this.
#[inline(always)]
pub(super) unsafe fn global<const FORMAT: u32>(
    launch: &Quantize,
    token: &Token<FORMAT>,
    block: u32,
    numbers: &Block,
) -> f32 {
    let (warps, warp) = (dynamic_shared_address(), thread::thread_idx_x() / WARP_SIZE);
    let mut amax = numbers.amax.max((LARGEST * LEAST_GLOBAL).to_bits());
    // The blocks of the other CTAs.
    let mut other = thread::thread_idx_x();
    while other < launch.k / BLOCK {
        if other != block {
            // SAFETY: the token has this block, and nothing writes the token during the launch.
            amax = amax.max(unsafe { token.block(other, true) }.amax);
        }
        other += Quantize::FEW_THREADS;
    }
    // SAFETY: all threads are here. Each warp has its own number in shared memory, and the barrier is between writes
    // and reads.
    unsafe {
        let of_warp = warp_reduce_max_u32(ALL_LANES, amax);
        if lane_id() == 0 {
            st_shared_b32(warps + warp * size_of::<u32>() as u32, of_warp);
        }
        thread::sync_threads();
        let [a, b, c, d] = ld_shared_v4_b32(warps);
        f32::from_bits(a.max(b).max(c.max(d))) / LARGEST
    }
}
