//! Accesses to global memory as the rest of the grid sees them: the knowledge that threads publish and observe there,
//! and the search for races. Only the race detector uses this file; without a race detector, its functions do nothing.

use std::sync::Arc;

use crate::config::fault::Stopped;
use crate::machine::beyond::Beyond;
use crate::machine::footprint::{Access, Kind, Object};
use crate::machine::grid_races::{Digests, LINE, Meeting, Order, Record};
use crate::machine::race::{Agent, Clock, Mode};
use crate::machine::scope::{Origin, Scope};
use crate::machine::state::Machine;
use crate::machine::touches::{Touch, bits, digest};
use crate::machine::warp::Warp;
use crate::operand::lanes;

/// Order between an earlier access of a byte and a later access by a thread in the cluster `own` that knows `clock`.
fn order(clock: &Clock, own: u32, async_proxy: bool, earlier: &Record, byte: u32) -> Order {
    let (cluster, number, time) = (earlier.origin.cluster, earlier.number(byte), earlier.time);
    let beyond = clock.beyond();
    let (seen, proxied) = if cluster == own {
        clock.reaches(number, time)
    } else {
        (
            beyond.is_some_and(|b| b.seen.reaches(cluster, number, time)),
            beyond.is_some_and(|b| b.proxied.reaches(cluster, number, time)),
        )
    };
    if seen {
        return if async_proxy && !proxied && !earlier.mode.reads() { Order::Unproxied } else { Order::Known };
    }
    match beyond {
        Some(beyond) if beyond.drawn.reaches(cluster, number, time) => Order::Drawn,
        Some(beyond) if beyond.polled.reaches(cluster, number, time) => Order::Polled,
        _ => Order::Unknown,
    }
}

impl Machine<'_> {
    /// Location of a warp.
    pub fn origin(&self, w: &Warp) -> Origin {
        Origin { cluster: self.index, cta: w.cta }
    }

    /// Records an access of the current instruction to global memory. [`Machine::check_touches`] checks all recorded
    /// accesses.
    pub fn touch(&mut self, lane: u32, address: u64, bytes: u32, mode: Mode, data: &[u8]) {
        if self.launch.races.is_some() {
            let mut digests = Digests::default();
            if mode == Mode::Write {
                digest(&mut digests, (address % LINE) as u32, data);
            }
            let touch = Touch { lane, lanes: 1, address, bytes, mode, digests };
            match self.touches.list.last_mut() {
                // A read-modify-write is one access.
                Some(read) if mode == Mode::Atomic && (read.lane, read.address) == (lane, address) => *read = touch,
                _ => self.touches.list.push(touch),
            }
        }
    }

    /// Records accesses of all lanes of the current instruction. `value` fills in the bytes that a lane writes.
    pub fn touch_row(
        &mut self,
        mask: u32,
        addresses: &[u64; 32],
        bytes: u32,
        mode: Mode,
        value: impl Fn(usize, &mut [u8]),
    ) {
        if self.launch.races.is_none() {
            return;
        }
        let first = mask.trailing_zeros() as usize % 32;
        let begin = addresses[first];
        let same = |at: u64| lanes(mask).all(|lane| addresses[lane] == begin + (lane - first) as u64 * at);
        let count = mask.count_ones();
        let mut buffer = [0; 64];
        let data = &mut buffer[..bytes as usize];
        let mut add_digests = |lane: usize, digests: &mut Digests| {
            if mode == Mode::Write {
                value(lane, data);
                digest(digests, (addresses[lane] % LINE) as u32, data);
            }
        };
        if mode == Mode::Read && same(0) {
            // If all lanes read the same bytes, one lane is recorded.
            self.touch(first as u32, begin, bytes, mode, &[]);
        } else if mask >> first == u32::MAX >> (32 - count) && bytes.is_power_of_two() && same(bytes.into()) {
            let mut lane = first as u32;
            let end = lane + count;
            while lane < end {
                let address = addresses[lane as usize];
                let left = (LINE - address % LINE) as u32 / bytes;
                let lanes = left.min(end - lane);
                let mut digests = Digests::default();
                (lane..lane + lanes).for_each(|lane| add_digests(lane as usize, &mut digests));
                self.touches.list.push(Touch { lane, lanes, address, bytes, mode, digests });
                lane += lanes;
            }
        } else {
            for lane in lanes(mask) {
                let (mut digests, address) = (Digests::default(), addresses[lane]);
                add_digests(lane, &mut digests);
                self.touches.list.push(Touch { lane: lane as u32, lanes: 1, address, bytes, mode, digests });
            }
        }
    }

    /// Whether the current instruction has accessed global memory.
    pub fn has_touches(&self) -> bool {
        !self.touches.list.is_empty()
    }

    /// Searches for races of the current instruction's accesses to global memory.
    pub fn check_touches(&mut self, w: &Warp) -> Stopped<()> {
        let Some(race) = &self.race else { return Ok(()) };
        let (origin, time, scope) = (self.origin(w), race.now(w.index), self.touches.scope);
        let mut list = std::mem::take(&mut self.touches.list);
        let mut meetings = Vec::new();
        let mut open: Option<(u64, Record)> = None;
        for touch in &list {
            let line = touch.address / LINE;
            if open.as_mut().is_some_and(|(at, record)| *at == line && touch.join(record)) {
                continue;
            }
            let new = (line, touch.record(origin, w.index * 32, time, w.pc(), scope));
            if let Some((line, record)) = open.replace(new) {
                self.check_line(w, line, record, &mut meetings);
            }
        }
        if let Some((line, record)) = open {
            self.check_line(w, line, record, &mut meetings);
        }
        list.clear();
        self.touches.list = list;
        meetings.into_iter().try_for_each(|meeting| self.met(meeting))
    }

    fn check_line(&mut self, w: &Warp, line: u64, record: Record, meetings: &mut Vec<Meeting>) {
        if record.mode == Mode::Read && self.touches.seen.again(line, &record) {
            return;
        }
        let (Some(race), Some(races)) = (&self.race, self.launch.races) else { return };
        let order = |earlier: &Record, byte: u32| {
            let clock = race.clock(w.index, record.lane(byte));
            order(clock, self.index, false, earlier, byte)
        };
        races.access(line, record, &order, meetings);
    }

    /// Searches for races of an asynchronous operation's access to global memory. A lane issues the operation.
    pub fn touch_async(
        &mut self,
        w: &Warp,
        lane: u32,
        agent: Option<&Agent>,
        (address, bytes): (u64, u64),
        mode: Mode,
    ) -> Stopped<()> {
        if let Some(recorder) = &mut self.recorder {
            let kind = if mode.reads() { Kind::Read } else { Kind::Write };
            recorder.issued.add(Access::new(Object::Global, address..address + bytes, kind));
        }
        let (Some(races), Some(agent)) = (self.launch.races, agent) else { return Ok(()) };
        let (base, time, clock) = agent.identity();
        let issuer = Some(w.index * 32 + lane);
        let (origin, pc, scope) = (self.origin(w), w.pc(), Scope::Gpu);
        let mut meetings = Vec::new();
        let (mut at, end) = (address, address + bytes);
        while at < end {
            let line = at / LINE;
            let stop = end.min((line + 1) * LINE);
            let bytes = bits((at % LINE) as u32, (stop - at) as u32);
            let (digests, has_digests, first_lane, shift) = (Digests::default(), false, 0, 7);
            let access =
                Record { bytes, origin, base, issuer, first_lane, shift, time, pc, mode, scope, digests, has_digests };
            let order = |earlier: &Record, byte: u32| {
                if earlier.issuer.is_some() && earlier.same_operation(&access) {
                    return Order::Known;
                }
                order(clock, self.index, agent.in_async_proxy(), earlier, byte)
            };
            races.access(line, access, &order, &mut meetings);
            at = stop;
        }
        meetings.into_iter().try_for_each(|meeting| self.met(meeting))
    }

    /// Handles a race between two accesses of global memory. A race within the cluster ends the launch at once. A race
    /// between clusters that run at the same time is kept, so that the report does not depend on which cluster ran
    /// first.
    fn met(&mut self, meeting: Meeting) -> Stopped<()> {
        let earlier = meeting.earlier;
        let silent = self.silent_clusters.contains(&earlier.origin.cluster);
        let guess = self.launch.is_guess([earlier.pc, meeting.later.pc]);
        let meeting = Meeting { silent, guess, ..meeting };
        let beyond = earlier.origin.cluster != self.index;
        if let (true, Some(races)) = (beyond, self.launch.races) {
            races.keep(meeting);
            return Ok(());
        }
        let harmless = meeting.is_warning() || self.is_behind(&meeting) || self.is_dropped(&meeting);
        let stop = self.launch.race(&meeting);
        if harmless { self.warn(stop) } else { self.hazard(stop) }
    }

    /// Whether the later of two accesses of one warp is behind the earlier access by the warp's course. If lanes store
    /// different values by one instruction, the lowest lane's value remains.
    fn is_behind(&mut self, meeting: &Meeting) -> bool {
        let Meeting { earlier, later, address, .. } = *meeting;
        let Some(race) = self.race.as_mut().filter(|_| earlier.same_warp(&later) && later.issuer.is_none()) else {
            return false;
        };
        let course = race.course(later.base / 32);
        let [lane, other] = [later, earlier].map(|record| record.lane((address % LINE) as u32));
        if (earlier.mode, earlier.pc) == (later.mode, later.pc) {
            return later.mode == Mode::Write && course.is_together(1 << other);
        }
        course.is_behind(lane, earlier.pc, 1 << other)
    }

    /// Lets strong loads or read-modify-writes of these addresses observe the last strong writes there.
    pub fn observe_global(&mut self, w: &Warp, mask: u32, addresses: &[u64; 32], acquire: bool, draws: bool) {
        let (origin, scope) = (self.origin(w), self.touches.scope);
        let Some(race) = &mut self.race else { return };
        for lane in lanes(mask) {
            let observed = self.launch.sync.observe(addresses[lane], origin, scope);
            self.silent_clusters.extend(observed.silent.iter().flatten());
            let Some(known) = observed.known else { continue };
            if acquire {
                race.learn(w.index, 1 << lane, self.index, &known);
                continue;
            }
            let seen = known.seen.clone();
            let unfenced = if draws {
                Beyond { drawn: seen, ..Beyond::default() }
            } else {
                Beyond { polled: seen, ..Beyond::default() }
            };
            race.learn(w.index, 1 << lane, self.index, &Arc::new(unfenced));
            self.sync.observed_global.entry(w.index).or_default().join(&known);
        }
    }

    /// Publishes by strong stores or read-modify-writes (`adds`) of these addresses.
    pub fn publish_global(&mut self, w: &Warp, mask: u32, addresses: &[u64; 32], release: bool, adds: bool) {
        let (origin, scope) = (self.origin(w), self.touches.scope);
        let Some(race) = &mut self.race else { return };
        for lane in lanes(mask) {
            let published = if release {
                let mut known = None;
                race.release(w.index, 1 << lane, &mut known);
                let known = known.map(|clock| Arc::new(race.publication(&clock, self.index)));
                known.into_iter().map(|known| (scope, known)).collect()
            } else {
                let fenced = self.sync.fenced_global.get(&w.index).into_iter().flatten();
                fenced.map(|(fence, known)| (scope.min(*fence), known.clone())).collect::<Vec<_>>()
            };
            self.launch.sync.publish(addresses[lane], origin, adds, &published);
        }
    }

    /// Executes a memory fence of the lanes `mask`: observations of strong loads become knowledge, and later strong
    /// stores publish that knowledge.
    pub fn fence_global(&mut self, w: &Warp, mask: u32, scope: Scope) {
        let own = self.index;
        let Some(race) = &mut self.race else { return };
        let mut learnt = self.sync.observed_global.remove(&w.index).unwrap_or_default();
        // Another thread may have observed the write and passed it on by a barrier.
        for lane in lanes(mask) {
            if let Some(beyond) = race.clock(w.index, lane as u32).beyond() {
                learnt.seen.join(&beyond.polled);
                learnt.seen.join(&beyond.drawn);
            }
        }
        if !learnt.seen.is_empty() {
            let learnt = if scope == Scope::Gpu { learnt } else { learnt.only(own) };
            race.learn(w.index, mask, own, &Arc::new(learnt));
        }
        let mut known = None;
        race.release(w.index, mask, &mut known);
        let Some(clock) = known else { return };
        let known = Arc::new(race.publication(&clock, own));
        let fenced = self.sync.fenced_global.entry(w.index).or_default();
        match fenced.iter_mut().find(|(other, _)| *other == scope) {
            Some((_, old)) => Arc::make_mut(old).join(&known),
            None => fenced.push((scope, known)),
        }
    }
}

impl Record {
    fn same_operation(&self, o: &Record) -> bool {
        (self.origin.cluster, self.base, self.time) == (o.origin.cluster, o.base, o.time)
    }
}
