//! Configuration of devices and launches, and the parameters of a kernel.

use std::time::Duration;

use super::fault::FaultKind;

/// Properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Number of SMs: the value of `%nsmid`, and the number of CTAs that run at the same time when CTAs communicate.
    pub sms: u32,
}

impl Default for DeviceConfig {
    /// 148 SMs, as in a B200.
    fn default() -> Self {
        DeviceConfig { sms: 148 }
    }
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub struct Param {
    /// The parameter's name.
    pub name: String,
    /// Byte offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// Order in which warps run and asynchronous operations complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Schedule {
    /// Warps take turns. Operations complete in the order of issue, after a fixed time.
    #[default]
    Fair,
    /// Warps and operations in random order. The same seed gives the same run.
    Seed(u64),
    /// A warp runs until it must wait. Operations complete when nothing else can run, the newest first.
    Worst,
}

impl Schedule {
    /// Order in which `count` clusters communicate in a round: forward, backward, or rotated by an amount that the seed
    /// and the round determine.
    pub(crate) fn order(self, count: usize, round: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        match self {
            Schedule::Fair => {}
            Schedule::Worst => order.reverse(),
            Schedule::Seed(seed) if count > 0 => order.rotate_left((seed as usize).wrapping_mul(31 + round) % count),
            Schedule::Seed(_) => {}
        }
        order
    }
}

impl std::fmt::Display for Schedule {
    /// Writes the form that [`Schedule::from_str`](std::str::FromStr) reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Schedule::Fair => f.write_str("fair"),
            Schedule::Seed(n) => write!(f, "seed:{n}"),
            Schedule::Worst => f.write_str("worst"),
        }
    }
}

impl std::str::FromStr for Schedule {
    type Err = String;

    /// Parses `fair`, `worst` or `seed:N`.
    fn from_str(s: &str) -> Result<Self, String> {
        match (s, s.strip_prefix("seed:").map(str::parse)) {
            ("fair", _) => Ok(Schedule::Fair),
            ("worst", _) => Ok(Schedule::Worst),
            (_, Some(Ok(n))) => Ok(Schedule::Seed(n)),
            _ => Err(format!("`{s}` is not a schedule; expected fair, worst or seed:N")),
        }
    }
}

/// Which violations count as faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Only violations that no GPU can continue from are faults. The emulator does not look for hazards.
    Machine,
    /// Violations that can go wrong on a GPU are faults. Violations of the manual that GPUs are known to tolerate are
    /// warnings.
    Default,
    /// Every violation of the manual is a fault.
    Strict,
}

impl std::str::FromStr for Level {
    type Err = String;

    /// Parses `machine`, `default` or `strict`.
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "machine" => Ok(Level::Machine),
            "default" => Ok(Level::Default),
            "strict" => Ok(Level::Strict),
            _ => Err(format!("`{s}` is not a level; expected machine, default or strict")),
        }
    }
}

/// How floating-point products of matrix instructions are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Sums {
    /// The sums of the tensor cores of the module's target, to the bit ([`hw::sums`](crate::hw::sums)).
    #[default]
    Card,
    /// Exact sums, rounded once to nearest even.
    Exact,
}

impl std::str::FromStr for Sums {
    type Err = String;

    /// Parses `card` or `exact`.
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "card" => Ok(Sums::Card),
            "exact" => Ok(Sums::Exact),
            _ => Err(format!("`{s}` is not a kind of sums; expected card or exact")),
        }
    }
}

/// A rule that suppresses hazards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allow {
    /// Kind of the hazards.
    pub kind: FaultKind,
    /// PTX line of one of the hazard's instructions. `None`: any line.
    pub line: Option<u32>,
}

impl std::fmt::Display for Allow {
    /// Writes the form that [`Allow::from_str`](std::str::FromStr) reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

impl std::str::FromStr for Allow {
    type Err = String;

    /// Parses `KIND` or `KIND:LINE`.
    fn from_str(s: &str) -> Result<Self, String> {
        let (kind, line) = s.split_once(':').map_or((s, None), |(kind, line)| (kind, Some(line)));
        let kind: FaultKind = kind.parse()?;
        if !kind.is_hazard() {
            return Err(format!("`{kind}` cannot be allowed: no run can continue after it"));
        }
        let line = line.map(|line| line.parse().map_err(|_| format!("`{line}` is not a line number"))).transpose()?;
        Ok(Allow { kind, line })
    }
}

/// Shape and options of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Number of CTAs in x, y and z.
    pub grid: [u32; 3],
    /// Threads per CTA in x, y and z.
    pub block: [u32; 3],
    /// CTAs per cluster in x, y and z.
    pub cluster: [u32; 3],
    /// Dynamic shared memory per CTA, in bytes.
    pub shared_bytes: u32,
    /// Order in which warps run and operations complete.
    pub schedule: Schedule,
    /// `true`: look for races, uninitialized reads and misuse. Bounds and alignment are always checked.
    pub sanitize: bool,
    /// `true`: enforce the manual literally. Warnings are faults, and tensor-core operations are ordered only if the
    /// manual lists them as pipelined.
    pub strict: bool,
    /// `true`: the launch may begin while the previous launch on this device still runs (the launch attribute
    /// `PROGRAMMATIC_STREAM_SERIALIZATION`). The kernel must wait for the end of the previous launch by
    /// `griddepcontrol.wait`; the sanitizer reports each access that does not wait. Host actions between the two
    /// launches do not count as a wait.
    pub overlaps: bool,
    /// `true`: `sanitize` also looks for races between the grid's threads in global memory.
    pub global_races: bool,
    /// Address of 8 zero bytes that the grid may synchronize through, or 0. A cooperative launch gives this address to
    /// cooperative_groups in `%envreg1` and `%envreg2`.
    pub grid_workspace: u64,
    /// `true`: continue after hazards, and list them in the report. Faults that no run can continue after still end the
    /// launch.
    pub keep_going: bool,
    /// `true`: `tcgen05.alloc.cta_group::2` of the two CTAs of a pair always wait for each other. `false`: only behind a
    /// cluster barrier, as a report of failures on a B300 suggests (NVIDIA/cutlass#3435). The manual says only that the
    /// instruction may block.
    pub alloc_rendezvous: bool,
    /// Rules that suppress hazards.
    pub allow: Vec<Allow>,
    /// How floating-point products of matrix instructions are added.
    pub sums: Sums,
    /// Maximum number of instructions that a warp may execute.
    pub instruction_budget: u64,
    /// Maximum time that the launch may take. `None`: any time.
    pub time_limit: Option<Duration>,
}

/// A limit of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Maximum number of instructions that a warp may execute.
    Instructions(u64),
    /// Maximum time that the launch may take.
    Time(Duration),
}

impl std::fmt::Display for Limit {
    /// Writes the form that [`Limit::from_str`](std::str::FromStr) reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limit::Instructions(count) => write!(f, "{count}"),
            Limit::Time(time) => write!(f, "{}s", time.as_secs_f64()),
        }
    }
}

impl std::str::FromStr for Limit {
    type Err = String;

    /// Parses a number of instructions, or seconds that end with `s`.
    fn from_str(s: &str) -> Result<Self, String> {
        let limit = match s.strip_suffix('s') {
            Some(seconds) => seconds.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok()).map(Limit::Time),
            None => s.parse().ok().map(Limit::Instructions),
        };
        limit.ok_or_else(|| format!("`{s}` is not a limit; expected a number of instructions, or seconds such as 60s"))
    }
}

impl LaunchConfig {
    /// Adds a limit.
    pub fn limit(&mut self, limit: Limit) {
        match limit {
            Limit::Instructions(count) => self.instruction_budget = count,
            Limit::Time(time) => self.time_limit = Some(time),
        }
    }
}

impl LaunchConfig {
    /// Level that corresponds to `sanitize` and `strict`.
    pub fn level(&self) -> Level {
        match (self.sanitize, self.strict) {
            (false, _) => Level::Machine,
            (true, false) => Level::Default,
            (true, true) => Level::Strict,
        }
    }

    /// Copy of this configuration at another level.
    #[must_use]
    pub fn at_level(self, level: Level) -> LaunchConfig {
        LaunchConfig { sanitize: level != Level::Machine, strict: level == Level::Strict, ..self }
    }

    /// Configuration with a one-dimensional grid and block, clusters of one CTA, the fair schedule and the sanitizer
    /// on.
    pub fn linear(ctas: u32, threads: u32) -> LaunchConfig {
        LaunchConfig {
            grid: [ctas, 1, 1],
            block: [threads, 1, 1],
            cluster: [1; 3],
            shared_bytes: 0,
            schedule: Schedule::Fair,
            sanitize: true,
            strict: false,
            overlaps: false,
            global_races: true,
            grid_workspace: 0,
            keep_going: false,
            alloc_rendezvous: false,
            allow: Vec::new(),
            sums: Sums::Card,
            instruction_budget: 1 << 32,
            time_limit: None,
        }
    }
}
