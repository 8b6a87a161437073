//! A cluster of CTAs and its scheduler. Everything in it happens on one thread, in an order that the schedule and its
//! seed alone decide; clusters that cannot see each other run in parallel.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;

use super::global::GlobalMemory;
use super::mbarrier::Mbarriers;
use super::memory::{LOCAL_BASE, RANK_SHIFT, SHARED_BASE, SharedMemory};
use super::overlap::Requests;
use super::pending::{Effect, Issuer, Operation, Pending};
use super::sync::Synchronisation;
use super::tmem::{self, Tmem};
use super::warp::{Fragment, Row, Warp};
use crate::device::{LaunchConfig, Schedule};
use crate::exec::barrier::{self, Barrier};
use crate::exec::cluster::ClusterBarrier;
use crate::exec::tcgen05::Pipe;
use crate::exec::{Flow, WaitFor};
use crate::fault::{Fault, FaultKind, Party, Place, Stop, Stopped};
use crate::lower::{Kernel, Special};
use crate::race::{Detector, Shared};
use crate::report::{BufferTraffic, Class, Role};

/// Instructions that a warp runs before the fair schedule turns to the next.
const FAIR_SLICE: u64 = 32;
/// Instructions after which even the worst schedule lets other warps run.
const LONG_SLICE: u64 = 4096;
/// How long an asynchronous operation takes on the fair schedule, in warp instructions of its cluster.
const FAIR_LATENCY: u64 = 64;
/// Seeded operations take up to 2 to this power.
const LATENCY_BITS: u64 = 14;

/// How long the worst schedule holds an operation back while anything else can run.
const WORST_LATENCY: u64 = 1 << 22;

/// What all CTAs of a launch share.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: &'a Kernel,
    pub config: &'a LaunchConfig,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    /// Addresses of the module's variables.
    pub symbols: &'a [u64],
    pub sms: u32,
    /// The next cluster that has not been launched.
    pub next_cluster: &'a AtomicU64,
    /// How many there are.
    pub clusters: u64,
}

impl Launch<'_> {
    /// `%ctaid` of the first CTA of a cluster.
    pub fn cluster_origin(&self, index: u64) -> [u32; 3] {
        let (grid, cluster) = (self.config.grid, self.config.cluster);
        let (nx, ny) = (u64::from(grid[0] / cluster[0]), u64::from(grid[1] / cluster[1]));
        let at = [index % nx, index / nx % ny, index / nx / ny];
        std::array::from_fn(|d| at[d] as u32 * cluster[d])
    }
}

/// A CTA's own state.
pub struct Cta {
    pub index: [u32; 3],
    pub shared: SharedMemory,
    pub barriers: [Barrier; barrier::COUNT as usize],
    pub mbarriers: Mbarriers,
    pub tmem: Tmem,
    pub requests: Requests,
    /// A thread has waited for the grids before.
    pub awaited_grids: bool,
    /// A thread has let dependents start without knowing of such a wait.
    pub let_dependents_start: bool,
    /// Registers of a thread that `setmaxnreg.dec` of its warps has released.
    pub free_registers: u32,
    /// Warps that have not exited.
    pub running: u32,
}

/// All state of a cluster but its warps.
pub struct Machine<'a> {
    pub launch: Launch<'a>,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    pub ctas: Vec<Cta>,
    pub pending: Pending,
    pub race: Option<Detector>,
    pub sync: Synchronisation,
    pub warp_barriers: HashMap<(u32, u32), Shared>,
    pub cluster_barrier: ClusterBarrier,
    /// Tensor-core operations in order, by CTA pair.
    pub pipes: Vec<Pipe>,
    /// Bulk copies that read a CTA's shared memory.
    pub shared_readers: Vec<(u32, u64)>,
    /// Results of asynchronous matrix instructions that no register has yet, by operation.
    pub matrix_results: HashMap<u64, Vec<Row>>,
    /// Counters by warp index in the CTA.
    pub roles: Vec<Role>,
    /// Counters by allocation of global memory.
    pub buffers: Vec<BufferTraffic>,
    pub sanitize: bool,
    /// Goes up whenever something that another thread may wait for has happened.
    pub progress: u64,
    /// Warp instructions issued.
    pub now: u64,
    pub warps_per_cta: u32,
    pub threads_per_cta: u32,
    random: Random,
}

impl Machine<'_> {
    /// Starts an asynchronous operation of the warp's current instruction; it gets a number.
    pub fn start(&mut self, w: &Warp, effect: impl FnOnce(&mut Machine<'_>) -> Stopped<()> + 'static) -> u64 {
        self.start_after(w, Vec::new(), effect)
    }

    /// The same for an operation that completes only after others.
    pub fn start_after(
        &mut self,
        w: &Warp,
        after: Vec<u64>,
        effect: impl FnOnce(&mut Machine<'_>) -> Stopped<()> + 'static,
    ) -> u64 {
        let id = self.pending.reserve();
        let issuer = Issuer { warp: w.index, pc: w.pc() };
        self.start_reserved(id, issuer, after, effect);
        id
    }

    /// The same for an operation whose number is known already.
    pub fn start_reserved(
        &mut self,
        id: u64,
        issuer: Issuer,
        after: Vec<u64>,
        effect: impl FnOnce(&mut Machine<'_>) -> Stopped<()> + 'static,
    ) {
        let due = match self.launch.config.schedule {
            Schedule::Fair => self.now + FAIR_LATENCY,
            Schedule::Seed(_) => {
                let bits = self.random.below(LATENCY_BITS);
                self.now + self.random.below(1 << bits)
            }
            Schedule::Worst => self.now + WORST_LATENCY,
        };
        let effect: Effect = Box::new(effect);
        self.pending.push(Operation { id, due, after, issuer, effect });
    }

    /// Whether a thread that may wait for a limited time gives up at once.
    pub fn out_of_patience(&mut self) -> bool {
        match self.launch.config.schedule {
            Schedule::Fair => false,
            Schedule::Seed(_) => self.random.below(4) == 0,
            Schedule::Worst => true,
        }
    }

    /// A warp has no threads left.
    fn exited(&mut self, w: &Warp) -> Stopped<()> {
        let cta = &mut self.ctas[w.cta as usize];
        cta.running -= 1;
        if cta.running == 0 && cta.awaited_grids {
            self.global.earlier.waits(!cta.let_dependents_start);
        }
        if cta.running == 0 && cta.tmem.used() > 0 {
            let text = format!("the CTA exits with {} columns allocated", cta.tmem.used());
            return Err(Stop::new(FaultKind::TmemNotFreed, text));
        }
        let pending = &self.pending;
        self.shared_readers.retain(|(_, id)| pending.contains(*id));
        if self.ctas[w.cta as usize].running == 0 && self.shared_readers.iter().any(|(cta, _)| *cta == w.cta) {
            let text = "the CTA exits while a bulk copy still reads its shared memory";
            return Err(Stop::new(FaultKind::OverwriteInFlight, text));
        }
        let waited = w.cluster_generation != self.cluster_barrier.generation;
        self.cluster_barrier.leave(w.all, if waited { 0 } else { w.cluster_arrived });
        Ok(())
    }

    /// Writes shared memory on behalf of an asynchronous operation whose target has been checked.
    pub fn write_shared(&mut self, cta: u32, offset: u32, data: &[u8]) {
        let memory = &mut self.ctas[cta as usize].shared;
        let range = offset as usize..offset as usize + data.len();
        memory.data[range.clone()].copy_from_slice(data);
        memory.defined[range].fill(true);
        self.progress += 1;
    }
}

/// SplitMix64 (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

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
    warps: Vec<Warp>,
    machine: Machine<'a>,
    next: usize,
    /// The progress when threads last ran out of time.
    timed_out_at: Option<u64>,
}

impl<'a> Cluster<'a> {
    /// The cluster with number `index` in the grid.
    pub fn new(launch: Launch<'a>, index: u64) -> Cluster<'a> {
        let Launch { kernel, config, .. } = launch;
        let [cx, cy, cz] = config.cluster;
        let origin = launch.cluster_origin(index);
        let threads = config.block.iter().product::<u32>();
        let warps_per_cta = threads.div_ceil(32);
        let shared_bytes = SHARED_BASE + kernel.shared_bytes + config.shared_bytes;
        let ctas_count = cx * cy * cz;
        let mut ctas = Vec::new();
        for rank in 0..ctas_count {
            let inside = [rank % cx, rank / cx % cy, rank / cx / cy];
            ctas.push(Cta {
                index: std::array::from_fn(|d| origin[d] + inside[d]),
                shared: SharedMemory::new(shared_bytes),
                barriers: Default::default(),
                mbarriers: Mbarriers::new(),
                tmem: Tmem::default(),
                requests: Requests::default(),
                awaited_grids: false,
                let_dependents_start: false,
                free_registers: 0,
                running: warps_per_cta,
            });
        }
        let seed = match config.schedule {
            Schedule::Seed(seed) => seed,
            Schedule::Fair | Schedule::Worst => 0,
        };
        let mut random = Random(seed ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.next();
        let warps = warps_per_cta * ctas.len() as u32;
        // The CTAs' shared memories, then their tensor memories.
        let tmem_bytes = if kernel.uses_tmem { tmem::BYTES } else { 0 };
        let memories = [shared_bytes, tmem_bytes].into_iter().flat_map(|n| ctas.iter().map(move |_| n));
        let race = config.sanitize.then(|| Detector::new(warps, memories));
        let mut cluster = Cluster {
            warps: Vec::new(),
            machine: Machine {
                launch,
                global: launch.global,
                params: launch.params,
                ctas,
                pending: Pending::default(),
                race,
                sync: Synchronisation::default(),
                warp_barriers: HashMap::new(),
                shared_readers: Vec::new(),
                matrix_results: HashMap::new(),
                pipes: vec![Pipe::default(); ctas_count.div_ceil(2) as usize],
                cluster_barrier: ClusterBarrier::new(threads * ctas_count),
                roles: vec![Role::default(); warps_per_cta as usize],
                buffers: vec![BufferTraffic::default(); launch.global.allocations().len()],
                sanitize: config.sanitize,
                progress: 0,
                now: 0,
                warps_per_cta,
                threads_per_cta: threads,
                random,
            },
            next: 0,
            timed_out_at: None,
        };
        for index in 0..warps {
            let (cta, role) = (index / warps_per_cta, index % warps_per_cta);
            let present = (threads - role * 32).min(32);
            let all = u32::MAX >> (32 - present);
            let local = LOCAL_BASE + kernel.local_bytes;
            let mut warp = Warp::new(index, cta, role, all, kernel.registers, kernel.predicates, local);
            if kernel.uses_wgmma && config.sanitize {
                warp.written_at = vec![0; kernel.registers as usize];
            }
            for &(register, special) in &kernel.specials {
                let row = special_row(&cluster.machine, &warp, special);
                warp.set(register, u32::MAX, &row);
                warp.define(register, u32::MAX, u32::MAX);
            }
            cluster.warps.push(warp);
        }
        cluster
    }

    /// Runs until the cluster is done, stuck, or `steps` warp instructions have passed.
    pub fn run(&mut self, steps: u64) -> Result<Status, Fault> {
        let end = self.machine.now.saturating_add(steps);
        loop {
            while let Some(operation) = self.machine.pending.take_due(self.machine.now) {
                self.complete(operation)?;
            }
            if self.warps.iter().all(|w| w.fragments.is_empty()) {
                while let Some(operation) = self.machine.pending.take_any(false) {
                    self.complete(operation)?;
                }
                return Ok(Status::Done);
            }
            if self.machine.now >= end {
                return Ok(Status::Running);
            }
            let (first, slice) = match self.machine.launch.config.schedule {
                Schedule::Fair => (self.next, FAIR_SLICE),
                Schedule::Seed(_) => {
                    let n = self.warps.len() as u64;
                    (self.machine.random.below(n) as usize, 1 + self.machine.random.below(2 * FAIR_SLICE))
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

    /// Ends the time of all threads that try or poll, if anything has happened since it last was; else they would only
    /// try again.
    fn time_out(&mut self) -> bool {
        if self.timed_out_at == Some(self.machine.progress) {
            return false;
        }
        self.timed_out_at = Some(self.machine.progress);
        let mut any = false;
        for f in self.warps.iter_mut().flat_map(|w| &mut w.fragments) {
            if matches!(f.wait, Some(WaitFor::Mbarrier { .. } | WaitFor::Progress { .. })) {
                f.wait = Some(WaitFor::TimedOut);
                any = true;
            }
        }
        any
    }

    fn complete(&mut self, operation: Operation) -> Result<(), Fault> {
        self.machine.progress += 1;
        (operation.effect)(&mut self.machine).map_err(|mut stop| {
            stop.pc.get_or_insert(operation.issuer.pc);
            self.fault(operation.issuer.warp as usize, *stop)
        })
    }

    /// Runs a warp for up to `slice` instructions; `false` if it cannot run.
    fn run_warp(&mut self, index: usize, slice: u64) -> Result<bool, Fault> {
        let (warp, machine) = (&mut self.warps[index], &mut self.machine);
        match execute(warp, machine, slice) {
            Ok(ran) => Ok(ran),
            Err(stop) => Err(self.fault(index, *stop)),
        }
    }

    /// Completes what a handler knows of a fault.
    fn fault(&self, warp: usize, stop: Stop) -> Fault {
        let w = &self.warps[warp];
        let kernel = self.machine.launch.kernel;
        let pc = stop.pc.or_else(|| w.fragments.get(w.current).map(|f| f.pc));
        Fault {
            kind: stop.kind,
            message: stop.message,
            kernel: kernel.name.clone(),
            cta: Some(self.machine.ctas[w.cta as usize].index),
            warp: Some(w.role),
            lane: stop.lane,
            place: pc.map(|pc| Box::new(kernel.place(pc))),
            others: stop
                .others
                .into_iter()
                .map(|(what, pc)| Party { what, place: pc.map(|pc| kernel.place(pc)) })
                .collect(),
        }
    }

    /// What to report when the cluster is idle for ever.
    pub fn deadlock(&self) -> Fault {
        let kernel = self.machine.launch.kernel;
        let mut waiting = Vec::new();
        let mut only_barriers = true;
        let mut undelivered = false;
        for w in &self.warps {
            for f in &w.fragments {
                let Some(wait) = &f.wait else { continue };
                only_barriers &= matches!(wait, WaitFor::Barrier { .. });
                if let WaitFor::Mbarrier { at, .. } | WaitFor::Progress { at, .. } = wait {
                    let barrier = self.machine.ctas[at.cta as usize].mbarriers.get(&at.offset);
                    undelivered |= barrier.is_some_and(|b| b.pending == 0 && b.tx != 0);
                }
                let rank = if self.machine.ctas.len() > 1 { format!("CTA rank {}, ", w.cta) } else { String::new() };
                let lanes = if f.mask == w.all { String::new() } else { format!(", lanes {:#010x}", f.mask) };
                let what = format!("{rank}warp {}{lanes} waits for {}", w.role, wait.describe(&self.machine));
                // A poll has been executed; what waits is the instruction after it.
                let pc = if matches!(wait, WaitFor::Progress { .. }) { f.pc - 1 } else { f.pc };
                waiting.push((w, pc, Party { what, place: Some(kernel.place(pc)) }));
            }
        }
        let exited = self.warps.iter().filter(|w| w.fragments.is_empty()).count();
        let (kind, message) = if only_barriers {
            let mut text = "threads wait at a barrier that the others will not reach".to_string();
            if exited > 0 {
                text += &format!("; {exited} warps have exited");
            }
            (FaultKind::BarrierDivergence, text)
        } else if undelivered {
            let text = "an mbarrier has all its arrivals, but nothing will deliver the bytes that it expects";
            (FaultKind::BytesNotDelivered, text.to_string())
        } else {
            (FaultKind::Deadlock, "nothing can run any more".to_string())
        };
        let mut fault = Fault::bare(kind, &kernel.name, message);
        if let Some((w, pc, _)) = waiting.first() {
            fault.cta = Some(self.machine.ctas[w.cta as usize].index);
            fault.warp = Some(w.role);
            fault.place = Some(Box::new(kernel.place(*pc)));
        }
        fault.others = waiting.into_iter().map(|(_, _, party)| party).collect();
        fault
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
        self.machine.now * self.machine.ctas.len() as u64
    }

    /// The most tensor-memory columns that were allocated at once in a CTA.
    pub fn peak_tmem_columns(&self) -> u32 {
        self.machine.ctas.iter().map(|c| c.tmem.peak).max().unwrap_or(0)
    }

    /// A measure of what has happened, to see whether anything does.
    pub fn progress(&self) -> u64 {
        self.machine.progress
    }
}

/// Runs a warp; `Ok(false)` if none of its fragments can run.
fn execute(w: &mut Warp, m: &mut Machine<'_>, slice: u64) -> Stopped<bool> {
    // A slice may have ended on a fragment that had just come out of its wait: it still has to run what it waited in.
    if w.resumed.is_none() && !w.schedule(m)? {
        return Ok(false);
    }
    let kernel = m.launch.kernel;
    let budget = m.launch.config.instruction_budget;
    for _ in 0..slice {
        let Fragment { pc, mask, .. } = w.fragments[w.current];
        let inst = &kernel.code[pc as usize];
        let mut exec = mask;
        if let Some((p, negated)) = inst.guard {
            if m.sanitize && mask & !w.predicate_defined(p) != 0 {
                let lane = (mask & !w.predicate_defined(p)).trailing_zeros();
                return Err(Stop::new(FaultKind::UninitialisedRegister, "the guard predicate").lane(lane));
            }
            let value = w.predicate(p);
            exec &= if negated { !value } else { value };
        }
        if exec == 0 {
            w.resumed = None;
            w.fragments[w.current].pc = pc + 1;
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        m.now += 1;
        w.issued += 1;
        if w.issued > budget {
            let text = format!("the warp has executed {budget} instructions");
            return Err(Stop::new(FaultKind::InstructionBudget, text));
        }
        let flow = if inst.aligned && exec != w.all {
            if exec != mask {
                let text = format!("its guard is true in lanes {exec:#010x} of {:#010x}", w.all);
                return Err(Stop::new(FaultKind::WarpDivergence, text));
            }
            Flow::Wait(WaitFor::Lanes { need: w.all, anywhere: false })
        } else {
            if m.sanitize {
                check_defined(w, inst, exec)?;
            }
            let flow = (inst.step)(w, m, exec)?;
            if m.sanitize {
                define(w, inst, exec);
            }
            if !matches!(flow, Flow::Wait(_)) {
                let role = &mut m.roles[w.role as usize];
                role.warp_instructions += 1;
                role.thread_instructions += u64::from(exec.count_ones());
                role.by_class[inst.class as usize] += u64::from(exec.count_ones());
            }
            flow
        };
        w.resumed = None;
        if let Flow::Next = flow {
            w.fragments[w.current].pc = pc + 1;
            if w.fragments.len() > 1 && meets(w) && !w.schedule(m)? {
                return Ok(true);
            }
            continue;
        }
        let pause = matches!(flow, Flow::Yield);
        advance(w, kernel, flow, exec, m.now);
        if w.fragments.is_empty() {
            m.progress += 1;
            m.exited(w)?;
            return Ok(true);
        }
        let alone = w.fragments.len() == 1 && w.fragments[0].wait.is_none();
        if alone {
            w.current = 0;
        } else if !w.schedule(m)? {
            return Ok(true);
        }
        if pause {
            return Ok(true);
        }
    }
    Ok(true)
}

/// Whether the running fragment has come to where another is.
fn meets(w: &Warp) -> bool {
    let pc = w.fragments[w.current].pc;
    w.fragments.iter().enumerate().any(|(i, f)| i != w.current && f.pc == pc)
}

fn check_defined(w: &Warp, inst: &crate::exec::Inst, exec: u32) -> Stopped<()> {
    for load in &w.tmem_loads {
        let in_flight = |r: &u32| load.values.iter().any(|(d, _)| d.register() == Some(*r));
        if inst.reads.iter().any(in_flight) {
            let text = "a register that tcgen05.ld fills, before tcgen05.wait::ld";
            return Err(Stop::new(FaultKind::ReadInFlight, text).other("the load", Some(load.pc)));
        }
    }
    for p in w.wgmma.all() {
        let result = |r: &u32| p.d.iter().any(|d| d.register() == Some(*r));
        if inst.reads.iter().any(result) {
            let text = "an accumulator register of wgmma, before wgmma.wait_group";
            return Err(Stop::new(FaultKind::ReadInFlight, text).other("the wgmma", Some(p.pc)));
        }
        if inst.writes.iter().any(|r| result(r) || p.a.contains(r)) {
            let text = "a register that wgmma still uses, before wgmma.wait_group";
            return Err(Stop::new(FaultKind::OverwriteInFlight, text).other("the wgmma", Some(p.pc)));
        }
    }
    if inst.moves {
        return Ok(());
    }
    let mut missing = 0;
    for &r in &inst.reads {
        missing |= exec & !w.defined(r);
    }
    for &p in &inst.predicate_reads {
        missing |= exec & !w.predicate_defined(p);
    }
    if missing == 0 {
        return Ok(());
    }
    let text = "a source register that no instruction has written";
    Err(Stop::new(FaultKind::UninitialisedRegister, text).lane(missing.trailing_zeros()))
}

fn define(w: &mut Warp, inst: &crate::exec::Inst, exec: u32) {
    let mut known = u32::MAX;
    if inst.moves {
        for &r in &inst.reads {
            known &= w.defined(r);
        }
        for &p in &inst.predicate_reads {
            known &= w.predicate_defined(p);
        }
    }
    for &r in &inst.writes {
        w.define(r, exec, known);
        if let Some(at) = w.written_at.get_mut(r as usize) {
            *at = w.issued;
        }
    }
    for &p in &inst.predicate_writes {
        w.define_predicate(p, exec, known);
    }
}

/// Moves the lanes `exec` of the running fragment as the flow says, and its other lanes to the next instruction.
fn advance(w: &mut Warp, kernel: &Kernel, flow: Flow, exec: u32, now: u64) {
    let current = w.fragments[w.current].clone();
    let pc = current.pc;
    let mut parts: Vec<Fragment> = Vec::new();
    let part = |mask, pc| Fragment { mask, pc, wait: None, since: now, ..current.clone() };
    let rest = current.mask & !exec;
    if rest != 0 {
        parts.push(part(rest, pc + 1));
    }
    match flow {
        Flow::Next | Flow::Yield => parts.push(part(exec, pc + 1)),
        Flow::Jump(label) => parts.push(part(exec, kernel.labels[label as usize])),
        Flow::Scatter(groups) => {
            parts.extend(groups.into_iter().map(|(mask, label)| part(mask, kernel.labels[label as usize])));
        }
        Flow::Call(function) => {
            let mut callee = part(exec, kernel.functions[function as usize].entry);
            callee.calls.push((pc + 1, function));
            parts.push(callee);
        }
        Flow::Return => {
            let mut caller = part(exec, pc);
            if let Some((back, _)) = caller.calls.pop() {
                caller.pc = back;
                parts.push(caller);
            }
        }
        Flow::Exit => {}
        Flow::Wait(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc) }),
        Flow::Pause(wait) => parts.push(Fragment { wait: Some(wait), ..part(exec, pc + 1) }),
    }
    let split = parts.len() > 1 || w.fragments.len() > 1;
    for f in &mut parts {
        f.spins += u32::from(split && f.pc <= pc && f.wait.is_none());
    }
    w.fragments.swap_remove(w.current);
    w.fragments.append(&mut parts);
    // Deterministic order, whatever the history of splits.
    w.fragments.sort_by_key(|f| (f.pc, f.mask.trailing_zeros()));
}

/// A special register's value in each lane of a warp (PTX ISA, "Special Registers").
fn special_row(m: &Machine<'_>, w: &Warp, special: Special) -> Row {
    let config = m.launch.config;
    let [bx, by, _] = config.block;
    let cta = &m.ctas[w.cta as usize];
    let thread = |lane: usize| w.role * 32 + lane as u32;
    let inside: [u32; 3] = std::array::from_fn(|d| cta.index[d] % config.cluster[d]);
    let clusters: [u32; 3] = std::array::from_fn(|d| config.grid[d] / config.cluster[d]);
    let linear = cta.index[0] + config.grid[0] * (cta.index[1] + config.grid[1] * cta.index[2]);
    let all = |v: u32| [u64::from(v); 32];
    let lanes = |f: &dyn Fn(usize) -> u32| std::array::from_fn(|n| u64::from(f(n)));
    match special {
        Special::Tid(0) => lanes(&|n| thread(n) % bx),
        Special::Tid(1) => lanes(&|n| thread(n) / bx % by),
        Special::Tid(_) => lanes(&|n| thread(n) / bx / by),
        Special::Ntid(d) => all(config.block[d]),
        Special::Ctaid(d) => all(cta.index[d]),
        Special::Nctaid(d) => all(config.grid[d]),
        Special::Clusterid(d) => all(cta.index[d] / config.cluster[d]),
        Special::Nclusterid(d) => all(clusters[d]),
        Special::ClusterCtaid(d) => all(inside[d]),
        Special::ClusterNctaid(d) => all(config.cluster[d]),
        Special::ClusterCtarank => all(w.cta),
        Special::ClusterNctarank => all(m.ctas.len() as u32),
        Special::Laneid => lanes(&|n| n as u32),
        Special::Warpid => all(w.role),
        Special::Nwarpid => all(m.warps_per_cta),
        Special::Smid => all(linear % m.launch.sms),
        Special::Nsmid => all(m.launch.sms),
        Special::LanemaskEq => lanes(&|n| 1 << n),
        Special::LanemaskLe => lanes(&|n| u32::MAX >> (31 - n)),
        Special::LanemaskLt => lanes(&|n| (1 << n) - 1),
        Special::LanemaskGe => lanes(&|n| u32::MAX << n),
        Special::LanemaskGt => lanes(&|n| !(u32::MAX >> (31 - n))),
        Special::DynamicSharedSize => all(config.shared_bytes),
        Special::TotalSharedSize => all(config.shared_bytes + m.launch.kernel.shared_bytes),
        Special::Zero => [0; 32],
        Special::Shared(offset) => all(w.cta << RANK_SHIFT | offset),
        Special::Variable(n) => [m.launch.symbols[n as usize]; 32],
    }
}

/// Instruction classes index the counters.
const _: () = assert!(Class::Other as usize + 1 == Class::COUNT);

impl Kernel {
    /// An instruction's place.
    pub(crate) fn place(&self, pc: u32) -> Place {
        let inst = &self.code[pc as usize];
        Place { line: inst.line, instruction: inst.name.clone(), source: self.sources.describe(inst.source) }
    }
}
