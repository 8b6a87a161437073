//! mbarrier objects (PTX ISA, "Parallel Synchronization: mbarrier"): phases, pending arrivals and transaction bytes.
//! The object's eight bytes are opaque; its state is kept here, by its place in shared memory.

use std::collections::BTreeMap;

use super::race::Shared;

/// Size and alignment of the object.
pub const BYTES: u32 = 8;
/// The largest count of arrivals, and of transaction bytes, positive or negative ("Contents of the mbarrier object").
pub const MAX_COUNT: u32 = (1 << 20) - 1;

/// One object.
#[derive(Default)]
pub struct Mbarrier {
    /// Arrivals of a phase.
    pub expected: u32,
    /// Arrivals still to come in this phase.
    pub pending: u32,
    /// Transaction bytes still to come.
    pub tx: i64,
    /// Complete phases.
    pub phase: u64,
    /// What the arrivals of this phase publish, and what those of the last complete phase published.
    pub arriving: Shared,
    pub published: Shared,
    /// The thread that initialized it, and when by the race detector's clock.
    pub owner: u32,
    pub init_time: u32,
    /// Generations of the cluster's barrier that are complete once its warp has arrived there behind the initialization.
    pub init_arrived: u64,
    pub init_pc: u32,
}

/// The mbarriers of a CTA by their offset in its shared memory.
pub type Mbarriers = BTreeMap<u32, Mbarrier>;

/// Where an mbarrier lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MbarrierAt {
    pub cta: u32,
    pub offset: u32,
}

/// Which phase a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The phase with this parity: the current one, or the one before, which is complete.
    Parity(bool),
    /// The phase that an arrival's state names.
    Token(u64),
}

/// How threads arrive.
#[derive(Clone, Copy)]
pub struct Arrival {
    /// They will not arrive in the phases after this one.
    pub drop: bool,
    /// The program promises that this arrival completes no phase.
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

    /// Ends the phase if nothing is outstanding.
    pub fn advance(&mut self) -> bool {
        let done = self.pending == 0 && self.tx == 0;
        if done {
            self.phase += 1;
            self.pending = self.expected;
            self.published = self.arriving.clone();
        }
        done
    }

    /// For reports.
    pub fn describe(&self) -> String {
        let arrived = self.expected - self.pending.min(self.expected);
        format!("phase {}, {arrived} of {} arrivals, {} bytes outstanding", self.phase, self.expected, self.tx)
    }
}
