//! The device: memory, variables of modules, and launches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rayon::prelude::*;

use crate::code::Kernel;
use crate::config::fault::{Fault, FaultKind, Warning};
use crate::config::launch::{DeviceConfig, LaunchConfig, Schedule};
use crate::config::report::{BufferTraffic, Report, Role};
use crate::machine::global::GlobalMemory;
use crate::machine::grid_races::GridRaces;
use crate::machine::grid_sync::GridSync;
use crate::machine::state::Launch;
use crate::module::Module;
use crate::parser::ast::Init;
use crate::scheduler::cluster::{Cluster, Status};
use crate::timed::{self, Timeline};
use crate::types::Space;

/// An allocation of global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Device address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// An argument of a kernel, as the bytes of its parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arg(pub Vec<u8>);

impl Arg {
    /// Argument from a plain value.
    pub fn value<T: bytemuck::NoUninit>(value: T) -> Arg {
        Arg(bytemuck::bytes_of(&value).to_vec())
    }
}

impl From<Buffer> for Arg {
    fn from(buffer: Buffer) -> Arg {
        Arg::value(buffer.address)
    }
}

/// Maximum number of threads per CTA.
const MAX_THREADS: u32 = 1024;
/// Maximum number of CTAs per cluster (with the non-portable size).
const MAX_CLUSTER: u32 = 16;
/// The same on compute capability 12.x (NVIDIA's tuning guide for Blackwell, "Thread Block Clusters").
const SMALL_MAX_CLUSTER: u32 = 8;
/// Maximum shared memory per CTA in bytes, static and dynamic (compute capability 9.0 and 10.0).
const MAX_SHARED: u32 = 227 * 1024;
/// Maximum shared memory per CTA in bytes (compute capability 12.x).
const SMALL_MAX_SHARED: u32 = 99 * 1024;
/// Warp instructions per turn, if clusters take turns.
const TURN: u64 = 2048;
/// Number of rounds without progress after which clusters that take turns count as stuck.
const PATIENCE: u32 = 4;

/// What an SM holds at a time (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
struct SmLimits {
    threads: u64,
    ctas: u64,
    /// Bytes of shared memory. [`RESERVED_SHARED`](SmLimits::RESERVED_SHARED) bytes per CTA count too.
    shared_bytes: u64,
}

impl SmLimits {
    /// Compute capability 9.0 and 10.x.
    const LARGE: SmLimits = SmLimits { threads: 2048, ctas: 32, shared_bytes: 228 << 10 };
    /// Compute capability 12.x.
    const SMALL: SmLimits = SmLimits { threads: 1536, ctas: 24, shared_bytes: 100 << 10 };
    /// Shared memory that the system reserves per CTA, in bytes.
    const RESERVED_SHARED: u64 = 1 << 10;

    /// Maximum number of CTAs of a launch on an SM at a time, at least 1. PTX does not say how many registers a thread
    /// needs, so they do not count.
    fn ctas(&self, kernel: &Kernel, config: &LaunchConfig) -> u64 {
        let threads = config.block.iter().map(|&n| u64::from(n)).product::<u64>().next_multiple_of(32);
        let shared = u64::from(kernel.shared_bytes) + u64::from(config.shared_bytes) + SmLimits::RESERVED_SHARED;
        self.ctas.min(self.threads / threads).min(self.shared_bytes / shared).max(1)
    }
}

/// A device with its memory.
#[derive(Default)]
pub struct Device {
    config: DeviceConfig,
    memory: GlobalMemory,
    /// Addresses of the variables of each loaded module.
    modules: HashMap<u64, Vec<u64>>,
}

impl Device {
    /// A device without allocations.
    pub fn new(config: DeviceConfig) -> Device {
        Device { config, ..Device::default() }
    }

    /// Allocates `bytes` zero bytes. Addresses are multiples of 256, and nothing is mapped between allocations.
    pub fn allocate(&mut self, bytes: u64) -> Buffer {
        Buffer { address: self.memory.allocate(bytes, None, false), bytes }
    }

    /// Allocates `bytes` zero bytes at an address that the caller chooses, such as the address of host memory. Returns
    /// `None` if the address is not a multiple of 4, or if the range overlaps an allocation.
    pub fn allocate_at(&mut self, address: u64, bytes: u64) -> Option<Buffer> {
        self.memory.allocate_at(address, bytes).then_some(Buffer { address, bytes })
    }

    /// Variables of a module by name. The first call creates them.
    ///
    /// # Errors
    /// [`FaultKind::Unsupported`] if an initial value is not supported.
    pub fn variables(&mut self, module: &Module) -> Result<Vec<(String, Buffer)>, Fault> {
        let addresses = self.load(module)?;
        let variables = module.variables.iter().zip(addresses);
        Ok(variables.map(|(v, address)| (v.name.clone(), Buffer { address, bytes: v.bytes })).collect())
    }

    /// Allocates and fills a buffer.
    pub fn upload<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.allocate(bytes.len() as u64);
        self.write(buffer, 0, bytes);
        buffer
    }

    /// Names a buffer, for faults and reports. Several buffers may have the same name.
    ///
    /// # Panics
    /// If the buffer does not belong to this device.
    pub fn name(&mut self, buffer: Buffer, name: &str) {
        self.memory.name(buffer.address, name);
    }

    /// Frees a buffer. Its addresses are never reused, so a kernel that still uses them faults.
    ///
    /// # Panics
    /// If the buffer does not belong to this device, or is already freed.
    pub fn free(&mut self, buffer: Buffer) {
        self.memory.free(buffer.address);
    }

    /// Writes bytes at an offset of a buffer.
    ///
    /// # Panics
    /// If the bytes do not fit.
    pub fn write(&mut self, buffer: Buffer, offset: u64, data: &[u8]) {
        let at = self.memory.locate(buffer.address + offset, data.len() as u64);
        let (allocation, offset) = at.expect("the bytes must lie inside the buffer");
        allocation.copy_in(offset, data);
        allocation.define(offset, data.len() as u64);
    }

    /// Marks bytes as undefined, as fresh memory of an allocator is, until the host or a kernel writes them. The
    /// sanitizer reports a use of such bytes. Their values stay.
    ///
    /// # Panics
    /// If the bytes do not lie inside the buffer.
    pub fn undefine(&mut self, buffer: Buffer, offset: u64, bytes: u64) {
        assert!(self.memory.undefine(buffer.address + offset, bytes), "the bytes must lie inside the buffer");
    }

    /// Contents of a buffer.
    ///
    /// # Panics
    /// If the length of the buffer is not a multiple of the size of `T`.
    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, buffer: Buffer) -> Vec<T> {
        let size = size_of::<T>() as u64;
        assert!(
            size > 0 && buffer.bytes.is_multiple_of(size),
            "{} bytes are not a whole number of elements",
            buffer.bytes
        );
        let mut out = vec![T::zeroed(); (buffer.bytes / size) as usize];
        let (allocation, offset) =
            self.memory.locate(buffer.address, buffer.bytes).expect("the buffer must belong to this device");
        allocation.copy_out(offset, bytemuck::cast_slice_mut(&mut out));
        out
    }

    /// Assigns addresses and initial values to a module's variables when the module is first used.
    fn load(&mut self, module: &Module) -> Result<Vec<u64>, Fault> {
        if let Some(addresses) = self.modules.get(&module.id) {
            return Ok(addresses.clone());
        }
        let mut addresses = Vec::new();
        for v in &module.variables {
            let constant = v.space == Space::Const;
            addresses.push(self.memory.allocate(v.bytes, Some(format!("`{}`", v.name)), constant));
        }
        for (v, &address) in module.variables.iter().zip(&addresses) {
            let size = v.element.bytes() as usize;
            for (n, init) in v.init.iter().enumerate() {
                let value = match init {
                    Init::Bits(bits) => *bits,
                    Init::Symbol { name, offset } => {
                        let variable = module.variables.iter().position(|v| v.name == *name).map(|n| addresses[n]);
                        let target = variable.or_else(|| module.functions.get(name).copied()).ok_or_else(|| {
                            Fault::bare(
                                FaultKind::Unsupported,
                                "",
                                format!("`{}` is initialized with the address of `{name}`", v.name),
                            )
                        })?;
                        target.wrapping_add(*offset as u64)
                    }
                };
                if let Some((allocation, at)) = self.memory.locate(address + (n * size) as u64, size as u64) {
                    allocation.copy_in(at, &value.to_le_bytes()[..size.min(8)]);
                }
            }
        }
        self.modules.insert(module.id, addresses.clone());
        Ok(addresses)
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// The first fault, by cluster. [`FaultKind::BadLaunch`] if the launch does not fit the kernel.
    pub fn launch(
        &mut self,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
    ) -> Result<Report, Fault> {
        self.launch_on(None, module, entry, config, args)
    }

    /// Runs a kernel to its end by the clock of a GPU: on the fair schedule, without looking for hazards. The launch is
    /// added to the timeline.
    ///
    /// # Errors
    /// Same as [`Device::launch`].
    pub fn time(
        &mut self,
        timeline: &mut Timeline,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
    ) -> Result<Report, Fault> {
        let config = LaunchConfig { schedule: Schedule::Fair, sanitize: false, ..config.clone() };
        self.launch_on(Some(timeline), module, entry, &config, args)
    }

    fn launch_on(
        &mut self,
        timeline: Option<&mut Timeline>,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
    ) -> Result<Report, Fault> {
        self.begin(module, entry, config)?;
        self.with_launch(module, entry, config, args, |kernel, launch| {
            let mut outcome = match timeline {
                Some(timeline) => {
                    let mut sum = Outcome::default();
                    timed::run(kernel, launch, timeline, |cluster| sum.add(&Outcome::of(cluster)))?;
                    sum
                }
                None if kernel.communicates => take_turns(kernel, launch)?,
                None => in_parallel(kernel, launch)?,
            };
            races_between_clusters(kernel, launch, &mut outcome).map_err(|fault| outcome.before(fault))?;
            Ok(finished(kernel, launch, outcome))
        })
    }

    /// Global memory.
    pub(crate) fn memory(&self) -> &GlobalMemory {
        &self.memory
    }

    /// Prepares global memory for a launch.
    pub(crate) fn begin(&mut self, module: &Module, entry: &str, config: &LaunchConfig) -> Result<(), Fault> {
        let kernel = entry_of(module, entry)?;
        check(kernel, config)?;
        self.load(module)?;
        self.memory.begin_launch(&kernel.name, config.overlaps);
        Ok(())
    }

    /// Calls `run` with a launch for which memory has been prepared.
    pub(crate) fn with_launch<R>(
        &mut self,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
        run: impl FnOnce(&Kernel, Launch<'_>) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        let kernel = entry_of(module, entry)?;
        let params = arguments(kernel, args)?;
        let symbols = self.load(module)?;
        let ctas = config.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        let clusters = ctas / config.cluster.iter().map(|&n| u64::from(n)).product::<u64>();
        let races = (config.sanitize && config.global_races).then(GridRaces::default);
        let allows = !config.allow.is_empty();
        let lines: Vec<u32> = kernel.code.iter().filter(|_| allows).map(|inst| inst.line).collect();
        let swaps = (0..).zip(&kernel.code).filter_map(|(pc, inst)| Some((pc, inst.uses.swap?))).collect();
        let launch = Launch {
            config,
            lines: &lines,
            swaps: &swaps,
            outlets: &|load| kernel.outlets(load),
            leads: &|from, to| kernel.leads(from, to),
            sync: &GridSync::default(),
            races: races.as_ref(),
            global: &self.memory,
            params: &params,
            declared: &kernel.params,
            symbols: &symbols,
            sms: self.config.sms,
            next_cluster: &AtomicU64::new(0),
            clusters,
            began: Instant::now(),
        };
        run(kernel, launch)
    }
}

fn entry_of<'m>(module: &'m Module, entry: &str) -> Result<&'m Kernel, Fault> {
    module.entry(entry).ok_or_else(|| {
        let names: Vec<_> = module.entries().iter().map(|k| k.name.as_str()).collect();
        Fault::launch(entry, format!("the module has no such entry; its entries are {}", names.join(", ")))
    })
}

/// Report of a launch that has ended.
pub(crate) fn finished(kernel: &Kernel, launch: Launch<'_>, outcome: Outcome) -> Report {
    let config = launch.config;
    let mut buffers = outcome.buffers;
    for (buffer, allocation) in buffers.iter_mut().zip(launch.global.allocations()) {
        buffer.name = allocation.name.clone();
        (buffer.address, buffer.bytes) = (allocation.base(), allocation.len());
        (buffer.distinct_loaded, buffer.distinct_stored) = allocation.distinct_bytes();
    }
    buffers.retain(|buffer| buffer.distinct_loaded + buffer.distinct_stored > 0);
    let mut report = Report {
        kernel: kernel.name.clone(),
        ctas: config.grid.iter().map(|&n| u64::from(n)).product::<u64>(),
        cta_steps: outcome.cta_steps,
        roles: outcome.roles,
        buffers,
        peak_tmem_columns: outcome.peak_tmem_columns,
        warnings: outcome.warnings,
        hazards: outcome.hazards,
        unwatched: launch.races.is_some_and(GridRaces::is_full),
        output: outcome.output,
        shared_bytes: u64::from(kernel.shared_bytes + config.shared_bytes),
        ..Report::default()
    };
    report.finish();
    report
}

fn check(kernel: &Kernel, config: &LaunchConfig) -> Result<(), Fault> {
    let refuse = |text: String| Err(Fault::launch(&kernel.name, text));
    let LaunchConfig { grid, block, cluster, .. } = *config;
    let threads = block.iter().map(|&n| u64::from(n)).product::<u64>();
    if grid.contains(&0) || block.contains(&0) || cluster.contains(&0) {
        return refuse(format!("grid {grid:?}, block {block:?} and cluster {cluster:?} must not contain 0"));
    }
    if threads > MAX_THREADS.into() {
        return refuse(format!("{threads} threads per CTA; the maximum is {MAX_THREADS}"));
    }
    if grid[1] > 65535 || grid[2] > 65535 || grid[0] > i32::MAX as u32 {
        return refuse(format!("grid {grid:?}; the maximum is [2147483647, 65535, 65535]"));
    }
    let most = if kernel.small_sm { SMALL_MAX_CLUSTER } else { MAX_CLUSTER };
    if cluster.iter().map(|&n| u64::from(n)).product::<u64>() > most.into() {
        return refuse(format!("cluster {cluster:?}; the maximum is {most} CTAs per cluster"));
    }
    if (0..3).any(|d| grid[d] % cluster[d] != 0) {
        return refuse(format!("grid {grid:?} is not a multiple of cluster {cluster:?}"));
    }
    if let Some(most) = kernel.limits.max_threads
        && threads > most.into()
    {
        return refuse(format!("{threads} threads per CTA; `.maxntid` allows {most}"));
    }
    if let Some(required) = kernel.limits.required_threads
        && required != block
    {
        return refuse(format!("block {block:?}; `.reqntid` requires {required:?}"));
    }
    if let Some(required) = kernel.limits.required_cluster
        && required != cluster
    {
        return refuse(format!("cluster {cluster:?}; `.reqnctapercluster` requires {required:?}"));
    }
    let shared = u64::from(kernel.shared_bytes) + u64::from(config.shared_bytes);
    let most = if kernel.small_sm { SMALL_MAX_SHARED } else { MAX_SHARED };
    if shared > most.into() {
        return refuse(format!("{shared} bytes of shared memory per CTA; the maximum is {most}"));
    }
    Ok(())
}

/// Bytes of the kernel's parameter block.
fn arguments(kernel: &Kernel, args: &[Arg]) -> Result<Vec<u8>, Fault> {
    let refuse = |text: String| Err(Fault::launch(&kernel.name, text));
    if args.len() != kernel.params.len() {
        return refuse(format!("{} arguments; the kernel takes {}", args.len(), kernel.params.len()));
    }
    let mut block = vec![0; kernel.param_bytes() as usize];
    for (n, (arg, p)) in args.iter().zip(&kernel.params).enumerate() {
        if arg.0.len() != p.bytes as usize {
            let text = format!("argument {n} has {} bytes; `{}` takes {}", arg.0.len(), p.name, p.bytes);
            return refuse(text);
        }
        block[p.offset as usize..][..arg.0.len()].copy_from_slice(&arg.0);
    }
    Ok(block)
}

/// Results of finished clusters.
#[derive(Default)]
pub(crate) struct Outcome {
    roles: Vec<Role>,
    /// By [`Allocation::index`](crate::machine::global::Allocation::index).
    buffers: Vec<BufferTraffic>,
    cta_steps: u64,
    peak_tmem_columns: u32,
    warnings: Vec<Warning>,
    hazards: Vec<Warning>,
    output: String,
}

impl Outcome {
    pub(crate) fn of(cluster: &mut Cluster<'_>) -> Outcome {
        let (warnings, hazards) = cluster.noted();
        Outcome {
            roles: cluster.roles().to_vec(),
            buffers: cluster.buffers().to_vec(),
            cta_steps: cluster.cta_steps(),
            peak_tmem_columns: cluster.peak_tmem_columns(),
            warnings,
            hazards,
            output: cluster.output().to_owned(),
        }
    }

    pub(crate) fn add(&mut self, other: &Outcome) {
        self.roles.resize(self.roles.len().max(other.roles.len()), Role::default());
        for (a, b) in self.roles.iter_mut().zip(&other.roles) {
            a.add(b);
        }
        self.buffers.resize(self.buffers.len().max(other.buffers.len()), BufferTraffic::default());
        for (a, b) in self.buffers.iter_mut().zip(&other.buffers) {
            a.add(b);
        }
        self.cta_steps += other.cta_steps;
        self.peak_tmem_columns = self.peak_tmem_columns.max(other.peak_tmem_columns);
        self.output.push_str(&other.output);
        other.warnings.iter().for_each(|warning| Warning::count(&mut self.warnings, warning.clone()));
        other.hazards.iter().for_each(|hazard| Warning::add(&mut self.hazards, hazard.clone()));
    }

    /// Adds earlier output and hazards to a fault.
    pub(crate) fn before(&self, fault: Fault) -> Fault {
        let mut before = self.hazards.clone();
        fault.before.iter().for_each(|hazard| Warning::add(&mut before, hazard.clone()));
        Fault { printed: format!("{}{}", self.output, fault.printed), before, ..fault }
    }
}

/// Runs clusters that cannot communicate, on all threads. If several clusters fault, returns the fault of the lowest
/// cluster, so that the result does not depend on timing.
fn in_parallel(kernel: &Kernel, launch: Launch<'_>) -> Result<Outcome, Fault> {
    let first_fault = AtomicU64::new(u64::MAX);
    let run = |index: u64| -> Result<Outcome, (u64, Fault)> {
        if first_fault.load(Ordering::Relaxed) < index {
            return Ok(Outcome::default());
        }
        let fault = |fault| {
            first_fault.fetch_min(index, Ordering::Relaxed);
            (index, fault)
        };
        let mut cluster = Cluster::new(kernel, launch, index);
        let end = match cluster.run(u64::MAX) {
            Ok(Status::Done) => return Ok(Outcome::of(&mut cluster)),
            Ok(Status::Stuck) => cluster.no_progress(&[], 0),
            Ok(Status::Running | Status::Held | Status::Idle) => cluster.deadlock(),
            Err(fault) => fault,
        };
        Err(fault(Outcome::of(&mut cluster).before(end)))
    };
    let results = (0..launch.clusters).into_par_iter().map(run);
    let sum = results.reduce(
        || Ok(Outcome::default()),
        |a, b| match (a, b) {
            (Ok(mut a), Ok(b)) => {
                a.add(&b);
                Ok(a)
            }
            (Err(a), Err(b)) => Err(if a.0 <= b.0 { a } else { b }),
            (Err(e), Ok(_)) => Err(e),
            (Ok(a), Err((index, fault))) => Err((index, a.before(fault))),
        },
    );
    sum.map_err(|(_, fault)| fault)
}

/// Moves the races in global memory between clusters that were found so far to the outcome. The gravest race may be a
/// fault.
pub(crate) fn races_between_clusters(kernel: &Kernel, launch: Launch<'_>, outcome: &mut Outcome) -> Result<(), Fault> {
    let Some(races) = launch.races else { return Ok(()) };
    for (meeting, times) in races.take() {
        let stop = launch.race(&meeting);
        if launch.allows(&stop) {
            continue;
        }
        let fault = stop.into_fault(kernel, Some(launch.later_thread(&meeting)));
        let grave = !meeting.is_warning() || launch.config.strict;
        if grave && !launch.config.keep_going {
            return Err(fault);
        }
        if grave {
            Warning::add(&mut outcome.hazards, Warning { fault, times });
        } else {
            Warning::count(&mut outcome.warnings, Warning { fault, times });
        }
    }
    Ok(())
}

/// Runs clusters that may communicate: a CTA on each SM, and more of them, up to the number that the device holds at the
/// same time, if none of them can go on otherwise. In each round, every cluster runs on its thread until it is about to
/// communicate. The clusters then communicate one after the other. The outcome of a kernel without races therefore
/// depends only on the schedule.
fn take_turns(kernel: &Kernel, launch: Launch<'_>) -> Result<Outcome, Fault> {
    let mut running = Vec::new();
    let mut sum = Outcome::default();
    run_rounds(kernel, launch, &mut running, &mut sum).map_err(|fault| {
        running.iter_mut().for_each(|cluster| sum.add(&Outcome::of(cluster)));
        sum.before(fault)
    })?;
    Ok(sum)
}

/// Number of clusters of a launch that the device holds at a time.
pub(crate) fn most_clusters(kernel: &Kernel, launch: Launch<'_>) -> usize {
    let ctas = launch.config.cluster.iter().product::<u32>();
    let limits = if kernel.small_sm { SmLimits::SMALL } else { SmLimits::LARGE };
    let per_sm = limits.ctas(kernel, launch.config);
    (u64::from(launch.sms) * per_sm / u64::from(ctas)).max(1) as usize
}

/// Runs the rounds of [`take_turns`]. Results of finished clusters go to `sum`. After a fault, `running` holds the
/// unfinished clusters.
pub(crate) fn run_rounds<'a>(
    kernel: &'a Kernel,
    launch: Launch<'a>,
    running: &mut Vec<Cluster<'a>>,
    sum: &mut Outcome,
) -> Result<(), Fault> {
    let most = most_clusters(kernel, launch);
    let mut resident = (launch.sms / launch.config.cluster.iter().product::<u32>()).max(1) as usize;
    let (mut rounds, mut idle_rounds) = (0, 0);
    // Changes by finished clusters, and by all clusters up to the last round.
    let (mut finished, mut changes) = (0, 0);
    loop {
        while running.len() < resident && launch.next_cluster.load(Ordering::Relaxed) < launch.clusters {
            let index = launch.next_cluster.fetch_add(1, Ordering::Relaxed);
            running.push(Cluster::new(kernel, launch, index).take_turns());
        }
        if running.is_empty() {
            return Ok(());
        }
        let turn = |cluster: &mut Cluster<'a>| {
            let before = cluster.progress();
            cluster.run(TURN).map(|status| (status, status == Status::Running || cluster.progress() != before))
        };
        let turns: Vec<_> = match &mut running[..] {
            [only] => vec![turn(only)],
            several => several.par_iter_mut().map(turn).collect(),
        };
        let turns = turns.into_iter().collect::<Result<Vec<_>, Fault>>()?;
        let mut moved = turns.iter().any(|(status, moved)| *moved || *status == Status::Done);
        let held: Vec<usize> = (0..running.len()).filter(|&n| turns[n].0 == Status::Held).collect();
        for n in launch.config.schedule.order(held.len(), rounds) {
            running[held[n]].communicate()?;
            moved = true;
        }
        races_between_clusters(kernel, launch, sum)?;
        let mut statuses = turns.iter().map(|(status, _)| *status);
        running.retain_mut(|cluster| {
            let done = statuses.next() == Some(Status::Done);
            if done {
                finished += 1 + cluster.changes();
                sum.add(&Outcome::of(cluster));
            }
            !done
        });
        let before = std::mem::replace(&mut changes, finished + running.iter().map(Cluster::changes).sum::<u64>());
        if before != changes {
            running.iter_mut().filter(|cluster| cluster.is_stuck()).for_each(Cluster::look_again);
        }
        (rounds, idle_rounds) = (rounds + 1, if moved { 0 } else { idle_rounds + 1 });
        let stuck = (before == changes).then(|| stuck(running, &turns)).flatten();
        if stuck.is_none() && idle_rounds <= PATIENCE {
            continue;
        }
        let not_begun = launch.clusters.saturating_sub(launch.next_cluster.load(Ordering::Relaxed));
        if not_begun > 0 && running.len() < most {
            (resident, idle_rounds) = (most.min(2 * running.len()), 0);
            continue;
        }
        return Err(match stuck {
            Some(stuck) => running[stuck].no_progress(running, not_begun),
            None => running[0].deadlock(),
        });
    }
}

/// Index of a cluster whose warps repeat the same steps, if no cluster can go on. `turns` holds the last turn of each.
fn stuck(running: &[Cluster<'_>], turns: &[(Status, bool)]) -> Option<usize> {
    let rests = |(cluster, turn): (&Cluster<'_>, &(Status, bool))| cluster.is_stuck() || turn.0 == Status::Idle;
    let all = running.len() == turns.len() && running.iter().zip(turns).all(rests);
    running.iter().position(|cluster| all && cluster.is_stuck())
}
