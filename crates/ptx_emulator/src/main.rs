//! The command `ptx-emulator`: checks a PTX file, prints the emulator's coverage, or runs a launch or a whole program.

mod clock;
mod exit;
mod explore;
mod files;
mod hazards;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use files::read;
use hazards::Hazards;
use ptx_emulator::launch_json::LaunchFile;
use ptx_emulator::{Level, Limit, Module, Sums, coverage};

/// Runs PTX on the CPU and finds its bugs.
///
/// Exit codes: 0 success, 1 fault of the kernel, 2 bad input, 4 feature that the emulator does not support.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a CUDA program with its launches emulated, and print a summary of launches and hazards at the end.
    ///
    /// The program may use the driver API, or the CUDA runtime if it was built with `nvcc -cudart shared`. Its kernels
    /// must be included as PTX (`-gencode arch=compute_90a,code=compute_90a`). The exit code is the program's own, or 1
    /// if a launch faulted.
    Run(run::RunArgs),
    /// Parse a PTX file and list instructions that the emulator cannot run.
    Check { file: PathBuf },
    /// Print the opcodes that the emulator runs, as a Markdown table.
    Coverage,
    /// Run the launch that a JSON file describes.
    Launch {
        file: PathBuf,
        /// Schedule: fair, worst, seed:N, or an order that --explore has printed. Overrides the file.
        #[arg(long)]
        schedule: Option<String>,
        /// Level: machine (only violations that no GPU can continue from), default (violations that can go wrong on a
        /// GPU) or strict (all violations of the manual). Overrides the file.
        #[arg(long)]
        level: Option<Level>,
        /// Same as `--level strict`.
        #[arg(long, conflicts_with = "level")]
        strict: bool,
        /// How matrix instructions add floating-point products: card (as the GPU does, to the bit) or exact (rounded
        /// once to nearest). Overrides the file.
        #[arg(long)]
        sums: Option<Sums>,
        #[command(flatten)]
        hazards: Hazards,
        /// Limit: a number of instructions of a warp, or seconds such as 60s. May be given twice. Overrides the file.
        #[arg(long)]
        limit: Vec<Limit>,
        #[command(flatten)]
        clock: clock::Clock,
        #[command(flatten)]
        explore: explore::Explore,
        /// Print the report or the fault as one JSON object.
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(args),
        Command::Check { file } => check(&file),
        Command::Coverage => {
            print!("{}", coverage());
            Ok(ExitCode::SUCCESS)
        }
        Command::Launch { file, schedule, level, strict, sums, hazards, limit, clock, explore, json } => {
            let level = level.or(strict.then_some(Level::Strict));
            launch(&file, (schedule, level, sums), hazards, &limit, (&clock, &explore), json)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(exit::BAD_INPUT)
    })
}

fn check(path: &Path) -> Result<ExitCode> {
    let module = Module::parse(&read(path)?).with_context(|| path.display().to_string())?;
    let mut complete = true;
    for kernel in module.entries() {
        println!("entry `{}`: {} bytes of parameters", kernel.name, kernel.param_bytes());
        for (line, what) in &kernel.unsupported {
            complete = false;
            println!("  line {line}: {what}");
        }
    }
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::from(exit::UNSUPPORTED) })
}

fn launch(
    path: &Path,
    (schedule, level, sums): (Option<String>, Option<Level>, Option<Sums>),
    hazards: Hazards,
    limits: &[Limit],
    (clock, explore): (&clock::Clock, &explore::Explore),
    json: bool,
) -> Result<ExitCode> {
    let mut file = LaunchFile::parse(&read(path)?).with_context(|| path.display().to_string())?;
    let order = explore::order(&mut file, schedule)?;
    if let Some(level) = level {
        (file.sanitize, file.strict) = (level != Level::Machine, level == Level::Strict);
    }
    file.keep_going |= hazards.keep_going;
    file.alloc_rendezvous |= hazards.alloc_rendezvous;
    file.global_races &= !hazards.no_global_races;
    let folder = path.parent().unwrap_or("".as_ref());
    let mut prepared = file.prepare(folder)?;
    let mut timeline = clock.timeline(&folder.join(&file.ptx))?;
    let later = prepared.then.iter_mut().map(|launch| &mut launch.config);
    later.chain([&mut prepared.config]).for_each(|config| {
        config.allow.extend(&hazards.allow);
        config.sums = sums.unwrap_or(config.sums);
        limits.iter().for_each(|limit| config.limit(*limit));
    });
    if let Some(bounds) = explore.bounds() {
        return explore::explore(&mut prepared, &bounds, json);
    }
    let done = match (&mut timeline, &order) {
        (Some(timeline), _) => prepared.time(timeline),
        (None, Some(order)) => prepared.replay(order),
        (None, None) => prepared.run(),
    };
    match done {
        Ok(report) => {
            let mut text = serde_json::to_value(&report)?;
            if let Some(timeline) = &timeline {
                text["predicted_us"] = timeline.predicted_us().into();
                text["prediction"] = serde_json::to_value(timeline.launches())?;
                clock.draw(timeline)?;
            }
            if json {
                println!("{text}");
            } else {
                print!("{report}");
                timeline.iter().for_each(clock::print);
            }
            prepared.save()?;
            Ok(if report.hazards.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(exit::FAULT) })
        }
        Err(fault) => {
            if json {
                println!("{}", serde_json::to_string(&fault)?);
            } else {
                println!("{fault}");
            }
            Ok(ExitCode::from(exit::of(&fault)))
        }
    }
}
