//! Loads weights in [`units`](crate::units) from global memory to a stage.

use cuda_std::{
    global::GlobalAddress,
    mbarrier::{Mbarrier, mbarrier_arrive_expect_tx},
    shared::SharedAddress,
    tma::cp_async_bulk_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use crate::{
    ring::Ring,
    units::{K_BLOCK, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, unit_bytes, unit_offset},
};

/// Number of units per whole slab.
const SLAB_UNITS: u32 = SLAB_ROWS / UNIT_ROWS;

/// Rows of a panel that are contiguous in a stage, and the place of their units.
#[derive(Clone, Copy)]
pub struct Piece {
    /// Address of the first k-block of the piece's slab.
    slab: GlobalAddress,
    /// Number of units per k-block of the slab.
    slab_units: u32,
    /// Index of the piece's first unit in the slab.
    first: u32,
    /// Number of units of the piece. It is at most the number of units that the piece has room for.
    units: u32,
}

impl Piece {
    /// Returns up to `most_units` units of a matrix `[n, k]`, from unit `unit` on.
    #[inline(always)]
    pub fn new(matrix: GlobalAddress, n: u32, k: u32, unit: u32, most_units: u32) -> Self {
        // Offset of the slab's first unit: in a slab, the units of one k-block follow the units of the preceding
        // k-block.
        let (slab_unit, in_slab) = (unit / SLAB_UNITS * SLAB_UNITS, unit % SLAB_UNITS);
        Self {
            slab: matrix + unit_offset(n, k, slab_unit, 0),
            slab_units: (n / UNIT_ROWS - slab_unit).min(SLAB_UNITS),
            first: in_slab,
            units: (n / UNIT_ROWS - unit).min(most_units),
        }
    }

    /// Loads all k-blocks of `pieces`, with `k` columns, to stages: one k-block per stage, one piece after another,
    /// with room for `room` units per piece. The first stage lies at `first_stage`.
    ///
    /// # Safety
    /// The pieces' units are valid in global memory. The stages' barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub unsafe fn load_to_stages(pieces: &[Self], room: u32, k: u32, stages: &mut Ring, first_stage: SharedAddress) {
        let (count, whole) = (pieces.len() as u32, k / K_BLOCK);
        // Bytes of a unit in all preceding k-blocks, and in this one.
        let (mut before, mut bytes) = (0, UNIT_BYTES);
        for k_block in 0..k_blocks(k) {
            if k_block >= whole {
                bytes = unit_bytes(block_columns(k, k_block));
            }
            let (stage, full) = (first_stage + stages.index() * (count * room * UNIT_BYTES), stages.full());
            // SAFETY: the caller guarantees that the pieces' units are valid in global memory. A stage is written while
            // it is empty, and its full barrier expects the bytes of every copy.
            unsafe {
                stages.wait_empty();
                if lane_id() == 0 {
                    mbarrier_arrive_expect_tx(full, count * room * bytes);
                    for index in 0..count {
                        pieces[index as usize].load(stage + index * room * UNIT_BYTES, before, bytes, room, full);
                    }
                }
                sync_warp(ALL_LANES);
            }
            before += bytes;
            stages.advance();
        }
    }

    /// Loads the units of a k-block, `unit_bytes` bytes each. Each unit has `before` bytes in the preceding k-blocks.
    /// If the piece has fewer units than room, its units are loaded again to fill the room; their sums are not written
    /// to C.
    ///
    /// # Safety
    /// The units are valid in global memory, and the room at `target` is empty.
    #[inline(always)]
    unsafe fn load(&self, target: SharedAddress, before: u32, unit_bytes: u32, room: u32, full: Mbarrier) {
        let source = self.slab + u64::from(self.slab_units * before + self.first * unit_bytes);
        let mut loaded = 0;
        while loaded < room {
            let more = self.units.min(room - loaded);
            // SAFETY: the caller guarantees that the units are valid in global memory and that the stage's room at
            // `target` is empty.
            unsafe {
                cp_async_bulk_shared_global(target + loaded * unit_bytes, source, more * unit_bytes, full);
            }
            loaded += more;
        }
    }
}
