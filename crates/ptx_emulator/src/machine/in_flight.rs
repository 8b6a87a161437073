//! What a warp has started and not yet waited for.

use std::collections::VecDeque;

use super::race::Agent;
use crate::operand::{Dst, Row};

/// The non-bulk asynchronous copies of one lane.
#[derive(Clone, Debug, Default)]
pub struct CopyGroups {
    /// Issued and not yet committed.
    pub open: Vec<(u64, Option<Agent>)>,
    /// Committed, oldest first.
    pub committed: VecDeque<Vec<(u64, Option<Agent>)>>,
}

/// A bulk copy that belongs to a group: when its source has been read, and when it is complete.
#[derive(Clone, Debug)]
pub struct BulkCopy {
    pub read: u64,
    pub written: u64,
    pub agent: Option<Agent>,
}

/// A load from tensor memory before its wait: registers and the values they will get.
pub struct TmemLoad {
    pub values: Vec<(Dst, Row)>,
    pub agent: Option<Agent>,
    pub pc: u32,
}

/// The bulk copies of one lane that complete by groups.
#[derive(Clone, Debug, Default)]
pub struct BulkGroups {
    /// Issued and not yet committed.
    pub open: Vec<BulkCopy>,
    /// Committed, oldest first.
    pub committed: VecDeque<Vec<BulkCopy>>,
}

/// One instruction of a warp whose results are not in its registers yet.
#[derive(Clone)]
pub struct Wgmma {
    pub id: u64,
    pub agent: Option<Agent>,
    pub d: Vec<Dst>,
    /// Registers of A, which must not be written.
    pub a: Vec<u32>,
    pub pc: u32,
}

/// A warp's asynchronous matrix instructions.
#[derive(Default)]
pub struct WgmmaGroups {
    pub open: Vec<Wgmma>,
    pub committed: VecDeque<Vec<Wgmma>>,
    /// The warp's instruction count at its last `wgmma.fence`.
    pub fenced_at: u64,
}

impl WgmmaGroups {
    /// All that are in flight, oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Wgmma> {
        self.committed.iter().flatten().chain(&self.open)
    }
}
