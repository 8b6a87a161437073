//! What lanes can wait for. When a wait is over, the scheduler knows.

use super::mbarrier::{MbarrierAt, Phase};

/// What a fragment can wait for.
#[derive(Clone, Debug, PartialEq)]
pub enum WaitFor {
    /// These lanes of the warp.
    Lanes { need: u32, place: Place },
    /// Nothing any more: all lanes have arrived.
    Released,
    /// Nothing any more: the other lanes do not come.
    Alone,
    /// The named barrier's next generation.
    Barrier { cta: u32, id: u32, generation: u64 },
    /// Asynchronous operations.
    Operations(Vec<u64>),
    /// A phase of an mbarrier, which the instruction at `pc` polls.
    Mbarrier { at: MbarrierAt, phase: Phase, pc: u32 },
    /// Anything that might change what an mbarrier's poll at `pc` has found.
    Progress { since: u64, at: MbarrierAt, pc: u32 },
    /// Nothing any more: time is over.
    TimedOut,
    /// The cluster barrier's next generation.
    Cluster { generation: u64 },
    /// Columns of tensor memory that others must free.
    Columns { cta: u32, columns: u32 },
    /// The peer's allocation of tensor memory for the pair: as many as this CTA has made.
    PeerAllocation { peer: u32, count: u32 },
    /// The other warps of the warpgroup: as many matrix instructions as this warp has issued.
    Warpgroup { cta: u32, group: u32, count: u64 },
    /// Registers for each thread of a warp that others must release.
    Registers { cta: u32, count: u32 },
}

/// Where lanes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At this instruction, which whole warps execute.
    Aligned,
    /// At this instruction.
    Here,
    /// At any that waits for the same lanes.
    Anywhere,
}
