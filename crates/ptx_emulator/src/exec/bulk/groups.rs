//! Copies from shared to global memory, which complete through bulk groups of the issuing thread. A copy has two
//! moments: it reads its source, then it writes its destination.

use super::reduction::Reduction;
use super::shared::{SharedRange, spawn};
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::machine::in_flight::BulkCopy;
use crate::machine::pending::Issuer;
use crate::machine::race::Agent;
use crate::machine::state::{Effect, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::lanes;
use crate::timing::work::Work;

/// A copy of pieces, each with its address in global memory.
pub struct Copy {
    pub pieces: Vec<(SharedRange, u64)>,
    pub reduction: Option<Reduction>,
}

impl Copy {
    /// Starts the copy, adds it to the open group of each lane in `together`, and counts it.
    pub fn start(self, m: &mut Machine<'_>, w: &mut Warp, together: u32, agent: Option<Agent>) -> Stopped<()> {
        // `wait_group.read` and `wait_group` wait for different moments, so each moment has an agent.
        let writer = spawn(m, w, together);
        let lane = together.trailing_zeros() as usize;
        for &(from, address) in &self.pieces {
            let range = (address, from.bytes.into());
            m.issue_global(w, lane, writer.as_ref(), range, Reduction::mode(self.reduction))?;
        }
        let bytes: u64 = self.pieces.iter().map(|(from, _)| u64::from(from.bytes)).sum();
        let bulk = &mut m.roles[w.role as usize].bulk;
        bulk.shared_load += bytes;
        bulk.global_store += bytes;
        let written = m.pending.reserve();
        let issuer = Issuer { warp: w.index, pc: w.pc() };
        let read = m.start(w, ReadSource { copy: self, written, issuer });
        m.shared_readers.push((w.cta, read, w.pc()));
        let copy = BulkCopy { read, written, agent, writer };
        lanes(together).for_each(|lane| w.bulk[lane].open.push(copy.clone()));
        Ok(())
    }
}

/// The first moment: reads the source.
struct ReadSource {
    copy: Copy,
    /// Id of the second moment.
    written: u64,
    issuer: Issuer,
}

impl Effect for ReadSource {
    fn work(&self) -> Work {
        Work::ReadShared { bytes: self.copy.pieces.iter().map(|(from, _)| u64::from(from.bytes)).sum() }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let Copy { pieces, reduction } = self.copy;
        let pieces = pieces.into_iter().map(|(from, to)| (to, from.read(m).to_vec())).collect();
        m.start_reserved(self.written, self.issuer, Vec::new(), WriteDestination { pieces, reduction });
        Ok(())
    }
}

/// The second moment: writes the destination.
struct WriteDestination {
    pieces: Vec<(u64, Vec<u8>)>,
    reduction: Option<Reduction>,
}

impl Effect for WriteDestination {
    fn communicates(&self) -> bool {
        self.reduction.is_some()
    }

    fn work(&self) -> Work {
        Work::Store { ranges: self.pieces.iter().map(|(to, data)| (*to, data.len() as u32)).collect() }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        for (address, data) in &self.pieces {
            let (allocation, at) = m.locate_global(*address, data.len() as u64)?;
            match self.reduction {
                Some(reduction) => {
                    let mut old = vec![0; data.len()];
                    allocation.read(at, &mut old);
                    allocation.write(at, &reduction.apply(&old, data));
                }
                None => allocation.write(at, data),
            }
            m.buffers[allocation.index].bulk_stored += data.len() as u64;
            m.progress += 1;
        }
        Ok(())
    }
}

/// `cp.async.bulk.wait_group{.read} N`: waits until all but the N newest groups are complete, or have read their
/// sources.
pub struct WaitGroup {
    keep: usize,
    read: bool,
}

impl Instruction for WaitGroup {
    fn decode(i: &mut Parsed<'_>) -> Result<WaitGroup> {
        i.awaits_loads();
        Ok(WaitGroup { keep: i.constant(0, "the number of groups")? as usize, read: i.has("read") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let mut waiting = Vec::new();
        for lane in lanes(mask) {
            let groups = &w.bulk[lane];
            let done = groups.committed.len().saturating_sub(self.keep);
            let copies = groups.committed.iter().take(done).flatten();
            // The id of the second moment is reserved at issue.
            waiting.extend(copies.map(|c| if self.read { c.read } else { c.written }));
        }
        m.await_operations(&mut waiting);
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        for lane in lanes(mask) {
            let groups = &mut w.bulk[lane];
            let done = groups.committed.len().saturating_sub(self.keep);
            if let Some(race) = &mut m.race {
                let mut known = None;
                for copy in groups.committed.iter().take(done).flatten() {
                    let writer = copy.writer.as_ref().filter(|_| !self.read);
                    copy.agent.iter().chain(writer).for_each(|agent| race.finish(agent, &mut known));
                }
                race.acquire(w.index, 1 << lane, &known);
            }
            if !self.read {
                groups.committed.drain(..done);
            }
        }
        Ok(Flow::Next)
    }
}
