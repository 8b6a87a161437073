//! Exploration of the orders in which the warps and asynchronous operations of a launch can make their steps. Each order
//! runs the launch from its beginning.

pub mod tree;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::code::Kernel;
use crate::config::fault::{Fault, FaultKind};
use crate::config::launch::{LaunchConfig, Schedule};
use crate::config::order::{Agent, Bounds, End, Exploration, Failure, Order};
use crate::config::report::Report;
use crate::device::{Arg, Device, Outcome, finished, most_clusters, races_between_clusters, run_rounds};
use crate::machine::footprint::Footprint;
use crate::machine::state::Launch;
use crate::module::Module;
use crate::scheduler::cluster::Cluster;
use tree::{Guide, Tree, default_choice, last_warp, preempts};

/// Runs that the search for a shorter failing order may take.
const SHRINKING_RUNS: usize = 400;

/// Follows a given order, then the default choices.
struct Replay<'o> {
    order: &'o [Agent],
    /// `true`: choices that cannot be made are left out. `false`: the first such choice ends the run.
    lenient: bool,
    at: usize,
    last: Option<Agent>,
    /// What the run did, and the number of its preemptions.
    done: Vec<Agent>,
    preemptions: u32,
    /// The choice that could not be made.
    refused: Option<(usize, Agent)>,
}

impl<'o> Replay<'o> {
    fn new(order: &'o [Agent], lenient: bool) -> Replay<'o> {
        Replay { order, lenient, at: 0, last: None, done: Vec::new(), preemptions: 0, refused: None }
    }
}

impl Guide for Replay<'_> {
    fn choose(&mut self, enabled: &[Agent]) -> Option<Agent> {
        let mut chosen = None;
        while let Some(&agent) = self.order.get(self.at) {
            self.at += 1;
            if enabled.contains(&agent) {
                chosen = Some(agent);
                break;
            }
            if !self.lenient {
                self.refused = Some((self.at, agent));
                return None;
            }
        }
        let chosen = chosen.or_else(|| default_choice(self.last, enabled))?;
        self.preemptions += u32::from(preempts(self.last, chosen, enabled));
        self.last = last_warp(self.last, chosen);
        self.done.push(chosen);
        Some(chosen)
    }

    fn stepped(&mut self, _: Footprint, _: &[Agent]) {}
}

/// Runs a launch in the order that a guide chooses. `None`: the guide gave up. If no agent can go on, the clusters run
/// on in the usual way, which ends waits with time limits and finds out who waits for whom.
fn run<'a>(kernel: &'a Kernel, launch: Launch<'a>, guide: &mut dyn Guide) -> Result<Option<Outcome>, Fault> {
    let (mut running, mut sum) = (Vec::new(), Outcome::default());
    let done = run_steps(kernel, launch, guide, &mut running, &mut sum);
    done.map(|whole| whole.then(|| std::mem::take(&mut sum))).map_err(|fault| {
        running.iter_mut().for_each(|cluster| sum.add(&Outcome::of(cluster)));
        sum.before(fault)
    })
}

/// The steps of [`run`]. Returns whether the launch ran to its end. Results of finished clusters go to `sum`.
fn run_steps<'a>(
    kernel: &'a Kernel,
    launch: Launch<'a>,
    guide: &mut dyn Guide,
    running: &mut Vec<Cluster<'a>>,
    sum: &mut Outcome,
) -> Result<bool, Fault> {
    let most = most_clusters(kernel, launch);
    let begin = |running: &mut Vec<Cluster<'a>>| {
        while running.len() < most && launch.next_cluster.load(Ordering::Relaxed) < launch.clusters {
            let index = launch.next_cluster.fetch_add(1, Ordering::Relaxed);
            let mut cluster = Cluster::new(kernel, launch, index);
            cluster.begin_steps();
            running.push(cluster);
        }
    };
    begin(running);
    let agents = |running: &[Cluster<'a>]| running.iter().flat_map(Cluster::agents).collect::<Vec<_>>();
    let mut enabled = agents(running);
    while !enabled.is_empty() {
        let Some(agent) = guide.choose(&enabled) else { return Ok(false) };
        let Some(cluster) = running.iter_mut().find(|cluster| cluster.index() == agent.cluster()) else { break };
        let (footprint, done) = cluster.step(agent);
        running.iter_mut().for_each(|cluster| cluster.wake_sleepers(&footprint));
        running.retain_mut(|cluster| {
            let done = done.is_ok() && cluster.is_done();
            if done {
                sum.add(&Outcome::of(cluster));
            }
            !done
        });
        begin(running);
        // A fault ends all agents, so the orders in which they come before it are others.
        enabled = if done.is_ok() { agents(running) } else { Vec::new() };
        guide.stepped(footprint, &enabled);
        done?;
    }
    if !running.is_empty() {
        running.iter_mut().for_each(Cluster::end_steps);
        run_rounds(kernel, launch, running, sum)?;
    }
    races_between_clusters(kernel, launch, sum)?;
    Ok(true)
}

/// A launch that is run several times, each time on the same memory.
struct Launcher<'l> {
    device: &'l mut Device,
    module: &'l Module,
    entry: &'l str,
    config: LaunchConfig,
    args: &'l [Arg],
    before: crate::machine::global::Saved,
}

impl<'l> Launcher<'l> {
    fn new(
        device: &'l mut Device,
        module: &'l Module,
        entry: &'l str,
        config: &LaunchConfig,
        args: &'l [Arg],
    ) -> Result<Launcher<'l>, Fault> {
        if !config.sanitize {
            let text = "orders are explored and replayed only at the levels default and strict, which look for hazards";
            return Err(Fault::launch(entry, text));
        }
        // The operations of a step come from its agents alone, so the schedule decides nothing else.
        let config = LaunchConfig { schedule: Schedule::Fair, ..config.clone() };
        device.begin(module, entry, &config)?;
        let before = device.memory().save();
        Ok(Launcher { device, module, entry, config, args, before })
    }

    fn run(&mut self, guide: &mut dyn Guide) -> Result<Option<Report>, Fault> {
        self.device.memory().restore(&self.before);
        self.device.with_launch(self.module, self.entry, &self.config, self.args, |kernel, launch| {
            Ok(run(kernel, launch, guide)?.map(|outcome| finished(kernel, launch, outcome)))
        })
    }

    /// Looks for an order with fewer preemptions and fewer turns that has the same fault: leaves out one turn after the
    /// other, and then all that the default choices do by themselves.
    fn shrink(&mut self, fault: Fault, order: Order) -> Failure {
        let mut replay = Replay::new(&order.0, true);
        let again = self.run(&mut replay);
        let (mut order, mut preemptions) = (replay.done, replay.preemptions);
        let mut best_fault = match again {
            Err(found) if found.is_like(&fault) => found,
            _ => return Failure { fault, order: Order(order), preemptions },
        };
        let mut runs = 0;
        let mut at = 0;
        while runs < SHRINKING_RUNS {
            let turns = turns(&order);
            let Some(turn) = turns.get(at) else { break };
            let shorter: Vec<Agent> = order[..turn.start].iter().chain(&order[turn.end..]).copied().collect();
            let mut replay = Replay::new(&shorter, true);
            let found = self.run(&mut replay);
            runs += 1;
            let weight = (replay.preemptions, self::turns(&replay.done).len());
            match found {
                Err(found) if found.is_like(&fault) && weight < (preemptions, turns.len()) => {
                    (best_fault, order, preemptions) = (found, replay.done, replay.preemptions);
                    at = 0;
                }
                _ => at += 1,
            }
        }
        while let Some(turn) = turns(&order).pop() {
            let mut replay = Replay::new(&order[..turn.start], false);
            match self.run(&mut replay) {
                Err(found) if found == best_fault && replay.preemptions <= preemptions => order.truncate(turn.start),
                _ => break,
            }
        }
        Failure { fault: best_fault, order: Order(order), preemptions }
    }
}

/// Ranges of an order in which one agent makes all steps.
fn turns(order: &[Agent]) -> Vec<std::ops::Range<usize>> {
    let mut turns: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, agent) in order.iter().enumerate() {
        match turns.last_mut() {
            Some(turn) if order[turn.start] == *agent => turn.end = at + 1,
            _ => turns.push(at..at + 1),
        }
    }
    turns
}

impl Device {
    /// Runs a kernel in all orders that its warps and asynchronous operations can take, up to bounds. Of orders that
    /// differ only in the order of independent steps, one is run. Afterwards global memory is as after the first
    /// order or, if there are faults, as before the launch.
    ///
    /// An order is a sequence of whole steps: memory is sequentially consistent, divergent lanes of a warp take the
    /// scheduler's own order, and `mbarrier.try_wait` gives up only if nothing else can go on.
    ///
    /// # Errors
    /// [`FaultKind::BadLaunch`] if the launch does not fit the kernel or does not look for hazards,
    /// [`FaultKind::Unsupported`] if the kernel needs what the emulator lacks. Other faults are in the result.
    pub fn explore(
        &mut self,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
        bounds: &Bounds,
    ) -> Result<Exploration, Fault> {
        let began = Instant::now();
        let mut launcher = Launcher::new(self, module, entry, config, args)?;
        let mut tree = Tree::new(bounds.reduction, bounds.preemptions);
        let mut found = Exploration::new();
        let (mut results, mut first) = (HashSet::new(), None);
        found.end = loop {
            let done = launcher.run(&mut tree);
            found.steps = found.steps.max(tree.steps());
            match done {
                Ok(None) => found.repeated += 1,
                Ok(Some(report)) => {
                    found.orders += 1;
                    let memory = launcher.device.memory().save();
                    results.insert(memory.digest());
                    if first.is_none() {
                        (first, found.report) = (Some(memory), Some(report));
                    }
                }
                Err(fault) if matches!(fault.kind, FaultKind::BadLaunch | FaultKind::Unsupported) => return Err(fault),
                Err(fault) => {
                    found.orders += 1;
                    if !found.failures.iter().any(|known| known.fault.is_like(&fault)) {
                        let failure = launcher.shrink(fault, tree.order());
                        found.failures.push(failure);
                    }
                    if !bounds.every_fault {
                        break End::Fault;
                    }
                }
            }
            if !tree.turn() {
                break if tree.bounded { End::Preemptions } else { End::Whole };
            }
            if found.orders + found.repeated >= bounds.orders {
                break End::Orders;
            }
            if began.elapsed() >= bounds.time {
                break End::Time;
            }
        };
        found.results = results.len();
        let memory = first.as_ref().filter(|_| found.failures.is_empty()).unwrap_or(&launcher.before);
        launcher.device.memory().restore(memory);
        Ok(found)
    }

    /// Runs a kernel in a given order.
    ///
    /// # Errors
    /// Same as [`Device::launch`]. [`FaultKind::BadLaunch`] if a step of the order cannot be made.
    pub fn replay(
        &mut self,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
        order: &Order,
    ) -> Result<Report, Fault> {
        let mut replay = Replay::new(&order.0, false);
        let report = Launcher::new(self, module, entry, config, args)?.run(&mut replay)?;
        report.ok_or_else(|| {
            let (at, agent) = replay.refused.unwrap_or((0, Agent::Warp { cluster: 0, warp: 0 }));
            let text = format!(
                "step {at} of the order cannot be made: {agent} cannot go on there; give an order of this launch"
            );
            Fault::launch(entry, text)
        })
    }
}
