//! What a launch did: counters, summed over CTAs and kept per warp of the CTA, since in a warp-specialised kernel a
//! warp is a role.

use std::fmt;

/// What an instruction is counted as.
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
    /// How many classes there are.
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
    /// Thread instructions by [`Class`], in the order of [`Class::NAMES`]; in JSON an object of them.
    #[serde(serialize_with = "by_name")]
    pub by_class: [u64; Class::COUNT],
    /// Times that a warp had to wait at a named, cluster or memory barrier.
    pub barrier_waits: u64,
    /// Times that a warp polled an mbarrier in vain.
    pub failed_polls: u64,
    /// Bytes that ld, st, atom and red moved, by space.
    pub bytes: Traffic,
    /// Extra shared-memory cycles: for each ld, st or atom, the accesses beyond the fewest that its bytes need.
    pub bank_conflicts: u64,
    /// Bytes that bulk and tensor copies of this role moved from global to shared memory.
    pub bulk_load_bytes: u64,
    /// Bytes that bulk and tensor copies of this role moved from shared to global memory.
    pub bulk_store_bytes: u64,
    /// Multiply-adds that matrix instructions of this role did, one and the same element once.
    pub matrix_multiply_adds: u64,
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
        self.bytes.global_load += o.bytes.global_load;
        self.bytes.global_store += o.bytes.global_store;
        self.bytes.shared_load += o.bytes.shared_load;
        self.bytes.shared_store += o.bytes.shared_store;
        self.bytes.local_load += o.bytes.local_load;
        self.bytes.local_store += o.bytes.local_store;
        self.bytes.other += o.bytes.other;
        self.bank_conflicts += o.bank_conflicts;
        self.bulk_load_bytes += o.bulk_load_bytes;
        self.bulk_store_bytes += o.bulk_store_bytes;
        self.matrix_multiply_adds += o.matrix_multiply_adds;
    }
}

/// The counters of a launch that ended without a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The entry's name.
    pub kernel: String,
    /// CTAs that ran.
    pub ctas: u64,
    /// Sum over all roles.
    pub total: Role,
    /// By warp index in the CTA.
    pub roles: Vec<Role>,
    /// Distinct bytes of global memory read, in sectors of 32.
    pub dram_read_bytes: u64,
    /// Distinct bytes of global memory written, in sectors of 32.
    pub dram_write_bytes: u64,
    /// Shared memory of a CTA, static and dynamic.
    pub shared_bytes: u64,
    /// The most tensor-memory columns that were allocated at once in a CTA.
    pub peak_tmem_columns: u32,
}

impl Report {
    /// The share of the matrix multiply-adds that the caller says were useful.
    pub fn useful_share(&self, useful_multiply_adds: u64) -> f64 {
        useful_multiply_adds as f64 / self.total.matrix_multiply_adds.max(1) as f64
    }

    /// Adds what a later launch did. Bytes that both read or wrote count twice.
    pub fn add(&mut self, later: &Report) {
        if self.kernel != later.kernel {
            self.kernel = format!("{}, {}", self.kernel, later.kernel);
        }
        self.ctas += later.ctas;
        self.total.add(&later.total);
        self.roles.resize_with(self.roles.len().max(later.roles.len()), Role::default);
        for (role, later) in self.roles.iter_mut().zip(&later.roles) {
            role.add(later);
        }
        self.dram_read_bytes += later.dram_read_bytes;
        self.dram_write_bytes += later.dram_write_bytes;
        self.shared_bytes = self.shared_bytes.max(later.shared_bytes);
        self.peak_tmem_columns = self.peak_tmem_columns.max(later.peak_tmem_columns);
    }

    pub(crate) fn finish(&mut self) {
        let mut total = Role::default();
        for role in &self.roles {
            total.add(role);
        }
        self.total = total;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = &self.total;
        writeln!(f, "kernel `{}`: {} CTAs, no fault", self.kernel, self.ctas)?;
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
            ("bulk bytes loaded", t.bulk_load_bytes),
            ("bulk bytes stored", t.bulk_store_bytes),
            ("distinct global bytes read", self.dram_read_bytes),
            ("distinct global bytes written", self.dram_write_bytes),
            ("shared bytes of a CTA", self.shared_bytes),
            ("shared bank conflicts", t.bank_conflicts),
            ("barrier waits", t.barrier_waits),
            ("matrix multiply-adds", t.matrix_multiply_adds),
            ("peak tensor-memory columns", u64::from(self.peak_tmem_columns)),
        ];
        for (name, n) in rows.iter().filter(|(_, n)| *n > 0) {
            writeln!(f, "{name}: {n}")?;
        }
        if self.roles.len() > 1 {
            for (warp, role) in self.roles.iter().enumerate() {
                writeln!(
                    f,
                    "warp {warp}: {} warp instructions, {} barrier waits",
                    role.warp_instructions, role.barrier_waits
                )?;
            }
        }
        Ok(())
    }
}
