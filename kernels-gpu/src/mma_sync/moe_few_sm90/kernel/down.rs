//! Down, and the weighted sum of each token's rows: the intermediate → the output.
//!
//! A CTA has some strips of all named experts. Their rows, rounded as if they went to memory, meet in shared memory.

use core::hint::assert_unchecked;

use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, st_global_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    shared::{dynamic_shared_address, ld_shared_b32, st_shared_b16},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use super::{
    lists::{Lists, Row},
    products::Products,
    work::Work,
};
use crate::{
    decoding::{Decode, Packed},
    epilogue::{convert, decode},
    format::{OUTPUT_BF16, OUTPUT_F16},
    lists::NO_ROW,
    mma_sync::moe_few_sm90::abi::{
        Choices, Down, LISTS_BYTES, MAX_CHOICES, ROW_BYTES, STAGES_AT, STRIP_ROWS, stage_bytes, stages,
    },
    units::ROW_LANES,
};

/// Bytes of an element.
const ELEMENT_BYTES: u32 = 2;

/// Pairs of columns per strip.
const PAIRS: u32 = STRIP_ROWS / 2;

/// The CTA's strips of all named experts: first all experts' first strips, then their second strips.
struct OfBlock {
    warp: u32,
    /// Warps of the CTA.
    warps: u32,
    /// Number of named experts.
    named: u32,
    /// Number of strips of the CTA.
    strips: u32,
    /// Start of the intermediate, and bytes per row.
    intermediate: GlobalAddress,
    row_bytes: u32,
}

impl Work for OfBlock {
    #[inline(always)]
    fn first(&self) -> u32 {
        self.warp
    }

    #[inline(always)]
    fn step(&self) -> u32 {
        self.warps
    }

    #[inline(always)]
    fn end(&self) -> u32 {
        self.named * self.strips
    }

    #[inline(always)]
    fn piece(&self, index: u32) -> (u32, u32) {
        let of_block = self.strip(index);
        (index - of_block * self.named, strip(of_block))
    }

    #[inline(always)]
    unsafe fn token(&self, lists: Lists, named: u32) -> GlobalAddress {
        // SAFETY: the lists are made, and a named expert has at least one row.
        self.row(unsafe { lists.row(named, 0) })
    }
}

impl OfBlock {
    /// Address of a row of the intermediate.
    #[inline(always)]
    fn row(&self, row: Row) -> GlobalAddress {
        self.intermediate + u64::from(row.choice) * u64::from(self.row_bytes)
    }

    /// Index of a piece's strip among the CTA's strips.
    #[inline(always)]
    fn strip(&self, index: u32) -> u32 {
        // Checked for the reason given in `gate_up`.
        index.checked_div(self.named).unwrap_or(0)
    }
}

/// Returns which strip of the output is the CTA's `index`-th strip.
#[inline(always)]
fn strip(index: u32) -> u32 {
    thread::block_idx_x() + index * thread::grid_dim_x()
}

/// One thread's part of the kernel.
///
/// # Safety
/// The contract in `moe_few_sm90/mod.rs`.
#[inline(always)]
pub(super) unsafe fn run<const BF16: bool, const ONE: bool>(launch: &Down)
where
    Packed<BF16>: Decode,
{
    let format = if BF16 { OUTPUT_BF16 } else { OUTPUT_F16 };
    let shared = dynamic_shared_address();
    let (lists, rows) = (Lists::at(shared), shared + LISTS_BYTES);
    // Place of a column of a choice's row in one of the CTA's strips.
    let place = |strip: u32, choice: u32, column: u32| {
        rows + ((strip * MAX_CHOICES + choice) * ROW_BYTES + column * ELEMENT_BYTES)
    };
    let Choices { token_count, top_k, .. } = launch.choices;
    let (n, k) = (launch.matrices.n, launch.matrices.k);
    // SAFETY: all threads of the CTA take the same branches, in whole warps. Lists and rows are read after barriers.
    // The intermediate is read after the previous grid has ended; the previous grid has waited for the grid that wrote
    // the ids. Each element of the output is written by one thread.
    unsafe {
        // All lanes hold the same value. The shuffle lets the compiler know that.
        let (warp, _) = warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE);
        if warp == 0 {
            lists.make(&launch.choices, launch.weights);
        }
        thread::sync_threads();
        let blocks = thread::grid_dim_x();
        assert_unchecked(token_count > 0 && blocks > 0);
        let strips = (n / STRIP_ROWS - thread::block_idx_x()).div_ceil(blocks);
        let work = OfBlock {
            warp,
            warps: thread::block_dim_x() / WARP_SIZE,
            named: lists.count(),
            strips,
            intermediate: GlobalAddress::new(launch.intermediate),
            row_bytes: k * ELEMENT_BYTES,
        };
        let stages = shared + STAGES_AT + warp * (stages(ONE) * stage_bytes(ONE));
        let mut products: Products<'_, false, BF16, ONE, OfBlock> =
            Products::begin(&launch.matrices, lists, &work, stages);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if ONE {
            products.await_token();
        }
        let columns = [0, 1].map(|half| lane_id() / ROW_LANES + half * PAIRS);
        products.run(
            |row| work.row(row),
            |strip| columns.map(|column| strip * STRIP_ROWS + column),
            |index, row, [first, second]| {
                let of_block = work.strip(index);
                let both = convert(format, first, second);
                st_shared_b16(place(of_block, row.choice, columns[0]), both as u16);
                st_shared_b16(place(of_block, row.choice, columns[1]), (both >> 16) as u16);
            },
        );
        thread::sync_threads();
        let mut index = thread::thread_idx_x();
        while index < strips * token_count * PAIRS {
            let (pair, token) = (index % PAIRS, index / PAIRS % token_count);
            let of_block = index / PAIRS / token_count;
            let column = u64::from(strip(of_block) * STRIP_ROWS + 2 * pair);
            let mut sums = [0.0; 2];
            for choice in token * top_k..(token + 1) * top_k {
                let row = lists.place(choice);
                if row != NO_ROW {
                    let both = ld_shared_b32(place(of_block, row, 2 * pair));
                    let weight = lists.weight(choice);
                    let [low, high] = decode(format, both);
                    sums = [fma_rn_f32(weight, low, sums[0]), fma_rn_f32(weight, high, sums[1])];
                    if launch.rows != 0 {
                        let element = u64::from(choice) * u64::from(n) + column;
                        st_global_b32(GlobalAddress::new(launch.rows) + element * 2, both);
                    }
                }
            }
            let output = GlobalAddress::new(launch.output) + (u64::from(token) * launch.output_pitch + column * 2);
            st_global_b32(output, convert(format, sums[0], sums[1]));
            index += thread::block_dim_x();
        }
    }
}
