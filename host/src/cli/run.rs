//! `nvfp4 run`: the main job. Inputs, a backend, runs, the check against the exact reference, a report.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::ValueEnum;
use nvfp4::backend::{self, Backend, Layer, cpu::Cpu, cuda::Cuda, emulated};
use nvfp4::checkpoint::{Activations, Checkpoint, OutputFile, refuse_input};
use nvfp4::compare::{Comparison, Mismatch, Tolerance, compare_with};
use nvfp4::format::Matrix;
use nvfp4::generate::{self, Generator};
use nvfp4::oracle::{Element, Reference, element_at};
use nvfp4::plan::roofline::Roofline;
use nvfp4::plan::variant::{LaunchSchedule, Variant};
use nvfp4::problem::{Group, GroupedProblem, Op, OutDtype, Step, Weights};
use nvfp4::{Output, shape};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::json;

use super::progress::Progress;
use super::table;

/// Run an MoE layer's grouped GEMM, check it against the exact reference, and report its speed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 run                                      the default shape on the best device here
  nvfp4 run --shape decode-1 --backend cpu --repeat 20
  nvfp4 run --shape mine.json#layer-3 --input all-codes --json
  nvfp4 run --shape group-test-1 --backend emulated --arch sm_90a --schedule worst
  nvfp4 run --variant streams=4,graph            a launch for each group over 4 streams, replayed as a CUDA graph
  nvfp4 run --weights model/ --layer 3 --tokens 16
  nvfp4 run --weights model/ --layer 3 --activations tokens.safetensors --output out.safetensors

Exit codes: 0 nothing wrong, 1 a wrong result or a fault of the kernel, 2 bad input or usage, 3 no such device.")]
pub struct Args {
    /// A built-in shape (see `nvfp4 shapes`), FILE.json or FILE.json#NAME.
    #[arg(long, default_value = "moe-1", conflicts_with = "weights")]
    shape: String,
    /// The operation, in place of the shape's own.
    #[arg(long, value_name = "gated|plain", value_parser = super::parse_op)]
    op: Option<Op>,
    /// Where to run; auto takes a CUDA GPU if there is one.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// How a GPU computes it: words separated by commas, of which all may be left out. A launch schedule: persistent (one
    /// launch), per-group, streams=N or unfused (the baseline of three kernels); graph (replayed as a CUDA graph); a kernel:
    /// gated_sm100, gated_sm90 or gated_simt; one of its instances, such as t64. On Blackwell, gated_sm100 has run in the
    /// emulator only and is not the default.
    #[arg(long, value_name = "WORD,…", default_value_t)]
    variant: Variant,
    /// The emulated GPU: sm_80, sm_90a or sm_100f [default: sm_100f].
    #[arg(long)]
    arch: Option<String>,
    /// Which warp the emulated GPU runs next, and when its asynchronous operations complete: fair, seed:N or worst
    /// [default: fair].
    #[arg(long)]
    schedule: Option<emulated::Schedule>,
    /// How inputs are made: public-dual, public-group, gaussian or all-codes [default: the shape's own, or gaussian].
    #[arg(long, value_name = "GENERATOR", value_parser = parse_generator)]
    input: Option<Generator>,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Type of the output.
    #[arg(long, value_name = "f16|bf16", default_value = "f16", value_parser = parse_out_dtype)]
    out_dtype: OutDtype,
    /// An NVFP4 checkpoint: a .safetensors file, its index, or the folder of a model.
    #[arg(long, value_name = "CHECKPOINT", requires = "layer")]
    weights: Option<PathBuf>,
    /// The layer of the checkpoint.
    #[arg(long, requires = "weights")]
    layer: Option<usize>,
    /// Generated tokens for each expert of the checkpoint.
    #[arg(long, value_name = "M", requires = "weights", default_value_t = 16)]
    tokens: usize,
    /// Tokens from a file: `hidden` [T, K] and `group_sizes` [experts], sorted by expert.
    #[arg(long, value_name = "FILE", requires = "weights", conflicts_with_all = ["tokens", "input", "seed"])]
    activations: Option<PathBuf>,
    /// Where the output goes, as `output` [T, N] of a .safetensors file.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How much of the output is checked.
    #[arg(long, value_enum, default_value_t = Verify::Full)]
    verify: Verify,
    /// Timed runs, after one to warm up [default: 5]. The emulator times nothing: there it runs once, unless told.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Choice {
    Auto,
    Cpu,
    Cuda,
    /// The GPU's kernel executed on the CPU, its faults found.
    Emulated,
}

impl Args {
    /// Runs that are reported, and runs before them that warm caches and buffers.
    fn runs(&self) -> (usize, usize) {
        let emulated = self.backend == Choice::Emulated;
        let (timed, warm_up) = if emulated { (1, 0) } else { (5, 1) };
        (self.repeat.map_or(timed, |repeat| repeat as usize), warm_up)
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Verify {
    /// Every element.
    Full,
    /// Some thousand elements, drawn by the seed.
    Sample,
    /// None.
    Off,
}

fn parse_generator(name: &str) -> Result<Generator, String> {
    let names = Generator::ALL.map(Generator::name).join(", ");
    Generator::ALL.into_iter().find(|generator| generator.name() == name).ok_or(format!("one of {names}"))
}

fn parse_out_dtype(name: &str) -> Result<OutDtype, String> {
    [OutDtype::F16, OutDtype::Bf16].into_iter().find(|dtype| dtype.name() == name).ok_or("f16 or bf16".into())
}

/// Inputs, and where they came from, in words.
struct Job<'a> {
    shape: String,
    input: String,
    weights: Weights<'a>,
    tokens: Vec<Matrix<'static>>,
}

/// Runs the job and prints the report.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let backend = choose_backend(args)?;
    let checkpoint = args.weights.as_deref().map(Checkpoint::open).transpose()?;
    if let Some(path) = &args.output {
        let inputs = checkpoint.iter().flat_map(Checkpoint::paths).chain(args.activations.as_deref());
        refuse_input(path, inputs)?;
    }
    let Job { shape, input, weights, tokens } = match &checkpoint {
        Some(checkpoint) => loaded(args, checkpoint)?,
        None => generated(args)?,
    };
    let step = Step::new(&weights, tokens, args.out_dtype)?;
    let problem = step.problem();
    let output_file = args.output.as_deref().map(|path| OutputFile::create(path, problem)).transpose()?;
    let mut output = Output::new(problem);
    let mut layer = backend.prepare(&weights)?;

    let (timed, warm_up) = args.runs();
    let (mut times, mut host_times) = (Vec::new(), Vec::new());
    {
        let progress = Progress::new("running", warm_up + timed);
        for _ in 0..warm_up + timed {
            times.push(backend::run(layer.as_mut(), &step, &mut output)?);
            host_times.extend(layer.host_time());
            progress.add(1);
        }
    }
    for times in [&mut times, &mut host_times] {
        times.drain(..warm_up.min(times.len()));
        times.sort();
    }

    let unfused = args.variant.schedule == LaunchSchedule::Unfused;
    let tolerance = |element: &Element| match unfused {
        true => Tolerance::unfused(args.out_dtype, element),
        false => Tolerance::of(args.out_dtype),
    };
    let comparison = match args.verify {
        Verify::Full => Some(verify_all(&weights, &step, &output, tolerance)),
        Verify::Sample => Some(verify_sample(&weights, &step, &output, tolerance, args.seed)),
        Verify::Off => None,
    };
    let report = Report {
        args,
        shape,
        input,
        problem,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: host_times.get(host_times.len() / 2).copied(),
        comparison,
    };
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        report.print(out)?;
    }
    if comparison.is_some_and(|comparison| !comparison.passed()) {
        return Ok(ExitCode::from(super::WRONG));
    }
    if let Some(file) = output_file {
        file.write(&output)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn choose_backend(args: &Args) -> anyhow::Result<Box<dyn Backend>> {
    if args.backend != Choice::Emulated && (args.arch.is_some() || args.schedule.is_some()) {
        bail!("--arch and --schedule are the emulator's; add --backend emulated");
    }
    let cuda = || Cuda::open(0)?.with_variant(args.variant);
    let plain = args.variant == Variant::default();
    Ok(match args.backend {
        Choice::Cpu if !plain => bail!("--variant is of GPUs, real and emulated; leave it out with --backend cpu"),
        Choice::Cpu => Box::new(Cpu::new()),
        Choice::Cuda => Box::new(cuda()?),
        Choice::Emulated => {
            let schedule = args.schedule.unwrap_or_default();
            let options = emulated::Options { schedule, ..Default::default() };
            let gpu = emulated::Emulated::new(args.arch.as_deref().unwrap_or(emulated::default_arch()), options)?;
            Box::new(gpu.with_variant(args.variant)?)
        }
        Choice::Auto => match cuda() {
            Ok(gpu) => Box::new(gpu),
            Err(error) if error.is_no_device() && plain => Box::new(Cpu::new()),
            Err(error) => return Err(error.into()),
        },
    })
}

/// The job of a layer of a checkpoint.
fn loaded<'a>(args: &Args, checkpoint: &'a Checkpoint) -> anyhow::Result<Job<'a>> {
    let number = args.layer.expect("clap requires it beside --weights");
    let layer = checkpoint.layer(number, args.op.unwrap_or(Op::Gated))?;
    let (tokens, input) = match &args.activations {
        Some(path) => (Activations::open(path)?.quantize(&layer.input_scales)?, path.display().to_string()),
        None => {
            let experts = layer.weights.experts().iter();
            let groups: Vec<_> = experts.map(|expert| Group { m: args.tokens, n: expert.n(), k: expert.k() }).collect();
            check_memory(&GroupedProblem::new(layer.weights.op(), args.out_dtype, groups.clone())?)?;
            let generator = args.input.unwrap_or_default();
            (generate::activations(generator, &groups, args.seed)?, generator.name().into())
        }
    };
    Ok(Job { shape: format!("{} layer {number}", checkpoint.path().display()), input, weights: layer.weights, tokens })
}

/// The job of a shape, its inputs made from the seed.
fn generated(args: &Args) -> anyhow::Result<Job<'static>> {
    let mut shape = shape::find(&args.shape)?;
    shape.op = args.op.unwrap_or(shape.op);
    let problem = shape.problem(args.out_dtype)?;
    check_memory(&problem)?;
    let generator = args.input.unwrap_or(shape.input);
    let progress = Progress::new("generating", shape.groups.len());
    let mut experts = Vec::new();
    for (group, sizes) in shape.groups.iter().enumerate() {
        experts.push(generate::expert(generator, shape.op, group, sizes, args.seed)?);
        progress.add(1);
    }
    Ok(Job {
        shape: args.shape.clone(),
        input: generator.name().into(),
        weights: Weights::new(shape.op, experts)?,
        tokens: generate::activations(generator, &shape.groups, args.seed)?,
    })
}

/// Refuses a problem that this machine's memory cannot hold, before anything is allocated.
fn check_memory(problem: &GroupedProblem) -> anyhow::Result<()> {
    let work = Roofline::new(problem);
    let weights: f64 = problem.groups().iter().map(|group| group.n as f64 * group.k as f64).sum();
    // Weights and their prepared copy at 9/16 of a byte an element, f32 numbers while one matrix is quantised, and the
    // f64 reference.
    let largest = problem.groups().iter().map(|group| group.n.max(group.m) as f64 * group.k as f64).fold(0.0, f64::max);
    let projections = problem.op().projections() as f64;
    let outputs = work.output_bytes as f64 * (1.0 + 8.0 * projections);
    let needed = 2.0 * projections * weights * 9.0 / 16.0 + 4.0 * largest + 8.0 * work.token_bytes as f64 + outputs;
    let ram = sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
    // Where the system does not say, the allocator will.
    let Ok(system) = sysinfo::System::new_with_specifics(ram) else { return Ok(()) };
    let present = system.total_memory() as f64;
    if needed > present {
        bail!(
            "the shape needs about {} of memory and this machine has {}; take fewer or smaller groups",
            table::bytes(needed),
            table::bytes(present)
        );
    }
    Ok(())
}

fn verify_all(
    weights: &Weights<'_>,
    step: &Step<'_>,
    output: &Output,
    tolerance: impl Fn(&Element) -> Tolerance + Sync,
) -> Comparison {
    let projections = step.problem().op().projections();
    let dot_products = step.problem().groups().iter().map(|group| projections * group.m * group.n).sum();
    let progress = Progress::new("verifying", dot_products);
    let reference = Reference::with_progress(weights, step, &|done| progress.add(done));
    compare_with(output, &reference, step, |_, _, _, element| tolerance(element))
}

fn verify_sample(
    weights: &Weights<'_>,
    step: &Step<'_>,
    output: &Output,
    tolerance: impl Fn(&Element) -> Tolerance,
    seed: u64,
) -> Comparison {
    const ELEMENTS: usize = 4096;
    let dtype = output.dtype();
    let groups: Vec<(usize, &Group)> =
        step.problem().groups().iter().enumerate().filter(|(_, group)| group.m > 0).collect();
    let mut comparison = Comparison::default();
    if groups.is_empty() {
        return comparison;
    }
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let progress = Progress::new("verifying", ELEMENTS);
    for _ in 0..ELEMENTS {
        let (group, sizes) = groups[rng.random_range(0..groups.len())];
        let (row, column) = (rng.random_range(0..sizes.m), rng.random_range(0..sizes.n));
        let exact = element_at(weights, step, group, row, column);
        let (got, want) = (dtype.decode(output.group(group)[row * sizes.n + column]), exact.value);
        comparison.add(tolerance(&exact), dtype, Mismatch { group, row, column, got, want });
        progress.add(1);
    }
    comparison
}

struct Report<'a> {
    args: &'a Args,
    shape: String,
    input: String,
    problem: &'a GroupedProblem,
    backend: &'a dyn Backend,
    layer: &'a dyn Layer,
    min: Duration,
    median: Duration,
    /// Median time to queue a run.
    host: Option<Duration>,
    comparison: Option<Comparison>,
}

impl Report<'_> {
    /// True only after every element was checked.
    fn verified(&self) -> bool {
        self.args.verify == Verify::Full && self.comparison.is_some_and(|comparison| comparison.passed())
    }

    fn json(&self) -> serde_json::Value {
        let work = Roofline::new(self.problem);
        let seconds = self.median.as_secs_f64();
        let groups: Vec<_> =
            self.problem.groups().iter().map(|group| json!({"m": group.m, "n": group.n, "k": group.k})).collect();
        // Rates of the emulator would be taken for the device's.
        let rate = |amount: f64| self.layer.counters().is_none().then_some(amount / seconds);
        let mut report = json!({
            "op": self.problem.op(),
            "backend": self.backend.name(),
            "kernel": self.layer.kernel(),
            "variant": self.layer.launches().map(|_| self.args.variant.to_string()),
            "device": self.backend.device(),
            "shape": self.shape,
            "input": self.input,
            "groups": groups,
            "time_us": {"min": self.min.as_secs_f64() * 1e6, "median": seconds * 1e6},
            "launches": self.layer.launches(),
            "host_us": self.host.map(|host| host.as_secs_f64() * 1e6),
            "tflops": rate(work.operations / 1e12),
            "gb_per_s": rate(work.bytes() as f64 / 1e9),
            "max_abs_err": self.comparison.map(|comparison| comparison.max_abs_err),
            "max_rel_err": self.comparison.map(|comparison| comparison.max_rel_err),
            "mismatches": self.comparison.map(|comparison| comparison.mismatches),
            "verified": self.verified(),
        });
        if let Some(counters) = self.layer.counters() {
            report["counters"] = json!(counters);
            report["useful_share"] = json!(useful_share(counters, &work));
        }
        report
    }

    fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let work = Roofline::new(self.problem);
        let seconds = self.median.as_secs_f64();
        writeln!(
            out,
            "{} {} · {} → {} · {} on {}, {}",
            self.shape,
            self.problem.op().name(),
            self.input,
            self.problem.out_dtype().name(),
            self.backend.name(),
            self.backend.device(),
            self.layer.kernel()
        )?;
        writeln!(out, "{}", group_table(self.problem.groups()))?;
        match self.layer.counters() {
            Some(counters) => {
                writeln!(out, "variant   {}: {}", self.args.variant, launches(self.layer.launches().unwrap_or(0)))?;
                print_counters(counters, &work, seconds, out)?;
            }
            None => {
                writeln!(
                    out,
                    "time      median {}, min {} of {}",
                    table::time(seconds),
                    table::time(self.min.as_secs_f64()),
                    self.args.runs().0
                )?;
                if let (Some(count), Some(host)) = (self.layer.launches(), self.host) {
                    let host = table::time(host.as_secs_f64());
                    writeln!(out, "variant   {}: {} a run, queued in {host}", self.args.variant, launches(count))?;
                }
                writeln!(
                    out,
                    "rate      {:.3} TFLOP/s, {:.2} GB/s",
                    work.operations / seconds / 1e12,
                    work.bytes() as f64 / seconds / 1e9
                )?;
            }
        }
        if let Some(peaks) = self.backend.peaks() {
            let share = work.seconds(peaks) / seconds;
            writeln!(
                out,
                "roofline  {:.0} % of the device's: {} at {:.1} GB/s and {:.2} TFLOP/s{}",
                100.0 * share,
                table::time(work.seconds(peaks)),
                peaks.bytes_per_second / 1e9,
                peaks.ops_per_second / 1e12,
                if share > 1.0 { "; so little data stays in caches" } else { "" }
            )?;
        }
        let Some(comparison) = &self.comparison else {
            writeln!(out, "verified  no: not checked")?;
            return Ok(());
        };
        writeln!(
            out,
            "error     at most {:.2e} absolute, {:.2e} relative",
            comparison.max_abs_err, comparison.max_rel_err
        )?;
        let Tolerance { absolute, relative } = Tolerance::of(self.problem.out_dtype());
        let more = match self.args.variant.schedule {
            LaunchSchedule::Unfused => " + what rounding gate and up moves it by",
            _ => "",
        };
        let bound = format!("within {absolute} + {relative}·|x|{more} of the exact reference");
        let checked = table::thousands(comparison.checked);
        match (comparison.first, self.args.verify) {
            (Some(first), _) => {
                let wrong = table::thousands(comparison.mismatches);
                writeln!(out, "verified  NO: {wrong} of {checked} elements are wrong, the first {first}")
            }
            (None, Verify::Full) => writeln!(out, "verified  yes: all {checked} elements {bound}"),
            (None, _) => writeln!(out, "verified  no: of a sample of {checked} elements all are {bound}"),
        }
    }
}

fn launches(count: usize) -> String {
    if count == 1 { "1 launch".into() } else { format!("{count} launches") }
}

/// The share of multiply-adds that belong to an element of the output, where tensor cores do them.
fn useful_share(counters: &emulated::Counters, work: &Roofline) -> Option<f64> {
    let useful = (work.operations / 2.0) as u64;
    (counters.total.matrix_multiply_adds > 0).then(|| counters.useful_share(useful))
}

/// What an emulated kernel did. No rate: the time is the emulator's.
fn print_counters(
    counters: &emulated::Counters,
    work: &Roofline,
    seconds: f64,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let total = &counters.total;
    let number = |count: u64| table::thousands(count as usize);
    let bytes = |count: u64| table::bytes(count as f64);
    writeln!(
        out,
        "executed  {} instructions of threads, {} of warps, {} CTAs; no fault",
        number(total.thread_instructions),
        number(total.warp_instructions),
        number(counters.ctas)
    )?;
    let loaded = |name| {
        let buffers = counters.buffers_named(name);
        bytes(buffers.loaded + buffers.bulk_loaded)
    };
    writeln!(
        out,
        "global    {} of weights and {} of tokens loaded, {} distinct; {} stored",
        loaded(emulated::WEIGHTS),
        loaded(emulated::TOKENS),
        bytes(counters.dram_read_bytes),
        bytes(total.bytes.global_store + total.bulk.global_store)
    )?;
    writeln!(
        out,
        "shared    {} loaded, {} stored, {} extra cycles by bank conflicts",
        bytes(total.bytes.shared_load),
        bytes(total.bytes.shared_store),
        number(total.bank_conflicts)
    )?;
    if let Some(useful) = useful_share(counters, work) {
        writeln!(
            out,
            "matrix    {} multiply-adds, {:.1} % useful",
            number(total.matrix_multiply_adds),
            100.0 * useful
        )?;
    }
    if total.loads.phases > 0 {
        writeln!(
            out,
            "pipeline  {:.1} % of {} loads beside matrix operations, {:.1} of those ahead of its use",
            100.0 * total.loads.overlap(),
            number(total.loads.phases),
            total.loads.mean_distance()
        )?;
    }
    let waits: Vec<_> =
        counters.roles.iter().map(|role| format!("{:.0}", 100.0 * counters.waiting_share(role))).collect();
    writeln!(out, "waiting   {} % of the emulated time, by warp", waits.join(", "))?;
    writeln!(out, "time      {} to emulate; says nothing of a GPU", table::time(seconds))
}

/// The groups, those of equal size in one row.
fn group_table(groups: &[Group]) -> comfy_table::Table {
    let mut rows = table::table(&["group", "M", "N", "K"], 1);
    let mut first = 0;
    for equal in groups.chunk_by(|a, b| a == b) {
        let last = first + equal.len() - 1;
        let name = if first == last { first.to_string() } else { format!("{first}–{last}") };
        rows.add_row([name, equal[0].m.to_string(), equal[0].n.to_string(), equal[0].k.to_string()]);
        first = last + 1;
    }
    rows
}
