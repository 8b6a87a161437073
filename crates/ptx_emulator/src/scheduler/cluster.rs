//! A running cluster of CTAs. All of it runs on one thread, and only the schedule and its seed decide the order.
//! Clusters that cannot communicate run in parallel.

use super::execute::execute;
use super::special;
use crate::code::Kernel;
use crate::config::fault::Fault;
use crate::config::launch::Schedule;
use crate::config::report::{BufferTraffic, Role};
use crate::machine::address::{LOCAL_BASE, SHARED_BASE};
use crate::machine::pending::Operation;
use crate::machine::state::{Completion, Launch, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;

/// Instructions that a warp runs before the fair schedule turns to the next.
const FAIR_SLICE: u64 = 32;
/// Instructions after which even the worst schedule lets other warps run.
const LONG_SLICE: u64 = 4096;

/// How often threads may run out of time with nothing else happening. It takes two for each look at an mbarrier, and
/// one more ends a try that will be repeated.
const FRUITLESS_TRIES: u32 = 33;

/// How far a cluster has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It can go on.
    Running,
    /// Nothing in it can run until another cluster does something.
    Idle,
    Done,
}

/// A cluster that runs.
pub struct Cluster<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) warps: Vec<Warp>,
    pub(super) machine: Machine<'a>,
    next: usize,
    /// The progress when threads last ran out of time, and how often they have since.
    timed_out_at: (u64, u32),
}

impl<'a> Cluster<'a> {
    /// The cluster with number `index` in the grid, which runs `kernel`.
    pub fn new(kernel: &'a Kernel, launch: Launch<'a>, index: u64) -> Cluster<'a> {
        let shared_bytes = SHARED_BASE + kernel.shared_bytes + launch.config.shared_bytes;
        let machine = Machine::new(launch, index, shared_bytes, kernel.uses_tmem);
        let (per_cta, threads) = (machine.warps_per_cta, machine.threads_per_cta);
        let warp = |index: u32| {
            let (cta, role) = (index / per_cta, index % per_cta);
            let present = (threads - role * 32).min(32);
            let all = u32::MAX >> (32 - present);
            let local = LOCAL_BASE + kernel.local_bytes;
            let mut warp = Warp::new(index, cta, role, all, kernel.registers, kernel.predicates, local);
            if kernel.uses_wgmma && machine.sanitize {
                warp.written_at = vec![0; kernel.registers as usize];
            }
            for &(register, special) in &kernel.specials {
                warp.set(register, u32::MAX, &special::row(kernel, &machine, &warp, special));
                warp.define(register, u32::MAX, u32::MAX);
            }
            warp
        };
        let warps = (0..per_cta * machine.ctas.len() as u32).map(warp).collect();
        Cluster { kernel, warps, machine, next: 0, timed_out_at: (0, 0) }
    }

    /// Runs until the cluster is done, stuck, or `steps` warp instructions have passed.
    pub fn run(&mut self, steps: u64) -> Result<Status, Fault> {
        let end = self.machine.clock.now.saturating_add(steps);
        loop {
            while let Some(operation) = self.machine.pending.take_due(self.machine.clock.now) {
                self.complete(operation)?;
            }
            if self.warps.iter().all(|w| w.fragments.is_empty()) {
                while let Some(operation) = self.machine.pending.take_any(false) {
                    self.complete(operation)?;
                }
                return Ok(Status::Done);
            }
            if self.machine.clock.now >= end {
                return Ok(Status::Running);
            }
            let (first, slice) = match self.machine.launch.config.schedule {
                Schedule::Fair => (self.next, FAIR_SLICE),
                Schedule::Seed(_) => {
                    let n = self.warps.len() as u64;
                    (self.machine.clock.random.below(n) as usize, 1 + self.machine.clock.random.below(2 * FAIR_SLICE))
                }
                Schedule::Worst => (self.next, LONG_SLICE),
            };
            let n = self.warps.len();
            let mut ran = false;
            for i in (first..n).chain(0..first) {
                if !self.warps[i].fragments.is_empty() && self.run_warp(i, slice)? {
                    self.next = (i + 1) % n;
                    ran = true;
                    break;
                }
            }
            if ran {
                continue;
            }
            let newest = self.machine.launch.config.schedule == Schedule::Worst;
            match self.machine.pending.take_any(newest) {
                Some(operation) => self.complete(operation)?,
                None if self.time_out() => {}
                None => return Ok(Status::Idle),
            }
        }
    }

    /// Ends the wait of all threads that try or poll an mbarrier. A thread need not try again: it may have only looked,
    /// and go on to do what others wait for. If it does nothing but try again, that is a deadlock.
    fn time_out(&mut self) -> bool {
        let (progress, times) = self.timed_out_at;
        let times = if progress == self.machine.progress { times } else { 0 };
        if times == FRUITLESS_TRIES {
            return false;
        }
        self.timed_out_at = (self.machine.progress, times + 1);
        let mut any = false;
        for f in self.warps.iter_mut().flat_map(|w| &mut w.fragments) {
            if matches!(f.wait, Some(WaitFor::Mbarrier { .. } | WaitFor::Progress { .. })) {
                f.wait = Some(WaitFor::TimedOut);
                any = true;
            }
        }
        any
    }

    fn complete(&mut self, operation: Operation<Completion>) -> Result<(), Fault> {
        self.machine.progress += 1;
        (operation.effect)(&mut self.machine).map_err(|mut stop| {
            stop.pc.get_or_insert(operation.issuer.pc);
            self.fault(operation.issuer.warp as usize, *stop)
        })
    }

    /// Runs a warp for up to `slice` instructions; `false` if it cannot run.
    fn run_warp(&mut self, index: usize, slice: u64) -> Result<bool, Fault> {
        match execute(self.kernel, &mut self.warps[index], &mut self.machine, slice) {
            Ok(ran) => Ok(ran),
            Err(stop) => Err(self.fault(index, *stop)),
        }
    }

    /// The counters, by warp index in the CTA.
    pub fn roles(&self) -> &[Role] {
        &self.machine.roles
    }

    /// The counters, by allocation of global memory.
    pub fn buffers(&self) -> &[BufferTraffic] {
        &self.machine.buffers
    }

    /// Warp instructions issued, once for each CTA.
    pub fn cta_steps(&self) -> u64 {
        self.machine.clock.now * self.machine.ctas.len() as u64
    }

    /// The most tensor-memory columns that were allocated at once in a CTA.
    pub fn peak_tmem_columns(&self) -> u32 {
        self.machine.ctas.iter().map(|c| c.tmem.peak).max().unwrap_or(0)
    }

    /// A number that changes whenever something happens.
    pub fn progress(&self) -> u64 {
        self.machine.progress
    }
}
