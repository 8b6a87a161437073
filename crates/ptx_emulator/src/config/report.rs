//! Report of a launch: counters summed over CTAs and kept per warp of the CTA. In a warp-specialized kernel, each warp
//! has a role.

use std::fmt;

use super::fault::Warning;
use super::names::readable;

/// Class that an instruction is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Class {
    Integer,
    Float,
    Convert,
    Move,
    Memory,
    Control,
    Warp,
    Barrier,
    Async,
    Matrix,
    Other,
}

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 11;
    /// Names in the order of the variants.
    pub const NAMES: [&str; Class::COUNT] =
        ["integer", "float", "convert", "move", "memory", "control", "warp", "barrier", "async", "matrix", "other"];
}

/// Counters of one role: a warp index, summed over all CTAs.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Role {
    /// Warp instructions issued.
    pub warp_instructions: u64,
    /// Thread instructions: active lanes summed over warp instructions.
    pub thread_instructions: u64,
    /// Thread instructions by [`Class`], in the order of [`Class::NAMES`]. In JSON, an object with these names as keys.
    #[serde(serialize_with = "by_name")]
    pub by_class: [u64; Class::COUNT],
    /// Number of times that a warp had to wait at a named, cluster or memory barrier.
    pub barrier_waits: u64,
    /// Number of polls that found an mbarrier's phase incomplete.
    pub failed_polls: u64,
    /// Number of tensor copies whose boxes are wholly outside their tensors: legal, but often a wrong coordinate.
    pub boxes_outside: u64,
    /// Warp instructions that the rest of the cluster issued while a warp waited for a barrier, for asynchronous
    /// operations or for tensor memory. Compare with [`Report::cta_steps`]: both count the emulator's steps, not a
    /// GPU's time.
    pub waited_steps: u64,
    /// Bytes that `ld`, `st`, `atom`, `red` and `cp.async` moved, by space.
    pub bytes: Traffic,
    /// Bytes that bulk and tensor copies moved, by space. The bytes stored to shared memory can exceed the bytes loaded
    /// from global memory: a tensor copy also fills the part of its box outside the tensor, and multicast writes to
    /// several CTAs.
    pub bulk: Traffic,
    /// Extra shared-memory cycles of `ld`, `st`, `ldmatrix` and `stmatrix`, beyond the minimum that their bytes need.
    /// Counted only with the sanitizer on.
    pub bank_conflicts: u64,
    /// Matrix instructions. A `wgmma` counts once for each of its four warps.
    pub matrix_operations: u64,
    /// Multiply-adds of these matrix instructions. Each element of D counts once for each element of K.
    pub matrix_multiply_adds: u64,
    /// Copies that the role waited for.
    pub loads: Loads,
}

/// Bytes moved, by direction and space.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Traffic {
    pub global_load: u64,
    pub global_store: u64,
    pub shared_load: u64,
    pub shared_store: u64,
    pub local_load: u64,
    pub local_store: u64,
    pub other: u64,
}

/// Copies into shared memory that a warp waited for at mbarriers, and the number of matrix operations issued to the
/// CTA's tensor core between the request of a copy and its use.
///
/// The distance is in operations, not in time: the work that a GPU's tensor cores can do while a copy is in flight. If
/// a kernel loads a stage only after all earlier operations are done, the distance is 0 on every schedule. If the
/// kernel loads each stage again as soon as that stage is free, the distance on the `fair` schedule approaches the
/// number of operations of all other stages. Whether that distance hides the latency of a copy depends on the duration
/// of an operation, which the emulator does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Loads {
    /// Mbarrier phases that were completed by bulk or tensor copies from global memory, or by a
    /// `cp.async.mbarrier.arrive`. A phase counts for the first warp that found it complete.
    pub phases: u64,
    /// Phases with a matrix operation between the request of the last copy and the end of the wait.
    pub overlapped: u64,
    /// Matrix operations between request and end of the wait, summed over phases.
    pub matrix_operations: u64,
}

impl Loads {
    /// Share of phases with a matrix operation between request and use.
    pub fn overlap(&self) -> f64 {
        self.overlapped as f64 / self.phases.max(1) as f64
    }

    /// Mean number of matrix operations between request and use.
    pub fn mean_distance(&self) -> f64 {
        self.matrix_operations as f64 / self.phases.max(1) as f64
    }
}

/// Traffic of one allocation of global memory, or of one variable of the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct BufferTraffic {
    /// Name of the allocation or variable, if it has one.
    pub name: Option<String>,
    /// Start address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes that `ld`, `atom`, `red`, `cp.async` and fetches of tensor maps read.
    pub loaded: u64,
    /// Bytes that `st`, `atom` and `red` wrote.
    pub stored: u64,
    /// Bytes that bulk and tensor copies read.
    pub bulk_loaded: u64,
    /// Bytes that bulk and tensor copies wrote.
    pub bulk_stored: u64,
    /// Distinct bytes read, in sectors of 32 bytes: the DRAM reads with an unlimited cache.
    pub distinct_loaded: u64,
    /// Distinct bytes written, in sectors of 32 bytes.
    pub distinct_stored: u64,
}

impl BufferTraffic {
    /// Adds the bytes of `o`. The name and the address stay.
    pub fn add(&mut self, o: &BufferTraffic) {
        self.loaded += o.loaded;
        self.stored += o.stored;
        self.bulk_loaded += o.bulk_loaded;
        self.bulk_stored += o.bulk_stored;
        self.distinct_loaded += o.distinct_loaded;
        self.distinct_stored += o.distinct_stored;
    }
}

impl Traffic {
    fn add(&mut self, o: &Traffic) {
        self.global_load += o.global_load;
        self.global_store += o.global_store;
        self.shared_load += o.shared_load;
        self.shared_store += o.shared_store;
        self.local_load += o.local_load;
        self.local_store += o.local_store;
        self.other += o.other;
    }
}

fn by_name<S: serde::Serializer>(counts: &[u64; Class::COUNT], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Class::NAMES.iter().zip(counts))
}

impl Role {
    pub(crate) fn add(&mut self, o: &Role) {
        self.warp_instructions += o.warp_instructions;
        self.thread_instructions += o.thread_instructions;
        for (a, b) in self.by_class.iter_mut().zip(o.by_class) {
            *a += b;
        }
        self.barrier_waits += o.barrier_waits;
        self.failed_polls += o.failed_polls;
        self.boxes_outside += o.boxes_outside;
        self.waited_steps += o.waited_steps;
        self.bytes.add(&o.bytes);
        self.bulk.add(&o.bulk);
        self.bank_conflicts += o.bank_conflicts;
        self.matrix_operations += o.matrix_operations;
        self.matrix_multiply_adds += o.matrix_multiply_adds;
        self.loads.phases += o.loads.phases;
        self.loads.overlapped += o.loads.overlapped;
        self.loads.matrix_operations += o.loads.matrix_operations;
    }
}

/// Counters of a launch that ended without a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The entry's name.
    pub kernel: String,
    /// Number of CTAs that ran.
    pub ctas: u64,
    /// Warp instructions that the clusters issued, counted once per CTA. An attempt that ended in a wait also counts.
    pub cta_steps: u64,
    /// Sum over all roles.
    pub total: Role,
    /// Counters by warp index in the CTA.
    pub roles: Vec<Role>,
    /// Traffic of each allocation that the launch touched.
    pub buffers: Vec<BufferTraffic>,
    /// Distinct bytes of global memory read, in sectors of 32.
    pub dram_read_bytes: u64,
    /// Distinct bytes of global memory written, in sectors of 32.
    pub dram_write_bytes: u64,
    /// Shared memory per CTA in bytes, static and dynamic.
    pub shared_bytes: u64,
    /// Maximum number of tensor-memory columns allocated at the same time in a CTA.
    pub peak_tmem_columns: u32,
    /// Output of `printf`, cluster by cluster.
    pub output: String,
    /// Violations that `strict` would report as faults, one entry per place.
    pub warnings: Vec<Warning>,
    /// Hazards that the launch continued after ([`keep_going`](crate::LaunchConfig)), one entry per place.
    pub hazards: Vec<Warning>,
    /// `true` if part of global memory was not searched for races, because the records of accesses would have been too
    /// large.
    pub unwatched: bool,
}

impl Report {
    /// Share of the matrix multiply-adds that the caller counts as useful.
    pub fn useful_share(&self, useful_multiply_adds: u64) -> f64 {
        useful_multiply_adds as f64 / self.total.matrix_multiply_adds.max(1) as f64
    }

    /// Share of the CTAs' time in which a role waited.
    pub fn waiting_share(&self, role: &Role) -> f64 {
        role.waited_steps as f64 / self.cta_steps.max(1) as f64
    }

    /// Sum of the traffic of all buffers with this name.
    pub fn buffers_named(&self, name: &str) -> BufferTraffic {
        let mut sum = BufferTraffic { name: Some(name.to_owned()), ..BufferTraffic::default() };
        self.buffers.iter().filter(|buffer| buffer.name.as_deref() == Some(name)).for_each(|buffer| sum.add(buffer));
        sum
    }

    /// Adds the report of a later launch. Bytes that both launches touched count twice.
    pub fn add(&mut self, later: &Report) {
        if self.kernel.split(", ").all(|kernel| kernel != later.kernel) {
            self.kernel = format!("{}, {}", self.kernel, later.kernel);
        }
        self.ctas += later.ctas;
        self.cta_steps += later.cta_steps;
        self.roles.resize_with(self.roles.len().max(later.roles.len()), Role::default);
        for (role, later) in self.roles.iter_mut().zip(&later.roles) {
            role.add(later);
        }
        for later in &later.buffers {
            match self.buffers.iter_mut().find(|buffer| buffer.address == later.address) {
                Some(buffer) => buffer.add(later),
                None => self.buffers.push(later.clone()),
            }
        }
        self.shared_bytes = self.shared_bytes.max(later.shared_bytes);
        self.peak_tmem_columns = self.peak_tmem_columns.max(later.peak_tmem_columns);
        self.output.push_str(&later.output);
        later.warnings.iter().for_each(|warning| Warning::count(&mut self.warnings, warning.clone()));
        later.hazards.iter().for_each(|hazard| Warning::add(&mut self.hazards, hazard.clone()));
        self.unwatched |= later.unwatched;
        self.finish();
    }

    pub(crate) fn finish(&mut self) {
        let mut total = Role::default();
        for role in &self.roles {
            total.add(role);
        }
        self.total = total;
        self.dram_read_bytes = self.buffers.iter().map(|buffer| buffer.distinct_loaded).sum();
        self.dram_write_bytes = self.buffers.iter().map(|buffer| buffer.distinct_stored).sum();
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.total;
        let kernels: Vec<_> = self.kernel.split(", ").map(readable).collect();
        let found = match self.hazards.len() {
            0 => "no fault".into(),
            n => format!("hazards at {n} places"),
        };
        writeln!(f, "kernel `{}`: {} CTAs, {found}", kernels.join(", "), self.ctas)?;
        writeln!(f, "instructions: {} warp, {} thread", t.warp_instructions, t.thread_instructions)?;
        for (name, n) in Class::NAMES.iter().zip(t.by_class).filter(|(_, n)| *n > 0) {
            writeln!(f, "  {name}: {n}")?;
        }
        let rows = [
            ("global bytes loaded", t.bytes.global_load),
            ("global bytes stored", t.bytes.global_store),
            ("shared bytes loaded", t.bytes.shared_load),
            ("shared bytes stored", t.bytes.shared_store),
            ("local bytes loaded", t.bytes.local_load),
            ("local bytes stored", t.bytes.local_store),
            ("global bytes loaded by bulk copies", t.bulk.global_load),
            ("global bytes stored by bulk copies", t.bulk.global_store),
            ("shared bytes loaded by bulk copies", t.bulk.shared_load),
            ("shared bytes stored by bulk copies", t.bulk.shared_store),
            ("distinct global bytes read", self.dram_read_bytes),
            ("distinct global bytes written", self.dram_write_bytes),
            ("shared bytes per CTA", self.shared_bytes),
            ("shared bank conflicts", t.bank_conflicts),
            ("tensor copies wholly outside their tensors", t.boxes_outside),
            ("barrier waits", t.barrier_waits),
            ("matrix operations", t.matrix_operations),
            ("matrix multiply-adds", t.matrix_multiply_adds),
            ("loads waited for", t.loads.phases),
            ("loads overlapped by matrix operations", t.loads.overlapped),
            ("peak tensor-memory columns", u64::from(self.peak_tmem_columns)),
        ];
        for (name, n) in rows.iter().filter(|(_, n)| *n > 0) {
            writeln!(f, "{name}: {n}")?;
        }
        if self.roles.len() > 1 {
            for (warp, role) in self.roles.iter().enumerate() {
                writeln!(
                    f,
                    "warp {warp}: {} warp instructions, {} barrier waits, waiting {:.0} % of the time",
                    role.warp_instructions,
                    role.barrier_waits,
                    100.0 * self.waiting_share(role)
                )?;
            }
        }
        if self.unwatched {
            writeln!(f, "the records of global memory were full: some global memory was not searched for races")?;
        }
        self.hazards.iter().try_for_each(|hazard| writeln!(f, "{}", hazard.display("fault")))?;
        self.warnings.iter().try_for_each(|warning| writeln!(f, "{warning}"))?;
        if self.output.is_empty() { Ok(()) } else { write!(f, "printed:\n{}", self.output) }
    }
}
