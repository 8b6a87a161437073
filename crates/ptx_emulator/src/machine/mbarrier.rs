//! Mbarrier objects (PTX ISA, "Parallel Synchronization: mbarrier"): phases, pending arrivals and transaction bytes.
//! The object's eight bytes are opaque. Its state is kept here, by its address in shared memory.

use std::collections::BTreeMap;

use super::race::Shared;

/// Size and alignment of the object in bytes.
pub const BYTES: u32 = 8;
/// Maximum number of arrivals, and maximum magnitude of the transaction bytes ("Contents of the mbarrier object").
pub const MAX_COUNT: u32 = (1 << 20) - 1;

/// An mbarrier object.
#[derive(Default)]
pub struct Mbarrier {
    /// Number of arrivals per phase.
    pub expected: u32,
    /// Number of pending arrivals in this phase.
    pub pending: u32,
    /// Number of pending transaction bytes.
    pub tx: i64,
    /// Number of complete phases.
    pub phase: u64,
    /// Knowledge published by the arrivals of this phase, and by the arrivals of the last complete phase.
    pub arriving: Shared,
    pub published: Shared,
    /// Thread that initialized the object, and the race detector's time of the initialization.
    pub owner: u32,
    pub init_time: u32,
    /// Number of cluster-barrier generations that are complete after the owner's warp has arrived there following the
    /// initialization.
    pub init_arrived: u64,
    pub init_pc: u32,
}

/// Mbarriers of a CTA, by offset in its shared memory.
pub type Mbarriers = BTreeMap<u32, Mbarrier>;

/// Address of an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MbarrierAt {
    pub cta: u32,
    pub offset: u32,
}

/// Phase that a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The phase with this parity: the current phase, or the previous phase, which is complete.
    Parity(bool),
    /// The phase of an arrival's state.
    Token(u64),
}

/// Options of an arrival.
#[derive(Clone, Copy)]
pub struct Arrival {
    /// `true`: the threads will not arrive in later phases.
    pub drop: bool,
    /// `true`: the program promises that this arrival does not complete the phase.
    pub no_complete: bool,
}

impl Mbarrier {
    /// Whether the phase is complete.
    pub fn is_complete(&self, phase: Phase) -> bool {
        match phase {
            Phase::Parity(odd) => (self.phase & 1 == 1) != odd,
            Phase::Token(token) => self.phase > token,
        }
    }

    /// Ends the phase if no arrivals or bytes are pending. Returns `true` if it ends the phase.
    pub fn advance(&mut self) -> bool {
        let done = self.pending == 0 && self.tx == 0;
        if done {
            self.phase += 1;
            self.pending = self.expected;
            self.published = self.arriving.clone();
        }
        done
    }

    /// Description for reports.
    pub fn describe(&self) -> String {
        let arrived = self.expected - self.pending.min(self.expected);
        format!("phase {}, {arrived} of {} arrivals, {} bytes outstanding", self.phase, self.expected, self.tx)
    }
}
