//! A running cluster of CTAs. The whole cluster runs on one thread at a time, and only the schedule and its seed decide
//! the order. Clusters run in parallel. If clusters may communicate, each stops before an instruction or operation that
//! communicates, and the clusters execute these one after the other.

use super::execute::execute;
use super::special;
use super::stall::Stall;
use super::steps::Steps;
use crate::code::Kernel;
use crate::config::fault::{Fault, FaultKind, Stop};
use crate::config::launch::Schedule;
use crate::config::report::{BufferTraffic, Role};
use crate::machine::address::{LOCAL_BASE, SHARED_BASE};
use crate::machine::pending::Operation;
use crate::machine::state::{Completion, Launch, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;

/// Instructions that a warp runs before the fair schedule switches to the next warp.
const FAIR_SLICE: u64 = 32;
/// Instructions after which even the worst schedule lets other warps run.
const LONG_SLICE: u64 = 4096;

/// Number of timeouts in a row without progress after which no wait times out any more: 16 checks of an mbarrier take
/// two timeouts each, and one more timeout ends a repeated try.
const FRUITLESS_TRIES: u32 = 33;

/// State of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The cluster can continue.
    Running,
    /// The next operation of the cluster carries information between clusters.
    Held,
    /// The cluster can continue only after another cluster does something.
    Idle,
    /// Like [`Idle`](Status::Idle), but some warps run: they repeat the same steps.
    Stuck,
    Done,
}

/// A running cluster.
pub struct Cluster<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) warps: Vec<Warp>,
    pub(super) machine: Machine<'a>,
    next: usize,
    /// Operation, or instruction of a warp with the rest of its slice, that the cluster is held before.
    held_operation: Option<Operation<Completion>>,
    held_slice: Option<(usize, u64)>,
    /// Changes at the last timeout, and number of timeouts since then.
    timed_out_at: (u64, u32),
    pub(super) stall: Stall,
    /// Whether the cluster can continue only after another cluster does something, although its warps run.
    stuck: bool,
    /// Clock at which the time limit is looked at next.
    limit_at: u64,
    /// Record of the steps, for an explorer of orders.
    pub(super) steps: Steps,
}

impl<'a> Cluster<'a> {
    /// Cluster with number `index` in the grid, running `kernel`.
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
        let warps: Vec<Warp> = (0..per_cta * machine.ctas.len() as u32).map(warp).collect();
        Cluster {
            kernel,
            stall: Stall::new(warps.len()),
            warps,
            machine,
            next: 0,
            held_operation: None,
            held_slice: None,
            timed_out_at: (0, 0),
            stuck: false,
            limit_at: 0,
            steps: Steps::default(),
        }
    }

    /// Runs until the cluster is done, idle or held, or until `steps` warp instructions have passed.
    pub fn run(&mut self, steps: u64) -> Result<Status, Fault> {
        let end = self.machine.clock.now.saturating_add(steps);
        loop {
            if self.stuck {
                return Ok(Status::Stuck);
            }
            self.check_time()?;
            while let Some(operation) = self.machine.pending.take_due(self.machine.clock.now) {
                if self.holds(operation)? {
                    return Ok(Status::Held);
                }
            }
            if self.warps.iter().all(|w| w.fragments.is_empty()) {
                while let Some(operation) = self.machine.pending.take_any(false) {
                    if self.holds(operation)? {
                        return Ok(Status::Held);
                    }
                }
                return Ok(Status::Done);
            }
            if self.machine.clock.now >= end {
                return Ok(Status::Running);
            }
            if self.run_some_warp()? {
                self.look_for_a_stall()?;
                if self.machine.held {
                    return Ok(Status::Held);
                }
                continue;
            }
            let newest = self.machine.launch.config.schedule == Schedule::Worst;
            match self.machine.pending.take_any(newest) {
                Some(operation) => {
                    if self.holds(operation)? {
                        return Ok(Status::Held);
                    }
                }
                None if self.time_out() => {}
                None => return Ok(Status::Idle),
            }
        }
    }

    /// Fault if the launch has run for longer than its limit.
    pub(super) fn check_time(&mut self) -> Result<(), Fault> {
        /// Instructions between two looks at the time.
        const STRIDE: u64 = 1 << 16;
        if self.machine.clock.now < self.limit_at {
            return Ok(());
        }
        self.limit_at = self.machine.clock.now + STRIDE;
        let config = self.machine.launch.config;
        match config.time_limit {
            Some(limit) if self.machine.launch.began.elapsed() >= limit => {
                let text = format!("the launch has run for {} s, the limit", limit.as_secs_f64());
                let warp = self.warps.iter().position(|w| !w.fragments.is_empty()).unwrap_or(0);
                Err(self.at_limit(warp, *Stop::new(FaultKind::InstructionBudget, text)))
            }
            _ => Ok(()),
        }
    }

    /// Fault of an instruction. That of a limit tells what the threads wait for.
    fn at_limit(&self, warp: usize, stop: Stop) -> Fault {
        let limit = stop.kind == FaultKind::InstructionBudget;
        let mut fault = self.fault(warp, stop);
        if limit {
            self.explain_limit(&mut fault);
        }
        fault
    }

    /// At the end of a watch, finds out whether every warp waits or repeats its steps. Then completes the next operation
    /// or ends waits, if any are left. Otherwise the cluster is stuck.
    fn look_for_a_stall(&mut self) -> Result<(), Fault> {
        let (changes, now) = (self.machine.changes(), self.machine.clock.now);
        if !self.stall.window_ended(changes, now) {
            return Ok(());
        }
        if !(0..self.warps.len()).all(|n| self.stall.repeats(n) || !self.can_run(n)) {
            return Ok(());
        }
        let newest = self.machine.launch.config.schedule == Schedule::Worst;
        match self.machine.pending.take_any(newest) {
            Some(operation) => _ = self.holds(operation)?,
            None if self.time_out() => self.stall.watch_again(now),
            None => self.stuck = true,
        }
        Ok(())
    }

    /// Looks again for progress, because another cluster has changed something.
    pub fn look_again(&mut self) {
        self.stuck = false;
        self.stall.changed(self.machine.changes(), self.machine.clock.now);
    }

    /// Whether the cluster is [`Status::Stuck`].
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// Number of the cluster's changes so far.
    pub fn changes(&self) -> u64 {
        self.machine.changes()
    }

    /// Runs the first warp that can run, for one slice. Returns `false` if no warp can run.
    fn run_some_warp(&mut self) -> Result<bool, Fault> {
        let n = self.warps.len();
        let (first, slice) = match (self.machine.launch.config.schedule, self.held_slice.take()) {
            (_, Some(rest)) => rest,
            (Schedule::Fair, None) => (self.next, FAIR_SLICE),
            (Schedule::Seed(_), None) => {
                let random = &mut self.machine.clock.random;
                (random.below(n as u64) as usize, 1 + random.below(2 * FAIR_SLICE))
            }
            (Schedule::Worst, None) => (self.next, LONG_SLICE),
        };
        for i in (first..n).chain(0..first) {
            let before = self.machine.clock.now;
            if self.warps[i].fragments.is_empty() || !self.run_warp(i, slice)? {
                continue;
            }
            self.next = (i + 1) % n;
            if self.machine.held {
                self.held_slice = Some((i, slice - (self.machine.clock.now - before).min(slice - 1)));
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Completes an operation, or holds it until the cluster may communicate. Returns `true` if the operation is held.
    fn holds(&mut self, operation: Operation<Completion>) -> Result<bool, Fault> {
        self.machine.held = operation.communicates && !self.machine.may_communicate;
        match self.machine.held {
            true => self.held_operation = Some(operation),
            false => self.complete(operation)?,
        }
        Ok(self.machine.held)
    }

    /// Makes the cluster stop before every instruction or operation that carries information between clusters.
    pub fn take_turns(mut self) -> Cluster<'a> {
        self.machine.may_communicate = false;
        self
    }

    /// Executes the operation or instruction that the cluster is held before.
    pub fn communicate(&mut self) -> Result<(), Fault> {
        (self.machine.held, self.machine.may_communicate) = (false, true);
        match (self.held_operation.take(), self.held_slice.take()) {
            (Some(operation), slice) => {
                self.held_slice = slice;
                self.complete(operation)?;
            }
            (None, Some((warp, slice))) => {
                self.run_warp(warp, 1)?;
                let fair = self.machine.launch.config.schedule == Schedule::Fair;
                self.held_slice = (!fair && slice > 1).then(|| (warp, slice - 1));
            }
            (None, None) => {}
        }
        self.machine.may_communicate = false;
        Ok(())
    }

    /// Ends the wait of all threads that try or poll an mbarrier. A thread need not try again: after polling, it may
    /// continue with work that other threads wait for. Threads that only try again are in a deadlock.
    fn time_out(&mut self) -> bool {
        let (changes, times) = self.timed_out_at;
        let times = if changes == self.machine.changes() { times } else { 0 };
        if times == FRUITLESS_TRIES {
            return false;
        }
        self.timed_out_at = (self.machine.changes(), times + 1);
        let mut any = false;
        for f in self.warps.iter_mut().flat_map(|w| &mut w.fragments) {
            if matches!(f.wait, Some(WaitFor::Mbarrier { .. } | WaitFor::Progress { .. })) {
                f.wait = Some(WaitFor::TimedOut);
                any = true;
            }
        }
        any
    }

    pub(super) fn complete(&mut self, operation: Operation<Completion>) -> Result<(), Fault> {
        self.machine.progress += 1;
        self.machine.current = (operation.issuer.warp, operation.issuer.pc);
        (operation.effect)(&mut self.machine).map_err(|mut stop| {
            stop.pc.get_or_insert(operation.issuer.pc);
            self.fault(operation.issuer.warp as usize, *stop)
        })
    }

    /// Runs a warp for up to `slice` instructions. Returns `false` if the warp cannot run.
    fn run_warp(&mut self, index: usize, slice: u64) -> Result<bool, Fault> {
        if self.stall.watches(self.machine.changes(), self.machine.clock.now) {
            return self.run_watched(index, slice);
        }
        match execute(self.kernel, &mut self.warps[index], &mut self.machine, slice) {
            Ok(ran) => Ok(ran),
            Err(stop) => Err(self.at_limit(index, *stop)),
        }
    }

    /// Like [`run_warp`](Cluster::run_warp), instruction by instruction.
    fn run_watched(&mut self, index: usize, slice: u64) -> Result<bool, Fault> {
        for step in 0..slice {
            let before = self.warps[index].issued;
            match execute(self.kernel, &mut self.warps[index], &mut self.machine, 1) {
                Ok(true) => {}
                Ok(false) => return Ok(step > 0),
                Err(stop) => return Err(self.at_limit(index, *stop)),
            }
            if self.machine.held || self.warps[index].fragments.is_empty() {
                break;
            }
            let executed = self.warps[index].issued != before;
            self.stall.step(self.kernel, &mut self.warps[index], &self.machine, executed);
        }
        Ok(true)
    }

    /// Number of the cluster in the grid.
    pub fn index(&self) -> u32 {
        self.machine.index
    }

    /// Counters by warp index in the CTA.
    pub fn roles(&self) -> &[Role] {
        &self.machine.roles
    }

    /// Counters by allocation of global memory.
    pub fn buffers(&self) -> &[BufferTraffic] {
        &self.machine.buffers
    }

    /// Warp instructions issued, counted once per CTA.
    pub fn cta_steps(&self) -> u64 {
        self.machine.clock.now * self.machine.ctas.len() as u64
    }

    /// Maximum number of tensor-memory columns allocated at the same time in a CTA.
    pub fn peak_tmem_columns(&self) -> u32 {
        self.machine.ctas.iter().map(|c| c.tmem.peak).max().unwrap_or(0)
    }

    /// A number that changes with every event.
    pub fn progress(&self) -> u64 {
        self.machine.progress
    }
}
