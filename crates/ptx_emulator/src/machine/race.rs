//! Race detector: happens-before by vector clocks over every thread of a cluster, with FastTrack's epochs for the last
//! write and the reads since (Flanagan & Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", 2009). It
//! handles numbers of threads, bytes of memory and indices of instructions, but knows no instruction.
//!
//! Each thread's clock counts the releases of its warp. An asynchronous operation is a separate thread, called an
//! agent. An agent starts with the knowledge of the thread that issues it. A thread that waits for the agent acquires
//! the agent's knowledge.
//!
//! A clock has two halves. `seen` is the ordinary happens-before order. `proxied` is the part of it that a proxy fence
//! has made visible to the async proxy (PTX ISA, "Memory Consistency Model: Proxies"). An operation of the async proxy
//! may touch only bytes whose generic writes are in the `proxied` half of its issuer's clock.
//!
//! After the threads and agents, a clock has an entry for each warp: the time up to which the warp's initializations of
//! mbarriers are known and fenced, even if nothing else of the warp is known. The last entry stands for the end of the
//! earlier grids. A thread that waits for those grids acquires it.
//!
//! Limits:
//! - Agents take [`AGENTS`] slots in turn. Two operations that share a slot count as ordered.
//! - At most [`LATE`] loads are recorded as possibly reading after an arrival. At the limit, all records are dropped.
//! - Among the reads of a word since its last write, only the latest of each warp is kept.
//! - Other modules search for races in global memory: [`super::grid_races`] within the grid, [`super::earlier`] with
//!   earlier grids.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::beyond::{self, Beyond, Known, Snapshot};
use super::course::Course;
use crate::operand::lanes;

/// Number of slots for asynchronous operations in flight, per cluster.
pub const AGENTS: u32 = 256;

/// Maximum number of loads that may read after an arrival, per cluster.
const LATE: usize = 1 << 16;

/// A vector clock and its async-proxy half. Entries: the threads, the agents, the warps' initializations of mbarriers,
/// and the end of the earlier grids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock {
    seen: Vec<u32>,
    proxied: Vec<u32>,
    /// Knowledge of other clusters.
    beyond: Option<Arc<Beyond>>,
    /// Times that weak arrivals have passed on: the accesses were made before, but are not published.
    met: Option<Arc<Vec<u32>>>,
}

/// Joins times into a clock's weak knowledge.
fn join_times(into: &mut Option<Arc<Vec<u32>>>, from: &Arc<Vec<u32>>) {
    match into {
        None => *into = Some(from.clone()),
        Some(all) if Arc::ptr_eq(all, from) => {}
        Some(all) => Arc::make_mut(all).iter_mut().zip(from.iter()).for_each(|(a, b)| *a = (*a).max(*b)),
    }
}

impl Clock {
    fn join(&mut self, o: &Clock) {
        for (a, b) in self.seen.iter_mut().zip(&o.seen) {
            *a = (*a).max(*b);
        }
        for (a, b) in self.proxied.iter_mut().zip(&o.proxied) {
            *a = (*a).max(*b);
        }
        beyond::merge(&mut self.beyond, &o.beyond);
        o.met.iter().for_each(|met| join_times(&mut self.met, met));
    }

    /// Whether the accesses of some lanes are known at least weakly.
    fn has_met(&self, earlier: Access, mask: u32) -> bool {
        let met = |lane: usize| self.met_time(earlier.base + lane as u32) >= earlier.time;
        self.met.is_some() && lanes(mask).all(met)
    }

    /// Time of a thread or agent that is known at least weakly.
    pub fn met_time(&self, number: u32) -> u32 {
        let weak = self.met.as_ref().map_or(0, |met| met[number as usize]);
        weak.max(self.seen[number as usize])
    }

    /// Knowledge of other clusters.
    pub fn beyond(&self) -> Option<&Beyond> {
        self.beyond.as_deref()
    }

    /// Whether a time of a thread or agent of the cluster is known, and whether it is visible to the async proxy.
    pub fn reaches(&self, number: u32, time: u32) -> (bool, bool) {
        (self.seen[number as usize] >= time, self.proxied[number as usize] >= time)
    }

    fn knows_end_of_grids(&self) -> bool {
        self.seen.last() == Some(&1)
    }

    fn covers(&self, o: &Clock) -> bool {
        let ge = |a: &[u32], b: &[u32]| a.iter().zip(b).fold(true, |ok, (a, b)| ok & (a >= b));
        let beyond = || match (&self.beyond, &o.beyond) {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a.covers(b),
        };
        let met = || match (&self.met, &o.met) {
            (_, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b) || ge(a, b),
            (None, Some(b)) => ge(&self.seen, b),
        };
        ge(&self.seen, &o.seen) && ge(&self.proxied, &o.proxied) && beyond() && met()
    }
}

/// Knowledge that a release published and an acquire may obtain.
pub type Shared = Option<Arc<Clock>>;

/// Joins `from` into `into`. Shares the allocation if one covers the other.
pub fn merge(into: &mut Shared, from: &Arc<Clock>) {
    match into {
        None => *into = Some(from.clone()),
        Some(a) if Arc::ptr_eq(a, from) || a.covers(from) => {}
        Some(a) if from.covers(a) => *into = Some(from.clone()),
        Some(a) => Arc::make_mut(a).join(from),
    }
}

/// Knowledge of a warp's lanes.
struct WarpClock {
    lanes: [Arc<Clock>; 32],
    /// Time of the warp. It advances at each release of any lane.
    now: u32,
}

/// Accessor of memory: one or more lanes of a warp, or an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accessor {
    /// Thread number of the warp's lane 0, or number of the agent.
    pub base: u32,
    /// Lane mask; 1 for an agent.
    pub mask: u32,
}

/// An asynchronous operation as an accessor.
#[derive(Clone, Debug)]
pub struct Agent {
    slot: u32,
    time: u32,
    clock: Arc<Clock>,
    /// `true` if the agent accesses memory through the async proxy.
    async_proxy: bool,
    /// Knowledge of tensor memory, if it is less than the knowledge of shared memory.
    tensor: Option<Arc<Clock>>,
    /// Quarter of tensor memory whose order the agent follows.
    quarter: Option<u32>,
}

/// A store to tensor memory, complete or in flight.
#[derive(Clone, Copy)]
struct Store {
    /// Time of the agent.
    time: u32,
    quarter: u32,
    /// Issuing thread, and that thread's time of issue.
    thread: u32,
    issued: u32,
}

impl Agent {
    /// Number, time and knowledge of the agent.
    pub fn identity(&self) -> (u32, u32, &Arc<Clock>) {
        (self.slot, self.time, &self.clock)
    }

    /// Whether the agent accesses memory through the async proxy.
    pub fn in_async_proxy(&self) -> bool {
        self.async_proxy
    }

    /// The same agent, with accesses that need no proxy fence.
    pub fn without_proxy(&self) -> Agent {
        Agent { async_proxy: false, ..self.clone() }
    }

    /// The same agent, ordered after issued stores of its quarter.
    pub fn in_quarter(self, quarter: u32) -> Agent {
        Agent { quarter: Some(quarter), ..self }
    }

    /// The same agent, with only this knowledge of tensor memory.
    pub fn with_tensor_knowledge(self, known: &Shared, nothing: &Detector) -> Agent {
        Agent { tensor: Some(known.clone().unwrap_or_else(|| nothing.zero.clone())), ..self }
    }

    /// The agent with its knowledge of tensor memory.
    pub fn in_tensor_memory(&self) -> Agent {
        let clock = self.tensor.clone().unwrap_or_else(|| self.clock.clone());
        Agent { clock, async_proxy: false, ..self.clone() }
    }
}

/// Last write of a word, and the reads since that write.
#[derive(Clone, Copy, Default)]
struct Cell {
    write: Access,
    read: Access,
    /// 1 + index into `more` for the reads of further warps.
    more: u32,
    /// Combination of [`ATOMIC`], [`SPLIT`] and [`WHOLE`].
    flags: u8,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Access {
    base: u32,
    /// Lane mask. 0: no access.
    mask: u32,
    time: u32,
    pc: u32,
}

/// The write was atomic.
const ATOMIC: u8 = 1;
/// The word is tracked by bytes.
const SPLIT: u8 = 2;
/// Set in the first word of a chunk: the cell stands for all words of the chunk.
const WHOLE: u8 = 4;

/// Words per chunk of 16 bytes, the unit of copies and of the tensor cores.
const CHUNK_WORDS: usize = 4;
const CHUNK: u32 = 4 * CHUNK_WORDS as u32;

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A plain load.
    Read,
    /// A strong load, which does not race with strong writes. It is checked against earlier writes and not recorded.
    StrongRead,
    /// A plain store.
    Write,
    /// A plain store of the value that the bytes already have. It changes nothing, so it conflicts with no earlier
    /// access. Like a read, it must be ordered before a write of another value.
    SameValue,
    /// A read-modify-write or strong access, which does not race with other strong accesses.
    Atomic,
}

impl Mode {
    /// Whether the access does not write.
    pub fn reads(self) -> bool {
        matches!(self, Mode::Read | Mode::StrongRead)
    }

    /// Whether the access overwrites all earlier contents.
    fn replaces(self) -> bool {
        matches!(self, Mode::Write | Mode::Atomic)
    }

    /// Whether the access does not race with other strong accesses.
    pub fn is_strong(self) -> bool {
        matches!(self, Mode::StrongRead | Mode::Atomic)
    }
}

/// Earlier access of a race.
#[derive(Clone, Copy, Debug)]
pub struct Conflict {
    /// `true` if the earlier access wrote.
    pub wrote: bool,
    /// Accessor of the earlier access.
    pub accessor: Accessor,
    /// Instruction of the earlier access.
    pub pc: u32,
    /// `true` if the accesses are ordered, but no proxy fence separates them.
    pub only_proxy: bool,
    /// `true` if the earlier access is an ordered load that may not be complete.
    pub loading: bool,
    /// `true` if only a proxy fence is missing between a write and a later access, and a thread has read the written
    /// value in between, so the write had reached memory. The whole access is recorded.
    pub observed: bool,
    /// `true` if only weak arrivals order the two accesses ([`Detector::release_weakly`]). The whole access is recorded.
    pub met: bool,
}

/// Race detector of one cluster.
pub struct Detector {
    warps: Vec<WarpClock>,
    agent_times: Vec<u32>,
    /// For each slot, the store to tensor memory that its operation is.
    stores: Vec<Option<Store>>,
    zero: Arc<Clock>,
    threads: u32,
    next_agent: u32,
    /// For each slot, the warp that issued its operation.
    issuers: Vec<u32>,
    /// Loads whose warp arrived at an mbarrier before it used the loaded value. Key: first thread of the warp, time and
    /// instruction of the load. Value: time of the first use.
    late: FxHashMap<(u32, u32, u32), u32>,
    /// Instructions by which all lanes of a warp read together. Whoever is ordered after the read of one lane is ordered after
    /// the reads of all lanes.
    together: FxHashSet<u32>,
    /// `true`: use only the order that the manual guarantees.
    strict: bool,
    threads_per_cta: u32,
    /// Courses by warp.
    courses: Vec<Course>,
    /// Last access that is ordered after another access of its warp only by the warp's course.
    behind: Option<Conflict>,
    history: History,
    /// Accesses of asynchronous operations since the log was taken: memory, range, and whether it writes. `None`: they
    /// are not logged.
    pub log: Option<Vec<(u32, Range<u32>, bool)>>,
}

impl Detector {
    /// Detector for `warps` warps and memories of these sizes in bytes.
    pub fn new(warps: u32, memories: impl Iterator<Item = u32>, strict: bool) -> Detector {
        let threads = warps * 32;
        let n = (threads + AGENTS + warps + 1) as usize;
        let zero = Arc::new(Clock { seen: vec![0; n], proxied: vec![0; n], beyond: None, met: None });
        Detector {
            warps: (0..warps).map(|_| WarpClock { lanes: std::array::from_fn(|_| zero.clone()), now: 1 }).collect(),
            agent_times: vec![0; AGENTS as usize],
            stores: vec![None; AGENTS as usize],
            zero,
            threads,
            next_agent: 0,
            issuers: vec![0; AGENTS as usize],
            late: FxHashMap::default(),
            together: FxHashSet::default(),
            strict,
            threads_per_cta: threads,
            courses: (0..warps).map(|_| Course::default()).collect(),
            behind: None,
            history: History::new(memories),
            log: None,
        }
    }

    /// The detector of a cluster of `ctas` CTAs.
    pub fn of_ctas(self, ctas: u32) -> Detector {
        Detector { threads_per_cta: self.threads / ctas.max(1), ..self }
    }

    /// Threads of the CTA whose shared memory has number `memory`. Empty for tensor memory.
    fn owners(&self, memory: u32) -> Range<u32> {
        let first = memory * self.threads_per_cta;
        if first < self.threads { first..first + self.threads_per_cta } else { 0..0 }
    }

    /// Whether an accessor is an asynchronous operation.
    pub fn is_agent(&self, who: Accessor) -> bool {
        who.base >= self.threads
    }

    /// Warp that issued an asynchronous operation. `None`: the accessor is a lane.
    pub fn issuer(&self, who: Accessor) -> Option<u32> {
        Some(self.issuers[who.base.checked_sub(self.threads)? as usize])
    }

    /// Publishes the knowledge of the lanes `mask` of `warp` into `into`.
    pub fn release(&mut self, warp: u32, mask: u32, into: &mut Shared) {
        let clock = &mut self.warps[warp as usize];
        let base = (warp * 32) as usize;
        let mut last: Option<*const Clock> = None;
        for lane in lanes(mask) {
            let known = &clock.lanes[lane];
            if last != Some(Arc::as_ptr(known)) {
                merge(into, known);
                last = Some(Arc::as_ptr(known));
            }
        }
        if let Some(shared) = into {
            let shared = Arc::make_mut(shared);
            for lane in lanes(mask) {
                shared.seen[base + lane] = clock.now;
            }
        }
        clock.now += 1;
    }

    /// Passes on the knowledge of the lanes `mask` of `warp` by an arrival that does not publish it: a relaxed arrival, or
    /// one whose scope does not include the waiting thread. Earlier reads count as ordered, since a GPU has completed
    /// them. Earlier writes do not: the peer had written operands before an arrival of this kind, and 29 of 200 products
    /// were wrong on a B200 (NVIDIA/cutlass#3647). In the writer's own CTA they were visible behind relaxed cluster
    /// barriers: on an H200 to each of 57,600,000 reads, and to none of 115,200,000 copies too late.
    ///
    /// Writes of asynchronous operations that the lanes have seen complete count, except under `strict`: they are in
    /// memory, and the lanes have no part in them. DeepGEMM's pairs report their copies so to the CTA that multiplies
    /// (sm100_fp8_fp4_gemm_1d1d.cuh).
    pub fn release_weakly(&mut self, warp: u32, mask: u32, into: &mut Shared) {
        let mut known = None;
        self.release(warp, mask, &mut known);
        let into = Arc::make_mut(into.get_or_insert_with(|| self.zero.clone()));
        if let Some(known) = known {
            join_times(&mut into.met, &Arc::new(known.seen.clone()));
            known.met.iter().for_each(|met| join_times(&mut into.met, met));
            if !self.strict {
                let agents = self.threads as usize..(self.threads + AGENTS) as usize;
                for (into, known) in [(&mut into.seen, &known.seen), (&mut into.proxied, &known.proxied)] {
                    let times = into[agents.clone()].iter_mut().zip(&known[agents.clone()]);
                    times.for_each(|(into, known)| *into = (*into).max(*known));
                }
            }
        }
    }

    /// Makes weak knowledge count, for an operation that only needs earlier accesses to be over.
    pub fn count_weak(known: &mut Shared) {
        if let Some(known) = known
            && let Some(met) = known.met.clone()
        {
            let seen = Arc::make_mut(known).seen.iter_mut().zip(met.iter());
            seen.for_each(|(seen, met)| *seen = (*seen).max(*met));
        }
    }

    /// Returns the warp's time and advances it, so that later accesses of the warp get a later time.
    pub fn tick(&mut self, warp: u32) -> u32 {
        let now = &mut self.warps[warp as usize].now;
        *now += 1;
        *now - 1
    }

    /// Executes a fence of the lanes `mask` after initializations of mbarriers. Those threads, and all threads that
    /// acquire their knowledge, may then use the mbarriers from other CTAs and by the async proxy. Returns the time of
    /// the fence.
    pub fn fence_initializations(&mut self, warp: u32, mask: u32) -> u32 {
        let at = (self.threads + AGENTS + warp) as usize;
        let now = self.tick(warp);
        self.update(warp, mask, |old| {
            let mut fenced = (**old).clone();
            fenced.seen[at] = now;
            Arc::new(fenced)
        });
        now
    }

    /// Publishes only the initializations of mbarriers that `warp` made up to `time`.
    pub fn release_initializations(&self, warp: u32, time: u32, into: &mut Shared) {
        let clock = Arc::make_mut(into.get_or_insert_with(|| self.zero.clone()));
        let known = &mut clock.seen[(self.threads + AGENTS + warp) as usize];
        *known = time.max(*known);
    }

    /// Whether a lane knows that the thread `owner` has fenced its initializations since `time`, or knows the
    /// initializations through a proxy fence.
    pub fn knows_initializations(&self, warp: u32, lane: u32, owner: u32, time: u32) -> bool {
        let clock = self.clock(warp, lane);
        clock.seen[(self.threads + AGENTS + owner / 32) as usize] >= time || clock.proxied[owner as usize] >= time
    }

    /// Changes the knowledge of the lanes `mask` of `warp`. Lanes that share a clock keep sharing it.
    fn update(&mut self, warp: u32, mask: u32, change: impl Fn(&Arc<Clock>) -> Arc<Clock>) {
        let clock = &mut self.warps[warp as usize];
        let mut done: Option<(Arc<Clock>, Arc<Clock>)> = None;
        for lane in lanes(mask) {
            let known = &mut clock.lanes[lane];
            let new = match &done {
                Some((old, new)) if Arc::ptr_eq(old, known) => new.clone(),
                _ => change(known),
            };
            done = Some((std::mem::replace(known, new.clone()), new));
        }
    }

    /// Lets the lanes `mask` of `warp` acquire published knowledge.
    pub fn acquire(&mut self, warp: u32, mask: u32, from: &Shared) {
        let Some(from) = from else { return };
        self.update(warp, mask, |old| {
            let mut joined = Some(from.clone());
            merge(&mut joined, old);
            joined.unwrap_or_else(|| old.clone())
        });
    }

    /// Lets the lanes `mask` of `warp` know that the earlier grids have ended.
    pub fn acquire_end_of_grids(&mut self, warp: u32, mask: u32) {
        let mut ended = (*self.zero).clone();
        ended.seen.last_mut().into_iter().for_each(|end| *end = 1);
        self.acquire(warp, mask, &Some(Arc::new(ended)));
    }

    /// Whether a lane of `warp` knows that the earlier grids have ended.
    pub fn knows_end_of_grids(&self, warp: u32, lane: u32) -> bool {
        self.warps[warp as usize].lanes[lane as usize].knows_end_of_grids()
    }

    /// Executes a proxy fence of the lanes `mask`: their knowledge becomes visible to the async proxy.
    pub fn proxy_fence(&mut self, warp: u32, mask: u32) {
        let base = (warp * 32) as usize;
        let now = self.tick(warp);
        self.update(warp, mask, |old| {
            let mut fenced = (**old).clone();
            fenced.proxied = fenced.seen.clone();
            for lane in lanes(mask) {
                fenced.proxied[base + lane] = now;
            }
            if let Some(beyond) = &mut fenced.beyond {
                let beyond = Arc::make_mut(beyond);
                beyond.proxied = beyond.seen.clone();
            }
            Arc::new(fenced)
        });
    }

    /// Knowledge that a clock of this cluster publishes to other clusters. `own` is the cluster's number in the grid.
    pub fn publication(&self, clock: &Clock, own: u32) -> Beyond {
        let mut all = match &clock.beyond {
            Some(beyond) => Beyond { polled: Known::default(), drawn: Known::default(), ..(**beyond).clone() },
            None => Beyond::default(),
        };
        let times = (self.threads + AGENTS) as usize;
        let seen = Arc::new(Snapshot::of(&clock.seen[..times], self.threads));
        all.seen.add(own, &seen);
        let same = clock.seen[..times] == clock.proxied[..times];
        let proxied = || Arc::new(Snapshot::of(&clock.proxied[..times], self.threads));
        all.proxied.add(own, &if same { seen } else { proxied() });
        all
    }

    /// Lets the lanes `mask` of `warp` learn knowledge that a thread of the grid has published. `own` is this cluster's
    /// number.
    pub fn learn(&mut self, warp: u32, mask: u32, own: u32, what: &Arc<Beyond>) {
        let threads = self.threads;
        self.update(warp, mask, |old| {
            if old.beyond.as_ref().is_some_and(|known| Arc::ptr_eq(known, what)) {
                return old.clone();
            }
            let mut new = (**old).clone();
            what.seen.of(own).into_iter().for_each(|snapshot| snapshot.raise(&mut new.seen, threads));
            what.proxied.of(own).into_iter().for_each(|snapshot| snapshot.raise(&mut new.proxied, threads));
            beyond::merge(&mut new.beyond, &Some(what.clone()));
            Arc::new(new)
        });
    }

    /// Starts an asynchronous operation with the knowledge of the lanes `mask` of `warp`.
    pub fn spawn(&mut self, warp: u32, mask: u32, async_proxy: bool) -> Agent {
        let mut known = None;
        self.release(warp, mask, &mut known);
        self.spawn_from(warp, &known, async_proxy)
    }

    /// Starts an asynchronous operation of a warp with published knowledge.
    pub fn spawn_from(&mut self, warp: u32, known: &Shared, async_proxy: bool) -> Agent {
        let slot = self.next_agent;
        self.issuers[slot as usize] = warp;
        self.next_agent = (slot + 1) % AGENTS;
        self.agent_times[slot as usize] += 1;
        let clock = known.clone().unwrap_or_else(|| self.zero.clone());
        Agent {
            slot: self.threads + slot,
            time: self.agent_times[slot as usize],
            clock,
            async_proxy,
            tensor: None,
            quarter: None,
        }
    }

    /// Ends the agent: its knowledge and its accesses are added to `into`. Both proxies see its accesses.
    pub fn finish(&self, agent: &Agent, into: &mut Shared) {
        merge(into, &agent.clock);
        if let Some(shared) = into {
            let shared = Arc::make_mut(shared);
            let at = agent.slot as usize;
            shared.seen[at] = shared.seen[at].max(agent.time);
            shared.proxied[at] = shared.proxied[at].max(agent.time);
        }
    }

    /// Ends the agent: only its accesses are added to `into`, not its knowledge.
    pub fn finish_apart(&self, agent: &Agent, into: &mut Shared) {
        let clock = Arc::make_mut(into.get_or_insert_with(|| self.zero.clone()));
        let at = agent.slot as usize;
        clock.seen[at] = clock.seen[at].max(agent.time);
        clock.proxied[at] = clock.proxied[at].max(agent.time);
    }

    /// Records that a warp arrives at an mbarrier before it uses the value of a load from shared memory at `time`.
    pub fn release_load(&mut self, warp: u32, time: u32, pc: u32) {
        if self.late.len() == LATE {
            self.late.clear();
        }
        self.late.insert((warp * 32, time, pc), u32::MAX);
    }

    /// Records the first use of the value of that load.
    pub fn end_load(&mut self, warp: u32, time: u32, pc: u32) {
        self.late.insert((warp * 32, time, pc), self.warps[warp as usize].now);
    }

    /// Records that the agent is a store issued by `thread`. Agents of the same `quarter` are ordered after it once
    /// they know of its issue.
    pub fn begin_store(&mut self, agent: &Agent, thread: u32, quarter: u32) {
        let issued = agent.clock.seen[thread as usize];
        self.stores[(agent.slot - self.threads) as usize] = Some(Store { time: agent.time, quarter, thread, issued });
    }

    /// Knowledge of a lane.
    pub fn clock(&self, warp: u32, lane: u32) -> &Arc<Clock> {
        &self.warps[warp as usize].lanes[lane as usize]
    }

    /// Time of a warp.
    pub fn now(&self, warp: u32) -> u32 {
        self.warps[warp as usize].now
    }

    /// Course of a warp.
    pub fn course(&mut self, warp: u32) -> &mut Course {
        &mut self.courses[warp as usize]
    }

    /// Takes the last conflict that only the warp's course orders.
    pub fn take_behind(&mut self) -> Option<Conflict> {
        self.behind.take()
    }

    /// Records that a warp reads as a whole by this instruction.
    pub fn reads_together(&mut self, pc: u32) {
        self.together.insert(pc);
    }

    /// Remote accesses of a CTA's memory that none of its threads knows of, even weakly: the CTA's end is not ordered after
    /// them.
    pub fn unknown_to(&self, cta: u32, accesses: &[RemoteAccess]) -> Option<RemoteAccess> {
        let owners = self.owners(cta);
        let warps = &self.warps[owners.start as usize / 32..owners.end as usize / 32];
        let known = |access: &RemoteAccess| {
            let lanes = warps.iter().flat_map(|warp| &warp.lanes);
            lanes.fold(0, |time, clock| time.max(clock.met_time(access.number))) >= access.time
        };
        accesses.iter().copied().filter(|access| !known(access)).min_by_key(|access| (access.pc, access.number))
    }

    /// Forgets the accesses to `len` bytes at each of several offsets.
    pub fn forget(&mut self, memory: u32, offsets: &[u32], len: u32) {
        let cells = &mut self.history.cells[memory as usize];
        for &offset in offsets {
            for word in offset / 4..(offset + len) / 4 {
                self.history.more.clear(&mut cells[word as usize].more);
                let whole = if word.is_multiple_of(CHUNK_WORDS as u32) { WHOLE } else { 0 };
                cells[word as usize] = Cell { flags: whole, ..Cell::default() };
                self.history.split.remove(&(memory, word));
            }
        }
    }

    /// Records an access and checks it against earlier ones. Lanes of one warp access the same `len` bytes at `offset`
    /// of CTA `cta`'s shared memory.
    pub fn access(
        &mut self,
        cta: u32,
        offset: u32,
        len: u32,
        who: Accessor,
        mode: Mode,
        pc: u32,
    ) -> Result<(), Conflict> {
        let w = &self.warps[(who.base / 32) as usize];
        let clock = w.lanes[who.mask.trailing_zeros() as usize & 31].clone();
        let access = Access { base: who.base, mask: who.mask, time: w.now, pc };
        let course = Some(&self.courses[(who.base / 32) as usize]).filter(|_| !self.strict);
        let own = Some(self.owners(cta)).filter(|owners| owners.contains(&who.base));
        let weak = Some(own.unwrap_or(0..0)).filter(|_| !self.strict);
        let view = View { course, weak, ..View::of_thread(&clock, who, &self.together) };
        let result = self.history.record(cta, offset..offset + len, mode, access, &view);
        self.behind = view.behind.take();
        result
    }

    /// Like [`access`](Detector::access), for plain loads of lanes with the same knowledge. Each group is an offset and
    /// the lanes that load `len` bytes there. Returns the lanes whose loads are recorded. [`Detector::access`] must
    /// handle the other lanes, for example if they read bytes that a lane of their warp has just written.
    pub fn read_groups(&mut self, cta: u32, base: u32, groups: &[(u32, u32)], len: u32, pc: u32) -> u32 {
        let all = groups.iter().fold(0, |all, (_, mask)| all | mask);
        let w = &self.warps[(base / 32) as usize];
        let clock = w.lanes[all.trailing_zeros() as usize & 31].clone();
        if !lanes(all).all(|lane| Arc::ptr_eq(&clock, &w.lanes[lane])) {
            return 0;
        }
        let time = w.now;
        let view = View::of_thread(&clock, Accessor { base, mask: 0 }, &self.together);
        let recorded = groups.iter().filter(|&&(offset, mask)| {
            let access = Access { base, mask, time, pc };
            self.history.record(cta, offset..offset + len, Mode::Read, access, &view).is_ok()
        });
        recorded.fold(0, |all, (_, mask)| all | mask)
    }

    /// Returns `true` if lanes of a warp, which all know the same, may read the bytes by strong loads. `false`:
    /// [`Detector::access`] must handle each lane, for example if one of them has written the bytes.
    pub fn may_read_together(&mut self, cta: u32, bytes: Range<u32>, who: Accessor, pc: u32) -> bool {
        let w = &self.warps[(who.base / 32) as usize];
        let clock = w.lanes[who.mask.trailing_zeros() as usize & 31].clone();
        if !lanes(who.mask).all(|lane| Arc::ptr_eq(&clock, &w.lanes[lane])) {
            return false;
        }
        let access = Access { base: who.base, mask: who.mask, time: w.now, pc };
        let view = View::of_thread(&clock, Accessor { mask: 0, ..who }, &self.together);
        self.history.record(cta, bytes, Mode::StrongRead, access, &view).is_ok()
    }

    /// Like [`access`](Detector::access), for an asynchronous operation.
    pub fn agent_access(
        &mut self,
        agent: &Agent,
        cta: u32,
        offset: u32,
        len: u32,
        mode: Mode,
        pc: u32,
    ) -> Result<(), Conflict> {
        self.agent_accesses(agent, cta, &[offset], len, mode, pc).map_err(|(_, conflict)| conflict)
    }

    /// Like [`agent_access`](Detector::agent_access), for `len` bytes at each of several offsets. Returns the index of
    /// the first offset that conflicts. Accesses after that offset are not recorded.
    pub fn agent_accesses(
        &mut self,
        agent: &Agent,
        cta: u32,
        offsets: &[u32],
        len: u32,
        mode: Mode,
        pc: u32,
    ) -> Result<(), (usize, Conflict)> {
        if let Some(log) = &mut self.log {
            log.extend(offsets.iter().map(|&offset| (cta, offset..offset + len, !mode.reads())));
        }
        let access = Access { base: agent.slot, mask: 1, time: agent.time, pc };
        let issuer = self.issuers[(agent.slot - self.threads) as usize] * 32;
        let own = Some(self.owners(cta)).filter(|owners| mode == Mode::Write || owners.contains(&issuer));
        let stores = |quarter| IssuedStores { first: self.threads, list: &self.stores, quarter };
        let view = View {
            clock: &agent.clock,
            who: Accessor { base: agent.slot, mask: 1 },
            async_proxy: agent.async_proxy,
            is_agent: true,
            issued: agent.quarter.map(stores),
            late: Some(&self.late).filter(|late| agent.async_proxy && !late.is_empty()),
            together: &self.together,
            course: None,
            weak: Some(own.unwrap_or(0..0)).filter(|_| !self.strict),
            behind: Default::default(),
            observed: Default::default(),
            written: Default::default(),
            read: Default::default(),
        };
        for (number, &offset) in offsets.iter().enumerate() {
            let result = self.history.record(cta, offset..offset + len, mode, access, &view);
            result.and_then(|()| view.observed.take().map_or(Ok(()), Err)).map_err(|conflict| (number, conflict))?;
        }
        Ok(())
    }
}

/// An access to the shared memory of another CTA.
#[derive(Clone, Copy)]
pub struct RemoteAccess {
    /// Number and time of the thread or agent.
    pub number: u32,
    pub time: u32,
    pub pc: u32,
    /// Warp that made or issued the access.
    pub warp: u32,
}

/// Accesses of each word.
struct History {
    /// One cell per word, for each memory.
    cells: Vec<Vec<Cell>>,
    /// Words accessed in part: one cell per byte.
    split: FxHashMap<(u32, u32), [Cell; 4]>,
    more: Lists,
}

impl History {
    /// History without accesses, for memories of these sizes in bytes.
    fn new(memories: impl Iterator<Item = u32>) -> History {
        let untouched = |bytes: u32| {
            let mut cells = vec![Cell::default(); bytes.div_ceil(CHUNK) as usize * CHUNK_WORDS];
            cells.iter_mut().step_by(CHUNK_WORDS).for_each(|cell| cell.flags = WHOLE);
            cells
        };
        History { cells: memories.map(untouched).collect(), split: FxHashMap::default(), more: Lists::default() }
    }

    fn record(
        &mut self,
        cta: u32,
        range: std::ops::Range<u32>,
        mode: Mode,
        access: Access,
        view: &View<'_>,
    ) -> Result<(), Conflict> {
        let (mut at, end) = (range.start, range.end);
        while at < end {
            let first = at / CHUNK * CHUNK;
            let stop = end.min(first + CHUNK);
            let all = at == first && stop == first + CHUNK;
            let chunk = &mut self.cells[cta as usize][first as usize / 4..][..CHUNK_WORDS];
            if all && chunk[0].flags & WHOLE != 0 {
                check(&mut chunk[0], access, mode, view, &mut self.more)?;
                at = stop;
                continue;
            }
            if chunk[0].flags & WHOLE != 0 {
                open(chunk, &mut self.more);
            }
            self.record_words(cta, at..stop, mode, access, view)?;
            // The words share only this write, unless some of their bytes are tracked separately.
            let chunk = &mut self.cells[cta as usize][first as usize / 4..][..CHUNK_WORDS];
            if all && mode.replaces() && chunk.iter().all(|cell| cell.flags & SPLIT == 0) {
                chunk[0].flags |= WHOLE;
            }
            at = stop;
        }
        Ok(())
    }

    /// Records an access to bytes of a chunk that is tracked by words.
    fn record_words(
        &mut self,
        cta: u32,
        range: std::ops::Range<u32>,
        mode: Mode,
        access: Access,
        view: &View<'_>,
    ) -> Result<(), Conflict> {
        let (mut at, end) = (range.start, range.end);
        while at < end {
            let cell = &mut self.cells[cta as usize][at as usize / 4];
            if at.is_multiple_of(4) && at + 4 <= end && cell.flags & SPLIT == 0 {
                check(cell, access, mode, view, &mut self.more)?;
                at += 4;
            } else {
                at = self.record_bytes(cta, at, end, mode, access, view)?;
            }
        }
        Ok(())
    }

    /// Records an access to the bytes of one word from `at` up to at most `end`. Returns the end of the recorded bytes.
    fn record_bytes(
        &mut self,
        cta: u32,
        at: u32,
        end: u32,
        mode: Mode,
        access: Access,
        view: &View<'_>,
    ) -> Result<u32, Conflict> {
        let word = at / 4;
        let cell = &mut self.cells[cta as usize][word as usize];
        let bytes = self.split.entry((cta, word)).or_insert_with(|| {
            let mut bytes = [*cell; 4];
            bytes[1..].iter_mut().for_each(|copy| copy.more = self.more.copy(cell.more));
            bytes
        });
        cell.flags |= SPLIT;
        let stop = end.min((word + 1) * 4);
        for byte in at..stop {
            check(&mut bytes[(byte % 4) as usize], access, mode, view, &mut self.more)?;
        }
        if stop - at == 4 && mode.replaces() {
            *cell = Cell { flags: bytes[0].flags & ATOMIC, ..bytes[0] };
            self.split.remove(&(cta, word));
        }
        Ok(stop)
    }
}

/// Switches a chunk to tracking by words.
fn open(chunk: &mut [Cell], more: &mut Lists) {
    let first = &mut chunk[0];
    first.flags &= !WHOLE;
    let first = *first;
    for word in &mut chunk[1..] {
        *word = Cell { more: more.copy(first.more), ..first };
    }
}

/// Lists of reads, named by 1 + their index. 0 is the empty list.
#[derive(Default)]
struct Lists {
    all: Vec<Vec<Access>>,
    free: Vec<u32>,
}

impl Lists {
    fn get(&mut self, list: u32) -> Option<&mut Vec<Access>> {
        self.all[..].get_mut((list as usize).wrapping_sub(1))
    }

    fn push(&mut self, list: &mut u32, access: Access) {
        if *list == 0 {
            *list = self.free.pop().unwrap_or_else(|| {
                self.all.push(Vec::new());
                self.all.len() as u32
            });
        }
        self.all[*list as usize - 1].push(access);
    }

    /// Returns a copy of a list.
    fn copy(&mut self, list: u32) -> u32 {
        let mut copy = 0;
        let Some(reads) = self.get(list).map(|list| list.clone()) else { return 0 };
        reads.into_iter().for_each(|read| self.push(&mut copy, read));
        copy
    }

    fn clear(&mut self, list: &mut u32) {
        let list = std::mem::take(list);
        if let Some(reads) = self.get(list) {
            reads.clear();
            self.free.push(list);
        }
    }
}

struct View<'a> {
    clock: &'a Clock,
    who: Accessor,
    async_proxy: bool,
    /// Whether the accessor is an asynchronous operation.
    is_agent: bool,
    /// Stores that the accessor is ordered after before they are complete.
    issued: Option<IssuedStores<'a>>,
    /// Loads that may still read after an arrival.
    late: Option<&'a FxHashMap<(u32, u32, u32), u32>>,
    /// Instructions by which all lanes of a warp read together.
    together: &'a FxHashSet<u32>,
    /// Course of the accessor's warp, if the course counts as an order.
    course: Option<&'a Course>,
    /// Threads whose writes count as ordered by weak arrivals, with a warning. `None`: weak arrivals give no order.
    weak: Option<Range<u32>>,
    /// Last conflict that the course orders.
    behind: std::cell::Cell<Option<Conflict>>,
    /// Last conflict that is resolved because a thread has read the written value.
    observed: std::cell::Cell<Option<Conflict>>,
    /// Last write known to the accessor, and recent known reads. Adjacent words mostly have the same accesses.
    written: std::cell::Cell<Access>,
    read: [std::cell::Cell<Answer>; 4],
}

/// Whether an access is known.
#[derive(Clone, Copy, Default)]
struct Answer {
    access: Access,
    known: bool,
}

/// Stores of a quarter of tensor memory.
struct IssuedStores<'a> {
    /// Number of the first agent.
    first: u32,
    list: &'a [Option<Store>],
    quarter: u32,
}

impl IssuedStores<'_> {
    /// Whether the access is a store of the quarter whose issue is known to `clock`.
    fn contain(&self, access: Access, clock: &Clock) -> bool {
        let slot = access.base.checked_sub(self.first);
        slot.and_then(|slot| self.list[slot as usize]).is_some_and(|store| {
            let issued = clock.seen[store.thread as usize] > store.issued;
            store.time == access.time && store.quarter == self.quarter && issued
        })
    }
}

impl View<'_> {
    /// View of a thread.
    fn of_thread<'a>(clock: &'a Clock, who: Accessor, together: &'a FxHashSet<u32>) -> View<'a> {
        View {
            clock,
            who,
            async_proxy: false,
            is_agent: false,
            issued: None,
            late: None,
            together,
            course: None,
            weak: None,
            behind: Default::default(),
            observed: Default::default(),
            written: Default::default(),
            read: Default::default(),
        }
    }

    /// Conflict with an earlier write. `None`: the accessor is ordered after it.
    #[inline(always)]
    fn conflict_with_write(&self, earlier: Access) -> Option<Conflict> {
        if self.written.get() == earlier {
            return None;
        }
        let conflict = self.find_conflict(earlier, true);
        if conflict.is_none() {
            self.written.set(earlier);
        }
        conflict
    }

    /// Whether the accessor is ordered after an earlier read.
    #[inline(always)]
    fn knows_read(&self, earlier: Access) -> bool {
        // Thread numbers differ above the lane bits, agent numbers below.
        let slot = &self.read[(earlier.base ^ (earlier.base / 32)) as usize % self.read.len()];
        let last = slot.get();
        if last.access == earlier {
            return last.known;
        }
        let known = self.find_conflict(earlier, false).is_none();
        slot.set(Answer { access: earlier, known });
        known
    }

    /// Conflict with an earlier read. `None`: the accessor is ordered after it.
    #[inline(always)]
    fn conflict_with_read(&self, earlier: Access) -> Option<Conflict> {
        if self.knows_read(earlier) { None } else { self.find_conflict(earlier, false) }
    }

    /// Whether the accessor is behind the accesses of lanes of its own warp.
    fn is_behind(&self, earlier: Access, others: u32) -> bool {
        let lane = self.who.mask.trailing_zeros();
        let own = |_: &&Course| earlier.base == self.who.base;
        self.course.filter(own).is_some_and(|course| course.is_behind(lane, earlier.pc, others))
    }

    fn find_conflict(&self, earlier: Access, wrote: bool) -> Option<Conflict> {
        let mut missing = 0u32;
        let mut unfenced = 0u32;
        let (seen, proxied) = (&self.clock.seen, &self.clock.proxied);
        let own = if earlier.base == self.who.base { self.who.mask } else { 0 };
        for lane in lanes(earlier.mask) {
            let at = earlier.base as usize + lane;
            let mine = own >> lane & 1 == 1;
            missing |= u32::from(!mine && seen[at] < earlier.time) << lane;
            unfenced |= u32::from(!mine && proxied[at] < earlier.time) << lane;
        }
        let report = |mask, only_proxy, loading| {
            let accessor = Accessor { base: earlier.base, mask };
            Some(Conflict { wrote, accessor, pc: earlier.pc, only_proxy, loading, observed: false, met: false })
        };
        let late = self.late.filter(|_| !wrote && missing == 0);
        let used = late.and_then(|late| late.get(&(earlier.base, earlier.time, earlier.pc)));
        let reads_on = |&lane: &usize| used.is_some_and(|&used| seen[earlier.base as usize + lane] < used);
        let ordered_by_issue = || self.issued.as_ref().is_some_and(|issued| issued.contain(earlier, self.clock));
        let read_together = || {
            // The last warp of a CTA may have fewer threads.
            let mut lanes = seen[earlier.base as usize..].iter().take(32);
            !wrote && self.together.contains(&earlier.pc) && lanes.any(|&lane| lane >= earlier.time)
        };
        if missing != 0 && (ordered_by_issue() || read_together()) {
            None
        } else if missing != 0 && self.is_behind(earlier, missing) {
            self.behind.set(report(missing, false, false));
            None
        } else if let Some(owners) = self.weak.as_ref().filter(|_| missing != 0 && self.clock.has_met(earlier, missing))
            && (!wrote || owners.contains(&earlier.base))
        {
            if wrote {
                let conflict = report(missing, false, false).map(|conflict| Conflict { met: true, ..conflict });
                if self.is_agent { &self.observed } else { &self.behind }.set(conflict);
            }
            None
        } else if missing != 0 {
            report(missing, false, false)
        } else if self.async_proxy && unfenced != 0 && wrote {
            report(unfenced, true, false)
        } else if let Some(lane) = lanes(earlier.mask).find(reads_on) {
            report(1 << lane, false, true)
        } else {
            None
        }
    }
}

#[inline(always)]
fn check(cell: &mut Cell, access: Access, mode: Mode, view: &View<'_>, more: &mut Lists) -> Result<(), Conflict> {
    let both_atomic = mode.is_strong() && cell.flags & ATOMIC != 0;
    if cell.write.mask != 0
        && mode != Mode::SameValue
        && !both_atomic
        && let Some(conflict) = view.conflict_with_write(cell.write)
    {
        if !conflict.only_proxy || mode.reads() || cell.read.mask == 0 {
            return Err(conflict);
        }
        view.observed.set(Some(Conflict { observed: true, ..conflict }));
    }
    if mode == Mode::StrongRead {
        return Ok(());
    }
    if !mode.replaces() {
        let same = |r: &Access| r.base == access.base;
        if cell.read.mask == 0 || same(&cell.read) {
            let joined = cell.read.mask != 0 && cell.read.time == access.time;
            let mask = access.mask | if joined { cell.read.mask } else { 0 };
            // Earlier reads by other lanes of this warp are dropped: only the latest read of each warp is kept.
            cell.read = Access { mask, ..access };
        } else if let Some(r) = more.get(cell.more).and_then(|list| list.iter_mut().find(|r| same(r))) {
            let mask = access.mask | if r.time == access.time { r.mask } else { 0 };
            *r = Access { mask, ..access };
        } else if view.knows_read(cell.read) {
            cell.read = access;
        } else {
            more.push(&mut cell.more, access);
        }
        return Ok(());
    }
    if cell.read.mask != 0
        && let Some(conflict) = view.conflict_with_read(cell.read)
    {
        return Err(conflict);
    }
    if let Some(list) = more.get(cell.more) {
        if let Some(conflict) = list.iter().find_map(|read| view.conflict_with_read(*read)) {
            return Err(conflict);
        }
        more.clear(&mut cell.more);
    }
    let atomic = if mode == Mode::Atomic { ATOMIC } else { 0 };
    *cell = Cell { write: access, flags: cell.flags & (SPLIT | WHOLE) | atomic, ..Cell::default() };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The first conflict does not depend on how an access is split into pieces.
        #[test]
        fn chunks_words_and_bytes_give_the_same_races(
            steps in prop::collection::vec((0u32..2, 0u32..2, 0u32..32, 0u32..6, 0usize..5), 1..40),
        ) {
            const MODES: [Mode; 5] = [Mode::Read, Mode::StrongRead, Mode::Write, Mode::SameValue, Mode::Atomic];
            let [mut whole, mut bytes] = [(); 2].map(|()| Detector::new(2, [32].into_iter(), false));
            for (pc, (warp, of, at, size, mode)) in steps.into_iter().enumerate() {
                let who = lane(warp, of);
                if size == 5 {
                    // One warp passes its knowledge to the other.
                    for d in [&mut whole, &mut bytes] {
                        let mut told = None;
                        d.release(warp, u32::MAX, &mut told);
                        d.acquire(1 - warp, u32::MAX, &told);
                    }
                    continue;
                }
                let len = 1 << size;
                let first = at / len * len;
                let found = whole.access(0, first, len, who, MODES[mode], pc as u32);
                let mut each = (first..first + len).map(|at| bytes.access(0, at, 1, who, MODES[mode], pc as u32));
                let expected = each.find_map(Result::err);
                prop_assert_eq!(found.err().map(|c| (c.pc, c.accessor)), expected.map(|c| (c.pc, c.accessor)));
                if expected.is_some() {
                    break;
                }
            }
        }
    }

    fn lane(warp: u32, lane: u32) -> Accessor {
        Accessor { base: warp * 32, mask: 1 << lane }
    }

    #[test]
    fn unordered_writes_conflict_until_a_barrier_orders_them() {
        let mut d = Detector::new(2, [64].into_iter(), false);
        d.access(0, 0, 4, lane(0, 0), Mode::Write, 7).unwrap();
        let c = d.access(0, 0, 4, lane(1, 0), Mode::Read, 8).unwrap_err();
        assert!(c.wrote && c.pc == 7 && c.accessor == lane(0, 0));
        let mut barrier = None;
        d.release(0, u32::MAX, &mut barrier);
        d.release(1, u32::MAX, &mut barrier);
        d.acquire(1, u32::MAX, &barrier);
        d.access(0, 0, 4, lane(1, 0), Mode::Write, 8).unwrap();
        d.access(0, 0, 4, lane(0, 0), Mode::Read, 9).unwrap_err();
    }

    #[test]
    fn neighboring_bytes_do_not_conflict() {
        let mut d = Detector::new(1, [64].into_iter(), false);
        d.access(0, 0, 1, lane(0, 0), Mode::Write, 0).unwrap();
        d.access(0, 1, 1, lane(0, 1), Mode::Write, 0).unwrap();
        d.access(0, 0, 4, lane(0, 2), Mode::Read, 0).unwrap_err();
    }

    #[test]
    fn async_access_needs_order_and_a_proxy_fence() {
        let mut d = Detector::new(1, [64].into_iter(), false);
        d.access(0, 0, 4, lane(0, 0), Mode::Write, 1).unwrap();
        let early = d.spawn(0, 1, true);
        let c = d.agent_access(&early, 0, 0, 4, Mode::Read, 2).unwrap_err();
        assert!(c.only_proxy);
        d.proxy_fence(0, 1);
        let late = d.spawn(0, 1, true);
        d.agent_access(&late, 0, 0, 4, Mode::Read, 2).unwrap();
        // Overwriting bytes that the agent reads is a conflict until a thread has waited for the agent.
        d.access(0, 0, 4, lane(0, 0), Mode::Write, 3).unwrap_err();
        let mut done = None;
        d.finish(&late, &mut done);
        d.acquire(0, 1, &done);
        d.access(0, 0, 4, lane(0, 0), Mode::Write, 3).unwrap();
    }
}
