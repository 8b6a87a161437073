//! Few tokens: each row of a token is spread over CTAs, one block per thread. Each CTA reads the whole token for its
//! largest magnitude, so no CTA waits for another one.

use cuda_std::{
    global::{GlobalAddress, st_global_b32_where},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel,
    shared::{dynamic_shared_address, ld_shared_v4_b32, st_shared_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_reduce_max_u32},
};

use super::{
    abi::{LARGEST, LEAST_GLOBAL, Quantize},
    kernel::{Block, NUMBER, Row, Token, number},
};
use crate::{
    format::{BLOCK, OUTPUT_BF16, OUTPUT_F16, SCALE_TILE_COLUMNS},
    lists::NO_ROW,
    nvfp4_rows::scale_tiles,
    schedule::last_begun_by_warp,
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
    // the same row, so they take the same branch. Each block of a row belongs to one thread.
    unsafe {
        let choice = thread::block_idx_x().checked_div(pieces).unwrap_or(0);
        let piece = thread::block_idx_x() - choice * pieces;
        let has_places = launch.places != 0;
        let index = if has_places { choice.checked_div(launch.top_k).unwrap_or(0) } else { choice };
        let is_known = has_places || launch.firsts == 0;
        let tokens = if is_known { launch.token_count } else { number(launch.firsts, launch.experts) };
        if index >= tokens {
            return;
        }
        let place = if has_places { number(launch.places, choice) } else { index };
        let token = Token::<FORMAT>::new(launch, index);
        let block = piece * Quantize::FEW_THREADS + thread::thread_idx_x();
        let numbers = token.block(block, block < launch.k / BLOCK);
        if place != NO_ROW {
            store(launch, &token, row(launch, place), block, &numbers);
        }
    }
}

/// Writes a block to a row of the token. The thread of the first block also writes the row's global scale.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. All threads of the CTA call this with the same row, and each has its own
/// block, with the `numbers` of the token.
#[inline(always)]
pub(super) unsafe fn store<const FORMAT: u32>(
    launch: &Quantize,
    token: &Token<FORMAT>,
    mut row: Row,
    block: u32,
    numbers: &Block,
) {
    // SAFETY: all threads of the CTA are here, and take the same branch. The row is the token's, and the block is this
    // thread's.
    unsafe {
        if row.global == 0.0 {
            row.global = global(launch, token, block, numbers);
        }
        let of_row = GlobalAddress::new(launch.globals) + u64::from(row.index) * NUMBER;
        st_global_b32_where(block == 0, of_row, row.global.to_bits());
        if block < scale_tiles(launch.k) * SCALE_TILE_COLUMNS {
            numbers.store(launch, row, block);
        }
    }
}

/// Returns the row whose index is `place`.
///
/// # Safety
/// The contract in this folder's `mod.rs` holds. The whole warp calls this together, with the same place.
#[inline(always)]
unsafe fn row(launch: &Quantize, place: u32) -> Row {
    // SAFETY: the lists have a number per expert and one more. The whole warp is here. A row belongs to the last expert
    // that begins at it or before it, and the first expert begins at the first row.
    unsafe {
        let (mut expert, mut of_rows, mut of_tiles) = (0, [0, launch.token_count], [0, launch.token_tiles]);
        if launch.firsts != 0 {
            expert = last_begun_by_warp(launch.experts, place, |expert| number(launch.firsts, expert));
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
unsafe fn global<const FORMAT: u32>(launch: &Quantize, token: &Token<FORMAT>, block: u32, numbers: &Block) -> f32 {
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
