//! Weights in [`units`](crate::units), from global memory to a stage.

use cuda_std::{global::GlobalAddress, mbarrier::Mbarrier, shared::SharedAddress, tma::cp_async_bulk_shared_global};

use crate::units::{SLAB_ROWS, UNIT_ROWS, unit_offset};

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

    /// Loads the units of a k-block, each of so many bytes, which come behind `before` bytes of every unit in the k-blocks before.
    /// If there are fewer than the piece has room for, the same again stand in for those that lack: what becomes of them is not
    /// written to C.
    ///
    /// # Safety
    /// The units lie there; the room for them at `target` is empty.
    #[inline(always)]
    pub unsafe fn load(&self, target: SharedAddress, before: u32, unit_bytes: u32, room: u32, full: Mbarrier) {
        let source = self.slab + u64::from(self.slab_units * before + self.first * unit_bytes);
        let mut loaded = 0;
        while loaded < room {
            let more = self.units.min(room - loaded);
            // SAFETY: what `# Safety` above asks.
            unsafe {
                cp_async_bulk_shared_global(target + loaded * unit_bytes, source, more * unit_bytes, full);
            }
            loaded += more;
        }
    }
}
