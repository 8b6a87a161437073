//! Racing loads whose values have been dropped so far. `access/dropped_reads.rs` has the rules.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::grid_races::Meeting;

/// Dropped loads of one cluster.
#[derive(Default)]
pub struct DroppedReads {
    /// Races with loads whose value has been dropped so far.
    pub open: Vec<Open>,
    /// Outlets of each load, by the load's instruction.
    outlets: FxHashMap<u32, Option<Arc<[u32]>>>,
}

/// A race with a load whose value has been dropped so far.
pub struct Open {
    /// Warp of the load.
    pub warp: u32,
    /// Instructions by which the value can leave registers.
    pub outlets: Arc<[u32]>,
    pub meeting: Meeting,
}

impl DroppedReads {
    /// Instructions by which the value of the load at `pc` can leave registers, found by `find` once per load. `None`:
    /// the value decides which code is executed.
    pub fn outlets(&mut self, pc: u32, find: impl FnOnce(u32) -> Option<Vec<u32>>) -> Option<Arc<[u32]>> {
        self.outlets.entry(pc).or_insert_with(|| find(pc).map(Arc::from)).clone()
    }
}
