//! The device: memory, modules' variables, and launches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

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
    /// Any plain value.
    pub fn value<T: bytemuck::NoUninit>(value: T) -> Arg {
        Arg(bytemuck::bytes_of(&value).to_vec())
    }
}

impl From<Buffer> for Arg {
    fn from(buffer: Buffer) -> Arg {
        Arg::value(buffer.address)
    }
}

/// The most threads of a CTA.
const MAX_THREADS: u32 = 1024;
/// The most CTAs of a cluster (with the non-portable size).
const MAX_CLUSTER: u32 = 16;
/// The most shared memory of a CTA, static and dynamic (compute capability 9.0 and 10.0).
const MAX_SHARED: u32 = 227 * 1024;
/// The same of compute capability 12.x.
const SMALL_MAX_SHARED: u32 = 99 * 1024;
/// Where clusters take turns: warp instructions of a turn.
const TURN: u64 = 2048;
/// Where clusters take turns: rounds without any progress after which they count as stuck.
const PATIENCE: u32 = 4;

/// A device with its memory.
#[derive(Default)]
pub struct Device {
    config: DeviceConfig,
    memory: GlobalMemory,
    /// Addresses of the variables of each module seen.
    modules: HashMap<u64, Vec<u64>>,
}

impl Device {
    /// A device without allocations.
    pub fn new(config: DeviceConfig) -> Device {
        Device { config, ..Device::default() }
    }

    /// Allocates `bytes` of zeros. Addresses are multiples of 256; nothing is mapped between allocations.
    pub fn allocate(&mut self, bytes: u64) -> Buffer {
        Buffer { address: self.memory.allocate(bytes, None, false), bytes }
    }

    /// Allocates `bytes` of zeros at an address of the caller's, such as host memory's own; `None` where it is not a
    /// multiple of 4, or where some of it is taken.
    pub fn allocate_at(&mut self, address: u64, bytes: u64) -> Option<Buffer> {
        self.memory.allocate_at(address, bytes).then_some(Buffer { address, bytes })
    }

    /// A module's variables by name; they are there from the first time on.
    ///
    /// # Errors
    /// [`FaultKind::Unsupported`] where an initial value cannot be made.
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

    /// Names a buffer, for faults and reports; several may have one name.
    ///
    /// # Panics
    /// If it is no buffer of this device.
    pub fn name(&mut self, buffer: Buffer, name: &str) {
        self.memory.name(buffer.address, name);
    }

    /// Frees a buffer. Its addresses are never used again, so a kernel that still has them faults.
    ///
    /// # Panics
    /// If it is no buffer of this device, or freed already.
    pub fn free(&mut self, buffer: Buffer) {
        self.memory.free(buffer.address);
    }

    /// Writes bytes at an offset of a buffer.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&mut self, buffer: Buffer, offset: u64, data: &[u8]) {
        let at = self.memory.locate(buffer.address + offset, data.len() as u64);
        let (allocation, offset) = at.expect("the bytes lie inside the buffer");
        allocation.copy_in(offset, data);
    }

    /// A buffer's contents.
    ///
    /// # Panics
    /// If its length is no multiple of the size of `T`.
    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, buffer: Buffer) -> Vec<T> {
        let size = size_of::<T>() as u64;
        assert!(size > 0 && buffer.bytes.is_multiple_of(size), "{} bytes are no whole elements", buffer.bytes);
        let mut out = vec![T::zeroed(); (buffer.bytes / size) as usize];
        let (allocation, offset) = self.memory.locate(buffer.address, buffer.bytes).expect("a buffer of this device");
        allocation.copy_out(offset, bytemuck::cast_slice_mut(&mut out));
        out
    }

    /// Gives a module's variables addresses and initial values, when the module is first seen.
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
    /// The first fault, by cluster; [`FaultKind::BadLaunch`] if the launch does not fit
    /// the kernel.
    pub fn launch(
        &mut self,
        module: &Module,
        entry: &str,
        config: &LaunchConfig,
        args: &[Arg],
    ) -> Result<Report, Fault> {
        self.launch_on(None, module, entry, config, args)
    }

    /// Runs a kernel to its end by the clock of a card: on the fair schedule, without looking for hazards. The launch is
    /// the next of the timeline.
    ///
    /// # Errors
    /// As [`Device::launch`].
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
        let kernel = module.entry(entry).ok_or_else(|| {
            let names: Vec<_> = module.entries().iter().map(|k| k.name.as_str()).collect();
            Fault::launch(entry, format!("the module has no such entry; it has {}", names.join(", ")))
        })?;
        check(kernel, config)?;
        let params = arguments(kernel, args)?;
        let symbols = self.load(module)?;
        self.memory.begin_launch(&kernel.name, config.overlaps);
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
        };
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
        let mut buffers = outcome.buffers;
        for (buffer, allocation) in buffers.iter_mut().zip(self.memory.allocations()) {
            buffer.name = allocation.name.clone();
            (buffer.address, buffer.bytes) = (allocation.base(), allocation.len());
            (buffer.distinct_loaded, buffer.distinct_stored) = allocation.distinct_bytes();
        }
        buffers.retain(|buffer| buffer.distinct_loaded + buffer.distinct_stored > 0);
        let mut report = Report {
            kernel: kernel.name.clone(),
            ctas,
            cta_steps: outcome.cta_steps,
            roles: outcome.roles,
            buffers,
            peak_tmem_columns: outcome.peak_tmem_columns,
            warnings: outcome.warnings,
            hazards: outcome.hazards,
            unwatched: races.as_ref().is_some_and(GridRaces::is_full),
            output: outcome.output,
            shared_bytes: u64::from(kernel.shared_bytes + config.shared_bytes),
            ..Report::default()
        };
        report.finish();
        Ok(report)
    }
}

fn check(kernel: &Kernel, config: &LaunchConfig) -> Result<(), Fault> {
    let refuse = |text: String| Err(Fault::launch(&kernel.name, text));
    let LaunchConfig { grid, block, cluster, .. } = *config;
    let threads = block.iter().map(|&n| u64::from(n)).product::<u64>();
    if grid.contains(&0) || block.contains(&0) || cluster.contains(&0) {
        return refuse(format!("grid {grid:?}, block {block:?} and cluster {cluster:?} must not contain 0"));
    }
    if threads > MAX_THREADS.into() {
        return refuse(format!("{threads} threads a CTA; {MAX_THREADS} are the most"));
    }
    if grid[1] > 65535 || grid[2] > 65535 || grid[0] > i32::MAX as u32 {
        return refuse(format!("grid {grid:?}; the most are 2147483647, 65535, 65535"));
    }
    if cluster.iter().map(|&n| u64::from(n)).product::<u64>() > MAX_CLUSTER.into() {
        return refuse(format!("cluster {cluster:?}; a cluster has {MAX_CLUSTER} CTAs at most"));
    }
    if (0..3).any(|d| grid[d] % cluster[d] != 0) {
        return refuse(format!("grid {grid:?} is no multiple of cluster {cluster:?}"));
    }
    if let Some(most) = kernel.limits.max_threads
        && threads > most.into()
    {
        return refuse(format!("{threads} threads a CTA; `.maxntid` allows {most}"));
    }
    if let Some(required) = kernel.limits.required_threads
        && required != block
    {
        return refuse(format!("block {block:?}; `.reqntid` asks for {required:?}"));
    }
    if let Some(required) = kernel.limits.required_cluster
        && required != cluster
    {
        return refuse(format!("cluster {cluster:?}; `.reqnctapercluster` asks for {required:?}"));
    }
    let shared = u64::from(kernel.shared_bytes) + u64::from(config.shared_bytes);
    let most = if kernel.small_shared_memory { SMALL_MAX_SHARED } else { MAX_SHARED };
    if shared > most.into() {
        return refuse(format!("{shared} bytes of shared memory a CTA; {most} are the most"));
    }
    Ok(())
}

/// The kernel's parameter block.
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

/// What clusters report when they are done.
#[derive(Default)]
struct Outcome {
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
    fn of(cluster: &mut Cluster<'_>) -> Outcome {
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

    fn add(&mut self, other: &Outcome) {
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
        other.warnings.iter().for_each(|warning| Warning::add(&mut self.warnings, warning.clone()));
        other.hazards.iter().for_each(|hazard| Warning::add(&mut self.hazards, hazard.clone()));
    }

    /// The fault with what was printed and found before.
    fn before(&self, fault: Fault) -> Fault {
        let mut before = self.hazards.clone();
        fault.before.iter().for_each(|hazard| Warning::add(&mut before, hazard.clone()));
        Fault { printed: format!("{}{}", self.output, fault.printed), before, ..fault }
    }
}

/// Runs clusters that cannot communicate, on all threads. Of several faults, that of the cluster with the lowest number
/// is returned, whatever the timing.
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

/// Races in global memory between clusters, found so far, go to the outcome; the gravest may be a fault.
fn races_between_clusters(kernel: &Kernel, launch: Launch<'_>, outcome: &mut Outcome) -> Result<(), Fault> {
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
        Warning::add(if grave { &mut outcome.hazards } else { &mut outcome.warnings }, Warning { fault, times });
    }
    Ok(())
}

/// Runs clusters that may communicate, as many at a time as the device holds. In a round each runs, on all threads, until
/// it is about to communicate; then they do that one after the other. So the outcome of a kernel without races depends on
/// the schedule alone.
fn take_turns(kernel: &Kernel, launch: Launch<'_>) -> Result<Outcome, Fault> {
    let mut running = Vec::new();
    let mut sum = Outcome::default();
    run_rounds(kernel, launch, &mut running, &mut sum).map_err(|fault| {
        running.iter_mut().for_each(|cluster| sum.add(&Outcome::of(cluster)));
        sum.before(fault)
    })?;
    Ok(sum)
}

/// The rounds of [`take_turns`]. What has ended goes to `sum`; after a fault, `running` is what has not.
fn run_rounds<'a>(
    kernel: &'a Kernel,
    launch: Launch<'a>,
    running: &mut Vec<Cluster<'a>>,
    sum: &mut Outcome,
) -> Result<(), Fault> {
    let ctas = launch.config.cluster.iter().product::<u32>();
    let resident = (launch.sms / ctas).max(1) as usize;
    let (mut rounds, mut idle_rounds) = (0, 0);
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
                sum.add(&Outcome::of(cluster));
            }
            !done
        });
        (rounds, idle_rounds) = (rounds + 1, if moved { 0 } else { idle_rounds + 1 });
        if idle_rounds > PATIENCE {
            return Err(running[0].deadlock());
        }
    }
}
