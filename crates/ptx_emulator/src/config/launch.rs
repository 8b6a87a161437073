//! How a device and a launch are configured, and what a launch passes.

use super::fault::FaultKind;

/// What a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Streaming multiprocessors: `%nsmid`, and how many CTAs run at a time when CTAs communicate.
    pub sms: u32,
}

impl Default for DeviceConfig {
    /// A B200's 148.
    fn default() -> Self {
        DeviceConfig { sms: 148 }
    }
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Byte offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
    /// Alignment in bytes.
    pub align: u32,
}

/// Which warp runs next, and when asynchronous operations complete.
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
    /// In which order `count` clusters communicate in a round: the first first, the last first, or from any on.
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
    /// As [`Schedule::from_str`](std::str::FromStr) reads it.
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

    /// `fair`, `worst` or `seed:N`.
    fn from_str(s: &str) -> Result<Self, String> {
        match (s, s.strip_prefix("seed:").map(str::parse)) {
            ("fair", _) => Ok(Schedule::Fair),
            ("worst", _) => Ok(Schedule::Worst),
            (_, Some(Ok(n))) => Ok(Schedule::Seed(n)),
            _ => Err(format!("`{s}` is no schedule; use fair, worst or seed:N")),
        }
    }
}

/// What counts as a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Only what no card can go on from. No hazards are looked for.
    Machine,
    /// What can go wrong on a card. What the manual forbids, but cards are known to bear, is a warning.
    Default,
    /// The manual's letter.
    Strict,
}

impl std::str::FromStr for Level {
    type Err = String;

    /// `machine`, `default` or `strict`.
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "machine" => Ok(Level::Machine),
            "default" => Ok(Level::Default),
            "strict" => Ok(Level::Strict),
            _ => Err(format!("`{s}` is no level; use machine, default or strict")),
        }
    }
}

/// Hazards that are not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allow {
    /// Their kind.
    pub kind: FaultKind,
    /// The PTX line of one of the instructions; any if it is missing.
    pub line: Option<u32>,
}

impl std::fmt::Display for Allow {
    /// As [`Allow::from_str`](std::str::FromStr) reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.kind)?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

impl std::str::FromStr for Allow {
    type Err = String;

    /// `KIND` or `KIND:LINE`.
    fn from_str(s: &str) -> Result<Self, String> {
        let (kind, line) = s.split_once(':').map_or((s, None), |(kind, line)| (kind, Some(line)));
        let kind: FaultKind = kind.parse()?;
        if !kind.is_hazard() {
            return Err(format!("`{kind}` cannot be allowed: no run can go on behind it"));
        }
        let line = line.map(|line| line.parse().map_err(|_| format!("`{line}` is no line number"))).transpose()?;
        Ok(Allow { kind, line })
    }
}

/// The shape of a launch and how to run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// CTAs in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub block: [u32; 3],
    /// CTAs of a cluster.
    pub cluster: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// See [`Schedule`].
    pub schedule: Schedule,
    /// Look for races, uninitialized reads and misuse; bounds and alignment are always checked.
    pub sanitize: bool,
    /// Hold the kernel to the manual's letter: warnings are faults, and only those tensor-core operations are ordered
    /// that the manual lists as pipelined.
    pub strict: bool,
    /// The launch may begin while the one before it on this device still runs (the launch attribute
    /// `PROGRAMMATIC_STREAM_SERIALIZATION`). The kernel must wait for the end of that launch itself, by
    /// `griddepcontrol.wait`; the sanitizer reports where it does not. What the host does between the two launches does
    /// not count as a wait.
    pub overlaps: bool,
    /// With `sanitize`: look for races of the grid's threads in global memory, too.
    pub global_races: bool,
    /// Address of 8 bytes of zeros that the grid may synchronize through, or 0: what a cooperative launch gives to
    /// cooperative_groups (`%envreg1` and `%envreg2`).
    pub grid_workspace: u64,
    /// Go on behind hazards; the report lists them. What no run can go on behind is a fault even so.
    pub keep_going: bool,
    /// Hazards that are not reported.
    pub allow: Vec<Allow>,
    /// Warp instructions that a warp may execute.
    pub instruction_budget: u64,
}

impl LaunchConfig {
    /// The level that `sanitize` and `strict` mean.
    pub fn level(&self) -> Level {
        match (self.sanitize, self.strict) {
            (false, _) => Level::Machine,
            (true, false) => Level::Default,
            (true, true) => Level::Strict,
        }
    }

    /// The same launch at a level.
    #[must_use]
    pub fn at_level(self, level: Level) -> LaunchConfig {
        LaunchConfig { sanitize: level != Level::Machine, strict: level == Level::Strict, ..self }
    }

    /// One-dimensional grid and block, no cluster, fair schedule, sanitizer on.
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
            allow: Vec::new(),
            instruction_budget: 1 << 32,
        }
    }
}
