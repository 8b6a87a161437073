//! SMs of a cluster, and clocks of its warps.
//!
//! A warp's next instruction issues when the warp's time has come, its scheduler has a slot, its pipe is free and its
//! registers are ready. A request to L2 is answered at the end of the window in which it was made ([`super::memory`]).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::card::{Card, Key};
use super::cost::Cost;
use super::memory::{Arrival, Kind, Request, Waiter};
use super::report::{Span, Unit, Usage, Why};
use super::work::{Fence, Range, Work};
use crate::types::Space;

/// A time later than any known time.
pub const NEVER: u64 = u64::MAX;
/// Warp schedulers per SM.
const QUARTERS: usize = 4;
/// Bytes per line of L1.
const LINE: u64 = 128;

/// An SM: the time until which each of its units is busy.
#[derive(Clone, Debug, Default)]
struct Multiprocessor {
    issue: [u64; QUARTERS],
    alu: [u64; QUARTERS],
    fma: [u64; QUARTERS],
    special: [u64; QUARTERS],
    tensor: [u64; QUARTERS],
    tmem: [u64; QUARTERS],
    shared: u64,
    intake: u64,
    /// Current and future `wgmma` in each quarter's tensor core.
    products: [VecDeque<Product>; QUARTERS],
    /// Accumulated fractions of a cycle by which `wgmma` delayed other instructions.
    delay: [f64; QUARTERS],
    /// Time at which the last matrix operation of its CTAs completes.
    matrix_done: u64,
    l1: L1,
}

/// A `wgmma` in the tensor core of a quarter. It reads and writes its accumulators there.
#[derive(Clone, Copy, Debug)]
struct Product {
    from: u64,
    to: u64,
    /// Delay of another instruction per issue slot, in cycles.
    delay: f64,
}

impl Multiprocessor {
    /// Cycles by which `slots` instructions of a quarter delay all later instructions, because a `wgmma` uses the
    /// registers of its accumulators.
    fn delayed(&mut self, quarter: usize, at: u64, slots: u16) -> u64 {
        let products = &mut self.products[quarter];
        while products.front().is_some_and(|product| product.to <= at) {
            products.pop_front();
        }
        let Some(product) = products.front().filter(|product| product.from <= at) else { return 0 };
        let delay = &mut self.delay[quarter];
        *delay += product.delay * f64::from(slots);
        let whole = *delay as u64;
        *delay -= whole as f64;
        whole
    }

    /// Completion time of an access to a quarter's tensor memory requested at a given time. Accesses run one after the
    /// other.
    fn in_tensor_memory(&mut self, quarter: usize, at: u64, bytes: u64, constants: &Constants) -> u64 {
        self.tmem[quarter] = self.tmem[quarter].max(at) + bytes / constants.tmem_bytes;
        self.tmem[quarter] + constants.tmem_latency
    }
}

/// Lines that an SM's loads have requested, each with its load. The oldest line is evicted first.
#[derive(Clone, Debug, Default)]
struct L1 {
    capacity: usize,
    lines: HashMap<u64, u64>,
    order: VecDeque<u64>,
}

impl L1 {
    /// Last load that requested a line of the ranges, if all lines are requested. Otherwise `load` requests the missing
    /// lines.
    fn asked(&mut self, ranges: &[Range], load: u64) -> Option<u64> {
        let mut last = Some(0);
        for line in ranges.iter().flat_map(|&(from, bytes)| from / LINE..(from + u64::from(bytes)).div_ceil(LINE)) {
            if let Some(&by) = self.lines.get(&line) {
                last = last.map(|last| last.max(by));
                continue;
            }
            last = None;
            self.lines.insert(line, load);
            self.order.push_back(line);
            if self.order.len() > self.capacity {
                self.order.pop_front().map(|oldest| self.lines.remove(&oldest));
            }
        }
        last
    }

    fn clear(&mut self) {
        self.lines.clear();
        self.order.clear();
    }
}

/// A load that L1 keeps and that was sent to memory.
#[derive(Clone, Debug)]
struct UnderWay {
    /// Time at which its registers are ready. [`NEVER`]: memory has not answered.
    ready: u64,
    /// Warps of clusters that wait for lines of this load.
    others: Vec<(u64, u32)>,
}

/// SMs that the CTAs of a cluster run on, one per CTA.
#[derive(Clone, Debug, Default)]
pub struct Core {
    sms: Vec<Multiprocessor>,
    /// Requests to L2 in this window.
    pub requests: Vec<Request>,
    /// Number of loads, and pending loads for L1 by number.
    loads: u64,
    under_way: HashMap<u64, UnderWay>,
    pub usage: Usage,
    /// Events to draw, if the cluster is drawn.
    pub spans: Option<Vec<Span>>,
    /// Start of the first matrix operation, and end of the last.
    pub matrix: Option<(u64, u64)>,
}

impl Core {
    /// Core of `sms` idle SMs, each with an L1 of `l1_bytes` bytes.
    pub fn new(sms: u32, l1_bytes: u64, drawn: bool) -> Core {
        let l1 = L1 { capacity: (l1_bytes / LINE) as usize, ..L1::default() };
        Core {
            sms: vec![Multiprocessor { l1, ..Multiprocessor::default() }; sms as usize],
            spans: drawn.then(Vec::new),
            ..Core::default()
        }
    }

    /// Number of SMs.
    pub fn multiprocessors(&self) -> usize {
        self.sms.len()
    }

    /// Records that memory has answered a load. Returns the other waiting warps, by cluster and warp.
    pub fn answered(&mut self, load: u64, ready: u64) -> Vec<(u64, u32)> {
        /// Number of answered loads that may be kept.
        const MANY: usize = 1 << 12;
        if self.under_way.len() > MANY {
            self.under_way.retain(|_, old| old.ready > ready);
        }
        let Some(under_way) = self.under_way.get_mut(&load) else { return Vec::new() };
        under_way.ready = ready;
        std::mem::take(&mut under_way.others)
    }

    fn span(&mut self, lane: impl FnOnce() -> String, name: &'static str, from: u64, to: u64) {
        if let Some(spans) = &mut self.spans {
            spans.push(Span { lane: lane(), name, from, to });
        }
    }

    /// Moves arrived data into the SMs of `ctas`. Returns the time at which all of them hold the data in shared memory
    /// or registers.
    pub fn take_in(&mut self, arrival: Arrival, ctas: &[u32], bytes_per_cycle: f64) -> u64 {
        let cycles = (arrival.bytes as f64 / bytes_per_cycle).ceil() as u64;
        let mut last = arrival.last;
        for &cta in ctas {
            let sm = &mut self.sms[cta as usize];
            let from = sm.intake.max(arrival.first);
            sm.intake = from + cycles;
            last = last.max(sm.intake);
            self.usage.add(Unit::Intake, from, cycles);
        }
        last
    }
}

/// Registers of a warp that a slow instruction writes, and the time at which they are ready.
#[derive(Clone, Debug)]
struct Expected {
    registers: Vec<u32>,
    ready: u64,
    /// Number of the load, while memory has not answered.
    load: u64,
    why: Why,
}

/// Clock of a warp.
#[derive(Clone, Debug)]
pub struct WarpClock {
    /// Time at which its next instruction can issue. [`NEVER`]: it waits for an event without a known time.
    pub at: u64,
    cta: usize,
    quarter: usize,
    expected: Vec<Expected>,
    /// Time at which the accumulators of its next product are ready, and start of its last product.
    sums: u64,
    multiplied: u64,
    /// `true` if the warp waits for registers that memory has not delivered.
    awaits_memory: bool,
    /// Time at which L2 has the warp's stores.
    stored: u64,
    /// `true` while the warp waits for the fence of its next instruction.
    fenced: bool,
    /// Start of the wait.
    pub since: u64,
    /// Cycles by reason.
    pub spent: [u64; Why::COUNT],
}

/// Access of an instruction whose time is not computed yet.
#[derive(Clone, Debug, Default)]
pub enum Access {
    #[default]
    None,
    /// Shared memory, for this number of cycles.
    Shared { cycles: u64 },
    /// Global memory, in this number of parts of L1.
    Global { ranges: Vec<Range>, loads: bool, cached: bool, parts: u64 },
    /// Tensor memory of the warp's quarter, for this number of bytes.
    Tmem { bytes: u64 },
    /// Tensor core of the warp's quarter, for this number of f16 multiply-adds.
    Matrix { multiply_adds: u64 },
}

/// Clock of a cluster.
pub struct Timed {
    pub core: Core,
    pub card: Arc<Card>,
    pub costs: Arc<Vec<Cost>>,
    /// Instructions that affect only values, if values are skipped.
    pub skipped: Arc<Vec<bool>>,
    pub values: bool,
    pub cluster: u64,
    pub warps: Vec<WarpClock>,
    pub now: u64,
    pub access: Access,
    /// End of the earlier grid, including its effects.
    pub earlier_end: u64,
    /// Time at which all CTAs know that the cluster barrier is complete.
    cluster_known: u64,
    /// Time at which every CTA has let dependents start or has ended.
    pub dependents: u64,
    /// Time of the last end of an event.
    pub end: u64,
    constants: Constants,
}

/// Constants that are used often.
#[derive(Clone, Copy)]
struct Constants {
    shared_latency: u64,
    l1_latency: u64,
    l1_part: u64,
    shared_bytes: u64,
    cluster: u64,
    cluster_barrier: u64,
    cluster_fence: u64,
    gpu_fence: u64,
    system_fence: u64,
    l2_latency: u64,
    tensor_rate: f64,
    mma_latency: u64,
    matrix_latency: u64,
    pair_latency: u64,
    matrix_floor: u64,
    sums_delay: f64,
    tmem_bytes: u64,
    tmem_latency: u64,
    copy_bytes: u64,
}

impl Timed {
    /// Clock of a cluster that starts at a given time, with its CTAs on the SMs of a core.
    #[allow(clippy::too_many_arguments, reason = "a cluster's whole context")]
    pub fn new(
        card: &Arc<Card>,
        costs: &Arc<Vec<Cost>>,
        skipped: &Arc<Vec<bool>>,
        values: bool,
        cluster: u64,
        (ctas, warps_per_cta): (u32, u32),
        start: u64,
        earlier_end: u64,
    ) -> Timed {
        let cycles = |key| card.cycles(key);
        let bytes = |key| card.get(key).max(1.0) as u64;
        let constants = Constants {
            shared_latency: cycles(Key::SharedLatency),
            l1_latency: cycles(Key::L1Latency),
            l1_part: cycles(Key::L1Part),
            shared_bytes: bytes(Key::SharedBytes),
            cluster: cycles(Key::ClusterLatency),
            cluster_barrier: cycles(Key::ClusterBarrier),
            cluster_fence: cycles(Key::ClusterFence),
            gpu_fence: cycles(Key::GpuFence),
            system_fence: cycles(Key::SystemFence),
            l2_latency: cycles(Key::L2Latency),
            tensor_rate: card.get(Key::TensorRate),
            mma_latency: cycles(Key::MmaLatency),
            matrix_latency: cycles(Key::MatrixLatency),
            pair_latency: cycles(Key::PairLatency),
            matrix_floor: cycles(Key::MatrixFloor),
            sums_delay: card.get(Key::SumsDelay),
            tmem_bytes: bytes(Key::TmemBytes),
            tmem_latency: cycles(Key::TmemLatency),
            copy_bytes: bytes(Key::CopyBytes),
        };
        let warp = |n: u32| WarpClock {
            at: start,
            cta: (n / warps_per_cta) as usize,
            quarter: (n % warps_per_cta) as usize % QUARTERS,
            expected: Vec::new(),
            sums: start,
            multiplied: start,
            awaits_memory: false,
            stored: start,
            fenced: false,
            since: start,
            spent: [0; Why::COUNT],
        };
        Timed {
            core: Core::default(),
            card: Arc::clone(card),
            costs: Arc::clone(costs),
            skipped: Arc::clone(skipped),
            values,
            cluster,
            warps: (0..ctas * warps_per_cta).map(warp).collect(),
            now: start,
            access: Access::None,
            earlier_end,
            cluster_known: start,
            dependents: 0,
            end: start,
            constants,
        }
    }

    /// Whether the execution of an instruction can be skipped.
    pub fn skips(&self, pc: u32) -> bool {
        !self.values && self.skipped[pc as usize]
    }

    /// Advances the clock of a warp that has issued an instruction. `writes` are the registers that the instruction
    /// writes.
    pub fn issued(&mut self, warp: u32, pc: u32, writes: &[u32], name: &str) {
        let start = self.occupy_pipes(warp, pc);
        self.begin_access(warp, start, writes);
        self.wait_if_named(warp, start, name);
    }

    /// Empties L1 after an instruction of the warp that acquires at a scope beyond the CTA.
    pub fn acquired(&mut self, warp: u32) {
        let cta = self.warps[warp as usize].cta;
        self.core.sms[cta].l1.clear();
    }

    /// Occupies the issue slots and pipes of an instruction, and advances the warp's clock past them. Returns when the
    /// instruction starts.
    fn occupy_pipes(&mut self, warp: u32, pc: u32) -> u64 {
        let cost = self.costs[pc as usize];
        let w = &mut self.warps[warp as usize];
        let sm = &mut self.core.sms[w.cta];
        let q = w.quarter;
        let mut start = self.now.max(w.at.min(self.now));
        if cost.slots > 0 {
            start = start.max(sm.issue[q]);
            w.spent[Why::Slot as usize] += start - self.now;
            let port = start;
            for (busy, free) in [(cost.alu, sm.alu[q]), (cost.fma, sm.fma[q]), (cost.special, sm.special[q])] {
                // A pipe accepts a few instructions ahead of time.
                if busy > 0 {
                    start = start.max(free.saturating_sub(4));
                }
            }
            w.spent[Why::Pipe as usize] += start - port;
            let delay = sm.delayed(q, start, cost.slots);
            sm.issue[q] = start + u64::from(cost.slots) + delay;
            let usage = &mut self.core.usage;
            usage.add(Unit::Issue, start, cost.slots.into());
            if cost.alu > 0 {
                sm.alu[q] = sm.alu[q].max(start) + u64::from(cost.alu);
                usage.add(Unit::Alu, start, cost.alu.into());
            }
            if cost.fma > 0 {
                sm.fma[q] = sm.fma[q].max(start) + u64::from(cost.fma);
                usage.add(Unit::Fma, start, cost.fma.into());
            }
            if cost.special > 0 {
                sm.special[q] = sm.special[q].max(start) + u64::from(cost.special);
                usage.add(Unit::Special, start, cost.special.into());
            }
            for free in [&mut sm.alu[q], &mut sm.fma[q], &mut sm.special[q]] {
                if *free > start {
                    *free += delay;
                }
            }
        }
        let advance = u64::from(cost.stall.max(cost.slots));
        w.spent[Why::Issue as usize] += advance;
        w.at = start + advance;
        start
    }

    /// Begins the memory access or the product of an instruction that starts at `start`. `writes` are the registers that
    /// it writes.
    fn begin_access(&mut self, warp: u32, start: u64, writes: &[u32]) {
        let w = &mut self.warps[warp as usize];
        let sm = &mut self.core.sms[w.cta];
        let q = w.quarter;
        let expect = |w: &mut WarpClock, ready, load, why| {
            if !writes.is_empty() {
                w.expected.push(Expected { registers: writes.to_vec(), ready, load, why });
            }
        };
        match std::mem::take(&mut self.access) {
            Access::None => {}
            Access::Shared { cycles } => {
                let from = sm.shared.max(start);
                sm.shared = from + cycles;
                self.core.usage.add(Unit::Shared, from, cycles);
                expect(w, sm.shared + self.constants.shared_latency, 0, Why::Shared);
            }
            Access::Tmem { bytes } => {
                // Only `tcgen05.wait::ld` waits for the registers of this load.
                let ready = sm.in_tensor_memory(q, start, bytes, &self.constants);
                w.expected.push(Expected { registers: Vec::new(), ready, load: 0, why: Why::Tmem });
            }
            Access::Matrix { multiply_adds } => {
                let math = multiply_adds as f64 / (self.constants.tensor_rate / QUARTERS as f64);
                let (cycles, cta) = (math.ceil() as u64, w.cta);
                let from = sm.tensor[q].max(start).max(w.sums);
                sm.tensor[q] = sm.tensor[q].max(start) + cycles;
                // One product may wait ahead of time, for the pipe or for its accumulators.
                w.at = w.at.max(w.multiplied);
                w.multiplied = from;
                expect(w, from + cycles + self.constants.mma_latency, 0, Why::Tensor);
                self.matrix_operation(&[cta], from, cycles, 1, || format!("CTA {cta} tensor core {q}"));
            }
            Access::Global { ranges, loads, cached, parts } => {
                let core = &mut self.core;
                let sm = &mut core.sms[w.cta];
                let load = core.loads + 1;
                let brings = (loads && cached).then(|| sm.l1.asked(&ranges, load)).flatten();
                if let Some(brings) = brings {
                    let cycles = parts * self.constants.l1_part;
                    let from = sm.shared.max(start);
                    sm.shared = from + cycles;
                    core.usage.add(Unit::Shared, from, cycles);
                    let there = sm.shared + self.constants.l1_latency;
                    match core.under_way.get_mut(&brings) {
                        Some(old) if old.ready == NEVER => {
                            old.others.push((self.cluster, warp));
                            expect(w, NEVER, brings, Why::Global);
                        }
                        Some(old) => expect(w, there.max(old.ready), 0, Why::Global),
                        None => expect(w, there, 0, Why::Global),
                    }
                } else {
                    let waiter = if loads {
                        core.loads = load;
                        if cached {
                            core.under_way.insert(load, UnderWay { ready: NEVER, others: Vec::new() });
                        }
                        expect(w, NEVER, load, Why::Global);
                        Waiter::Registers { cluster: self.cluster, warp, load }
                    } else {
                        w.stored = start + self.constants.l2_latency;
                        Waiter::Nobody
                    };
                    let kind = if loads { Kind::Load } else { Kind::Store };
                    core.requests.push(Request { time: start, kind, ranges, ctas: vec![w.cta as u32], waiter });
                }
            }
        }
    }

    /// Waits, if the instruction waits for an earlier grid, for the cluster or for tensor memory.
    fn wait_if_named(&mut self, warp: u32, start: u64, name: &str) {
        if name.starts_with("griddepcontrol") {
            if name.ends_with("wait") {
                let w = &mut self.warps[warp as usize];
                let until = w.at.max(self.earlier_end);
                w.spent[Why::Grid as usize] += until - w.at;
                w.at = until;
            } else if self.dependents == 0 {
                self.dependents = start;
            }
        } else if name.starts_with("barrier.cluster.wait") {
            let w = &mut self.warps[warp as usize];
            let until = w.at.max(self.cluster_known);
            w.spent[Why::Barrier as usize] += until - w.at;
            w.at = until;
        } else if name == "tcgen05.wait::ld.sync.aligned" {
            self.await_tensor_memory(warp);
        }
    }

    /// Records that the cluster's barrier is complete. All CTAs learn it after the barrier's latency, including the last
    /// to arrive, because other CTAs may arrive as late.
    pub fn cluster_complete(&mut self) {
        self.cluster_known = self.now + self.constants.cluster_barrier;
    }

    /// Delays a warp whose next instruction has a fence. Returns `false` if the fence is over.
    pub fn fence(&mut self, warp: u32, fence: Fence) -> bool {
        let w = &mut self.warps[warp as usize];
        let (stored, cycles) = match fence {
            Fence::Cluster => (0, self.constants.cluster_fence),
            Fence::Gpu => (w.stored, self.constants.gpu_fence),
            Fence::System => (w.stored, self.constants.system_fence),
        };
        w.fenced = !w.fenced && cycles > 0;
        if w.fenced {
            let until = w.at.max(stored) + cycles;
            w.spent[Why::Fence as usize] += until - w.at;
            w.at = until;
        }
        w.fenced
    }

    /// Delays the warp's next instruction until its loads from tensor memory have arrived.
    fn await_tensor_memory(&mut self, warp: u32) {
        let w = &mut self.warps[warp as usize];
        let ready = w.expected.iter().filter(|e| e.why == Why::Tmem).map(|e| e.ready).fold(w.at, u64::max);
        w.spent[Why::Tmem as usize] += ready - w.at;
        w.at = ready;
        w.expected.retain(|e| e.why != Why::Tmem);
    }

    /// Makes the warp wait until the registers of its next instruction are ready. If the instruction `multiplies`
    /// (`mma.sync`), accumulators that are not ready delay only the product: ptxas moves independent instructions that
    /// follow the product in the PTX before it.
    pub fn await_registers<'r>(
        &mut self,
        warp: usize,
        registers: impl Iterator<Item = &'r u32> + Clone,
        multiplies: bool,
    ) {
        let w = &mut self.warps[warp];
        if w.expected.is_empty() || w.at == NEVER {
            return;
        }
        let at = w.at;
        w.expected.retain(|e| e.ready > at);
        let mut until = (at, Why::Issue);
        let mut sums = at;
        for e in &w.expected {
            if e.ready > until.0 && registers.clone().any(|r| e.registers.contains(r)) {
                if multiplies && e.why == Why::Tensor {
                    sums = sums.max(e.ready);
                } else {
                    until = (e.ready, e.why);
                }
            }
        }
        w.sums = sums;
        if until.0 == NEVER {
            (w.since, w.at, w.awaits_memory) = (at, NEVER, true);
        } else {
            w.spent[until.1 as usize] += until.0 - at;
            w.at = until.0;
        }
    }

    /// Records that memory has answered a load. Its registers are ready at `ready`.
    pub fn loaded(&mut self, warp: u32, load: u64, ready: u64) {
        let w = &mut self.warps[warp as usize];
        for e in w.expected.iter_mut().filter(|e| e.load == load && e.ready == NEVER) {
            e.ready = ready;
        }
        self.end = self.end.max(ready);
    }

    /// Resumes a warp that waits for memory, so that it checks its registers again. Returns `false` if it did not wait.
    pub fn resume_after_memory(&mut self, warp: usize) -> bool {
        let w = &mut self.warps[warp];
        if w.awaits_memory {
            (w.at, w.awaits_memory) = (w.since, false);
            return true;
        }
        false
    }

    /// Whether a warp waits for registers that memory has not delivered.
    pub fn awaits_memory(&self, warp: usize) -> bool {
        self.warps[warp].awaits_memory
    }

    /// Resumes a waiting warp at a given time.
    pub fn wake(&mut self, warp: usize, at: u64, why: Why) {
        let w = &mut self.warps[warp];
        let at = at.max(w.since);
        w.spent[why as usize] += at - w.since;
        w.at = at;
        let (since, cta, n) = (w.since, w.cta, warp);
        self.core.span(|| format!("CTA {cta} warp {n}"), why.name(), since, at);
    }

    /// Completion time of an operation that its warp starts now. [`NEVER`]: memory determines the time.
    pub fn due(&mut self, warp: u32, id: u64, work: Work) -> u64 {
        let Constants { cluster, .. } = self.constants;
        let c = self.constants;
        let (cta, quarter) = self.warps.get(warp as usize).map_or((0, 0), |w| (w.cta, w.quarter));
        let now = self.now;
        let ctas_of = |ctas: &[u32]| ctas.iter().map(|&cta| cta as usize).collect::<Vec<_>>();
        match work {
            Work::Nothing => now,
            Work::Load { ranges, ctas, bulk } => {
                if !bulk {
                    let bytes: u64 = ranges.iter().map(|&(_, bytes)| u64::from(bytes)).sum();
                    let cycles = bytes.div_ceil(LINE) * c.l1_part;
                    let sm = &mut self.core.sms[cta];
                    let from = sm.shared.max(now);
                    sm.shared = from + cycles;
                    self.core.usage.add(Unit::Shared, from, cycles);
                }
                let waiter = Waiter::Operation { cluster: self.cluster, id };
                let kind = if bulk { Kind::Bulk } else { Kind::Load };
                self.core.requests.push(Request { time: now, kind, ranges, ctas, waiter });
                NEVER
            }
            Work::Store { ranges } => {
                let waiter = Waiter::Operation { cluster: self.cluster, id };
                let request = Request { time: now, kind: Kind::Store, ranges, ctas: vec![cta as u32], waiter };
                self.core.requests.push(request);
                NEVER
            }
            Work::ReadShared { bytes } => {
                let sm = &mut self.core.sms[cta];
                let from = sm.shared.max(now);
                let cycles = bytes.div_ceil(c.shared_bytes);
                sm.shared = from + cycles;
                self.core.usage.add(Unit::Shared, from, cycles);
                from + cycles + c.shared_latency
            }
            Work::Transfer { bytes, .. } => now + cluster + bytes.div_ceil(c.shared_bytes),
            Work::Wgmma { multiply_adds, shared_bytes, sums } => {
                let math = multiply_adds as f64 / (c.tensor_rate / QUARTERS as f64);
                let cycles = (math.ceil() as u64).max(shared_bytes.div_ceil(c.shared_bytes)).max(c.matrix_floor);
                let sm = &mut self.core.sms[cta];
                let from = sm.tensor[quarter].max(now);
                sm.tensor[quarter] = from + cycles;
                let delay = c.sums_delay * (2 * sums) as f64 / cycles as f64;
                sm.products[quarter].push_back(Product { from, to: from + cycles, delay });
                self.matrix_operation(&[cta], from, cycles, 1, || format!("CTA {cta} tensor core {quarter}"));
                from + cycles + c.matrix_latency
            }
            Work::Mma { ctas, multiply_adds, shared_bytes } => {
                let ctas = ctas_of(&ctas);
                let math = (multiply_adds as f64 / c.tensor_rate).ceil() as u64;
                let cycles = math.max(shared_bytes.div_ceil(c.shared_bytes)).max(1);
                let latency = if ctas.len() > 1 { c.pair_latency } else { c.matrix_latency };
                self.in_tensor_core(&ctas, cycles, latency, "mma")
            }
            Work::Copy { ctas, bytes } => {
                let ctas = ctas_of(&ctas);
                self.in_tensor_core(&ctas, bytes.div_ceil(c.copy_bytes), c.matrix_latency, "cp")
            }
            Work::Commit { pair } => {
                let peer = cta ^ usize::from(pair);
                let done = |cta: usize| self.core.sms.get(cta).map_or(0, |sm| sm.matrix_done);
                now.max(done(cta)).max(done(peer))
            }
            Work::Tmem { bytes } => self.core.sms[cta].in_tensor_memory(quarter, now, bytes, &c),
        }
    }

    /// Runs an operation on the tensor cores of CTAs that work on it together. Returns its completion time.
    fn in_tensor_core(&mut self, ctas: &[usize], cycles: u64, latency: u64, _: &'static str) -> u64 {
        let from = ctas.iter().map(|&cta| self.core.sms[cta].tensor[0]).fold(self.now, u64::max);
        for &cta in ctas {
            let sm = &mut self.core.sms[cta];
            sm.tensor[0] = from + cycles;
            sm.matrix_done = sm.matrix_done.max(from + cycles + latency);
        }
        let cta = ctas[0];
        self.matrix_operation(ctas, from, cycles, QUARTERS as u64, || format!("CTA {cta} tensor core"));
        from + cycles + latency
    }

    fn matrix_operation(&mut self, ctas: &[usize], from: u64, cycles: u64, times: u64, lane: impl FnOnce() -> String) {
        for _ in ctas {
            self.core.usage.add(Unit::Tensor, from, cycles * times);
        }
        let (first, last) = self.core.matrix.unwrap_or((from, from));
        self.core.matrix = Some((first.min(from), last.max(from + cycles)));
        self.core.span(lane, "matrix", from, from + cycles);
    }
}

/// Memory access of the lanes in `mask`, with `bytes` bytes per lane. A generic address counts as global memory. L1
/// keeps loads that are not strong.
pub fn access(mask: u32, addresses: &[u64; 32], bytes: u32, space: Space, loads: bool, strong: bool) -> Access {
    match space {
        Space::Local | Space::Param | Space::Const => Access::None,
        Space::Generic | Space::Global => {
            let parts = l1_parts(mask, addresses, bytes);
            Access::Global { ranges: sectors(mask, addresses, bytes), loads, cached: !strong, parts }
        }
        _ => Access::Shared { cycles: shared_cycles(mask, addresses, bytes) },
    }
}

/// Cycles of shared memory for the lanes' accesses. Each distinct word of the busiest bank costs one cycle.
pub fn shared_cycles(mask: u32, addresses: &[u64; 32], bytes: u32) -> u64 {
    // Wide accesses are split into parts of 128 bytes: quarter warps for 16 bytes per lane, half warps for 8.
    let lanes_at_once = lanes_at_once(bytes);
    let mut cycles = 0;
    for first in (0..32).step_by(lanes_at_once) {
        let mut words: [[u32; 8]; 32] = [[u32::MAX; 8]; 32];
        let mut counts = [0usize; 32];
        for lane in (first..first + lanes_at_once).filter(|lane| mask >> lane & 1 == 1) {
            let word = addresses[lane] as u32 / 4;
            for word in word..word + bytes.div_ceil(4) {
                let bank = (word % 32) as usize;
                let n = counts[bank].min(7);
                if !words[bank][..n].contains(&word) {
                    words[bank][n] = word;
                    counts[bank] += 1;
                }
            }
        }
        cycles += counts.iter().copied().max().unwrap_or(0) as u64;
    }
    cycles
}

/// Lanes that access 128 bytes together.
fn lanes_at_once(bytes: u32) -> usize {
    (32 / bytes.div_ceil(4)).max(1) as usize
}

/// Number of parts in which L1 serves the lanes' loads. A part is a line of lanes that access 128 bytes together.
fn l1_parts(mask: u32, addresses: &[u64; 32], bytes: u32) -> u64 {
    let lanes = lanes_at_once(bytes);
    let lines = |first: usize| {
        let there = (first..first + lanes).filter(|lane| mask >> lane & 1 == 1);
        there.map(|lane| addresses[lane] / LINE).collect::<HashSet<_>>().len() as u64
    };
    (0..32).step_by(lanes).map(lines).sum()
}

/// Sectors of 32 bytes that the lanes access, as ranges.
pub fn sectors(mask: u32, addresses: &[u64; 32], bytes: u32) -> Vec<Range> {
    let mut touched: Vec<u64> = Vec::with_capacity(32);
    for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
        touched.extend(addresses[lane] / 32..(addresses[lane] + u64::from(bytes)).div_ceil(32));
    }
    touched.sort_unstable();
    touched.dedup();
    let mut ranges: Vec<Range> = Vec::new();
    for sector in touched {
        match ranges.last_mut() {
            Some((from, length)) if *from + u64::from(*length) == sector * 32 => *length += 32,
            _ => ranges.push((sector * 32, 32)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_cost_cycles() {
        let consecutive: [u64; 32] = std::array::from_fn(|n| n as u64 * 4);
        assert_eq!(shared_cycles(u32::MAX, &consecutive, 4), 1);
        assert_eq!(shared_cycles(u32::MAX, &consecutive.map(|a| a * 4), 16), 4);
        assert_eq!(shared_cycles(u32::MAX, &consecutive.map(|a| a * 2), 4), 2);
        assert_eq!(shared_cycles(u32::MAX, &[64; 32], 4), 1);
    }

    #[test]
    fn wgmma_delays_other_instructions_of_its_quarter() {
        let mut sm = Multiprocessor::default();
        sm.products[1].extend([(10, 42, 1.5), (50, 60, 0.5)].map(|(from, to, delay)| Product { from, to, delay }));
        let delays = |sm: &mut Multiprocessor, quarter, times: [u64; 4]| times.map(|at| sm.delayed(quarter, at, 1));
        assert_eq!(delays(&mut sm, 0, [9, 10, 11, 12]), [0; 4]);
        assert_eq!(delays(&mut sm, 1, [9, 10, 11, 42]), [0, 1, 2, 0]);
        assert_eq!(delays(&mut sm, 1, [50, 51, 59, 60]), [0, 1, 0, 0]);
    }

    #[test]
    fn request_for_a_line_in_flight_waits_for_its_load() {
        let mut l1 = L1 { capacity: 2, ..L1::default() };
        assert_eq!(l1.asked(&[(0, 128)], 1), None);
        assert_eq!(l1.asked(&[(64, 128)], 2), None, "the second line is missing");
        assert_eq!(l1.asked(&[(64, 128)], 3), Some(2));
        assert_eq!(l1.asked(&[(32, 32)], 3), Some(1));
        assert_eq!(l1.asked(&[(256, 32)], 3), None);
        assert_eq!(l1.asked(&[(0, 32)], 4), None, "L1 holds only two lines");
        let mut core = Core::new(1, 256, false);
        core.under_way.insert(1, UnderWay { ready: NEVER, others: vec![(0, 7)] });
        assert_eq!(core.answered(1, 500), [(0, 7)]);
        assert_eq!(core.under_way[&1].ready, 500);
    }

    #[test]
    fn each_line_of_lanes_served_together_is_a_part() {
        let consecutive: [u64; 32] = std::array::from_fn(|n| n as u64);
        assert_eq!(l1_parts(u32::MAX, &consecutive.map(|n| n * 4), 4), 1);
        assert_eq!(l1_parts(u32::MAX, &consecutive.map(|n| n * 16), 16), 4);
        assert_eq!(l1_parts(u32::MAX, &consecutive.map(|n| n * 128), 16), 32);
        assert_eq!(l1_parts(0xff, &[0; 32], 16), 1);
    }

    #[test]
    fn neighboring_sectors_are_one_range() {
        let consecutive: [u64; 32] = std::array::from_fn(|n| n as u64 * 4);
        assert_eq!(sectors(u32::MAX, &consecutive, 4), [(0, 128)]);
        assert_eq!(sectors(0b11, &consecutive.map(|a| a * 32), 4), [(0, 32), (128, 32)]);
    }
}
