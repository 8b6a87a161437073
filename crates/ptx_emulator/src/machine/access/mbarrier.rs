//! Checked mbarrier operations of instructions and asynchronous operations.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::address::{Lane, SHARED_BASE, Spot};
use crate::machine::footprint::{Arriving, Kind};
use crate::machine::in_flight::Test;
use crate::machine::mbarrier::{Arrival, BYTES, MAX_COUNT, Mbarrier, MbarrierAt, Phase};
use crate::machine::race::{Accessor, Agent, Detector, Mode, merge};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::lanes;

fn name(at: MbarrierAt) -> String {
    format!("the mbarrier at byte {} of shared memory", i64::from(at.offset) - i64::from(SHARED_BASE))
}

impl Machine<'_> {
    /// Returns the mbarrier at a lane's address, or a fault if there is none. A `remote` access comes from another CTA
    /// or from the async proxy, and needs a fence after the initialization. An access that is not ordered after the
    /// initialization is a race.
    pub fn mbarrier(&mut self, w: &Warp, lane: Lane, remote: bool) -> Stopped<MbarrierAt> {
        let Spot::Shared { cta, offset } = self.resolve(w, lane, BYTES)? else {
            let text = format!("address {:#x} is not in shared memory", lane.address);
            return Err(Stop::new(FaultKind::MbarrierNotInitialized, text).lane(lane.lane));
        };
        let at = MbarrierAt { cta, offset };
        let who = Accessor { base: w.index * 32, mask: 1 << lane.lane };
        let Some(barrier) = self.ctas[cta as usize].mbarriers.get(&offset) else {
            let text = format!("{} was never initialized or was invalidated", name(at));
            return Err(Stop::new(FaultKind::MbarrierNotInitialized, text).lane(lane.lane));
        };
        let Mbarrier { owner, init_pc, init_time, init_arrived, .. } = *barrier;
        let fenced = |race: &Detector| race.knows_initializations(w.index, lane.lane, owner, init_time);
        let fenced = self.race.as_ref().is_none_or(fenced);
        if let Err(conflict) = self.track_order(cta, offset, BYTES, who, Mode::StrongRead, w.pc()) {
            let initialized = conflict.accessor.base == owner / 32 * 32 && conflict.pc == init_pc;
            if !(initialized && (fenced || w.cluster_waited >= init_arrived)) {
                self.hazard(self.conflict(Mode::StrongRead, conflict, offset, BYTES).lane(lane.lane))?;
            }
        }
        if remote && !fenced {
            let text = format!("{} is used by another proxy or CTA without a fence after its initialization", name(at));
            let stop = Stop::new(FaultKind::MissingProxyFence, text).lane(lane.lane);
            let stop = stop.other("its initialization", Some(init_pc));
            // Shipped kernels omit the fence within a CTA and after a cluster barrier.
            self.warn(stop)?;
        }
        Ok(at)
    }

    /// Same as [`mbarrier`](Machine::mbarrier), for lanes of the same CTA with the same address. `lane` is one of them.
    pub fn mbarrier_of_lanes(&mut self, w: &Warp, lane: Lane, mask: u32) -> Stopped<MbarrierAt> {
        if mask.is_power_of_two() {
            return self.mbarrier(w, lane, false);
        }
        let Spot::Shared { cta, offset } = self.resolve(w, lane, BYTES)? else {
            return self.mbarrier(w, lane, false);
        };
        let who = Accessor { base: w.index * 32, mask };
        let is_live = self.ctas[cta as usize].mbarriers.contains_key(&offset);
        let may_read = |race: &mut Detector| race.may_read_together(cta, offset..offset + BYTES, who, w.pc());
        if !is_live || !self.race.as_mut().is_none_or(may_read) {
            for number in lanes(mask) {
                self.mbarrier(w, Lane { lane: number as u32, ..lane }, false)?;
            }
        }
        Ok(MbarrierAt { cta, offset })
    }

    /// The object at an address known to hold an mbarrier.
    fn object(&mut self, at: MbarrierAt) -> Stopped<&mut Mbarrier> {
        self.ctas[at.cta as usize].mbarriers.get_mut(&at.offset).ok_or_else(|| {
            let text = format!("an operation signals {}, which is uninitialized or invalidated", name(at));
            Stop::new(FaultKind::MbarrierNotInitialized, text)
        })
    }

    pub fn mbarrier_init(&mut self, w: &mut Warp, lane: Lane, count: u32) -> Stopped<()> {
        if !(1..=MAX_COUNT).contains(&count) {
            let text = format!("invalid arrival count {count}; expected 1 to {MAX_COUNT}");
            return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane.lane));
        }
        if let Spot::Shared { cta, offset } = self.resolve(w, lane, BYTES)? {
            self.ctas[cta as usize].mbarriers.remove(&offset);
            self.store(w, lane, Mode::Write, &[0; BYTES as usize])?;
            self.record_shared(cta, offset, BYTES, Kind::Write);
            let init_time = self.race.as_mut().map_or(0, |race| race.tick(w.index));
            let init_arrived = self.generation_of_next_arrival(w);
            let barrier = Mbarrier {
                expected: count,
                pending: count,
                owner: w.index * 32 + lane.lane,
                init_pc: w.pc(),
                init_time,
                init_arrived,
                ..Mbarrier::default()
            };
            self.ctas[cta as usize].mbarriers.insert(offset, barrier);
        }
        Ok(())
    }

    pub fn mbarrier_inval(&mut self, w: &mut Warp, lane: Lane) -> Stopped<()> {
        let at = self.mbarrier(w, lane, false)?;
        self.invalidated.insert(at);
        if let (Some(race), Some((agent, pc))) = (&self.race, self.commits.remove(&at)) {
            let (number, time, _) = agent.identity();
            if !race.clock(w.index, lane.lane).reaches(number, time).0 {
                let text = format!("{} is invalidated while a tcgen05.commit may still signal it", name(at));
                self.warn(Stop::new(FaultKind::MbarrierInUse, text).lane(lane.lane).other("the commit", Some(pc)))?;
            }
        }
        self.ctas[at.cta as usize].mbarriers.remove(&at.offset);
        self.record_shared(at.cta, at.offset, BYTES, Kind::Write);
        self.store(w, lane, Mode::Write, &[0; BYTES as usize])
    }

    /// Publishes the knowledge of some lanes to the threads that wait for this phase. A weak arrival publishes only what
    /// was before the warp's last fence of at least the cluster's scope.
    pub fn mbarrier_publish(&mut self, w: &Warp, lanes: u32, at: MbarrierAt, weak: bool) -> Stopped<()> {
        let mut known = self.object(at)?.arriving.take();
        if let Some(race) = &mut self.race {
            if weak {
                let fenced = self.sync.fenced_cluster.get(&w.index).and_then(Option::as_ref);
                fenced.into_iter().for_each(|fenced| merge(&mut known, fenced));
                race.release_weakly(w.index, lanes, &mut known);
            } else {
                race.release(w.index, lanes, &mut known);
            }
        }
        self.object(at)?.arriving = known;
        Ok(())
    }

    /// Makes `count` arrivals for some lanes at once. Returns the phase of the arrivals.
    pub fn mbarrier_arrive(&mut self, lanes: u32, at: MbarrierAt, count: u32, how: Arrival) -> Stopped<u64> {
        let barrier = self.object(at)?;
        let phase = barrier.phase;
        if count > barrier.pending {
            let at_once = if lanes.is_power_of_two() { "" } else { " at once" };
            let text = format!("{count} arrivals{at_once} at {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text).lane(lanes.trailing_zeros()));
        }
        if how.no_complete && count == barrier.pending {
            let text =
                format!("an arrival with .noComplete would complete the phase of {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text).lane(lanes.trailing_zeros()));
        }
        let room = barrier.pending;
        barrier.pending -= count;
        if how.drop {
            barrier.expected -= count.min(barrier.expected);
        }
        let ends = barrier.advance();
        let arriving = Arriving { phase, ends, count, room, named: None };
        let kind = if how.drop || how.no_complete { Kind::Write } else { Kind::Arrive(arriving) };
        self.record_shared(at.cta, at.offset, BYTES, kind);
        self.progress += 1;
        Ok(phase)
    }

    /// Makes an arrival for an asynchronous operation.
    pub fn mbarrier_arrive_async(&mut self, at: MbarrierAt, agent: Option<&Agent>) -> Stopped<()> {
        self.publish_agent(at, agent)?;
        let barrier = self.object(at)?;
        if barrier.pending == 0 {
            let text = format!("an asynchronous arrival at {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text));
        }
        let (phase, room) = (barrier.phase, barrier.pending);
        barrier.pending -= 1;
        let ends = barrier.advance();
        let arriving = Arriving { phase, ends, count: 1, room, named: None };
        self.record_shared(at.cta, at.offset, BYTES, Kind::Arrive(arriving));
        self.progress += 1;
        Ok(())
    }

    fn publish_agent(&mut self, at: MbarrierAt, agent: Option<&Agent>) -> Stopped<()> {
        let mut known = self.object(at)?.arriving.take();
        if let (Some(race), Some(agent)) = (&self.race, agent) {
            race.finish(agent, &mut known);
        }
        self.object(at)?.arriving = known;
        Ok(())
    }

    /// Publishes the effects of an operation to the threads that wait for this phase.
    pub fn mbarrier_learn(&mut self, at: MbarrierAt, agent: &Agent) -> Stopped<()> {
        self.publish_agent(at, Some(agent))
    }

    /// Adds one pending arrival to this phase only.
    pub fn mbarrier_more(&mut self, at: MbarrierAt, lane: u32) -> Stopped<()> {
        let barrier = self.object(at)?;
        barrier.pending += 1;
        if barrier.pending > MAX_COUNT {
            let text = format!("one more pending arrival at {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text).lane(lane));
        }
        self.record_shared(at.cta, at.offset, BYTES, Kind::Write);
        Ok(())
    }

    /// Increases the number of expected transaction bytes.
    pub fn mbarrier_expect(&mut self, at: MbarrierAt, lane: u32, bytes: u32) -> Stopped<()> {
        let barrier = self.object(at)?;
        barrier.tx += i64::from(bytes);
        if barrier.tx > MAX_COUNT.into() {
            let text = format!("{bytes} more bytes at {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text).lane(lane));
        }
        Ok(())
    }

    /// Completes transaction bytes, and publishes the effects of the operation.
    pub fn mbarrier_complete(&mut self, at: MbarrierAt, bytes: u32, agent: Option<&Agent>) -> Stopped<()> {
        self.publish_agent(at, agent)?;
        let barrier = self.object(at)?;
        barrier.tx -= i64::from(bytes);
        if barrier.tx < -i64::from(MAX_COUNT) {
            let text = format!("{bytes} bytes delivered to {}: {}", name(at), barrier.describe());
            return Err(Stop::new(FaultKind::MbarrierOverflow, text));
        }
        // Bytes that come before they are expected do not commute with what expects them.
        let early = barrier.tx < 0;
        let (phase, ends) = (barrier.phase, barrier.advance());
        let kind = if early { Kind::Write } else { Kind::Arrive(Arriving::uncounted(phase, ends)) };
        self.record_shared(at.cta, at.offset, BYTES, kind);
        self.progress += 1;
        Ok(())
    }

    /// Records that a wait finds an mbarrier's phase incomplete.
    pub fn mbarrier_blocks(&mut self, at: MbarrierAt) -> Stopped<()> {
        let phase = self.object(at)?.phase;
        self.record_shared(at.cta, at.offset, BYTES, Kind::Block { phase });
        Ok(())
    }

    /// Returns the lanes whose phases are complete. These lanes acquire the published knowledge. A token of a phase that
    /// is too old is a fault. `waits`: lanes whose phases are incomplete wait for them.
    pub fn mbarrier_test(&mut self, w: &Warp, tests: &[Test], waits: bool) -> Stopped<u32> {
        // Lanes that acquire together keep sharing their knowledge.
        let mut complete: Vec<(MbarrierAt, u32)> = Vec::new();
        for &Test { lanes, at, phase } in tests {
            let barrier = self.object(at)?;
            if let Phase::Token(token) = phase
                && (token > barrier.phase || barrier.phase > token + 1)
            {
                let text = format!("a wait for phase {token} of {}: {}", name(at), barrier.describe());
                return Err(Stop::new(FaultKind::MbarrierPhase, text).lane(lanes.trailing_zeros()));
            }
            if !barrier.is_complete(phase) {
                continue;
            }
            match complete.iter_mut().find(|(place, _)| *place == at) {
                Some((_, all)) => *all |= lanes,
                None => complete.push((at, lanes)),
            }
        }
        for &(at, lanes) in &complete {
            let barrier = self.object(at)?;
            let (published, phase) = (barrier.published.clone(), barrier.phase.wrapping_sub(1));
            let kind = if waits { Kind::Await { phase } } else { Kind::Read };
            self.record_shared(at.cta, at.offset, BYTES, kind);
            if let Some(race) = &mut self.race {
                race.acquire(w.index, lanes, &published);
            }
            self.phase_awaited(w, at);
        }
        Ok(complete.iter().fold(0, |all, (_, lanes)| all | lanes))
    }

    /// Reports a fault if a write to shared memory overlaps a live mbarrier.
    pub fn check_no_mbarrier(&self, cta: u32, offset: u32, len: u32) -> Stopped<()> {
        let barriers = &self.ctas[cta as usize].mbarriers;
        if barriers.is_empty() {
            return Ok(());
        }
        let first = (offset + 1).saturating_sub(BYTES);
        match barriers.range(first..offset + len).next() {
            None => Ok(()),
            Some((&offset, barrier)) => {
                let at = MbarrierAt { cta, offset };
                let text = format!("a write overlaps {}, which was not invalidated: {}", name(at), barrier.describe());
                Err(Stop::new(FaultKind::MbarrierInUse, text).other("its initialization", Some(barrier.init_pc)))
            }
        }
    }
}
