//! Conditions that lanes can wait for. The scheduler decides when a wait ends.

use super::mbarrier::{MbarrierAt, Phase};

/// Condition that a fragment waits for.
#[derive(Clone, Debug, PartialEq)]
pub enum WaitFor {
    /// The lanes `need` of the warp.
    Lanes { need: u32, place: Place },
    /// Nothing: all lanes have arrived.
    Released,
    /// Nothing: the other lanes cannot arrive.
    Alone,
    /// The next generation of a named barrier.
    Barrier { cta: u32, id: u32, generation: u64 },
    /// Completion of asynchronous operations.
    Operations(Vec<u64>),
    /// A phase of an mbarrier that the instruction at `pc` polls.
    Mbarrier { at: MbarrierAt, phase: Phase, pc: u32 },
    /// Any event that might change the result of a poll of an mbarrier at `pc`.
    Progress { since: u64, at: MbarrierAt, pc: u32 },
    /// Nothing: the time limit of the wait has passed.
    TimedOut,
    /// The next generation of the cluster barrier.
    Cluster { generation: u64 },
    /// Columns of tensor memory that other warps must free.
    Columns { cta: u32, columns: u32 },
    /// The peer's allocations of tensor memory for the pair: the wait ends when the peer has made `count` allocations.
    PeerAllocation { peer: u32, count: usize },
    /// The other warps of the warpgroup: the wait ends when each has issued `count` matrix instructions.
    Warpgroup { cta: u32, group: u32, count: u64 },
    /// Registers per thread that other warps must release.
    Registers { cta: u32, count: u32 },
}

/// Place where lanes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This instruction, which only whole warps execute.
    Aligned,
    /// This instruction.
    Here,
    /// Any instruction that waits for the same lanes.
    Anywhere,
}
