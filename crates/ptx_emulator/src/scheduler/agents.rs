//! A cluster as a set of agents that an explorer chooses from: warps, and asynchronous operations in flight.
//!
//! A step of a warp is one instruction that other agents may notice, with all instructions up to the next such
//! instruction. A step of an operation is its completion. Divergent lanes of a warp run in the scheduler's own order.

use std::collections::BTreeSet;
use std::collections::hash_map::Entry;

use super::cluster::Cluster;
use super::execute::execute;
use super::stall::Decisive;
use super::steps::Loop;
use crate::code::Kernel;
use crate::config::fault::Fault;
use crate::config::order::Agent;
use crate::machine::barrier::COUNT;
use crate::machine::footprint::{Access, Arriving, Footprint, Kind, Moment, Object, Recorder};
use crate::machine::pending::Operation;
use crate::machine::state::{Completion, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;

/// Instructions whose steps record all that they touch. The others count as touching [`Object::Rest`].
const RECORDED: [&str; 25] = [
    "ld",
    "ldu",
    "st",
    "atom",
    "red",
    "mbarrier.",
    "bar.",
    "barrier.",
    "fence",
    "membar",
    "cp.async.",
    "cp.reduce.",
    "wgmma.",
    "wmma.",
    "ldmatrix",
    "stmatrix",
    "prefetch",
    "bra",
    "brx",
    "ret",
    "exit",
    "multimem.",
    "call",
    "nanosleep",
    "trap",
];
/// Instructions of tensor memory (`tcgen05`) whose steps record all that they touch. The other `tcgen05` instructions
/// also take a turn in the order of a tensor core.
const RECORDED_TCGEN05: [&str; 4] = ["ld", "st", "wait", "fence"];

/// Whether an instruction may touch something that other agents see.
fn is_visible(kernel: &Kernel, w: &Warp, pc: u32) -> bool {
    let uses = &kernel.code[pc as usize].uses;
    uses.acts && uses.jump.is_none() && !kernel.is_private(pc) || !w.polls.is_empty()
}

/// Whether an instruction's step records all that it touches.
fn is_recorded(name: &str) -> bool {
    match name.strip_prefix("tcgen05.") {
        Some(rest) => RECORDED_TCGEN05.iter().any(|start| rest.starts_with(start)),
        None => RECORDED.iter().any(|start| name.starts_with(start)),
    }
}

impl Machine<'_> {
    /// The recorder of a machine whose orders are explored.
    fn recorded(&mut self) -> &mut Recorder {
        self.recorder.get_or_insert_default()
    }

    /// Moves what the race detector has logged to the recorder.
    fn take_log(&mut self) {
        let (cluster, ctas) = (self.index, self.ctas.len() as u32);
        let Some(log) = self.race.as_mut().and_then(|race| race.log.replace(Vec::new())) else { return };
        let issued = &mut self.recorded().issued;
        for (memory, range, writes) in log {
            let kind = if writes { Kind::Write } else { Kind::Read };
            let (begin, end) = (range.start.into(), range.end.into());
            issued.add(Access::new(Object::Memory { cluster, memory }, begin..end, kind));
            if memory < ctas && ctas > 1 {
                issued.add(Access::of(Object::Exit { cluster, cta: memory }, Kind::Read));
            }
        }
    }
}

impl Cluster<'_> {
    /// Begins to record what steps touch.
    pub fn begin_steps(&mut self) {
        self.machine.recorder = Some(Box::default());
        if let Some(race) = &mut self.machine.race {
            race.log = Some(Vec::new());
        }
    }

    /// Makes the cluster run on with other clusters in the usual way.
    pub fn end_steps(&mut self) {
        self.machine.recorder = None;
        self.machine.may_communicate = false;
        if let Some(race) = &mut self.machine.race {
            race.log = None;
        }
    }

    /// Agents that can make a step: warps in ascending order, then operations in the order of issue.
    pub fn agents(&self) -> Vec<Agent> {
        let cluster = self.machine.index;
        let steps = &self.steps;
        let runs = |warp: &u32| !steps.asleep.contains_key(warp) && self.can_run(*warp as usize);
        let warps = (0..self.warps.len() as u32).filter(runs).map(|warp| Agent::Warp { cluster, warp });
        let operations = self.machine.pending.ready().filter_map(|operation| {
            let &(warp, number) = steps.names.get(&operation.id)?;
            Some(Agent::Operation { cluster, warp, number })
        });
        warps.chain(operations).collect()
    }

    /// Wakes warps that repeat reads of something that a step has changed.
    pub fn wake_sleepers(&mut self, step: &Footprint) {
        self.steps.asleep.retain(|_, reads| !step.changes_what(reads));
    }

    /// Makes a step of an agent that [`agents`](Cluster::agents) lists. The footprint of a step that ends the launch
    /// conflicts with all others.
    pub fn step(&mut self, agent: Agent) -> (Footprint, Result<(), Fault>) {
        let done = match agent {
            Agent::Warp { warp, .. } => self.step_warp(warp as usize),
            Agent::Operation { warp, number, .. } => {
                let id = self.steps.names.iter().find(|(_, name)| **name == (warp, number)).map(|(id, _)| *id);
                match id.and_then(|id| self.machine.pending.take(id)) {
                    Some(operation) => self.step_operation(operation),
                    None => Ok(()),
                }
            }
        };
        self.name_operations(agent.warp());
        let mut footprint = std::mem::take(self.machine.recorded()).own;
        if done.is_err() {
            footprint = Footprint::everything();
        }
        footprint.sort();
        (footprint, done)
    }

    fn step_operation(&mut self, operation: Operation<Completion>) -> Result<(), Fault> {
        let (cluster, id) = (self.machine.index, operation.id);
        let mut footprint = self.steps.claims.remove(&id).unwrap_or_default().at(Moment::Completion);
        // An operation that this one starts continues its work.
        self.machine.recorded().issued = footprint.clone();
        footprint.add(Access::of(Object::Operation { cluster, id }, Kind::Write));
        for &id in &operation.after {
            footprint.add(Access::of(Object::Operation { cluster, id }, Kind::Await { phase: 0 }));
        }
        if operation.communicates {
            footprint.add(Access::of(Object::Rest, Kind::Write));
        }
        self.machine.recorded().own = footprint;
        self.complete(operation)
    }

    /// Gives names to operations that `warp` has just issued, and keeps what operations in flight will touch. An operation
    /// that another one continues has its number since its issue, so that its name does not depend on the order. Returns
    /// whether an operation has begun.
    fn name_operations(&mut self, warp: u32) -> bool {
        let steps = &mut self.steps;
        let next = self.machine.pending.next_number();
        let issued = steps.issued.entry(warp).or_default();
        for id in steps.last + 1..=next {
            *issued += 1;
            steps.names.insert(id, (warp, *issued));
        }
        steps.last = next;
        let recorder = &self.machine.recorder;
        let mut any = false;
        for operation in self.machine.pending.all() {
            if let Entry::Vacant(claim) = steps.claims.entry(operation.id) {
                claim.insert(recorder.as_ref().map(|recorder| recorder.issued.clone()).unwrap_or_default());
                any = true;
            }
        }
        any
    }

    /// Records what the executed instruction's operations will touch.
    fn record_issued(&mut self, n: usize) {
        self.machine.take_log();
        let starts = self.name_operations(n as u32);
        // `tcgen05.st` writes at once; its operation is only the end of the wait for it.
        let at_once = self.kernel.code[self.machine.current.1 as usize].name.starts_with("tcgen05.st");
        let moment = if starts && !at_once { Moment::Issue } else { Moment::Whole };
        let recorder = self.machine.recorded();
        let issued = std::mem::take(&mut recorder.issued);
        recorder.own.extend(&issued.at(moment));
    }

    fn step_warp(&mut self, n: usize) -> Result<(), Fault> {
        self.record_ended_waits(n);
        *self.steps.steps.entry(n as u32).or_default() += 1;
        for executed in 0u64.. {
            self.check_time()?;
            let (w, kernel) = (&self.warps[n], self.kernel);
            let runs = |wait: &Option<WaitFor>, mask| wait.as_ref().is_none_or(|wait| wait.ready(&self.machine, mask));
            let visible = |pc| is_visible(kernel, w, pc);
            let at_visible = w.fragments.iter().any(|f| runs(&f.wait, f.mask) && visible(f.pc));
            if executed > 0 && at_visible && !self.machine.recorder.as_ref().is_none_or(|r| r.own.is_empty()) {
                break;
            }
            let (changes, phases) = (self.machine.changes(), self.phases(n));
            if !execute(kernel, &mut self.warps[n], &mut self.machine, 1).map_err(|stop| self.fault(n, *stop))? {
                if executed == 0 {
                    // Its lanes wait for each other in a way that only the usual run resolves.
                    self.steps.asleep.insert(n as u32, Footprint::default());
                }
                break;
            }
            self.record_issued(n);
            let changed = self.machine.changes() != changes;
            self.record_rest(n, changed);
            if self.warps[n].fragments.is_empty() {
                self.record_exit(n, phases);
                break;
            }
            if self.repeats(n) {
                break;
            }
        }
        let reads = self.machine.recorder.as_ref().map(|recorder| recorder.own.clone()).unwrap_or_default();
        let loops = self.steps.loops.entry(n as u32).or_default();
        loops.iter_mut().for_each(|open| open.reads.extend(&reads));
        self.rest(n, reads);
        Ok(())
    }

    /// Lets a warp sleep that polls in vain. Nothing that it polls changes before another agent's step.
    fn rest(&mut self, n: usize, mut reads: Footprint) {
        let polls = |wait: &Option<WaitFor>| matches!(wait, Some(WaitFor::Progress { .. }));
        if self.warps[n].fragments.iter().any(|f| polls(&f.wait)) {
            reads.sort();
            let runs = |wait: &Option<WaitFor>, mask| match wait {
                None => true,
                Some(WaitFor::Progress { .. }) => false,
                Some(wait) => wait.ready(&self.machine, mask),
            };
            if !self.warps[n].fragments.iter().any(|f| runs(&f.wait, f.mask)) {
                self.steps.asleep.insert(n as u32, reads);
            }
        }
    }

    /// Records what the waits were for that have ended when a warp begins its step.
    fn record_ended_waits(&mut self, n: usize) {
        let cluster = self.machine.index;
        let ended = |wait: &&WaitFor, mask| wait.ready(&self.machine, mask);
        let waits: Vec<WaitFor> = self.warps[n]
            .fragments
            .iter()
            .filter_map(|f| f.wait.as_ref().filter(|wait| ended(wait, f.mask)).cloned())
            .collect();
        for wait in waits {
            match wait {
                WaitFor::Barrier { cta, id, generation } => {
                    let object = Object::Barrier { cluster, cta, id };
                    self.machine.record(object, 0..1, Kind::Await { phase: generation });
                }
                WaitFor::Operations(ids) => {
                    for id in ids {
                        self.machine.record(Object::Operation { cluster, id }, 0..1, Kind::Await { phase: 0 });
                    }
                }
                WaitFor::Columns { .. } | WaitFor::PeerAllocation { .. } | WaitFor::Registers { .. } => {
                    self.machine.record(Object::Rest, 0..1, Kind::Read);
                }
                _ => {}
            }
        }
    }

    /// Records what the executed instruction touches beside memory.
    fn record_rest(&mut self, n: usize, changed: bool) {
        let pc = self.machine.current.1;
        let inst = &self.kernel.code[pc as usize];
        let operates = inst.uses.acts && inst.uses.jump.is_none();
        if operates && !is_recorded(&inst.name) && !self.kernel.is_private(pc) {
            self.machine.record(Object::Rest, 0..1, Kind::Write);
        }
        let arrives = operates && (inst.name.starts_with("bar.") || inst.name.starts_with("barrier."));
        for open in self.steps.loops.entry(n as u32).or_default() {
            open.body.insert(pc);
            open.changed |= changed || arrives;
        }
    }

    /// Phases of the barriers of a warp's CTA, and of the cluster's barrier.
    fn phases(&self, n: usize) -> ([u64; COUNT as usize], u64) {
        let barriers = &self.machine.ctas[self.warps[n].cta as usize].barriers;
        (std::array::from_fn(|id| barriers[id].generation), self.machine.cluster_barrier.generation)
    }

    /// Records that the last threads of a warp have exited, which counts as an arrival at all barriers. `phases`: the
    /// phases of the barriers before the exit.
    fn record_exit(&mut self, n: usize, phases: ([u64; COUNT as usize], u64)) {
        let (cluster, cta) = (self.machine.index, self.warps[n].cta);
        let exits = Kind::Arrive(Arriving::uncounted(0, false));
        self.machine.record(Object::Exit { cluster, cta }, 0..1, exits);
        let after = self.phases(n);
        for (id, (phase, after)) in (0..).zip(phases.0.into_iter().zip(after.0)) {
            let kind = Kind::Arrive(Arriving::uncounted(phase, after != phase));
            self.machine.record(Object::Barrier { cluster, cta, id }, 0..1, kind);
        }
        let kind = Kind::Arrive(Arriving::uncounted(phases.1, after.1 != phases.1));
        self.machine.record(Object::ClusterBarrier(cluster), 0..1, kind);
    }

    /// Whether a warp has come to the head of a loop again, with the same values in all that decides its course, and
    /// without having changed anything. It then sleeps until another agent changes what it has read.
    fn repeats(&mut self, n: usize) -> bool {
        let w = &self.warps[n];
        let pc = self.machine.current.1;
        let [only] = &w.fragments[..] else { return false };
        if only.pc > pc || only.wait.is_some() || self.kernel.code[pc as usize].uses.jump.is_none() {
            return false;
        }
        let head = only.pc;
        let step = self.steps.steps.get(&(n as u32)).copied().unwrap_or_default();
        let loops = self.steps.loops.entry(n as u32).or_default();
        if loops.iter().any(|open| open.head == head && open.step == step) {
            return false;
        }
        let now = self.machine.recorder.as_ref().map(|recorder| recorder.own.clone()).unwrap_or_default();
        // Loops inside of this one have ended.
        loops.retain(|open| open.head <= head);
        let mut repeats = None;
        if let Some(open) = loops.iter_mut().find(|open| open.head == head) {
            let same = || Decisive::of(self.kernel, &open.body).agrees(w, &open.state);
            if !open.changed && w.is_at(&open.state) && same() {
                open.reads.extend(&now);
                repeats = Some(std::mem::take(&mut open.reads));
            }
        }
        loops.retain(|open| open.head < head);
        let (body, reads) = (BTreeSet::new(), Footprint::default());
        loops.push(Loop { head, state: w.state(), body, reads, changed: false, step });
        let Some(mut reads) = repeats else { return false };
        reads.sort();
        self.steps.asleep.insert(n as u32, reads);
        true
    }
}
