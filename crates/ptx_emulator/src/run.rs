//! `ptx-emulator run`: runs a CUDA program with the emulator's driver and runtime.
//!
//! The crates `emulated_driver` and `emulated_runtime` provide the libraries. Cargo places them beside this command. A
//! temporary folder holds them under the names that programs expect, and comes first in the loader's path. The driver
//! writes a line of JSON for each launch; the summary is made from these lines.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use ptx_emulator::{Allow, Card, Level, Limit, Schedule, Sums, readable};
use serde::Deserialize;

use super::exit;
use super::hazards::Hazards;

/// GPU that the program sees.
#[derive(Clone, Copy, ValueEnum)]
enum Gpu {
    /// Compute capability 9.0, 132 SMs.
    H200,
    /// Compute capability 10.0, 148 SMs.
    B200,
    /// Compute capability 12.0, 170 SMs.
    #[value(name = "rtx-5090")]
    Rtx5090,
}

impl Gpu {
    /// Value for the driver's `PTX_EMULATOR_GPU`.
    fn name(self) -> &'static str {
        match self {
            Gpu::H200 => "h200",
            Gpu::B200 => "b200",
            Gpu::Rtx5090 => "rtx-5090",
        }
    }
}

#[derive(Args)]
pub struct RunArgs {
    /// GPU that the program sees [default: the GPU of --timed, or h200].
    #[arg(long, value_enum)]
    gpu: Option<Gpu>,
    /// Predict the time of each launch on a GPU: h200 or b200 (benches/lab/time-model.md describes the model and its
    /// accuracy). The run does not look for hazards.
    #[arg(long, value_name = "CARD", value_parser = Card::NAMES)]
    timed: Option<String>,
    /// Override a constant of the GPU. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", requires = "timed")]
    constant: Vec<String>,
    /// Skip arithmetic that no control flow depends on. The program's results are then meaningless.
    #[arg(long, requires = "timed")]
    no_values: bool,
    /// Level of checks: machine, default or strict.
    #[arg(long, default_value = "default")]
    level: Level,
    /// Schedule: fair, worst or seed:N.
    #[arg(long, default_value = "fair")]
    schedule: Schedule,
    /// How matrix instructions add floating-point products: card (as the GPU does, to the bit) or exact (rounded once to
    /// nearest).
    #[arg(long, default_value = "card")]
    sums: Sums,
    #[command(flatten)]
    hazards: Hazards,
    /// Limit of each launch: a number of instructions of a warp, or seconds. May be given twice.
    #[arg(long, default_value = "600s")]
    limit: Vec<Limit>,
    /// Write a line of JSON for each launch to this file.
    #[arg(long)]
    log: Option<PathBuf>,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// File names of each library: Cargo's name, and the name that programs load.
const LIBRARIES: [(&str, &str); 2] =
    [("libemulated_driver.so", "libcuda.so.1"), ("libemulated_runtime.so", "libcudart.so.13")];

/// A line of the driver's log.
#[derive(Deserialize)]
struct Line {
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    seconds: f64,
    #[serde(default)]
    instructions: u64,
    #[serde(default)]
    loaded: u64,
    #[serde(default)]
    stored: u64,
    #[serde(default)]
    multiply_adds: u64,
    #[serde(default)]
    warnings: Vec<Hazard>,
    /// The fault, or the hazards that the launch continued after.
    #[serde(default)]
    faults: Vec<Hazard>,
    /// Predicted time on a GPU, if requested.
    prediction: Option<Prediction>,
}

/// Predicted time of a launch on a GPU.
#[derive(Deserialize)]
struct Prediction {
    start_us: f64,
    end_us: f64,
    from_machine_code: bool,
}

#[derive(Deserialize)]
struct Hazard {
    text: String,
    kind: String,
}

/// Runs the program, then prints a summary of its launches.
///
/// # Errors
///
/// If the program or the libraries do not exist.
pub fn run(args: RunArgs) -> Result<ExitCode> {
    let folder = tempfile::tempdir().context("cannot create a temporary folder for the libraries")?;
    for (built, name) in LIBRARIES {
        let link = folder.path().join(name);
        symlink(find(built, name)?, &link).with_context(|| format!("linking {}", link.display()))?;
    }
    let log = args.log.clone().unwrap_or_else(|| folder.path().join("launches.jsonl"));
    if args.log.is_some() {
        // The driver appends to the file, so create it empty.
        std::fs::write(&log, "").with_context(|| format!("writing {}", log.display()))?;
    }
    let log = std::path::absolute(log)?;
    let mut path = folder.path().as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    let [program, arguments @ ..] = &args.program[..] else { bail!("missing program; name it after `--`") };
    let named = args.timed.as_deref().and_then(Card::named);
    // Rejects an invalid constant before anything runs.
    let set = |card: Card, constant: &String| card.with(constant).map_err(|text| anyhow!(text));
    named.map(|card| args.constant.iter().try_fold(card, set)).transpose()?;
    let seen = Gpu::value_variants().iter().copied().find(|gpu| args.timed.as_deref() == Some(gpu.name()));
    let gpu = match (args.gpu.or(seen), &args.timed) {
        (Some(gpu), _) => gpu,
        (None, None) => Gpu::H200,
        (None, Some(card)) => bail!("a program cannot see the GPU {card}; choose the visible GPU with --gpu"),
    };
    let status = Command::new(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", path)
        .env("PTX_EMULATOR_GPU", gpu.name())
        .env("PTX_EMULATOR_TIMED", args.timed.as_deref().unwrap_or_default())
        .env("PTX_EMULATOR_CONSTANTS", args.constant.join(","))
        .env("PTX_EMULATOR_NO_VALUES", if args.no_values { "1" } else { "" })
        .env("PTX_EMULATOR_LEVEL", format!("{:?}", args.level).to_lowercase())
        .env("PTX_EMULATOR_SCHEDULE", args.schedule.to_string())
        .env("PTX_EMULATOR_SUMS", format!("{:?}", args.sums).to_lowercase())
        .env("PTX_EMULATOR_ALLOW", args.hazards.allow.iter().map(Allow::to_string).collect::<Vec<_>>().join(","))
        .env("PTX_EMULATOR_KEEP_GOING", if args.hazards.keep_going { "1" } else { "" })
        .env("PTX_EMULATOR_ALLOC_RENDEZVOUS", if args.hazards.alloc_rendezvous { "1" } else { "" })
        .env("PTX_EMULATOR_NO_GLOBAL_RACES", if args.hazards.no_global_races { "1" } else { "" })
        .env("PTX_EMULATOR_LIMIT", args.limit.iter().map(Limit::to_string).collect::<Vec<_>>().join(","))
        .env("PTX_EMULATOR_LOG", &log)
        .status()
        .with_context(|| format!("running {}", Path::new(program).display()))?;
    let lines = read(&log)?;
    eprint!("{}", summary(&lines));
    if let Some(signal) = status.signal() {
        eprintln!("the program was ended by signal {signal}");
    }
    let faulted = lines.iter().any(|line| !line.faults.is_empty());
    Ok(if faulted { ExitCode::from(exit::FAULT) } else { code(status) })
}

/// Exit code of the program. If a signal ended it, 128 plus the signal's number, as in a shell.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Path of a library: beside this command, under Cargo's name or under the name that programs load, or in `deps` beside
/// it, where Cargo places libraries that only tests need.
fn find(built: &str, name: &str) -> Result<PathBuf> {
    let command = env::current_exe().context("cannot find the path of this command")?;
    let folder = command.parent().context("cannot find the folder of this command")?;
    let places = [folder.join(built), folder.join("deps").join(built), folder.join(name)];
    places.into_iter().find(|path| path.exists()).with_context(|| {
        format!("{built} is not in {}; build it with `cargo build --release` in the workspace", folder.display())
    })
}

fn read(log: &Path) -> Result<Vec<Line>> {
    if !log.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    let line = |line: &str| serde_json::from_str(line).with_context(|| format!("{}: {line}", log.display()));
    let lines: Vec<Line> = text.lines().map(line).collect::<Result<_>>()?;
    ensure!(lines.iter().all(|line| line.seconds >= 0.0), "{}: a negative time", log.display());
    Ok(lines)
}

/// Maximum number of warnings in the summary. The log has all of them.
const MOST_WARNINGS: usize = 5;

/// Launches of one kernel with one shape.
#[derive(Default)]
struct Sum {
    times: u64,
    instructions: u64,
    loaded: u64,
    stored: u64,
    multiply_adds: u64,
    seconds: f64,
    faults: u64,
    /// Predicted times, and the number of predictions based on machine code.
    microseconds: Vec<f64>,
    from_machine_code: usize,
}

fn summary(lines: &[Line]) -> String {
    let mut sums: BTreeMap<(String, [[u32; 3]; 3]), Sum> = BTreeMap::new();
    let mut warnings: BTreeMap<&str, (u64, &str)> = BTreeMap::new();
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    for line in lines {
        let sum = sums.entry((readable(&line.kernel), [line.grid, line.block, line.cluster])).or_default();
        sum.times += 1;
        sum.instructions += line.instructions;
        sum.loaded += line.loaded;
        sum.stored += line.stored;
        sum.multiply_adds += line.multiply_adds;
        sum.seconds += line.seconds;
        sum.faults += u64::from(!line.faults.is_empty());
        if let Some(Prediction { start_us, end_us, from_machine_code }) = line.prediction {
            sum.microseconds.push(end_us - start_us);
            sum.from_machine_code += usize::from(from_machine_code);
        }
        for warning in &line.warnings {
            warnings.entry(&warning.text).or_insert((0, &warning.kind)).0 += 1;
        }
        for fault in &line.faults {
            *kinds.entry(&fault.kind).or_default() += 1;
        }
    }
    let seconds = lines.iter().fold(0.0, |sum, line| sum + line.seconds);
    let mut text = format!("\nptx-emulator: {} launches, {seconds:.2} s\n", lines.len());
    for ((kernel, [grid, block, cluster]), sum) in &sums {
        let dims = |[x, y, z]: [u32; 3]| format!("{x}x{y}x{z}");
        text += &format!("  {kernel}\n    {} times, grid {}, block {}", sum.times, dims(*grid), dims(*block));
        if *cluster != [1; 3] {
            text += &format!(", cluster {}", dims(*cluster));
        }
        text += &format!(
            "; {} warp instructions, {} bytes loaded, {} stored, {} multiply-adds, {:.2} s",
            sum.instructions, sum.loaded, sum.stored, sum.multiply_adds, sum.seconds
        );
        if sum.faults > 0 {
            text += &format!("; {} faulted", sum.faults);
        }
        text.push('\n');
        if let (Some(least), Some(most)) =
            (sum.microseconds.iter().copied().reduce(f64::min), sum.microseconds.iter().copied().reduce(f64::max))
        {
            let mean = sum.microseconds.iter().sum::<f64>() / sum.microseconds.len() as f64;
            text += &format!(
                "    predicted {mean:.2} us from start to end ({least:.2} to {most:.2}), by the model, not measured"
            );
            if sum.from_machine_code < sum.microseconds.len() {
                text += "; some instructions counted in PTX, because machine code is missing";
            }
            text.push('\n');
        }
    }
    for (warning, (launches, _)) in warnings.iter().take(MOST_WARNINGS) {
        text += &format!("{warning}\n  in {launches} launches\n");
    }
    if let Some(more @ 1..) = warnings.len().checked_sub(MOST_WARNINGS) {
        text += &format!("and warnings at {more} more places\n");
    }
    let faults: Vec<String> = kinds.iter().map(|(kind, times)| format!("{times} {kind}")).collect();
    let mut hazards: BTreeMap<&str, u64> = BTreeMap::new();
    for (launches, kind) in warnings.values() {
        *hazards.entry(kind).or_default() += launches;
    }
    let hazards: Vec<String> = hazards.iter().map(|(kind, times)| format!("{times} {kind}")).collect();
    let or_none = |list: Vec<String>| if list.is_empty() { "none".to_owned() } else { list.join(", ") };
    text + &format!("  faults: {}; warnings: {}\n", or_none(faults), or_none(hazards))
}
