//! Writes tokens in the order of K to the rows of all their experts.
//!
//! A warp has a piece of a token, two k-blocks, and permutes it to the order of K like [`copy`](super::copy). Then a
//! lane has a chunk of a line, and stores it to each row. Each lane loads the row of one choice.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_v4_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use super::copy::{ELEMENT_BYTES, WORD_COLUMNS, core_matrix_row, load_word};
use crate::{
    epilogue::{convert, decode},
    layer::moe_route::abi::{Expand, ExpandedRows},
    lists::NO_ROW,
    sorted::{K_BLOCK_LINES, LINE_CHUNKS, chunk, line},
    units::{K_BLOCK, ROW_LANES, block_columns, block_start, element, k_blocks},
};

/// Bytes per number of a list, and per factor.
const NUMBER: u64 = size_of::<u32>() as u64;

/// Number of chunks per k-block.
const K_BLOCK_CHUNKS: u32 = K_BLOCK_LINES * LINE_CHUNKS;

const _: () = assert!(Expand::PIECE_K_BLOCKS * K_BLOCK_CHUNKS == WARP_SIZE);

/// Expands a piece of a token.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds. All threads of the CTA call this, in whole warps.
#[inline(always)]
pub(super) unsafe fn run(launch: &Expand) {
    let pieces = Expand::pieces(launch.hidden);
    let piece = thread::block_idx_x() * Expand::WARPS + thread::thread_idx_x() / WARP_SIZE;
    // SAFETY: a token has at least one element.
    unsafe { assert_unchecked(pieces > 0) };
    let (token, index) = (piece / pieces, piece % pieces);
    let (routed, shared) = (&launch.routed, &launch.shared);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if token >= launch.token_count {
        return;
    }
    // SAFETY: the previous grids have ended. A choice has a place, and each piece of a row belongs to one warp. The
    // whole warp is here.
    unsafe {
        let is_choice = routed.tokens != 0 && lane_id() < launch.top_k;
        let choice = u64::from(token) * u64::from(launch.top_k) + u64::from(lane_id());
        let row = ld_global_b32_or_zero(is_choice, GlobalAddress::new(launch.places) + choice * NUMBER);
        let weight = GlobalAddress::new(launch.input_weights) + u64::from(token) * NUMBER;
        let weight = f32::from_bits(ld_global_b32_or_zero(launch.input_weights != 0, weight));
        let (k_block, in_block) =
            (index * Expand::PIECE_K_BLOCKS + lane_id() / K_BLOCK_CHUNKS, lane_id() % K_BLOCK_CHUNKS);
        let is_there = k_block < k_blocks(launch.hidden);
        let (mut start, mut columns) = (k_block * K_BLOCK, K_BLOCK);
        if k_block >= launch.hidden / K_BLOCK {
            (start, columns) = if is_there {
                (block_start(launch.hidden, k_block), block_columns(launch.hidden, k_block))
            } else {
                (0, 0)
            };
        }
        let source =
            GlobalAddress::new(launch.input) + u64::from(token) * launch.input_pitch + u64::from(start * ELEMENT_BYTES);
        let has_halves = !launch.hidden.is_multiple_of(WORD_COLUMNS);
        let (lane, word) = (in_block % ROW_LANES, in_block / ROW_LANES);
        let mut elements = load_word(source, columns, lane, word, has_halves);
        if shared.tokens != 0 {
            let chunk = core_matrix_row(elements);
            if is_there {
                store(shared.tokens, shared, token, k_block, in_block, chunk);
            }
            if index == 0 {
                clear_rest(shared, token);
            }
        }
        if routed.tokens == 0 {
            return;
        }
        if launch.input_weights != 0 {
            for two in 0..elements.len() {
                let [low, high] = decode(launch.operand_type, elements[two]);
                // Elements past the end of K are zeros, whatever the factor.
                if element(columns, lane, word, 2 * two as u32).is_some() {
                    elements[two] = convert(launch.operand_type, low * weight, high * weight);
                }
            }
        }
        let chunk = core_matrix_row(elements);
        for copy in 0..launch.top_k {
            let (row, _) = warp_shuffle_idx(ALL_LANES, row, copy, WARP_SIZE);
            if row != NO_ROW {
                if is_there {
                    store(routed.tokens, routed, row, k_block, in_block, chunk);
                }
                if index == 0 {
                    clear_rest(routed, row);
                }
            }
        }
    }
}

/// Stores a chunk of a k-block of a row, of the rows at address `at`.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds, and the row has this chunk. No other lane writes it.
#[inline(always)]
unsafe fn store(at: u64, rows: &ExpandedRows, row: u32, k_block: u32, in_block: u32, bytes: [u32; 4]) {
    let index = k_block * K_BLOCK_LINES + in_block / LINE_CHUNKS;
    let place = line(rows.capacity, index, row) + u64::from(chunk(row, in_block % LINE_CHUNKS));
    // SAFETY: the row has this chunk, at a multiple of 16 bytes, and only this lane writes it.
    unsafe { st_global_v4_b32(GlobalAddress::new(at) + place, bytes) };
}

/// Writes zeros to the incomplete k-blocks of an intermediate row; there are up to two.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds, and the row belongs to this warp. The whole warp calls this together.
#[inline(always)]
unsafe fn clear_rest(rows: &ExpandedRows, row: u32) {
    let k_block = rows.width / K_BLOCK + lane_id() / K_BLOCK_CHUNKS;
    if k_block < k_blocks(rows.width) {
        // SAFETY: the row has this chunk, and no other lane writes it.
        unsafe { store(rows.intermediate, rows, row, k_block, lane_id() % K_BLOCK_CHUNKS, [0; 4]) };
    }
}
