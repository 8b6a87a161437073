//! `nvfp4 selftest`: tests the kernels of a GPU, each in a separate process. Also runs this test on the first use of a
//! kernel.

use std::cell::OnceCell;
use std::env;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::ValueHint;
use nvfp4::backend::cuda::{self, DeviceInfo, Options, Verdict};
use nvfp4::kernels::Subject;
use nvfp4::problem::TokenFormat;
use nvfp4::selftest::{Limits, prove, record, recorded, serve};
use serde_json::json;

use super::progress::Progress;
use super::{exit, parse};

/// Test the kernels of a GPU against the exact references; what fails is not used on this GPU
///
/// Each kernel runs in a separate process with a time limit. The user's cache keeps the verdict per GPU, driver and
/// code; this command, `run` and the library read it. A kernel that has only run in the emulator is used on a GPU after
/// it has passed.
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: 0 all passed, 1 a kernel failed, 2 bad input or a kernel could not be tested, 3 no \
                  such device."
)]
pub struct Args {
    /// Kernels to test [default: all that run on the GPU].
    #[arg(value_name = "KERNEL", value_parser = parse::named(&subjects(), |subject| subject.name()))]
    subjects: Vec<Subject>,
    /// Number of the device, in the order of the driver.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Repeat tests that already have a verdict.
    #[arg(long)]
    again: bool,
    /// A file with PTX or machine code to test instead of the built-in kernel with the same entries.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ptx: Option<PathBuf>,
    /// Time limits in seconds: FIRST for the first part of a kernel, in which the driver compiles it, and PART for each
    /// further part.
    #[arg(long, value_name = "FIRST,PART", value_parser = limits, default_value = "180,30")]
    limits: Limits,
    /// Print one JSON object per kernel.
    #[arg(long)]
    json: bool,
    /// Test the parts of one kernel from this part on, in this process, and report each result. This command starts
    /// itself in this way.
    #[arg(long, value_name = "PART", hide = true)]
    serve_from: Option<usize>,
}

fn subjects() -> Vec<Subject> {
    Subject::all().collect()
}

fn limits(text: &str) -> Result<Limits, String> {
    let seconds = |text: &str| text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let limits = text.split_once(',').and_then(|(first, part)| Some((seconds(first)?, seconds(part)?)));
    limits
        .map(|(first, part)| Limits { first, part })
        .ok_or_else(|| "expected two numbers of seconds, for example 180,30".into())
}

/// Tests the requested kernels, or prints their known verdicts.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let options = Options { code: args.ptx.clone(), ..Options::default() };
    if let (Some(from), &[subject]) = (args.serve_from, &args.subjects[..]) {
        serve(subject, from, args.device, &options, out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let device = device(args.device)?;
    let (major, minor) = device.capability;
    let of_card: Vec<_> = Subject::of_card(device.capability).collect();
    let subjects = if args.subjects.is_empty() { &of_card } else { &args.subjects };
    if let Some(other) = subjects.iter().find(|subject| !of_card.contains(subject)) {
        bail!("{} does not run on {}, compute capability {major}.{minor}", other.name(), device.name);
    }
    if !args.json {
        let DeviceInfo { name, driver, sms, .. } = &device;
        writeln!(out, "{name}, compute capability {major}.{minor}, {sms} SMs, driver {driver}")?;
    }
    let mut all_passed = true;
    for &subject in subjects {
        let begin = Instant::now();
        let known = if args.again { None } else { known(args.device, &options, subject) };
        let is_new = known.is_none();
        let verdict = match known {
            Some(verdict) => verdict,
            None => make(args.device, &options, subject, args.limits)?,
        };
        all_passed &= verdict.failed.is_empty();
        if args.json {
            let mut object = serde_json::to_value(&verdict)?;
            object["new"] = json!(is_new);
            object["seconds"] = json!(begin.elapsed().as_secs_f64());
            writeln!(out, "{object}")?;
        } else {
            let when = if is_new { format!("{:.1} s", begin.elapsed().as_secs_f64()) } else { "known".into() };
            writeln!(out, "{:12} {} ({when})", subject.name(), words(&verdict))?;
            for failed in &verdict.failed {
                let left_out = failed.instances.join(", ");
                let left_out = if left_out.is_empty() { left_out } else { format!("; left out: {left_out}") };
                writeln!(out, "    {failed}{left_out}")?;
            }
        }
    }
    if !args.json {
        if let Some(folder) = options.verdicts.folder()? {
            writeln!(out, "verdicts: {}", folder.display())?;
        }
        for note in self::device(args.device)?.notes {
            writeln!(out, "note: {note}")?;
        }
    }
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::from(exit::WRONG) })
}

/// Returns a verdict in short words.
fn words(verdict: &Verdict) -> String {
    let (passed, all) = (verdict.passed.len(), verdict.passed.len() + verdict.failed.len());
    if passed == all { format!("passed, {} parts", all) } else { format!("FAILED, {passed} of {all} parts passed") }
}

fn device(ordinal: u32) -> anyhow::Result<DeviceInfo> {
    let devices = cuda::devices()?;
    let count = devices.len();
    let found = devices.into_iter().find(|device| device.ordinal == ordinal);
    Ok(found.ok_or_else(|| {
        nvfp4::Error::NoDevice(format!("there is no device {ordinal}; the driver lists {count} devices"))
    })?)
}

/// Returns the verdict on a subject; `None` if there is none or it cannot be read.
fn known(ordinal: u32, options: &Options, subject: Subject) -> Option<Verdict> {
    recorded(ordinal, options, subject).unwrap_or_else(|error| {
        eprintln!("note: {error}");
        None
    })
}

/// Tests a subject in a separate process, and stores the verdict.
fn make(ordinal: u32, options: &Options, subject: Subject, limits: Limits) -> anyhow::Result<Verdict> {
    let program = env::current_exe().context("cannot find the path of this program")?;
    let command = |from: usize| {
        let mut command = Command::new(&program);
        command.args(["selftest", subject.name(), "--serve-from", &from.to_string()]);
        command.args(["--device", &ordinal.to_string()]);
        if let Some(path) = &options.code {
            command.arg("--ptx").arg(path);
        }
        command
    };
    let bar = OnceCell::new();
    let progress = |parts| bar.get_or_init(|| Progress::new(subject.name(), parts)).add(1);
    let proof = prove(subject, &command, limits, &progress)?;
    drop(bar);
    Ok(record(ordinal, options, subject, &proof)?)
}

/// Kernels that are about to be used.
pub enum FirstUse {
    /// The grouped kernel made for the GPU.
    OfGroups,
    /// Kernels of an MoE layer, for a token format or for the GPU's default format.
    OfMoe(Option<TokenFormat>),
    /// Kernels of a layer, if they run on the GPU.
    Of(Subject),
}

/// Tests kernels without a verdict on device 0 before their first use. The library then reads the verdict, if there is
/// one.
pub fn on_first_use(first: FirstUse) {
    let Ok(device) = device(0) else { return };
    let options = Options::default();
    let mut of_card = Subject::of_card(device.capability);
    let subject = match first {
        FirstUse::OfGroups => of_card.find(|subject| matches!(subject, Subject::Groups(_))),
        FirstUse::OfMoe(Some(format)) => of_card.find(|of_card| *of_card == Subject::moe(format)),
        FirstUse::OfMoe(None) => of_card.find(|of_card| *of_card == Subject::moe_unasked(device.capability)),
        FirstUse::Of(subject) => of_card.find(|of_card| *of_card == subject),
    };
    let Some(subject) = subject.filter(|subject| known(0, &options, *subject).is_none()) else { return };
    let (name, DeviceInfo { name: card, driver, .. }) = (subject.name(), &device);
    eprintln!("note: first use of {name} on {card} with driver {driver}: testing it once against the exact reference");
    let begin = Instant::now();
    match make(0, &options, subject, Limits::default()) {
        Ok(verdict) => eprintln!("note: {name} {} in {:.1} s", words(&verdict), begin.elapsed().as_secs_f64()),
        Err(error) => eprintln!("note: {}", nvfp4::printable(&format!("{error:#}"))),
    }
}
