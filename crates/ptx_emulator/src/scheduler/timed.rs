//! Runs a cluster by the clock. The event with the earliest time comes next: an instruction of a warp or the end of an
//! asynchronous operation.

use super::cluster::{Cluster, Status};
use super::execute::execute;
use crate::config::fault::Fault;
use crate::config::report::Class;
use crate::machine::wait::WaitFor;
use crate::timing::card::Key;
use crate::timing::core::{NEVER, Timed};
use crate::timing::report::Why;

impl<'a> Cluster<'a> {
    /// Adds a clock to the cluster.
    pub fn timed(mut self, timed: Timed) -> Cluster<'a> {
        self.machine.timed = Some(Box::new(timed));
        self
    }

    /// Clock of the cluster. The cluster must have one.
    pub fn time(&mut self) -> &mut Timed {
        self.machine.timed.as_mut().expect("a timed cluster has a clock")
    }

    /// Time of the next event. [`NEVER`]: it depends on memory or on other clusters.
    pub fn next_time(&self) -> u64 {
        let warps = self.machine.timed.iter().flat_map(|timed| timed.warps.iter().map(|w| w.at));
        warps.min().unwrap_or(NEVER).min(self.machine.pending.soonest())
    }

    /// Sets the completion time of an operation that memory has answered.
    pub fn set_due(&mut self, id: u64, due: u64) {
        self.machine.pending.set_due(id, due);
    }

    /// Executes all events before `end`.
    pub fn run_until(&mut self, end: u64) -> Result<Status, Fault> {
        let mut soonest = self.machine.pending.soonest();
        loop {
            let (first, second) = self.earliest_warps();
            let (warp, at) = first;
            if soonest <= at {
                if soonest == NEVER {
                    return Ok(self.stopped());
                }
                if soonest >= end {
                    return Ok(Status::Running);
                }
                self.check_time()?;
                self.complete_due(soonest)?;
                soonest = self.machine.pending.soonest();
                continue;
            }
            // The warp remains the first until the next warp's time.
            let until = second.min(soonest).min(end);
            if at >= end {
                return Ok(Status::Running);
            }
            let started = self.machine.pending.next_number();
            self.check_time()?;
            loop {
                let woke = self.issue(warp)?;
                if self.machine.pending.next_number() != started {
                    soonest = self.machine.pending.soonest();
                    break;
                }
                if woke || self.time().warps[warp].at >= until {
                    break;
                }
            }
        }
    }

    /// The warp with the earliest time, its time, and the time of the next warp.
    fn earliest_warps(&mut self) -> ((usize, u64), u64) {
        let (mut first, mut second) = ((0, NEVER), NEVER);
        for (n, w) in self.time().warps.iter().enumerate() {
            if w.at < first.1 {
                second = first.1;
                first = (n, w.at);
            } else {
                second = second.min(w.at);
            }
        }
        (first, second)
    }

    /// Status of a cluster that has no next event.
    fn stopped(&self) -> Status {
        if self.is_done() { Status::Done } else { Status::Idle }
    }

    /// Whether all warps and operations have ended.
    pub fn is_done(&self) -> bool {
        self.warps.iter().all(|w| w.fragments.is_empty()) && self.machine.pending.is_empty()
    }

    /// Records that memory has answered a warp's load. The load's registers are filled at time `ready`.
    pub fn loaded(&mut self, warp: u32, load: u64, ready: u64) {
        let n = warp as usize;
        let timed = self.time();
        timed.loaded(warp, load, ready);
        if !timed.resume_after_memory(n) {
            return;
        }
        let (w, kernel) = (&self.warps[n], self.kernel);
        let Some(f) = w.fragments.get(w.current) else { return };
        let inst = &kernel.code[f.pc as usize];
        let uses = inst.uses.reads.iter().chain(&inst.uses.writes);
        self.time().await_registers(n, uses, multiplies(&inst.name));
    }

    fn complete_due(&mut self, time: u64) -> Result<(), Fault> {
        let Some(operation) = self.machine.pending.take_due(time) else { return Ok(()) };
        let name = &self.kernel.code[operation.issuer.pc as usize].name;
        let why = match name.split(['.', ':']).next() {
            Some("cp" | "st") => Why::Copy,
            Some("wgmma" | "tcgen05") => Why::Tensor,
            _ => Why::Other,
        };
        let timed = self.time();
        timed.now = time;
        timed.end = timed.end.max(time);
        self.complete(operation)?;
        self.wake(time, why);
        Ok(())
    }

    /// Issues a warp's next instruction. Returns `true` if it may have woken other warps.
    fn issue(&mut self, n: usize) -> Result<bool, Fault> {
        let timed = self.time();
        timed.now = timed.warps[n].at;
        let before = self.machine.progress;
        let class = self.next_class(n);
        let ran = execute(self.kernel, &mut self.warps[n], &mut self.machine, 1);
        let ran = ran.map_err(|stop| self.fault(n, *stop))?;
        let (now, w) = (self.time().now, &self.warps[n]);
        if w.fragments.is_empty() {
            let timed = self.time();
            timed.end = timed.end.max(timed.warps[n].at.min(NEVER - 1));
            timed.warps[n].at = NEVER;
        } else if !ran || !self.can_run(n) {
            let clock = &mut self.time().warps[n];
            (clock.since, clock.at) = (clock.at, NEVER);
        } else {
            let f = &w.fragments[w.current.min(w.fragments.len() - 1)];
            let inst = &self.kernel.code[f.pc as usize];
            if let Some(timed) = &mut self.machine.timed {
                let uses = inst.uses.reads.iter().chain(&inst.uses.writes);
                timed.await_registers(n, uses, multiplies(&inst.name));
            }
        }
        let wakes = self.machine.progress != before
            || matches!(class, Class::Barrier | Class::Async | Class::Matrix | Class::Warp | Class::Other)
            || self.warps[n].fragments.is_empty();
        if wakes {
            self.wake(now, Why::Warp);
        }
        Ok(wakes)
    }

    fn next_class(&self, n: usize) -> Class {
        let w = &self.warps[n];
        w.fragments.get(w.current).map_or(Class::Other, |f| self.kernel.code[f.pc as usize].class)
    }

    /// Whether some fragment of a warp can continue.
    pub(super) fn can_run(&self, n: usize) -> bool {
        let w = &self.warps[n];
        w.fragments.iter().any(|f| match &f.wait {
            None => true,
            // Fragments at the same position are merged when the warp is run.
            Some(WaitFor::Lanes { need, .. }) => {
                let waiting =
                    w.fragments.iter().filter(|o| matches!(o.wait, Some(WaitFor::Lanes { .. }))).map(|o| o.mask);
                need & !waiting.fold(0, |all, mask| all | mask) == 0
            }
            Some(wait) => wait.ready(&self.machine, f.mask),
        })
    }

    /// Resumes the warps whose waits an event at `time` has ended.
    fn wake(&mut self, time: u64, why: Why) {
        for n in 0..self.warps.len() {
            let timed = self.time();
            if timed.warps[n].at != NEVER || timed.awaits_memory(n) {
                continue;
            }
            let w = &self.warps[n];
            if w.fragments.is_empty() || !self.can_run(n) {
                continue;
            }
            let waited = self.warps[n].fragments.iter().find_map(|f| f.wait.as_ref());
            let (key, why) = match waited {
                Some(WaitFor::Mbarrier { .. } | WaitFor::Progress { .. }) => (Some(Key::MbarrierWake), why),
                Some(WaitFor::Barrier { .. }) => (Some(Key::BarrierLatency), Why::Barrier),
                Some(WaitFor::Cluster { .. }) => (None, Why::Barrier),
                Some(WaitFor::Operations(_) | WaitFor::Warpgroup { .. }) => (None, why),
                _ => (None, Why::Other),
            };
            let timed = self.time();
            let latency = key.map_or(0, |key| timed.card.cycles(key));
            timed.wake(n, time + latency, why);
        }
    }
}

/// Whether an instruction is a matrix product of one warp.
fn multiplies(name: &str) -> bool {
    name.starts_with("mma.")
}
