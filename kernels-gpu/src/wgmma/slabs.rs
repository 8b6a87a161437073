//! Weights in [`units`](crate::units), from global memory to a stage.

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

/// Units of a whole slab.
const SLAB_UNITS: u32 = SLAB_ROWS / UNIT_ROWS;

/// Rows of a panel that lie together in a stage, and where their units lie.
#[derive(Clone, Copy)]
pub struct Piece {
    /// Their slab's first k-block.
    slab: GlobalAddress,
    /// Units of the slab.
    slab_units: u32,
    /// The piece's first one.
    first: u32,
    /// Units of the piece, no more than it has room for.
    units: u32,
}

impl Piece {
    /// The units from one on, up to so many, of a matrix `[n, k]`.
    #[inline(always)]
    pub fn new(matrix: GlobalAddress, n: u32, k: u32, unit: u32, most_units: u32) -> Self {
        // Of the slab's first unit, since units of a k-block follow those of the one before it in the whole slab.
        let (slab_unit, in_slab) = (unit / SLAB_UNITS * SLAB_UNITS, unit % SLAB_UNITS);
        Self {
            slab: matrix + unit_offset(n, k, slab_unit, 0),
            slab_units: (n / UNIT_ROWS - slab_unit).min(SLAB_UNITS),
            first: in_slab,
            units: (n / UNIT_ROWS - unit).min(most_units),
        }
    }

    /// Loads pieces with room for so many units each, all k-blocks of their `k` columns, to stages: one k-block a stage, a piece behind
    /// the other. The first stage lies at this address.
    ///
    /// # Safety
    /// The units lie there. The stages' barriers have been initialized. The whole warp calls it together.
    #[inline(always)]
    pub unsafe fn load_to_stages(pieces: &[Self], room: u32, k: u32, stages: &mut Ring, first_stage: SharedAddress) {
        let (count, whole) = (pieces.len() as u32, k / K_BLOCK);
        // Bytes of a unit in all k-blocks before, and in this one.
        let (mut before, mut bytes) = (0, UNIT_BYTES);
        for k_block in 0..k_blocks(k) {
            if k_block >= whole {
                bytes = unit_bytes(block_columns(k, k_block));
            }
            let (stage, full) = (first_stage + stages.index() * (count * room * UNIT_BYTES), stages.full());
            // SAFETY: the units lie there. A stage is written while it is empty, and its full barrier expects the bytes
            // of every copy.
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

    /// Loads the units of a k-block, each of so many bytes, which come behind `before` bytes of every unit in the k-blocks before.
    /// If there are fewer than the piece has room for, the same again stand in for those that lack: what becomes of them is not
    /// written to C.
    ///
    /// # Safety
    /// The units lie there; the room for them at `target` is empty.
    #[inline(always)]
    unsafe fn load(&self, target: SharedAddress, before: u32, unit_bytes: u32, room: u32, full: Mbarrier) {
        let source = self.slab + u64::from(self.slab_units * before + self.first * unit_bytes);
        let mut loaded = 0;
        while loaded < room {
            let more = self.units.min(room - loaded);
            // SAFETY: the units lie there, and the stage's room for them at `target` is empty.
            unsafe {
                cp_async_bulk_shared_global(target + loaded * unit_bytes, source, more * unit_bytes, full);
            }
            loaded += more;
        }
    }
}
