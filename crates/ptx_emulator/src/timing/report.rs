//! Breakdown of a launch's time.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Reason for which a warp spends time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its own instructions, including the stalls that ptxas placed between them.
    Issue,
    /// The scheduler's slot, used by other warps.
    Slot,
    /// A busy pipe.
    Pipe,
    /// A load from shared memory.
    Shared,
    /// A load from global memory.
    Global,
    /// Tensor memory.
    Tmem,
    /// An mbarrier that a copy into shared memory completed.
    Copy,
    /// The tensor core: an mbarrier that its commit completed, or wgmma's wait.
    Tensor,
    /// An mbarrier that another warp completed.
    Warp,
    /// A named barrier or the cluster barrier.
    Barrier,
    /// The earlier grid.
    Grid,
    /// The fence of a release.
    Fence,
    /// Anything else.
    Other,
}

impl Why {
    /// Number of reasons.
    pub const COUNT: usize = 13;
    /// Every reason.
    pub const ALL: [Why; Why::COUNT] = [
        Why::Issue,
        Why::Slot,
        Why::Pipe,
        Why::Shared,
        Why::Global,
        Why::Tmem,
        Why::Copy,
        Why::Tensor,
        Why::Warp,
        Why::Barrier,
        Why::Grid,
        Why::Fence,
        Why::Other,
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Why::Issue => "own instructions",
            Why::Slot => "issue slot",
            Why::Pipe => "pipe",
            Why::Shared => "shared load",
            Why::Global => "global load",
            Why::Tmem => "tensor memory",
            Why::Copy => "copy",
            Why::Tensor => "tensor core",
            Why::Warp => "another warp",
            Why::Barrier => "barrier",
            Why::Grid => "earlier grid",
            Why::Fence => "fence",
            Why::Other => "other",
        }
    }
}

/// A unit of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Unit {
    Issue,
    Alu,
    Fma,
    Special,
    Shared,
    Tensor,
    Intake,
    L2,
    Dram,
}

impl Unit {
    /// Number of units.
    pub const COUNT: usize = 9;
    /// Every unit, with its number per SM.
    pub const ALL: [(Unit, u64); Unit::COUNT] = [
        (Unit::Issue, 4),
        (Unit::Alu, 4),
        (Unit::Fma, 4),
        (Unit::Special, 4),
        (Unit::Shared, 1),
        (Unit::Tensor, 4),
        (Unit::Intake, 1),
        (Unit::L2, 1),
        (Unit::Dram, 1),
    ];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Issue => "issue slots",
            Unit::Alu => "integer pipe",
            Unit::Fma => "float pipe",
            Unit::Special => "special functions",
            Unit::Shared => "shared memory",
            Unit::Tensor => "tensor cores",
            Unit::Intake => "intake of multiprocessors",
            Unit::L2 => "L2",
            Unit::Dram => "DRAM",
        }
    }
}

/// Cycles per bucket of [`Usage`].
pub const BUCKET: u64 = 512;

/// Busy cycles of units, by bucket of time.
#[derive(Clone, Debug, Default)]
pub struct Usage(Vec<[u64; Unit::COUNT]>);

impl Usage {
    /// Adds busy cycles of a unit.
    pub fn add(&mut self, unit: Unit, from: u64, cycles: u64) {
        let bucket = (from / BUCKET) as usize;
        if bucket >= self.0.len() {
            self.0.resize(bucket + 1, [0; Unit::COUNT]);
        }
        self.0[bucket][unit as usize] += cycles;
    }

    /// Adds the cycles of another usage.
    pub fn add_all(&mut self, o: &Usage) {
        self.0.resize(self.0.len().max(o.0.len()), [0; Unit::COUNT]);
        for (a, b) in self.0.iter_mut().zip(&o.0) {
            for (a, b) in a.iter_mut().zip(b) {
                *a += b;
            }
        }
    }

    /// Busy cycles of a unit in the buckets between two times.
    pub fn busy(&self, unit: Unit, from: u64, to: u64) -> u64 {
        let range = (from / BUCKET) as usize..to.div_ceil(BUCKET) as usize;
        self.0.iter().take(range.end).skip(range.start).map(|bucket| bucket[unit as usize]).sum()
    }
}

/// An event with a duration, for drawings.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Span {
    pub lane: String,
    pub name: &'static str,
    pub from: u64,
    pub to: u64,
}

/// Time of a launch.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Time {
    /// Name of the kernel.
    pub kernel: String,
    /// `true`: costs of instructions come from machine code. `false`: each PTX instruction counts as one machine
    /// instruction.
    pub from_machine_code: bool,
    /// Start of the grid's first instruction, in microseconds from the start of the first launch.
    pub start_us: f64,
    /// End of the grid, in microseconds from the start of the first launch.
    pub end_us: f64,
    /// Time from the start of the grid to the first matrix operation, averaged over the SMs.
    pub prologue_us: f64,
    /// Time from an SM's last matrix operation to its end, on average.
    pub tail_us: f64,
    /// Time from the end of an SM to the end of the grid, on average.
    pub idle_us: f64,
    /// Share of the time for which each unit was busy.
    pub busy: BTreeMap<&'static str, f64>,
    /// Busiest unit of each phase, and its load.
    pub phases: Vec<Phase>,
    /// Shares of the warps' time by reason, for each role.
    pub roles: Vec<RoleTime>,
    /// Bytes delivered by L2.
    pub l2_bytes: u64,
    /// Bytes that came from DRAM.
    pub dram_bytes: u64,
    /// The simulated part. `None`: the whole launch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// A part of a launch that was simulated in place of the whole: number of simulated units, and total number.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Sample {
    pub multiprocessors: [u32; 2],
    pub ctas: [u64; 2],
}

/// A period in which one unit was the busiest.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Phase {
    pub from_us: f64,
    pub to_us: f64,
    pub unit: &'static str,
    pub busy: f64,
}

/// Breakdown of the time of the warps with a range of indices in their CTAs.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct RoleTime {
    pub first_warp: u32,
    pub last_warp: u32,
    /// Shares of the time, by [`Why`].
    pub spent: BTreeMap<&'static str, f64>,
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Time { kernel, start_us, end_us, prologue_us, tail_us, idle_us, .. } = self;
        let source = if self.from_machine_code { "machine code" } else { "PTX, because machine code is missing" };
        writeln!(f, "{kernel}: {start_us:.2} to {end_us:.2} us; instructions counted in {source}")?;
        if let Some(Sample { multiprocessors: [sms, all_sms], ctas: [ctas, all_ctas] }) = self.sample {
            writeln!(
                f,
                "  a sample: {ctas} of {all_ctas} CTAs on {sms} of {all_sms} SMs, with the same share of L2 and DRAM"
            )?;
        }
        writeln!(f, "  prologue {prologue_us:.2} us, tail {tail_us:.2} us, idle at the end {idle_us:.2} us")?;
        let busy: Vec<String> =
            self.busy.iter().map(|(unit, share)| format!("{unit} {:.0} %", 100.0 * share)).collect();
        writeln!(f, "  busy: {}", busy.join(", "))?;
        for Phase { from_us, to_us, unit, busy } in &self.phases {
            writeln!(f, "  {from_us:7.2} to {to_us:7.2} us: {unit}, {:.0} %", 100.0 * busy)?;
        }
        for RoleTime { first_warp, last_warp, spent } in &self.roles {
            let mut spent: Vec<_> = spent.iter().filter(|(_, share)| **share >= 0.005).collect();
            spent.sort_by(|a, b| b.1.total_cmp(a.1));
            let spent: Vec<String> =
                spent.iter().map(|(why, share)| format!("{why} {:.0} %", 100.0 * *share)).collect();
            writeln!(f, "  warps {first_warp} to {last_warp}: {}", spent.join(", "))?;
        }
        Ok(())
    }
}
