//! What a warp has started and not yet waited for.

use std::collections::VecDeque;
use std::sync::Arc;

use super::mbarrier::{MbarrierAt, Phase};
use super::race::Agent;
use crate::operand::Dst;

/// The copies of one lane that complete by groups.
#[derive(Clone, Debug)]
pub struct Groups<T> {
    /// Issued and not yet committed.
    pub open: Vec<T>,
    /// Committed, oldest first.
    pub committed: VecDeque<Vec<T>>,
}

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Groups { open: Vec::new(), committed: VecDeque::new() }
    }
}

impl<T> Groups<T> {
    /// The open copies become a group.
    pub fn commit(&mut self) {
        self.committed.push_back(std::mem::take(&mut self.open));
    }
}

/// The non-bulk asynchronous copies of one lane.
pub type CopyGroups = Groups<(u64, Option<Agent>)>;
/// The bulk copies of one lane that no mbarrier tracks.
pub type BulkGroups = Groups<BulkCopy>;

/// A bulk copy that belongs to a group: when its source has been read, and when it is complete.
#[derive(Clone, Debug)]
pub struct BulkCopy {
    pub read: u64,
    pub written: u64,
    /// Of its source, and of its destination.
    pub agent: Option<Agent>,
    pub writer: Option<Agent>,
}

/// An `mbarrier.try_wait` that has not found its phase complete, before its predicate is used.
pub struct Poll {
    pub pc: u32,
    pub predicate: u32,
    /// Lane, mbarrier and phase.
    pub lanes: Vec<(u32, MbarrierAt, Phase)>,
}

/// A load from shared memory before the first use of its registers.
pub struct SharedLoad {
    pub registers: Arc<[u32]>,
    pub pc: u32,
    /// The race detector's time of the load.
    pub time: u32,
    /// The warp has arrived at an mbarrier since.
    pub released: bool,
}

/// A load from tensor memory before its wait, and its registers.
pub struct TmemLoad {
    pub registers: Vec<u32>,
    pub agent: Option<Agent>,
    pub pc: u32,
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
    /// Something has waited for the results, which are in the registers, before `wgmma.wait_group`.
    pub delivered: bool,
}

impl Wgmma {
    /// Whether the register is one of the results.
    pub fn fills(&self, register: u32) -> bool {
        self.d.iter().any(|d| d.register == Some(register))
    }
}

/// The asynchronous matrix instructions of a warpgroup, by warp. One is complete when it is complete in all warps: it is
/// one operation of the warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Warpgroup").
pub struct Warpgroup {
    warps: Vec<Issued>,
}

/// The matrix instructions that a warp has issued.
#[derive(Clone, Default)]
struct Issued {
    /// How many are no longer in the list, because all warps have waited for them.
    dropped: u64,
    list: VecDeque<(u64, Option<Agent>)>,
    /// How many the warp has waited for.
    finished: u64,
}

impl Warpgroup {
    /// A warpgroup of so many warps.
    pub fn new(warps: u32) -> Warpgroup {
        Warpgroup { warps: vec![Issued::default(); warps as usize] }
    }

    /// A warp issues its part of an instruction.
    pub fn issue(&mut self, warp: u32, id: u64, agent: Option<Agent>) {
        self.warps[warp as usize].list.push_back((id, agent));
    }

    /// Whether all warps have issued so many.
    pub fn have_issued(&self, count: u64) -> bool {
        self.warps.iter().all(|w| w.dropped + w.list.len() as u64 >= count)
    }

    /// The parts of the first `count` instructions that some warp has not waited for.
    pub fn first(&self, count: u64) -> impl Iterator<Item = &(u64, Option<Agent>)> {
        self.warps.iter().flat_map(move |w| w.list.iter().take(count.saturating_sub(w.dropped) as usize))
    }

    /// A warp has waited for the first `count` instructions.
    pub fn finish(&mut self, warp: u32, count: u64) {
        self.warps[warp as usize].finished = count;
        let all = self.warps.iter().map(|w| w.finished).min().unwrap_or(0);
        for w in &mut self.warps {
            w.list.drain(..(all - w.dropped) as usize);
            w.dropped = all;
        }
    }
}

/// A warp's asynchronous matrix instructions.
#[derive(Default)]
pub struct WgmmaGroups {
    pub open: Vec<Wgmma>,
    pub committed: VecDeque<Vec<Wgmma>>,
    /// Instructions that the warp has waited for.
    pub finished: u64,
    /// The warp's instruction count at its last `wgmma.fence`.
    pub fenced_at: u64,
}

impl WgmmaGroups {
    /// All that are in flight, oldest first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Wgmma> {
        self.committed.iter().flatten().chain(&self.open)
    }

    /// The same, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Wgmma> {
        self.committed.iter_mut().flatten().chain(&mut self.open)
    }

    /// Whether none is in flight.
    pub fn is_empty(&self) -> bool {
        self.committed.is_empty() && self.open.is_empty()
    }
}
