//! Launches by the clock of a GPU. SMs run in windows that are no longer than the shortest round trip to L2. At the end
//! of each window, L2 and DRAM answer the requests in order of time. Repeated launches therefore have the same times.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::code::Kernel;
use crate::config::fault::Fault;
use crate::machine::state::Launch;
use crate::scheduler::cluster::Cluster;
use crate::scheduler::slice::values_only;
use crate::timing::calendar::Calendar;
use crate::timing::card::{Card, Key, Room};
use crate::timing::core::{Core, NEVER, Timed};
use crate::timing::cost::Cost;
use crate::timing::memory::{Memory, Request, Waiter};
use crate::timing::report::{BUCKET, Phase, RoleTime, Sample, Span, Time, Unit, Usage, Why};
use crate::timing::sass::Listing;

/// Registers per SM.
const REGISTERS: u32 = 65536;
/// Shared memory per CTA that the system reserves, in bytes.
const SYSTEM_SHARED: u32 = 1024;
/// Number of SMs that are drawn.
const DRAWN: usize = 2;
/// Number of parts of a launch, for the detection of phases.
const PARTS: u64 = 24;

/// Time of consecutive launches on a GPU.
pub struct Timeline {
    card: Arc<Card>,
    listings: Vec<Arc<Listing>>,
    values: bool,
    drawn: bool,
    /// Number of SMs that are simulated. `None`: all.
    sample: Option<u32>,
    memory: Memory,
    /// The previous launch: when its last CTA let dependents start, its end, and the resources of each of its CTAs.
    before: Option<Before>,
    launches: Vec<Time>,
    spans: Vec<Span>,
    end: u64,
}

struct Before {
    dependents: u64,
    end: u64,
    /// Time at which each SM became free.
    free: Vec<u64>,
    shared_bytes: u32,
    threads: u32,
}

impl Timeline {
    /// Timeline that starts on an idle GPU with an empty L2.
    pub fn new(card: Card) -> Timeline {
        let memory = Memory::new(&card);
        Timeline {
            card: Arc::new(card),
            listings: Vec::new(),
            values: true,
            drawn: false,
            sample: None,
            memory,
            before: None,
            launches: Vec::new(),
            spans: Vec::new(),
            end: 0,
        }
    }

    /// Takes costs of instructions from machine code. If several listings have an entry with the same name, the last
    /// listing added is used.
    pub fn add_listing(&mut self, listing: Arc<Listing>) {
        self.listings.retain(|other| !Arc::ptr_eq(other, &listing));
        self.listings.insert(0, listing);
    }

    /// Skips products and other arithmetic that no control flow depends on. Outputs are then meaningless.
    #[must_use]
    pub fn without_values(self) -> Timeline {
        Timeline { values: false, ..self }
    }

    /// Simulates only some SMs, with their share of L2, of DRAM and of each grid's CTAs, spread evenly over the grid. A
    /// line that sampled and other CTAs would share counts as read by the sampled CTAs alone. The results of other CTAs
    /// are missing.
    #[must_use]
    pub fn sampled(self, multiprocessors: u32) -> Timeline {
        let all = self.card.sms;
        let multiprocessors = multiprocessors.clamp(1, all);
        let memory = Memory::new(&self.card.share(f64::from(multiprocessors) / f64::from(all)));
        Timeline { sample: Some(multiprocessors).filter(|&n| n < all), memory, ..self }
    }

    /// Records the activity of some SMs, for drawings.
    #[must_use]
    pub fn drawn(self) -> Timeline {
        Timeline { drawn: true, ..self }
    }

    /// The GPU.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Time from the event before the first launch to the event after the last, in microseconds.
    pub fn predicted_us(&self) -> f64 {
        self.card.microseconds(self.card.cycles(Key::LaunchFloor) + self.end)
    }

    /// Times of the launches.
    pub fn launches(&self) -> &[Time] {
        &self.launches
    }

    /// Activity of the drawn SMs, in cycles.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn costs(&self, kernel: &Kernel) -> (Vec<Cost>, bool) {
        let code: Vec<(&str, u32)> = kernel.code.iter().map(|inst| (inst.name.as_str(), inst.line)).collect();
        let targets: BTreeSet<usize> = kernel.targets.iter().map(|&n| kernel.labels[n as usize] as usize).collect();
        let release = self.card.cycles(Key::Release) as u16;
        let of = |listing: &Arc<Listing>| listing.costs(&kernel.name, &code, &targets, release);
        if let Some(costs) = self.listings.iter().find_map(of) {
            return (costs, true);
        }
        let stall = self.card.cycles(Key::GenericStall) as u16;
        (code.iter().map(|(name, _)| Cost::of_ptx(name, stall)).collect(), false)
    }
}

/// SMs that clusters run on, and these clusters.
struct Slot<'a> {
    core: Core,
    clusters: Vec<Cluster<'a>>,
    /// Time at which the slot became idle.
    free: u64,
}

impl Slot<'_> {
    /// Runs its clusters until `end`.
    fn run_until(&mut self, end: u64) -> Result<(), Fault> {
        loop {
            let mut times: Vec<u64> = self.clusters.iter().map(Cluster::next_time).collect();
            let Some(first) = (0..times.len()).min_by_key(|&n| times[n]) else { return Ok(()) };
            if times[first] >= end {
                return Ok(());
            }
            times.swap_remove(first);
            /// Maximum number of cycles that a cluster may run ahead of the other clusters on its SM.
            const AHEAD: u64 = 16;
            let until = times.into_iter().min().map_or(end, |next| next.saturating_add(AHEAD).min(end));
            let cluster = &mut self.clusters[first];
            std::mem::swap(&mut cluster.time().core, &mut self.core);
            let ran = cluster.run_until(until);
            std::mem::swap(&mut cluster.time().core, &mut self.core);
            ran?;
        }
    }
}

/// Runs all clusters of a launch by the clock. `ended` is called for each finished cluster.
///
/// # Errors
/// The first fault, or a deadlock.
pub fn run<'a>(
    kernel: &'a Kernel,
    launch: Launch<'a>,
    timeline: &mut Timeline,
    mut ended: impl FnMut(&mut Cluster<'_>),
) -> Result<(), Fault> {
    let card = Arc::clone(&timeline.card);
    let (costs, from_machine_code) = timeline.costs(kernel);
    let (costs, skipped) = (Arc::new(costs), Arc::new(values_only(kernel)));
    let config = launch.config;
    let (ctas, threads) = (config.cluster.iter().product::<u32>(), config.block.iter().product::<u32>());
    let shared_bytes = kernel.shared_bytes + config.shared_bytes + SYSTEM_SHARED;
    let room = card.room();
    let most = residents(kernel, &room, threads, shared_bytes);
    // L1 gets the memory that shared memory does not use.
    let l1_bytes = u64::from((room.shared_bytes + room.least_l1).saturating_sub(shared_bytes * most));
    let sms = timeline.sample.map_or(launch.sms, |n| n.next_multiple_of(ctas).min(launch.sms));
    let clusters = (launch.clusters * u64::from(sms)).div_ceil(launch.sms.into());
    let (start, starts, earlier_end) = starts(timeline, config.overlaps, sms, shared_bytes, threads);
    let slots = (sms / ctas).max(1) as usize;
    let context =
        Context { kernel, launch, clusters, card: &card, costs, skipped, values: timeline.values, earlier_end };
    let mut slots: Vec<Slot<'a>> = (0..slots)
        .map(|n| {
            let free = (n * ctas as usize..(n + 1) * ctas as usize).map(|sm| starts.get(sm).copied().unwrap_or(start));
            Slot {
                core: Core::new(ctas, l1_bytes, timeline.drawn && n < DRAWN),
                clusters: Vec::new(),
                free: free.max().unwrap_or(start),
            }
        })
        .collect();
    for _ in 0..most {
        for slot in &mut slots {
            slot.clusters.extend(context.next(slot.free));
        }
    }
    let (window, intake) = (Memory::window(&card), card.bytes_per_cycle(Key::Intake));
    let mut sum = Sum::new(&launch);
    let mut now = start;
    loop {
        let end = now + window;
        for slot in &mut slots {
            slot.run_until(end)?;
        }
        answer(&mut slots, &mut timeline.memory, ctas, intake);
        let mut next = NEVER;
        for slot in &mut slots {
            refill(slot, &context, &mut sum, &mut ended);
            next = slot.clusters.iter().map(Cluster::next_time).fold(next, u64::min);
        }
        if slots.iter().all(|slot| slot.clusters.is_empty()) {
            break;
        }
        if next == NEVER {
            let stuck = slots.iter().flat_map(|slot| &slot.clusters).next();
            return stuck.map_or(Ok(()), |cluster| Err(cluster.deadlock()));
        }
        now = end.max(next);
    }
    let time = sum.report(kernel, &card, &slots, &timeline.memory, start, from_machine_code);
    let sample = timeline.sample.map(|_| Sample {
        multiprocessors: [sms, launch.sms],
        ctas: [clusters, launch.clusters].map(|clusters| clusters * u64::from(ctas)),
    });
    for (n, slot) in slots.iter_mut().enumerate() {
        for span in slot.core.spans.take().into_iter().flatten() {
            timeline.spans.push(Span { lane: format!("{} {n} {}", kernel.name, span.lane), ..span });
        }
    }
    let free = slots.iter().flat_map(|slot| std::iter::repeat_n(slot.free, ctas as usize)).collect();
    timeline.before =
        Some(Before { dependents: sum.dependents, end: sum.end, free, shared_bytes: shared_bytes * most, threads });
    timeline.end = timeline.end.max(sum.end);
    timeline.launches.push(Time { sample, ..time });
    Ok(())
}

/// Number of CTAs that an SM holds.
fn residents(kernel: &Kernel, room: &Room, threads: u32, shared_bytes: u32) -> u32 {
    let registers =
        kernel.registers_at_launch().map_or(room.ctas, |n| REGISTERS / (n * threads.next_multiple_of(32)).max(1));
    room.ctas.min(room.threads / threads.max(1)).min(room.shared_bytes / shared_bytes.max(1)).min(registers).max(1)
}

/// Start of a launch, start on each SM, and end of `griddepcontrol.wait`.
fn starts(timeline: &Timeline, overlaps: bool, sms: u32, shared_bytes: u32, threads: u32) -> (u64, Vec<u64>, u64) {
    let (card, Some(before)) = (&timeline.card, &timeline.before) else { return (0, Vec::new(), 0) };
    let earlier_end = before.end + card.cycles(Key::GridEnd);
    if !overlaps {
        return (before.end + card.cycles(Key::LaunchGap), Vec::new(), earlier_end);
    }
    let start = before.dependents + card.cycles(Key::DependentStart);
    let room = card.room();
    let fits = before.shared_bytes + shared_bytes <= room.shared_bytes && before.threads + threads <= room.threads;
    let free = |sm: usize| before.free.get(sm).map_or(0, |free| free + card.cycles(Key::CtaStart));
    let starts = (0..sms as usize).map(|sm| if fits { start } else { start.max(free(sm)) }).collect();
    (start, starts, earlier_end)
}

/// Data that new clusters start with.
struct Context<'a, 'c> {
    kernel: &'a Kernel,
    launch: Launch<'a>,
    /// Number of the grid's clusters that are run.
    clusters: u64,
    card: &'c Arc<Card>,
    costs: Arc<Vec<Cost>>,
    skipped: Arc<Vec<bool>>,
    values: bool,
    earlier_end: u64,
}

impl<'a> Context<'a, '_> {
    /// Next cluster of the grid, if any remain.
    fn next(&self, start: u64) -> Option<Cluster<'a>> {
        let index = self.launch.next_cluster.fetch_add(1, Ordering::Relaxed);
        if index >= self.clusters {
            return None;
        }
        let index = index * self.launch.clusters / self.clusters;
        let config = self.launch.config;
        let size = (config.cluster.iter().product(), config.block.iter().product::<u32>().div_ceil(32));
        let (costs, skipped) = (&self.costs, &self.skipped);
        let timed = Timed::new(self.card, costs, skipped, self.values, index, size, start, self.earlier_end);
        Some(Cluster::new(self.kernel, self.launch, index).timed(timed))
    }
}

/// Lets L2 and DRAM answer the requests of a window. A slot has an SM for each CTA of a cluster.
fn answer(slots: &mut [Slot<'_>], memory: &mut Memory, ctas: u32, intake: f64) {
    let mut requests: Vec<(usize, Request)> = Vec::new();
    for (n, slot) in slots.iter_mut().enumerate() {
        requests.extend(slot.core.requests.drain(..).map(|request| (n, request)));
    }
    requests.sort_by_key(|(slot, request)| (request.time, *slot));
    for (n, request) in requests {
        let multiprocessor = n as u32 * ctas + request.ctas.first().copied().unwrap_or(0);
        let arrival = memory.serve(&request, multiprocessor);
        let Slot { core, clusters, .. } = &mut slots[n];
        let time = core.take_in(arrival, &request.ctas, intake);
        let others = match request.waiter {
            Waiter::Registers { load, .. } => core.answered(load, time),
            _ => Vec::new(),
        };
        for waiting in clusters {
            let index = waiting.time().cluster;
            match request.waiter {
                Waiter::Operation { cluster, id } if cluster == index => waiting.set_due(id, time),
                Waiter::Registers { cluster, warp, load } => {
                    let warps = others.iter().copied().chain([(cluster, warp)]);
                    warps.filter(|&(of, _)| of == index).for_each(|(_, warp)| waiting.loaded(warp, load, time));
                }
                _ => {}
            }
        }
    }
}

/// Replaces finished clusters by new ones.
fn refill<'a>(slot: &mut Slot<'a>, context: &Context<'a, '_>, sum: &mut Sum, ended: &mut impl FnMut(&mut Cluster<'_>)) {
    let mut n = 0;
    while n < slot.clusters.len() {
        if !slot.clusters[n].is_done() {
            n += 1;
            continue;
        }
        let mut cluster = slot.clusters.swap_remove(n);
        let end = cluster.time().end;
        slot.free = slot.free.max(end);
        sum.add(cluster.time());
        ended(&mut cluster);
        slot.clusters.extend(context.next(end + context.card.cycles(Key::CtaStart)));
    }
}

/// Times of finished clusters.
struct Sum {
    end: u64,
    dependents: u64,
    warps_per_cta: usize,
    /// Cycles by warp of the CTA.
    spent: Vec<[u64; Why::COUNT]>,
}

impl Sum {
    fn new(launch: &Launch<'_>) -> Sum {
        let warps_per_cta = launch.config.block.iter().product::<u32>().div_ceil(32) as usize;
        Sum { end: 0, dependents: 0, warps_per_cta, spent: vec![[0; Why::COUNT]; warps_per_cta] }
    }

    fn add(&mut self, timed: &Timed) {
        self.end = self.end.max(timed.end);
        let dependents = if timed.dependents == 0 { timed.end } else { timed.dependents };
        self.dependents = self.dependents.max(dependents);
        for (n, w) in timed.warps.iter().enumerate() {
            for (sum, spent) in self.spent[n % self.warps_per_cta].iter_mut().zip(w.spent) {
                *sum += spent;
            }
        }
    }

    fn report(
        &self,
        kernel: &Kernel,
        card: &Card,
        slots: &[Slot<'_>],
        memory: &Memory,
        start: u64,
        machine: bool,
    ) -> Time {
        let us = |cycles: u64| card.microseconds(cycles);
        let sms = slots.iter().map(|slot| slot.core.multiprocessors()).sum::<usize>();
        let mut usage = Usage::default();
        slots.iter().for_each(|slot| usage.add_all(&slot.core.usage));
        let busy = |unit: Unit, many: u64, from: u64, to: u64| {
            let of_all = |calendar: &Calendar| calendar.utilization(from, to);
            let cycles = (to - from).max(1) * many * sms as u64;
            match unit {
                Unit::L2 => of_all(&memory.l2),
                Unit::Dram => of_all(&memory.dram),
                _ => usage.busy(unit, from, to) as f64 / cycles as f64,
            }
        };
        let step = (self.end - start).div_ceil(PARTS).next_multiple_of(BUCKET).max(BUCKET);
        let mut phases: Vec<Phase> = Vec::new();
        let mut from = start / BUCKET * BUCKET;
        while from < self.end {
            let to = from + step;
            let all = Unit::ALL.map(|(unit, many)| (unit.name(), busy(unit, many, from, to)));
            let (unit, share) = all.into_iter().fold(("", 0.0), |most, now| if now.1 > most.1 { now } else { most });
            let to_us = us(to.min(self.end));
            match phases.last_mut().filter(|last| last.unit == unit) {
                Some(last) => {
                    let (old, new) = (last.to_us - last.from_us, to_us - last.to_us);
                    last.busy = (last.busy * old + share * new) / (old + new).max(1e-9);
                    last.to_us = to_us;
                }
                None => phases.push(Phase { from_us: us(from.max(start)), to_us, unit, busy: share }),
            }
            from = to;
        }
        let matrices: Vec<((u64, u64), u64)> =
            slots.iter().filter_map(|slot| Some((slot.core.matrix?, slot.free))).collect();
        let mean = |sum: u64, count: usize| us(sum) / count.max(1) as f64;
        Time {
            kernel: kernel.name.clone(),
            from_machine_code: machine,
            start_us: us(start),
            end_us: us(self.end),
            prologue_us: mean(matrices.iter().map(|((first, _), _)| first.saturating_sub(start)).sum(), matrices.len()),
            tail_us: mean(matrices.iter().map(|((_, last), free)| free.saturating_sub(*last)).sum(), matrices.len()),
            idle_us: mean(slots.iter().map(|slot| self.end.saturating_sub(slot.free.max(start))).sum(), slots.len()),
            busy: Unit::ALL.iter().map(|&(unit, many)| (unit.name(), busy(unit, many, start, self.end))).collect(),
            phases,
            roles: self.roles(),
            l2_bytes: memory.bytes,
            dram_bytes: memory.missed,
            sample: None,
        }
    }

    /// Groups adjacent warps that spend their time in similar shares into roles.
    fn roles(&self) -> Vec<RoleTime> {
        let mut roles: Vec<RoleTime> = Vec::new();
        for (n, spent) in self.spent.iter().enumerate() {
            let all = spent.iter().sum::<u64>().max(1) as f64;
            let spent: BTreeMap<_, _> =
                Why::ALL.iter().map(|&why| (why.name(), spent[why as usize] as f64 / all)).collect();
            /// Maximum difference of two similar shares.
            const ALIKE: f64 = 0.05;
            match roles
                .last_mut()
                .filter(|last| last.spent.iter().all(|(why, share)| (share - spent[why]).abs() < ALIKE))
            {
                Some(last) => last.last_warp = n as u32,
                None => roles.push(RoleTime { first_warp: n as u32, last_warp: n as u32, spent }),
            }
        }
        roles
    }
}
