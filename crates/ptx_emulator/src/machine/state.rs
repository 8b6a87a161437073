//! State of a cluster of CTAs, except for its warps. Asynchronous operations start here.

use std::cell::RefCell;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};

use super::barrier::{self, Barrier, ClusterBarrier};
use super::clock::Clock;
use super::dropped_reads::DroppedReads;
use super::footprint::{Access, Kind, Object, Recorder};
use super::global::GlobalMemory;
use super::grid_races::GridRaces;
use super::grid_sync::GridSync;
use super::in_flight::Warpgroup;
use super::mbarrier::{MbarrierAt, Mbarriers};
use super::pending::{Issuer, Operation, Pending};
use super::race::{Agent, Detector, RemoteAccess, Shared};
use super::requests::Requests;
use super::synchronization::Synchronization;
use super::tensor_core::Pipes;
use super::tensor_memory::{self, Tmem};
use super::touches::Touches;
use super::warp::{Origin, Warp};
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::launch::{LaunchConfig, Level, Param, Sums};
use crate::config::report::{BufferTraffic, Role};
use crate::hw::descriptor::ScaleType;
use crate::hw::sums::Adder;
use crate::operand::Row;
use crate::timing::core::Timed;
use crate::timing::work::Work;

/// Number of warps per warpgroup.
pub const WARPGROUP: u32 = 4;

/// Data that all CTAs of a launch share.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    pub config: &'a LaunchConfig,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    /// Declared parameters.
    pub declared: &'a [Param],
    /// Addresses of the module's variables.
    pub symbols: &'a [u64],
    pub sms: u32,
    /// Number of the next cluster to launch.
    pub next_cluster: &'a AtomicU64,
    /// Number of clusters.
    pub clusters: u64,
    /// PTX line of each instruction, if any hazards are allowed.
    pub lines: &'a [u32],
    /// Loads and swaps of the kernel's `atom.cas` loops, by instruction.
    pub swaps: &'a FxHashMap<u32, Swap>,
    /// Instructions by which the value of a load can leave registers. `None`: the value decides which code is executed.
    pub outlets: &'a (dyn Fn(u32) -> Option<Vec<u32>> + Sync),
    /// Whether control flow leads from one instruction to another.
    pub leads: &'a (dyn Fn(u32, u32) -> bool + Sync),
    /// Knowledge that threads have published in global memory.
    pub sync: &'a GridSync,
    /// Detector of the grid's races in global memory. `None`: races are not searched for.
    pub races: Option<&'a GridRaces>,
    /// Start of the launch.
    pub began: Instant,
}

impl Launch<'_> {
    /// `%ctaid` of the first CTA of a cluster.
    pub fn cluster_origin(&self, index: u64) -> [u32; 3] {
        let (grid, cluster) = (self.config.grid, self.config.cluster);
        let (nx, ny) = (u64::from(grid[0] / cluster[0]), u64::from(grid[1] / cluster[1]));
        let at = [index % nx, index / nx % ny, index / nx / ny];
        std::array::from_fn(|d| at[d] as u32 * cluster[d])
    }

    /// Whether a hazard is allowed, by its kind and the lines of its instructions.
    pub fn allows(&self, stop: &Stop) -> bool {
        let places = || stop.pc.into_iter().chain(stop.others.iter().filter_map(|other| other.1));
        let at = |line: u32| places().any(|pc| self.lines.get(pc as usize) == Some(&line));
        self.config.allow.iter().any(|allow| allow.kind == stop.kind && allow.line.is_none_or(at))
    }

    /// Whether two racing instructions are the load and the swap of a compare-and-swap loop. In the manual, the plain
    /// load races with the swap, but a stale value only makes the swap fail (CUDA Programming Guide, "Atomic
    /// Functions").
    pub fn is_guess(&self, [one, other]: [u32; 2]) -> bool {
        let parts = [one, other].map(|pc| self.swaps.get(&pc));
        parts == [Some(&Swap::Guess), Some(&Swap::Compare)] || parts == [Some(&Swap::Compare), Some(&Swap::Guess)]
    }

    /// `%ctaid` of a CTA, from its cluster's number and its rank there.
    pub fn cta_index(&self, cluster: u32, rank: u32) -> [u32; 3] {
        let (origin, [x, y, _]) = (self.cluster_origin(cluster.into()), self.config.cluster);
        std::array::from_fn(|d| origin[d] + [rank % x, rank / x % y, rank / x / y][d])
    }

    /// CTA, warp and lane of a thread of a cluster.
    pub fn thread(&self, cluster: u32, thread: u32) -> ([u32; 3], u32, u32) {
        let warps = self.config.block.iter().product::<u32>().div_ceil(32);
        (self.cta_index(cluster, thread / 32 / warps), thread / 32 % warps, thread % 32)
    }
}

/// Role of an instruction in a compare-and-swap loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// A plain load of the value that an `atom.cas` of the same address expects. If it is stale, the swap fails.
    Guess,
    /// The `atom.cas`.
    Compare,
}

/// Shared memory of a CTA.
pub struct SharedMemory {
    pub data: Vec<u8>,
    /// `true` for each byte that has been written.
    pub defined: Vec<bool>,
    /// Bytes that hold copies of undefined bytes.
    pub undefined: FxHashMap<usize, Origin>,
}

impl SharedMemory {
    pub fn new(bytes: u32) -> SharedMemory {
        SharedMemory {
            data: vec![0; bytes as usize],
            defined: vec![false; bytes as usize],
            undefined: FxHashMap::default(),
        }
    }
}

/// Removes the bytes of `range` from the undefined bytes, because they are overwritten.
pub fn forget(undefined: &mut FxHashMap<usize, Origin>, range: std::ops::Range<usize>) {
    if !undefined.is_empty() {
        undefined.retain(|byte, _| !range.contains(byte));
    }
}

/// State of a CTA.
pub struct Cta {
    pub index: [u32; 3],
    pub shared: SharedMemory,
    pub barriers: [Barrier; barrier::COUNT as usize],
    pub mbarriers: Mbarriers,
    pub tmem: Tmem,
    pub requests: Requests,
    /// Addresses at which `tcgen05.alloc` has stored its result: its instruction, and the number of complete
    /// cluster-barrier generations after which its warp has arrived following the store.
    pub allocation_words: FxHashMap<u32, (u32, u64)>,
    /// `true` if a thread has waited for the earlier grids.
    pub awaited_grids: bool,
    /// `true` if a thread has let dependents start without knowing of this wait.
    pub let_dependents_start: bool,
    /// Last accesses to the CTA's shared memory by each thread and operation of other CTAs.
    pub remote_accesses: FxHashMap<u32, RemoteAccess>,
    /// Registers per thread that the CTA's warps have released by `setmaxnreg.dec`.
    pub free_registers: u32,
    /// Number of warps that have not exited.
    pub running: u32,
}

/// A hazard that did not end the launch: the first at its place.
pub struct Noted {
    /// Warp of the cluster.
    pub warp: u32,
    pub stop: Stop,
    /// `true` for a hazard, `false` for a warning.
    pub grave: bool,
    /// Number of occurrences.
    pub times: u64,
}

/// Effect of an asynchronous operation on the machine when the operation completes.
pub trait Effect: Send + 'static {
    fn finish(self, m: &mut Machine<'_>) -> Stopped<()>;

    /// Whether the effect may carry information between clusters.
    fn communicates(&self) -> bool {
        false
    }

    /// Work of the operation, for the time model.
    fn work(&self) -> Work {
        Work::Nothing
    }
}

/// An effect of any type.
pub type Completion = Box<dyn FnOnce(&mut Machine<'_>) -> Stopped<()> + Send>;

/// State of a cluster, except for its warps.
pub struct Machine<'a> {
    pub launch: Launch<'a>,
    /// Number of the cluster in the grid.
    pub index: u32,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    pub ctas: Vec<Cta>,
    pub pending: Pending<Completion>,
    pub race: Option<Detector>,
    pub sync: Synchronization,
    /// Accesses of the current instruction to global memory.
    pub touches: Touches,
    /// Racing loads whose values are unused so far.
    pub dropped_reads: DroppedReads,
    /// Clusters whose strong writes to global memory, without published knowledge, threads of this cluster have read.
    pub silent_clusters: FxHashSet<u32>,
    pub warp_barriers: FxHashMap<(u32, u32), Shared>,
    pub cluster_barrier: ClusterBarrier,
    /// Tensor-core operations in order, by CTA pair.
    pub pipes: Vec<Pipes>,
    /// Last `tcgen05.commit` to each mbarrier, with its instruction.
    pub commits: FxHashMap<MbarrierAt, (Agent, u32)>,
    /// Mbarriers that were invalidated.
    pub invalidated: FxHashSet<MbarrierAt>,
    /// Bulk copies that read a CTA's shared memory: CTA, operation and instruction.
    pub shared_readers: Vec<(u32, u64, u32)>,
    /// Warpgroups by CTA and number in the CTA.
    pub warpgroups: FxHashMap<(u32, u32), Warpgroup>,
    /// Results of asynchronous matrix instructions that are not in registers yet, by operation.
    pub matrix_results: FxHashMap<u64, Vec<Row>>,
    /// Counters by warp index in the CTA.
    pub roles: Vec<Role>,
    /// Counters by allocation of global memory.
    pub buffers: Vec<BufferTraffic>,
    pub sanitize: bool,
    /// Output of `printf`.
    pub output: String,
    /// Warp of the cluster, and instruction, whose step or operation is running.
    pub current: (u32, u32),
    /// Warnings, and hazards after which the launch continued.
    pub noted: RefCell<Vec<Noted>>,
    /// `true` if the cluster may communicate with other clusters at present. Otherwise it stops before communicating,
    /// and sets `held`.
    pub may_communicate: bool,
    pub held: bool,
    /// Number that increases with every event that another thread may wait for.
    pub progress: u64,
    /// Part of `progress` that changed no value: stores of values that memory held, and arrivals at barriers.
    pub repeats: u64,
    pub clock: Clock,
    /// Footprint of the current step, if orders are explored.
    pub recorder: Option<Box<Recorder>>,
    /// Time of the cluster on a GPU, if the launch is timed.
    pub timed: Option<Box<Timed>>,
    pub warps_per_cta: u32,
    pub threads_per_cta: u32,
}

impl<'a> Machine<'a> {
    /// Initial state of the cluster with number `index` in the grid.
    pub fn new(launch: Launch<'a>, index: u64, shared_bytes: u32, uses_tmem: bool) -> Machine<'a> {
        let config = launch.config;
        let [cx, cy, cz] = config.cluster;
        let threads = config.block.iter().product::<u32>();
        let warps_per_cta = threads.div_ceil(32);
        let ctas: Vec<Cta> = (0..cx * cy * cz)
            .map(|rank| Cta {
                index: launch.cta_index(index as u32, rank),
                shared: SharedMemory::new(shared_bytes),
                barriers: Default::default(),
                mbarriers: Mbarriers::new(),
                tmem: Tmem::default(),
                requests: Requests::default(),
                allocation_words: FxHashMap::default(),
                awaited_grids: false,
                let_dependents_start: false,
                remote_accesses: FxHashMap::default(),
                free_registers: 0,
                running: warps_per_cta,
            })
            .collect();
        let count = ctas.len() as u32;
        // Shared memories of the CTAs, then their tensor memories.
        let tmem_bytes = if uses_tmem { tensor_memory::BYTES } else { 0 };
        let memories = [shared_bytes, tmem_bytes].into_iter().flat_map(|n| ctas.iter().map(move |_| n));
        let race =
            config.sanitize.then(|| Detector::new(warps_per_cta * count, memories, config.strict).of_ctas(count));
        Machine {
            launch,
            index: index as u32,
            global: launch.global,
            params: launch.params,
            ctas,
            pending: Pending::default(),
            race,
            sync: Synchronization::default(),
            touches: Touches::default(),
            dropped_reads: DroppedReads::default(),
            silent_clusters: FxHashSet::default(),
            warp_barriers: FxHashMap::default(),
            commits: FxHashMap::default(),
            invalidated: FxHashSet::default(),
            shared_readers: Vec::new(),
            warpgroups: FxHashMap::default(),
            matrix_results: FxHashMap::default(),
            pipes: vec![Pipes::default(); count.div_ceil(2) as usize],
            cluster_barrier: ClusterBarrier::new(threads * count),
            roles: vec![Role::default(); warps_per_cta as usize],
            buffers: vec![BufferTraffic::default(); launch.global.allocations().len()],
            sanitize: config.sanitize,
            output: String::new(),
            current: (0, 0),
            noted: RefCell::default(),
            may_communicate: true,
            held: false,
            progress: 0,
            repeats: 0,
            clock: Clock::new(config.schedule, index),
            recorder: None,
            timed: None,
            warps_per_cta,
            threads_per_cta: threads,
        }
    }
}

impl Machine<'_> {
    /// Warpgroup of a warp.
    pub fn warpgroup(&mut self, w: &Warp) -> &mut Warpgroup {
        let group = w.role / WARPGROUP;
        let warps = (self.warps_per_cta - group * WARPGROUP).min(WARPGROUP);
        self.warpgroups.entry((w.cta, group)).or_insert_with(|| Warpgroup::new(warps))
    }

    /// Number of events that changed a value, or that a thread may have waited for.
    pub fn changes(&self) -> u64 {
        self.progress - self.repeats
    }

    /// Number of cluster-barrier generations that are complete after the warp's next arrival counts.
    pub fn generation_of_next_arrival(&self, w: &Warp) -> u64 {
        let barrier = &self.cluster_barrier;
        let arrived = w.cluster_arrived != 0 && w.cluster_generation == barrier.generation;
        barrier.generation + 1 + u64::from(arrived)
    }

    /// Number of threads of the cluster. The race detector numbers asynchronous operations from here.
    pub fn threads(&self) -> u32 {
        self.warps_per_cta * 32 * self.ctas.len() as u32
    }

    /// Reports a violation of the manual by the current instruction that GPUs tolerate: a hazard under `strict`,
    /// otherwise a warning.
    pub fn warn(&self, stop: Box<Stop>) -> Stopped<()> {
        match self.launch.config.level() {
            Level::Machine => Ok(()),
            Level::Default => {
                if let Err(stop) = self.allowed(stop) {
                    self.note(stop, false);
                }
                Ok(())
            }
            Level::Strict => self.hazard(stop),
        }
    }

    /// Reports something that the manual allows and that is not known to be right on any GPU: a warning at every level
    /// that looks for hazards.
    pub fn suspect(&self, stop: Box<Stop>) {
        if self.sanitize
            && let Err(stop) = self.allowed(stop)
        {
            self.note(stop, false);
        }
    }

    /// Reports a hazard of the current instruction or operation: a fault, unless the hazard is allowed or the launch
    /// continues after hazards.
    pub fn hazard(&self, stop: Box<Stop>) -> Stopped<()> {
        if stop.kind == FaultKind::DataRace
            && !self.launch.config.strict
            && let Some(other) = stop.others.first().and_then(|other| other.1)
            && self.launch.is_guess([stop.pc.unwrap_or(self.current.1), other])
        {
            return self.warn(stop);
        }
        let Err(stop) = self.allowed(stop) else { return Ok(()) };
        if self.launch.config.keep_going {
            self.note(stop, true);
            return Ok(());
        }
        Err(stop)
    }

    fn allowed(&self, mut stop: Box<Stop>) -> Stopped<()> {
        stop.pc.get_or_insert(self.current.1);
        if self.launch.allows(&stop) { Ok(()) } else { Err(stop) }
    }

    /// Keeps a hazard for the report, if it is the first at its place, and counts it otherwise.
    fn note(&self, stop: Box<Stop>, grave: bool) {
        let others = |s: &Stop| s.others.iter().filter(|_| grave).map(|other| other.1).collect::<Vec<_>>();
        let place = |s: &Stop| (s.kind, s.pc, others(s));
        let mut noted = self.noted.borrow_mut();
        match noted.iter_mut().find(|old| old.grave == grave && place(&old.stop) == place(&stop)) {
            Some(old) => old.times += 1,
            None => noted.push(Noted { warp: self.current.0, stop: *stop, grave, times: 1 }),
        }
    }

    /// Records an access of the current step.
    #[inline(always)]
    pub fn record(&mut self, object: Object, range: std::ops::Range<u64>, kind: Kind) {
        if let Some(recorder) = &mut self.recorder {
            recorder.own.add(Access::new(object, range, kind));
        }
    }

    /// Operations among `ids` that another one must follow: those in flight. If orders are explored, also the complete
    /// ones, so that the two never count as steps that could change their order.
    pub fn predecessors(&self, ids: impl Iterator<Item = u64>) -> Vec<u64> {
        ids.filter(|id| self.recorder.is_some() || self.pending.contains(*id)).collect()
    }

    /// Keeps the operations in flight in a list of operations that the current instruction waits for.
    pub fn await_operations(&mut self, ids: &mut Vec<u64>) {
        ids.retain(|&id| {
            let waits = self.pending.contains(id);
            if !waits {
                self.record(Object::Operation { cluster: self.index, id }, 0..1, Kind::Await { phase: 0 });
            }
            waits
        });
    }

    /// Records an access of the current step to the shared memory of a CTA.
    #[inline(always)]
    pub fn record_shared(&mut self, cta: u32, offset: u32, len: u32, kind: Kind) {
        if self.recorder.is_some() {
            let (cluster, ctas) = (self.index, self.ctas.len());
            if ctas > 1 {
                // Another CTA's shared memory ends with the CTA.
                self.record(Object::Exit { cluster, cta }, 0..1, Kind::Read);
            }
            let begin = u64::from(offset);
            self.record(Object::Memory { cluster, memory: cta }, begin..begin + u64::from(len), kind);
        }
    }

    /// Ends the generation of the cluster barrier if all threads have arrived.
    pub fn advance_cluster_barrier(&mut self) {
        if self.cluster_barrier.advance()
            && let Some(timed) = &mut self.timed
        {
            timed.cluster_complete();
        }
    }

    /// Starts an asynchronous operation of the warp's current instruction. Returns its number.
    pub fn start(&mut self, w: &Warp, effect: impl Effect) -> u64 {
        self.start_after(w, Vec::new(), effect)
    }

    /// Like [`start`](Machine::start), for an operation that completes only after others.
    pub fn start_after(&mut self, w: &Warp, after: Vec<u64>, effect: impl Effect) -> u64 {
        let id = self.pending.reserve();
        let issuer = Issuer { warp: w.index, pc: w.pc() };
        self.start_reserved(id, issuer, after, effect);
        id
    }

    /// Like [`start_after`](Machine::start_after), for an operation with a reserved number.
    pub fn start_reserved(&mut self, id: u64, issuer: Issuer, after: Vec<u64>, effect: impl Effect) {
        let due = match &mut self.timed {
            Some(timed) => timed.due(issuer.warp, id, effect.work()),
            None => self.clock.completion(),
        };
        let communicates = effect.communicates();
        let effect: Completion = Box::new(move |m| effect.finish(m));
        self.pending.push(Operation { id, due, after, issuer, communicates, effect });
    }

    /// Whether products and other values without effect on control flow are computed.
    pub fn computes_values(&self) -> bool {
        self.timed.as_ref().is_none_or(|timed| timed.values)
    }

    /// Codes of scale factors as a GPU reads them. GPUs ignore the top bit of a ue4m3, which must be zero by the manual
    /// (measured by MMA-Sim, arXiv 2511.10909). With the sanitizer, the bit stays, and is a fault.
    pub fn scale_codes(&self, scale: ScaleType, mut codes: Vec<u8>) -> Vec<u8> {
        if !self.sanitize && scale == ScaleType::Ue4m3 {
            codes.iter_mut().for_each(|code| *code &= 0x7f);
        }
        codes
    }

    /// How products are added: as the GPU does, or exactly.
    pub fn adder<'s>(&self, of_card: &'s Adder) -> Option<&'s Adder> {
        (self.launch.config.sums == Sums::Card).then_some(of_card)
    }

    /// Writes shared memory for an asynchronous operation whose target has been checked.
    pub fn write_shared(&mut self, cta: u32, offset: u32, data: &[u8]) {
        let memory = &mut self.ctas[cta as usize].shared;
        let range = offset as usize..offset as usize + data.len();
        memory.data[range.clone()].copy_from_slice(data);
        memory.defined[range.clone()].fill(true);
        forget(&mut memory.undefined, range);
        self.progress += 1;
    }

    /// Marks bytes of shared memory as copies of undefined bytes. `bytes` is a mask; bit 0 stands for the byte at
    /// `offset`.
    pub fn undefine_shared(&mut self, cta: u32, offset: u32, bytes: u64, origin: Origin) {
        let marked = (0..64).filter(|n| bytes >> n & 1 == 1).map(|n| (offset as usize + n, origin));
        self.ctas[cta as usize].shared.undefined.extend(marked);
    }
}
