//! Weighted sum of a token's rows.
//!
//! A warp has a piece of a token. Each lane loads the place and the weight of one choice, so the warp waits for memory
//! twice: for these, and for the rows.

use core::hint::assert_unchecked;

use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, ld_global_v4_b32_or_zero, st_global_v4_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx, warp_vote_ballot},
};

use crate::{
    epilogue::{convert, decode},
    layer::moe_route::abi::{Combine, PIECE, pieces},
    lists::NO_ROW,
};

/// Columns per lane.
const LANE_COLUMNS: u32 = PIECE / WARP_SIZE;

/// Bytes per element.
const ELEMENT_BYTES: u64 = 2;

/// Bytes per place and per weight.
const NUMBER: u64 = size_of::<u32>() as u64;

/// Number of rows in flight at once.
const BATCH: usize = 8;

/// Repeats a block for the rows of a batch.
macro_rules! batch {
    ($row:ident while $condition:expr => $block:block) => {
        unrolled!($row in [0 1 2 3 4 5 6 7] while $condition => $block)
    };
}

/// Adds up a piece of a token, with elements of format `FORMAT`.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds. All threads of the CTA call this, in whole warps.
#[inline(always)]
pub(super) unsafe fn run<const FORMAT: u32>(launch: &Combine) {
    griddepcontrol_launch_dependents();
    let pieces = pieces(launch.hidden);
    let piece = thread::block_idx_x() * Combine::WARPS + thread::thread_idx_x() / WARP_SIZE;
    // SAFETY: a token has at least one element.
    unsafe { assert_unchecked(pieces > 0) };
    let (token, column) = (piece / pieces, piece % pieces * PIECE + lane_id() * LANE_COLUMNS);
    griddepcontrol_wait();
    if token >= launch.token_count {
        return;
    }
    let is_there = column < launch.hidden;
    let at = |rows: u64, row: u32| {
        let element = u64::from(row) * u64::from(launch.hidden) + u64::from(column);
        GlobalAddress::new(rows) + element * ELEMENT_BYTES
    };
    // SAFETY: the previous grid has ended. The rows that places name exist. All lanes have the same token, so they
    // follow the same path. Only this thread writes these columns of the output.
    unsafe {
        let choice = u64::from(token) * u64::from(launch.top_k) + u64::from(lane_id());
        let is_choice = lane_id() < launch.top_k;
        let place = ld_global_b32_or_zero(is_choice, GlobalAddress::new(launch.places) + choice * NUMBER);
        let weight = load_weight(launch.weights, choice, is_choice).to_bits();
        let has_shared = launch.shared_rows != 0;
        let shared = ld_global_v4_b32_or_zero(is_there && has_shared, at(launch.shared_rows, token));
        let shared_weight = load_weight(launch.shared_weights, u64::from(token), has_shared);

        let mut sums = [0.0; LANE_COLUMNS as usize];
        let mut to_add = Choices(warp_vote_ballot(ALL_LANES, is_choice && place != NO_ROW));
        while !to_add.is_empty() {
            let (mut rows, mut to_load) = ([[0; 4]; BATCH], to_add);
            batch!(row while !to_load.is_empty() => {
                let (place, _) = warp_shuffle_idx(ALL_LANES, place, to_load.take_first(), WARP_SIZE);
                rows[row] = ld_global_v4_b32_or_zero(is_there, at(launch.rows, place));
            });
            batch!(row while !to_add.is_empty() => {
                let (weight, _) = warp_shuffle_idx(ALL_LANES, weight, to_add.take_first(), WARP_SIZE);
                add::<FORMAT>(&mut sums, f32::from_bits(weight), rows[row]);
            });
        }
        if has_shared {
            add::<FORMAT>(&mut sums, shared_weight, shared);
        }
        if is_there {
            let [a, b, c, d, e, f, g, h] = sums;
            let output = GlobalAddress::new(launch.output)
                + u64::from(token) * launch.output_pitch
                + u64::from(column) * ELEMENT_BYTES;
            let numbers = [[a, b], [c, d], [e, f], [g, h]].map(|[low, high]| convert(FORMAT, low, high));
            st_global_v4_b32(output, numbers);
        }
    }
}

/// Bit mask of the choices that have a row.
#[derive(Clone, Copy)]
struct Choices(u32);

impl Choices {
    #[inline(always)]
    fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Removes and returns the first choice. There is at least one.
    #[inline(always)]
    fn take_first(&mut self) -> u32 {
        let first = self.0.trailing_zeros();
        self.0 &= self.0.wrapping_sub(1);
        first
    }
}

/// Returns a weight of an array, or 1 if there is no array.
///
/// # Safety
/// If `predicate` holds and `weights` is not 0, it is the address of an array with a weight at this index.
#[inline(always)]
unsafe fn load_weight(weights: u64, index: u64, predicate: bool) -> f32 {
    // SAFETY: if `predicate` holds and the address is not 0, the array has a weight at `index`; otherwise nothing is
    // read.
    let bits =
        unsafe { ld_global_b32_or_zero(predicate && weights != 0, GlobalAddress::new(weights) + index * NUMBER) };
    if weights == 0 { 1.0 } else { f32::from_bits(bits) }
}

/// Adds a row times its weight.
#[inline(always)]
fn add<const FORMAT: u32>(sums: &mut [f32; LANE_COLUMNS as usize], weight: f32, row: [u32; 4]) {
    for word in 0..row.len() {
        let [low, high] = decode(FORMAT, row[word]);
        sums[2 * word] = fma_rn_f32(weight, low, sums[2 * word]);
        sums[2 * word + 1] = fma_rn_f32(weight, high, sums[2 * word + 1]);
    }
}
