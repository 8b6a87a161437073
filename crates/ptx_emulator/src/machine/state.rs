//! The state of a cluster of CTAs: everything but its warps. Asynchronous operations start here.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;

use super::access::grid::Touches;
use super::barrier::{self, Barrier, ClusterBarrier};
use super::clock::Clock;
use super::dropped_reads::DroppedReads;
use super::global::GlobalMemory;
use super::grid_races::GridRaces;
use super::grid_sync::GridSync;
use super::in_flight::Warpgroup;
use super::mbarrier::{MbarrierAt, Mbarriers};
use super::pending::{Issuer, Operation, Pending};
use super::race::{Agent, Detector, Shared};
use super::requests::Requests;
use super::synchronization::Synchronization;
use super::tensor_core::Pipes;
use super::tensor_memory::{self, Tmem};
use super::warp::Warp;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::launch::{LaunchConfig, Level, Param};
use crate::config::report::{BufferTraffic, Role};
use crate::operand::Row;
use crate::timing::core::Timed;
use crate::timing::work::Work;

/// Warps of a warpgroup.
pub const WARPGROUP: u32 = 4;

/// What all CTAs of a launch share.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    pub config: &'a LaunchConfig,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    /// How the parameters are declared.
    pub declared: &'a [Param],
    /// Addresses of the module's variables.
    pub symbols: &'a [u64],
    pub sms: u32,
    /// The next cluster that has not been launched.
    pub next_cluster: &'a AtomicU64,
    /// How many there are.
    pub clusters: u64,
    /// The PTX line of each instruction, if hazards may be allowed.
    pub lines: &'a [u32],
    /// The kernel's parts of loops around `atom.cas`, by their place in it.
    pub swaps: &'a HashMap<u32, Swap>,
    /// Where the value of a load can leave registers: the instructions, unless it decides what is executed.
    pub outlets: &'a (dyn Fn(u32) -> Option<Vec<u32>> + Sync),
    /// Whether the code leads from one instruction to another.
    pub leads: &'a (dyn Fn(u32, u32) -> bool + Sync),
    /// What threads have published in global memory.
    pub sync: &'a GridSync,
    /// Where races of the grid in global memory are looked for, if they are.
    pub races: Option<&'a GridRaces>,
}

impl Launch<'_> {
    /// `%ctaid` of the first CTA of a cluster.
    pub fn cluster_origin(&self, index: u64) -> [u32; 3] {
        let (grid, cluster) = (self.config.grid, self.config.cluster);
        let (nx, ny) = (u64::from(grid[0] / cluster[0]), u64::from(grid[1] / cluster[1]));
        let at = [index % nx, index / nx % ny, index / nx / ny];
        std::array::from_fn(|d| at[d] as u32 * cluster[d])
    }

    /// Whether a hazard is allowed, by its kind and the line of one of its instructions.
    pub fn allows(&self, stop: &Stop) -> bool {
        let places = || stop.pc.into_iter().chain(stop.others.iter().filter_map(|other| other.1));
        let at = |line: u32| places().any(|pc| self.lines.get(pc as usize) == Some(&line));
        self.config.allow.iter().any(|allow| allow.kind == stop.kind && allow.line.is_none_or(at))
    }

    /// Whether two instructions that race are the halves of a compare-and-swap loop. The manual calls the plain load a race
    /// with the swap; but a stale value makes the swap fail, and no more (CUDA Programming Guide, "Atomic Functions").
    pub fn is_guess(&self, [one, other]: [u32; 2]) -> bool {
        let parts = [one, other].map(|pc| self.swaps.get(&pc));
        parts == [Some(&Swap::Guess), Some(&Swap::Compare)] || parts == [Some(&Swap::Compare), Some(&Swap::Guess)]
    }

    /// `%ctaid` of a CTA by the number of its cluster and its rank there.
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

/// A part in a loop that reads a place, and swaps its value for another while it is what was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// A plain load of what an `atom.cas` of the same address expects: it may be stale, and then the swap fails.
    Guess,
    /// The `atom.cas`.
    Compare,
}

/// The shared memory of a CTA.
pub struct SharedMemory {
    pub data: Vec<u8>,
    /// Bytes that something has written.
    pub defined: Vec<bool>,
    /// Bytes to which undefined ones were stored.
    pub undefined: HashSet<usize>,
}

impl SharedMemory {
    pub fn new(bytes: u32) -> SharedMemory {
        SharedMemory { data: vec![0; bytes as usize], defined: vec![false; bytes as usize], undefined: HashSet::new() }
    }
}

/// Bytes of `range` are written anew.
pub fn forget(undefined: &mut HashSet<usize>, range: std::ops::Range<usize>) {
    if !undefined.is_empty() {
        undefined.retain(|byte| !range.contains(byte));
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
    /// Where `tcgen05.alloc` has stored an address: its instruction, and how many generations of the cluster's barrier
    /// must be complete for its warp to have arrived behind it.
    pub allocation_words: HashMap<u32, (u32, u64)>,
    /// A thread has waited for the grids before.
    pub awaited_grids: bool,
    /// A thread has let dependents start and did not know of such a wait.
    pub let_dependents_start: bool,
    /// Registers a thread that its warps have released by `setmaxnreg.dec`.
    pub free_registers: u32,
    /// Warps that have not exited.
    pub running: u32,
}

/// A hazard that did not end the launch: the first at its place.
pub struct Noted {
    /// The warp of the cluster.
    pub warp: u32,
    pub stop: Stop,
    /// It is no mere warning.
    pub grave: bool,
    /// How often it happened.
    pub times: u64,
}

/// What an asynchronous operation does to the machine when it completes.
pub trait Effect: Send + 'static {
    fn finish(self, m: &mut Machine<'_>) -> Stopped<()>;

    /// Whether it may carry information between clusters.
    fn communicates(&self) -> bool {
        false
    }

    /// What it asks of the card, for its time.
    fn work(&self) -> Work {
        Work::Nothing
    }
}

/// An effect of any kind.
pub type Completion = Box<dyn FnOnce(&mut Machine<'_>) -> Stopped<()> + Send>;

/// All state of a cluster but its warps.
pub struct Machine<'a> {
    pub launch: Launch<'a>,
    /// The cluster's number in the grid.
    pub index: u32,
    pub global: &'a GlobalMemory,
    pub params: &'a [u8],
    pub ctas: Vec<Cta>,
    pub pending: Pending<Completion>,
    pub race: Option<Detector>,
    pub sync: Synchronization,
    /// What the current instruction does to global memory.
    pub touches: Touches,
    /// Loads that race, and of whose values nothing has come yet.
    pub dropped_reads: DroppedReads,
    /// Clusters whose strong writes to global memory, with nothing published, threads here have read.
    pub silent_clusters: HashSet<u32>,
    pub warp_barriers: HashMap<(u32, u32), Shared>,
    pub cluster_barrier: ClusterBarrier,
    /// Tensor-core operations in order, by CTA pair.
    pub pipes: Vec<Pipes>,
    /// The last `tcgen05.commit` to each mbarrier, and its instruction.
    pub commits: HashMap<MbarrierAt, (Agent, u32)>,
    /// mbarriers that were invalidated.
    pub invalidated: HashSet<MbarrierAt>,
    /// Bulk copies that read a CTA's shared memory: the CTA, the operation, its instruction.
    pub shared_readers: Vec<(u32, u64, u32)>,
    /// By CTA and number in the CTA.
    pub warpgroups: HashMap<(u32, u32), Warpgroup>,
    /// Results of asynchronous matrix instructions that are not in registers yet, by operation.
    pub matrix_results: HashMap<u64, Vec<Row>>,
    /// Counters by warp index in the CTA.
    pub roles: Vec<Role>,
    /// Counters by allocation of global memory.
    pub buffers: Vec<BufferTraffic>,
    pub sanitize: bool,
    /// What `printf` has printed.
    pub output: String,
    /// The warp of the cluster, and the instruction, whose step or operation is at work.
    pub current: (u32, u32),
    /// Warnings, and hazards behind which the launch goes on.
    pub noted: RefCell<Vec<Noted>>,
    /// Whether the cluster may do now what carries information between clusters. If not, it stops before, and sets
    /// `held`.
    pub may_communicate: bool,
    pub held: bool,
    /// Goes up whenever something happens that another thread may wait for.
    pub progress: u64,
    pub clock: Clock,
    /// The cluster's time on a card, if the launch is timed.
    pub timed: Option<Box<Timed>>,
    pub warps_per_cta: u32,
    pub threads_per_cta: u32,
}

impl<'a> Machine<'a> {
    /// The state that the cluster with number `index` in the grid begins with.
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
                allocation_words: HashMap::new(),
                awaited_grids: false,
                let_dependents_start: false,
                free_registers: 0,
                running: warps_per_cta,
            })
            .collect();
        let count = ctas.len() as u32;
        // The CTAs' shared memories, then their tensor memories.
        let tmem_bytes = if uses_tmem { tensor_memory::BYTES } else { 0 };
        let memories = [shared_bytes, tmem_bytes].into_iter().flat_map(|n| ctas.iter().map(move |_| n));
        let race = config.sanitize.then(|| Detector::new(warps_per_cta * count, memories, config.strict));
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
            silent_clusters: HashSet::new(),
            warp_barriers: HashMap::new(),
            commits: HashMap::new(),
            invalidated: HashSet::new(),
            shared_readers: Vec::new(),
            warpgroups: HashMap::new(),
            matrix_results: HashMap::new(),
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
            clock: Clock::new(config.schedule, index),
            timed: None,
            warps_per_cta,
            threads_per_cta: threads,
        }
    }
}

impl Machine<'_> {
    /// The warpgroup of a warp.
    pub fn warpgroup(&mut self, w: &Warp) -> &mut Warpgroup {
        let group = w.role / WARPGROUP;
        let warps = (self.warps_per_cta - group * WARPGROUP).min(WARPGROUP);
        self.warpgroups.entry((w.cta, group)).or_insert_with(|| Warpgroup::new(warps))
    }

    /// How many generations of the cluster's barrier are complete once the warp's next arrival there counts.
    pub fn generation_of_next_arrival(&self, w: &Warp) -> u64 {
        let barrier = &self.cluster_barrier;
        let arrived = w.cluster_arrived != 0 && w.cluster_generation == barrier.generation;
        barrier.generation + 1 + u64::from(arrived)
    }

    /// Threads of the cluster; the race detector numbers asynchronous operations from here.
    pub fn threads(&self) -> u32 {
        self.warps_per_cta * 32 * self.ctas.len() as u32
    }

    /// What the manual forbids and cards bear, committed by the current instruction: a hazard under `strict`, by default a
    /// warning.
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

    /// What can go wrong on a card, committed by the current instruction or operation: a fault, unless it is allowed or the
    /// launch is to go on.
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

    /// Keeps a hazard for the report, the first at its place.
    fn note(&self, stop: Box<Stop>, grave: bool) {
        let place = |s: &Stop| (s.kind, s.pc, s.others.iter().map(|other| other.1).collect::<Vec<_>>());
        let mut noted = self.noted.borrow_mut();
        match noted.iter_mut().find(|old| old.grave == grave && place(&old.stop) == place(&stop)) {
            Some(old) => old.times += 1,
            None => noted.push(Noted { warp: self.current.0, stop: *stop, grave, times: 1 }),
        }
    }

    /// Ends the generation of the cluster's barrier if all threads have arrived.
    pub fn advance_cluster_barrier(&mut self) {
        if self.cluster_barrier.advance()
            && let Some(timed) = &mut self.timed
        {
            timed.cluster_complete();
        }
    }

    /// Starts an asynchronous operation of the warp's current instruction; it gets a number.
    pub fn start(&mut self, w: &Warp, effect: impl Effect) -> u64 {
        self.start_after(w, Vec::new(), effect)
    }

    /// The same for an operation that completes only after others.
    pub fn start_after(&mut self, w: &Warp, after: Vec<u64>, effect: impl Effect) -> u64 {
        let id = self.pending.reserve();
        let issuer = Issuer { warp: w.index, pc: w.pc() };
        self.start_reserved(id, issuer, after, effect);
        id
    }

    /// The same for an operation whose number is reserved already.
    pub fn start_reserved(&mut self, id: u64, issuer: Issuer, after: Vec<u64>, effect: impl Effect) {
        let due = match &mut self.timed {
            Some(timed) => timed.due(issuer.warp, id, effect.work()),
            None => self.clock.completion(),
        };
        let communicates = effect.communicates();
        let effect: Completion = Box::new(move |m| effect.finish(m));
        self.pending.push(Operation { id, due, after, issuer, communicates, effect });
    }

    /// Whether products and other values that no control flow depends on are computed.
    pub fn computes_values(&self) -> bool {
        self.timed.as_ref().is_none_or(|timed| timed.values)
    }

    /// Writes shared memory on behalf of an asynchronous operation whose target has been checked.
    pub fn write_shared(&mut self, cta: u32, offset: u32, data: &[u8]) {
        let memory = &mut self.ctas[cta as usize].shared;
        let range = offset as usize..offset as usize + data.len();
        memory.data[range.clone()].copy_from_slice(data);
        memory.defined[range.clone()].fill(true);
        forget(&mut memory.undefined, range);
        self.progress += 1;
    }
}
