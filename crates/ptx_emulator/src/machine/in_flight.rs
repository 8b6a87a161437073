//! Operations that a warp has started and not yet waited for.

use std::collections::VecDeque;
use std::sync::Arc;

use super::mbarrier::{MbarrierAt, Phase};
use super::race::Agent;
use crate::operand::Dst;

/// Copies of one lane that complete in groups.
#[derive(Clone, Debug)]
pub struct Groups<T> {
    /// Copies issued and not yet committed.
    pub open: Vec<T>,
    /// Committed groups, oldest first.
    pub committed: VecDeque<Vec<T>>,
}

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Groups { open: Vec::new(), committed: VecDeque::new() }
    }
}

impl<T> Groups<T> {
    /// Commits the open copies as a group.
    pub fn commit(&mut self) {
        self.committed.push_back(std::mem::take(&mut self.open));
    }
}

/// Non-bulk asynchronous copies of one lane.
pub type CopyGroups = Groups<(u64, Option<Agent>)>;
/// Bulk copies of one lane that no mbarrier tracks.
pub type BulkGroups = Groups<BulkCopy>;

/// A bulk copy of a group. `read` completes when its source has been read, `written` when the copy is complete.
#[derive(Clone, Debug)]
pub struct BulkCopy {
    pub read: u64,
    pub written: u64,
    /// Agents that read the source and write the destination.
    pub agent: Option<Agent>,
    pub writer: Option<Agent>,
}

/// An `mbarrier.try_wait` that has found its phase incomplete and whose predicate has not been used yet.
pub struct Poll {
    pub pc: u32,
    pub predicate: u32,
    pub tests: Vec<Test>,
}

/// Lanes that wait for the same phase of an mbarrier.
#[derive(Clone, Copy)]
pub struct Test {
    pub lanes: u32,
    pub at: MbarrierAt,
    pub phase: Phase,
}

/// A load from shared memory whose registers have not been used yet.
pub struct SharedLoad {
    pub registers: Arc<[u32]>,
    pub pc: u32,
    /// Race detector's time of the load.
    pub time: u32,
    /// `true` if the warp has arrived at an mbarrier since the load.
    pub released: bool,
}

/// A load from tensor memory that has not been waited for, with its registers.
pub struct TmemLoad {
    pub registers: Vec<u32>,
    pub agent: Option<Agent>,
    pub pc: u32,
}

/// A matrix instruction of a warp whose results are not yet in its registers.
#[derive(Clone)]
pub struct Wgmma {
    pub id: u64,
    pub agent: Option<Agent>,
    pub d: Vec<Dst>,
    /// Registers of A. They must not be written while the instruction is in flight.
    pub a: Vec<u32>,
    pub pc: u32,
    /// `true` if the results were delivered to the registers before `wgmma.wait_group`, because something waited for
    /// them.
    pub delivered: bool,
}

impl Wgmma {
    /// Whether the register receives one of the results.
    pub fn fills(&self, register: u32) -> bool {
        self.d.iter().any(|d| d.register == Some(register))
    }
}

/// Asynchronous matrix instructions of a warpgroup, by warp. An instruction is one operation of the warpgroup: it is
/// complete when it is complete in all warps (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Warpgroup").
pub struct Warpgroup {
    warps: Vec<Issued>,
}

/// Matrix instructions that a warp has issued.
#[derive(Clone, Default)]
struct Issued {
    /// Number of instructions removed from the list because all warps have waited for them.
    dropped: u64,
    list: VecDeque<(u64, Option<Agent>)>,
    /// Number of instructions that the warp has waited for.
    finished: u64,
}

impl Warpgroup {
    /// Warpgroup of `warps` warps.
    pub fn new(warps: u32) -> Warpgroup {
        Warpgroup { warps: vec![Issued::default(); warps as usize] }
    }

    /// Records that a warp issues its part of an instruction.
    pub fn issue(&mut self, warp: u32, id: u64, agent: Option<Agent>) {
        self.warps[warp as usize].list.push_back((id, agent));
    }

    /// Whether every warp has issued at least `count` instructions.
    pub fn have_issued(&self, count: u64) -> bool {
        self.warps.iter().all(|w| w.dropped + w.list.len() as u64 >= count)
    }

    /// Returns each warp's parts of the first `count` instructions, without the parts that the warp has waited for.
    pub fn first(&self, count: u64) -> impl Iterator<Item = &(u64, Option<Agent>)> {
        self.warps.iter().flat_map(move |w| w.list.iter().take(count.saturating_sub(w.dropped) as usize))
    }

    /// Records that a warp has waited for the first `count` instructions.
    pub fn finish(&mut self, warp: u32, count: u64) {
        self.warps[warp as usize].finished = count;
        let all = self.warps.iter().map(|w| w.finished).min().unwrap_or(0);
        for w in &mut self.warps {
            w.list.drain(..(all - w.dropped) as usize);
            w.dropped = all;
        }
    }
}

/// Asynchronous matrix instructions of a warp.
#[derive(Default)]
pub struct WgmmaGroups {
    pub open: Vec<Wgmma>,
    pub committed: VecDeque<Vec<Wgmma>>,
    /// Number of instructions that the warp has waited for.
    pub finished: u64,
    /// The warp's instruction count at its last `wgmma.fence`.
    pub fenced_at: u64,
}

impl WgmmaGroups {
    /// All instructions in flight, oldest first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Wgmma> {
        self.committed.iter().flatten().chain(&self.open)
    }

    /// All instructions in flight, oldest first, as mutable references.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Wgmma> {
        self.committed.iter_mut().flatten().chain(&mut self.open)
    }

    /// Whether no instruction is in flight.
    pub fn is_empty(&self) -> bool {
        self.committed.is_empty() && self.open.is_empty()
    }
}
