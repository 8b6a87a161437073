//! Record of a cluster's steps, for an explorer of orders.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::machine::footprint::Footprint;
use crate::machine::warp::State;

/// Record of a cluster's steps.
#[derive(Default)]
pub struct Steps {
    /// Warps that repeat a loop which only reads, or poll in vain, with what they read.
    pub asleep: FxHashMap<u32, Footprint>,
    /// Loops that warps are in, by warp.
    pub loops: FxHashMap<u32, Vec<Loop>>,
    /// Number of operations that each warp has issued.
    pub issued: FxHashMap<u32, u32>,
    /// Warp of each operation, and the operation's number among the warp's operations.
    pub names: FxHashMap<u64, (u32, u32)>,
    /// Footprints of operations in flight, as far as they are known at the issue.
    pub claims: FxHashMap<u64, Footprint>,
    /// Number of the last operation with a name.
    pub last: u64,
    /// Number of steps of each warp.
    pub steps: FxHashMap<u32, u64>,
}

/// A loop that a warp is in.
pub struct Loop {
    /// First instruction, and the warp's state there.
    pub head: u32,
    pub state: State,
    /// Instructions, and what they read since then.
    pub body: BTreeSet<u32>,
    pub reads: Footprint,
    /// Whether the loop changed anything.
    pub changed: bool,
    /// Number of the step in which the warp was there.
    pub step: u64,
}
