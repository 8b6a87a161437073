//! Gate, up and the activation: tokens → the intermediate.

use cuda_std::{
    global::{GlobalAddress, st_global_b16},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use super::{lists::Lists, products::Products, work::Work};
use crate::{
    decoding::{Decode, Packed},
    epilogue::{NO_PARAMETERS, convert, silu},
    format::{OUTPUT_BF16, OUTPUT_F16},
    mma_sync::moe_few_sm90::abi::{GateUp, STAGES_AT, STRIP_ROWS, stage_bytes, stages},
    units::{K_BLOCK, ROW_LANES, block_columns, block_start, element, nibble_at},
};

/// Columns of the intermediate per strip.
const STRIP_COLUMNS: u32 = STRIP_ROWS / 2;

/// The strips of all named experts, one expert after the other. They go to the first warps of all CTAs, then to the
/// second warps, and so on.
struct OfGrid {
    first: u32,
    step: u32,
    end: u32,
    /// Strips per expert.
    strips: u32,
    /// Address of the first token.
    token: GlobalAddress,
}

impl Work for OfGrid {
    #[inline(always)]
    fn first(&self) -> u32 {
        self.first
    }

    #[inline(always)]
    fn step(&self) -> u32 {
        self.step
    }

    #[inline(always)]
    fn end(&self) -> u32 {
        self.end
    }

    #[inline(always)]
    fn piece(&self, index: u32) -> (u32, u32) {
        // `checked_div` instead of an assumption that the divisor is not 0: with the assumption, ptxas does not find
        // that the lanes of a warp stay together (13.5).
        let named = index.checked_div(self.strips).unwrap_or(0);
        (named, index - named * self.strips)
    }

    #[inline(always)]
    unsafe fn token(&self, _: Lists, _: u32) -> GlobalAddress {
        self.token
    }
}

/// One thread's part of the kernel.
///
/// # Safety
/// The contract in `moe_few_sm90/mod.rs`.
#[inline(always)]
pub(super) unsafe fn run<const BF16: bool, const ONE: bool>(launch: &GateUp)
where
    Packed<BF16>: Decode,
{
    let shared = dynamic_shared_address();
    let (lists, warps) = (Lists::at(shared), thread::block_dim_x() / WARP_SIZE);
    // SAFETY: all threads of the CTA take the same branches, in whole warps. Lists are read after the barrier. Each
    // element of the intermediate is written by one lane.
    unsafe {
        // All lanes hold the same value. The shuffle lets the compiler know that.
        let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if warp == 0 {
            lists.make(&launch.choices, 0);
        }
        thread::sync_threads();
        let n = launch.matrices.n;
        let strips = n / STRIP_COLUMNS;
        let work = OfGrid {
            first: warp * thread::grid_dim_x() + thread::block_idx_x(),
            step: warps * thread::grid_dim_x(),
            end: lists.count() * strips,
            strips,
            token: GlobalAddress::new(launch.tokens),
        };
        let stages = shared + STAGES_AT + warp * (stages(ONE) * stage_bytes(ONE));
        let products: Products<'_, true, BF16, ONE, OfGrid> = Products::begin(&launch.matrices, lists, &work, stages);
        products.run(
            |row| GlobalAddress::new(launch.tokens) + u64::from(row.token) * launch.token_pitch,
            |strip| [strip * STRIP_COLUMNS + lane_id() / ROW_LANES; 2],
            |index, row, [gate, up]| {
                let activation = &launch.activation;
                let value = if activation.kind == NO_PARAMETERS { silu(gate) * up } else { activation.gated(gate, up) };
                let column = natural(n, work.piece(index).1 * STRIP_COLUMNS + lane_id() / ROW_LANES);
                let element = u64::from(row.choice) * u64::from(n) + u64::from(column);
                let output = if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 };
                let address = GlobalAddress::new(launch.intermediate) + element * 2;
                st_global_b16(address, convert(output, value, 0.0) as u16);
            },
        );
    }
}

/// Returns the column at a place in the order of K. There are `columns` columns.
#[inline(always)]
fn natural(columns: u32, place: u32) -> u32 {
    let mut k_block = place / K_BLOCK;
    // The last 16 columns may be a k-block of their own.
    k_block += (place >= block_start(columns, k_block) + block_columns(columns, k_block)) as u32;
    let (start, columns) = (block_start(columns, k_block), block_columns(columns, k_block));
    let (lane, word, nibble) = nibble_at(place - start);
    // `element_at` could panic, and a kernel has no panics.
    start + element(columns, lane, word, nibble).unwrap_or(0)
}
