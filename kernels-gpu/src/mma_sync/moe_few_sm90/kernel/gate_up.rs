//! Gate, up and the activation: tokens → the intermediate.

use cuda_std::{
    global::{GlobalAddress, st_global_b16},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    shared::dynamic_shared_address,
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use super::{
    lists::Lists,
    products::{Products, Work},
};
use crate::{
    decoding::{Decode, Packed},
    epilogue::{NO_PARAMETERS, convert, silu},
    format::{OUTPUT_BF16, OUTPUT_F16},
    mma_sync::moe_few_sm90::abi::{GateUp, STAGES_AT, STRIP_ROWS, stage_bytes, stages},
    units::{K_BLOCK, ROW_LANES, block_columns, block_start, element, nibble_at},
};

/// Columns of the intermediate that a strip has.
const STRIP_COLUMNS: u32 = STRIP_ROWS / 2;

/// The strips of all experts that are named, one behind the other, dealt out to the first warps of all blocks, then to their second ones.
struct OfGrid {
    first: u32,
    step: u32,
    end: u32,
    /// Of an expert.
    strips: u32,
    /// Where the first token begins.
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
        // Checked, and not assumed to divide: with the assumption ptxas no longer finds that warps stay together (13.5).
        let named = index.checked_div(self.strips).unwrap_or(0);
        (named, index - named * self.strips)
    }

    #[inline(always)]
    unsafe fn token(&self, _: Lists, _: u32) -> GlobalAddress {
        self.token
    }
}

/// A thread's part of the kernel.
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
    // SAFETY: all threads of the block go one way, whole warps. Lists are read behind the barrier; each element of the intermediate is
    // one lane's.
    unsafe {
        // The same value in all lanes; through the shuffle the compiler knows that it is.
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

/// The column, of so many, that stands at a place of the order of K.
#[inline(always)]
fn natural(columns: u32, place: u32) -> u32 {
    let mut k_block = place / K_BLOCK;
    // The last 16 columns may be a k-block of their own.
    k_block += (place >= block_start(columns, k_block) + block_columns(columns, k_block)) as u32;
    let (start, columns) = (block_start(columns, k_block), block_columns(columns, k_block));
    let (lane, word, nibble) = nibble_at(place - start);
    // Not `element_at`: there is no panic in a kernel.
    start + element(columns, lane, word, nibble).unwrap_or(0)
}
