//! Non-bulk asynchronous copies (PTX ISA, "Data Movement: cp.async, cp.async.commit_group, cp.async.wait_group").
//! The schedule decides when a copy reads and writes: at the latest when the wait for the copy ends.

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::machine::address::Spot;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::{Effect, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::{Origin, Source as Unwritten, Warp};
use crate::operand::{Address, PredicateSrc, Src, lanes};
use crate::timing::work::Work;
use crate::types::{Space, Type};

/// `cp.async.{ca,cg}.shared.global [to], [from], size{, source-size}{, cache-policy}`, or with the predicate
/// `ignore-source` instead of `source-size`.
pub struct CpAsync {
    to: Address,
    from: Address,
    /// 4, 8 or 16 bytes.
    size: u32,
    source: Source,
}

/// Number of source bytes that are read; the rest of the destination is filled with zeros.
enum Source {
    All,
    Bytes(Src),
    /// Reads nothing if the predicate is true.
    Ignored(PredicateSrc),
}

impl Instruction for CpAsync {
    fn decode(i: &mut Parsed<'_>) -> Result<CpAsync> {
        let (to, from) = (i.address(0)?, i.address(1)?);
        let size = i.constant(2, "the copy size")? as u32;
        if !matches!(size, 4 | 8 | 16) {
            return Err(DecodeError::invalid("the copy size must be 4, 8 or 16"));
        }
        if i.has("cg") && size != 16 {
            return Err(DecodeError::invalid("the copy size must be 16 with `.cg`"));
        }
        let policy = usize::from(i.has("L2::cache_hint"));
        let source = if i.operands().len() <= 3 + policy {
            Source::All
        } else if i.is_predicate(i.operand(3)?) {
            Source::Ignored(i.predicate(3)?)
        } else {
            Source::Bytes(i.src(3, Type::U32)?)
        };
        Ok(CpAsync { to, from, size, source })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let agent = m.race.as_mut().map(|r| r.spawn(w.index, mask, false));
        let mut transfers = Vec::with_capacity(32);
        for lane in lanes(mask) {
            transfers.extend(self.transfer(w, m, lane, agent.as_ref())?);
        }
        let unwritten = w.begins(Unwritten::UnwrittenGlobal);
        let id = m.start(w, Transfers { role: w.role as usize, size: self.size, transfers, unwritten });
        for lane in lanes(mask) {
            w.copies[lane].open.push((id, agent.clone()));
        }
        Ok(Flow::Next)
    }
}

impl CpAsync {
    /// Checks one lane's copy and records its accesses.
    fn transfer(&self, w: &Warp, m: &mut Machine<'_>, lane: usize, agent: Option<&Agent>) -> Stopped<Option<Transfer>> {
        let size = self.size;
        let bytes = match self.source {
            Source::All => size,
            Source::Bytes(s) => w.lane(s, lane) as u32,
            Source::Ignored(p) => size * (!p.mask(w) >> lane & 1),
        };
        if bytes > size {
            let text = format!("a source size of {bytes} bytes exceeds the copy size of {size}");
            return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
        }
        let to = w.lane_at(&self.to, Space::Shared, lane);
        let Spot::Shared { cta, offset } = m.resolve(w, to, size)? else { return Ok(None) };
        let address = w.address(&self.from, lane);
        if !address.is_multiple_of(size.into()) {
            let text = format!("global address {address:#x} is not a multiple of {size}");
            return Err(Stop::new(FaultKind::Misaligned, text).lane(lane as u32));
        }
        if bytes > 0 {
            m.issue_global(w, lane, agent, (address, bytes.into()), Mode::Read)?;
        }
        if let (Some(race), Some(agent)) = (&mut m.race, agent)
            && let Err(conflict) = race.agent_access(agent, cta, offset, size, Mode::Write, w.pc())
        {
            m.hazard(m.conflict(Mode::Write, conflict, offset, size).lane(lane as u32))?;
        }
        Ok(Some(Transfer { cta, offset, address, bytes }))
    }
}

/// One lane's copy: `bytes` from global `address` to `offset` of `cta`'s shared memory.
struct Transfer {
    cta: u32,
    offset: u32,
    address: u64,
    bytes: u32,
}

/// The copies of a warp. Each writes `size` bytes: `bytes` bytes of data, then zeros.
struct Transfers {
    role: usize,
    size: u32,
    transfers: Vec<Transfer>,
    /// Origin of the bytes that nothing had written.
    unwritten: Origin,
}

impl Effect for Transfers {
    fn work(&self) -> Work {
        let ranges = self.transfers.iter().map(|t| (t.address, t.bytes)).collect();
        Work::Load { ranges, ctas: self.transfers.first().map(|t| t.cta).into_iter().collect(), bulk: false }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        for t in &self.transfers {
            let mut data = [0; 16];
            let mut unwritten = 0;
            if let Some((allocation, at)) = m.global.locate(t.address, t.bytes.into()) {
                allocation.read(at, &mut data[..t.bytes as usize]);
                m.buffers[allocation.index].loaded += u64::from(t.bytes);
                unwritten = if m.sanitize { allocation.undefined_bytes(at, t.bytes) } else { 0 };
            }
            m.write_shared(t.cta, t.offset, &data[..self.size as usize]);
            m.undefine_shared(t.cta, t.offset, unwritten, self.unwritten);
            let bytes = &mut m.roles[self.role].bytes;
            bytes.global_load += u64::from(t.bytes);
            bytes.shared_store += u64::from(self.size);
        }
        Ok(())
    }
}

/// `cp.async.commit_group`, `cp.async.bulk.commit_group`.
pub struct CommitGroup {
    bulk: bool,
}

impl Instruction for CommitGroup {
    fn decode(i: &mut Parsed<'_>) -> Result<CommitGroup> {
        Ok(CommitGroup { bulk: i.has("bulk") })
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            if self.bulk { w.bulk[lane].commit() } else { w.copies[lane].commit() }
        }
        Ok(Flow::Next)
    }
}

/// `cp.async.wait_group N` waits for all but the N newest groups, `wait_all` for every copy of the thread.
pub struct WaitGroup {
    keep: Option<usize>,
}

impl Instruction for WaitGroup {
    fn decode(i: &mut Parsed<'_>) -> Result<WaitGroup> {
        i.awaits_loads();
        let keep = match i.operands() {
            [] => None,
            _ => Some(i.constant(0, "the number of groups")? as usize),
        };
        Ok(WaitGroup { keep })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let mut waiting = Vec::new();
        for lane in lanes(mask) {
            let copies = &w.copies[lane];
            let done = copies.committed.len().saturating_sub(self.keep.unwrap_or(0));
            waiting.extend(copies.committed.iter().take(done).flatten().map(|c| c.0));
            if self.keep.is_none() {
                waiting.extend(copies.open.iter().map(|c| c.0));
            }
        }
        waiting.sort_unstable();
        waiting.dedup();
        m.await_operations(&mut waiting);
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        // Lanes mostly finish the same copies. Lanes that acquire together keep sharing their knowledge.
        let mut finished: Vec<(Vec<_>, u32)> = Vec::new();
        for lane in lanes(mask) {
            let copies = &mut w.copies[lane];
            let done = copies.committed.len().saturating_sub(self.keep.unwrap_or(0));
            let mut mine: Vec<_> = copies.committed.drain(..done).flatten().collect();
            if self.keep.is_none() {
                mine.append(&mut copies.open);
            }
            let same = |(copies, _): &&mut (Vec<(u64, _)>, _)| copies.iter().map(|c| c.0).eq(mine.iter().map(|c| c.0));
            match finished.iter_mut().find(same) {
                Some((_, lanes)) => *lanes |= 1 << lane,
                None => finished.push((mine, 1 << lane)),
            }
        }
        if let Some(race) = &mut m.race {
            for (copies, lanes) in finished {
                let mut known = None;
                for agent in copies.iter().filter_map(|(_, agent)| agent.as_ref()) {
                    race.finish(agent, &mut known);
                }
                race.acquire(w.index, lanes, &known);
            }
        }
        Ok(Flow::Next)
    }
}

/// `cp.async.mbarrier.arrive [mbarrier]`: arrives once all earlier `cp.async` of the thread are complete.
pub struct MbarrierArrive {
    barrier: Address,
    space: Space,
    /// `true` with `.noinc`: the phase's expected count already contains this arrival.
    no_increment: bool,
}

impl Instruction for MbarrierArrive {
    fn decode(i: &mut Parsed<'_>) -> Result<MbarrierArrive> {
        let barrier = i.address(0)?;
        Ok(MbarrierArrive { barrier, space: i.space_at(&barrier), no_increment: i.has("noinc") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let at = m.mbarrier(w, w.lane_at(&self.barrier, self.space, lane), false)?;
            if !self.no_increment {
                m.mbarrier_more(at, lane as u32)?;
            }
            let copies = &w.copies[lane];
            let open: Vec<_> = copies.committed.iter().flatten().chain(&copies.open).cloned().collect();
            let after = m.predecessors(open.iter().map(|c| c.0));
            let issuer = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, false));
            let agents = open.into_iter().filter_map(|c| c.1).chain(issuer).collect();
            m.load_requested(at);
            m.start_after(w, after, Arrival { at, agents });
        }
        Ok(Flow::Next)
    }
}

/// An arrival that publishes the accesses of `agents`.
struct Arrival {
    at: MbarrierAt,
    agents: Vec<Agent>,
}

impl Effect for Arrival {
    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        for agent in &self.agents {
            m.mbarrier_learn(self.at, agent)?;
        }
        m.mbarrier_arrive_async(self.at, None)
    }
}
