//! `cargo xtask counters`: runs kernels in the emulator, verifies every element, and writes their counters to
//! `benches/lab/counters.json` and `benches/lab/counters.md`.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf, time::Instant};

use anyhow::{Context, ensure};
use cuda_builder::Arch;
use nvfp4::shape::{self, Shape};

use crate::{
    document::{self, Mode},
    emulate::{Nvfp4, Run},
    table::Table,
    work,
};

/// Run kernels in the emulator, verify every element, and renew benches/lab/counters.json and benches/lab/counters.md
#[derive(clap::Args)]
pub struct Args {
    /// Only these shapes; the recorded counts of other shapes stay
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    shapes: Vec<String>,
    /// Fail if a rerun of the quick shapes disagrees with the recorded counts, or the page is out of date
    #[arg(long, conflicts_with = "shapes")]
    check: bool,
    /// nvfp4 command to run, instead of building one
    #[arg(long, value_name = "FILE")]
    nvfp4: Option<PathBuf>,
}

/// Recorded counts.
const DATA: &str = "benches/lab/counters.json";

/// The page with the counts, and the template of its text.
const PAGE: &str = "benches/lab/counters.md";
const TEMPLATE: &str = include_str!("counters.md");

const COMMAND: &str = "cargo xtask counters";

/// Multiply-adds that a check may run at most, by architecture. A run above the limit takes more than seconds: a kernel
/// that decodes weights in software executes many instructions.
const QUICK_MULTIPLY_ADDS: [(Arch, u64); 3] =
    [(BLACKWELL, 4_000_000_000), (HOPPER, 100_000_000), (CONSUMER, 100_000_000)];

/// Architectures of the counted kernels: those with tensor-core kernels.
pub const BLACKWELL: Arch = Arch::SM_100F;
pub const HOPPER: Arch = Arch::SM_90A;
const CONSUMER: Arch = Arch::SM_120F;

/// Compared variants, by shape: all kinds on the smallest MoE layer; one launch and a launch per group on a shape of
/// eight ragged groups.
pub const VARIANTS: [(&str, &[&str]); 2] = [
    (
        "moe-4",
        &[
            "t64_s1",
            "t64_s2",
            "t64",
            "t64_tma",
            "t64_serial",
            "t64_serial_s3",
            "t64_pair",
            "t96",
            "t128",
            "t128_pair",
            "unfused",
        ],
    ),
    ("moe-2", &["t64", "t64,per-group"]),
];

/// Shapes on which the Hopper kernel is counted too.
const ON_HOPPER: [&str; 5] = ["dual-test-2", "group-test-5", "group-4", "moe-4", "decode-1"];

/// Shapes on which the kernel for RTX 50, RTX PRO and DGX Spark is counted too.
const ON_CONSUMER: [&str; 3] = ["dual-test-2", "group-test-5", "group-4"];

/// Minimum share of useful multiply-adds on the shapes for which 128-row tiles waste most.
const LEAST_USEFUL: f64 = 0.94;
const WASTEFUL: [&str; 2] = ["moe-1", "moe-2"];

/// A run: architecture, shape, variant.
type Job = (Arch, &'static Shape, &'static str);

fn jobs() -> Vec<Job> {
    let named = |name: &str| work::shape(name).expect("the shape is built in");
    let all = shape::builtin().iter().map(|shape| (BLACKWELL, shape, ""));
    let variants = VARIANTS
        .iter()
        .flat_map(|(name, variants)| variants.iter().map(move |&variant| (BLACKWELL, named(name), variant)));
    let hopper = ON_HOPPER.iter().map(|name| (HOPPER, named(name), ""));
    let consumer = ON_CONSUMER.iter().map(|name| (CONSUMER, named(name), ""));
    all.chain(variants).chain(hopper).chain(consumer).collect()
}

fn is_quick((arch, shape, _): &Job) -> bool {
    QUICK_MULTIPLY_ADDS.iter().any(|(of, most)| of == arch && work::multiply_adds(shape) <= *most)
}

/// Runs the requested kernels, checks their invariants, and writes or checks the data and the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    for name in &args.shapes {
        ensure!(work::shape(name).is_some(), "unknown shape {name:?}; `nvfp4 shapes` lists all shapes");
    }
    let wanted = |job: &Job| match args.check {
        true => is_quick(job),
        false => args.shapes.is_empty() || args.shapes.contains(&job.1.name),
    };
    let jobs = jobs();
    let kept = if args.shapes.is_empty() && !args.check { Vec::new() } else { read()? };
    let mut runs: BTreeMap<_, _> =
        kept.into_iter().map(|run| (key(&run.arch, &run.shape, &run.variant), run)).collect();
    let in_order = |runs: &BTreeMap<_, Run>| -> Vec<Run> {
        jobs.iter()
            .filter_map(|(arch, shape, variant)| runs.get(&key(&arch.to_string(), &shape.name, variant)).cloned())
            .collect()
    };

    let start = Instant::now();
    let nvfp4 = Nvfp4::given_or_built(args.nvfp4.as_deref())?;
    let mut again = 0;
    for &(arch, shape, variant) in jobs.iter().filter(|job| wanted(job)) {
        let begun = Instant::now();
        let run = nvfp4.run(&arch.to_string(), &shape.name, variant)?;
        check(&run, shape)?;
        let seconds = begun.elapsed().as_secs_f64();
        let shown = if variant.is_empty() { "default" } else { variant };
        println!("{arch:<7} {:<13} {shown:<13} {:<26} {seconds:6.1} s", shape.name, run.entry);
        if args.check {
            let known = runs.get(&key(&arch.to_string(), &shape.name, variant));
            let agrees = known.is_some_and(|known| run.agrees(known));
            ensure!(agrees, "{DATA} records {known:?}, but the rerun found {run:?}; run `{COMMAND}`");
        } else {
            runs.insert(key(&arch.to_string(), &shape.name, variant), run);
            // Written after every run, so that an interrupted command keeps the runs so far.
            document::whole(DATA, &json(&in_order(&runs)), Mode::Write, COMMAND)?;
        }
        again += 1;
    }
    let runs = in_order(&runs);
    println!("{again} of {} runs in {:.0} s", jobs.len(), start.elapsed().as_secs_f64());

    let mode = if args.check { Mode::Check } else { Mode::Write };
    document::whole(PAGE, &page(&runs), mode, COMMAND)
}

fn key(arch: &str, shape: &str, variant: &str) -> [String; 3] {
    [arch, shape, variant].map(str::to_owned)
}

/// Reads the recorded runs.
pub fn read() -> anyhow::Result<Vec<Run>> {
    serde_json::from_str(&document::read(DATA)?).context(DATA)
}

/// Formats the runs as an array with one run per line.
fn json(runs: &[Run]) -> String {
    let lines: Vec<_> = runs.iter().map(|run| serde_json::to_string(run).expect("a run serializes to JSON")).collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

/// Checks the invariants of a run of the Blackwell kernel:
/// - Weights are read by bulk copies only, once per tile of tokens.
/// - Few of the issued multiply-adds are wasted.
/// - With one stage, no load runs beside an MMA.
fn check(run: &Run, shape: &Shape) -> anyhow::Result<()> {
    if run.arch != BLACKWELL.to_string() {
        return Ok(());
    }
    let place = || format!("{} on {}, variant {:?}, entry {}", run.shape, run.arch, run.variant, run.entry);
    let tile = run.tile_tokens().with_context(|| format!("{}: the entry's name contains no tile size", place()))?;
    let expected = [work::weight_bytes(shape, tile), 0];
    ensure!(run.weights == expected, "{}: read {:?} bytes of weights, expected {expected:?}", place(), run.weights);
    ensure!(run.variant != "t64_s1" || run.loads[1] == 0, "{}: loads overlap MMAs in a pipeline of one stage", place());
    let useful = run.useful(shape);
    let must = WASTEFUL.contains(&run.shape.as_str()) && run.variant.is_empty();
    ensure!(
        !must || useful >= LEAST_USEFUL,
        "{}: only {useful:.3} of the multiply-adds are useful, expected at least {LEAST_USEFUL}",
        place()
    );
    Ok(())
}

fn page(runs: &[Run]) -> String {
    let of = |arch: Arch, default: bool| {
        let chosen = runs.iter().filter(|run| run.arch == arch.to_string() && run.variant.is_empty() == default);
        chosen.map(|run| (run, work::shape(&run.shape).expect("the run's shape is built in"))).collect()
    };
    TEMPLATE
        .replace("{{blackwell}}\n", &all(&of(BLACKWELL, true)))
        .replace("{{waiting}}\n", &waiting(&of(BLACKWELL, true)))
        .replace("{{variants}}\n", &variants(&of(BLACKWELL, false)))
        .replace("{{hopper}}\n", &sums_in_registers(&of(HOPPER, true), "beside wgmma"))
        .replace("{{consumer}}\n", &sums_in_registers(&of(CONSUMER, true), "beside mma.sync"))
}

type Rows<'a> = Vec<(&'a Run, &'static Shape)>;

fn all(rows: &Rows<'_>) -> String {
    let header = [
        "shape",
        "entry",
        "CTAs",
        "bytes of weights",
        "of tokens",
        "of output",
        "multiply-adds",
        "useful",
        "in rows of 128",
        "loads",
        "beside MMAs",
        "MMAs ahead",
    ];
    let mut table = Table::new(2, &header);
    for (run, shape) in rows {
        table.row([
            run.shape.clone(),
            run.entry.clone(),
            run.ctas.to_string(),
            thousands(run.weights[0]),
            thousands(run.tokens.iter().sum()),
            thousands(run.output.iter().sum()),
            thousands(run.multiply_adds),
            percent(run.useful(shape)),
            percent(work::useful_in_rows(shape, 128)),
            thousands(run.loads[0]),
            percent(run.overlap()),
            format!("{:.1}", run.ahead()),
        ]);
    }
    table.to_string()
}

fn waiting(rows: &Rows<'_>) -> String {
    let mut table = Table::new(2, &["shape", "entry", "steps", "warps 0–3: epilogue", "warp 4: load", "warp 5: MMA"]);
    for (run, _) in rows {
        let waiting: Vec<f64> = run.waiting().collect();
        let [epilogue @ .., load, mma] = &waiting[..] else { continue };
        let epilogue = epilogue.iter().sum::<f64>() / epilogue.len() as f64;
        let [epilogue, load, mma] = [epilogue, *load, *mma].map(percent);
        table.row([run.shape.clone(), run.entry.clone(), thousands(run.steps), epilogue, load, mma]);
    }
    table.to_string()
}

/// Returns a table of the counters in which variants of a kernel differ.
pub fn variants(rows: &Rows<'_>) -> String {
    let header = [
        "shape",
        "variant",
        "entry",
        "launches",
        "CTAs",
        "bytes of weights",
        "of tokens",
        "useful",
        "beside MMAs",
        "MMAs ahead",
        "shared bytes",
        "TMEM columns",
        "waiting, by warp",
    ];
    let mut table = Table::new(3, &header);
    for (run, shape) in rows {
        let waiting = run.waiting().fold(String::new(), |mut text, share| {
            let _ = write!(text, "{}{:.0}", if text.is_empty() { "" } else { " " }, 100.0 * share);
            text
        });
        table.row([
            run.shape.clone(),
            run.variant.clone(),
            run.entry.clone(),
            run.launches.to_string(),
            run.ctas.to_string(),
            thousands(run.weights[0]),
            thousands(run.tokens.iter().sum()),
            percent(run.useful(shape)),
            percent(run.overlap()),
            format!("{:.1}", run.ahead()),
            thousands(run.shared_bytes),
            run.tmem_columns.to_string(),
            waiting,
        ]);
    }
    table.to_string()
}

/// Returns a table of kernels that accumulate in registers. `beside`: heading of the column of loads beside products.
fn sums_in_registers(rows: &Rows<'_>, beside: &str) -> String {
    let header = [
        "shape",
        "entry",
        "CTAs",
        "bytes of weights",
        "of tokens",
        "of output",
        "multiply-adds",
        "useful",
        "loads",
        beside,
        "bank conflicts",
    ];
    let mut table = Table::new(2, &header);
    for (run, shape) in rows {
        table.row([
            run.shape.clone(),
            run.entry.clone(),
            run.ctas.to_string(),
            thousands(run.weights.iter().sum()),
            thousands(run.tokens.iter().sum()),
            thousands(run.output.iter().sum()),
            thousands(run.multiply_adds),
            percent(run.useful(shape)),
            thousands(run.loads[0]),
            percent(run.overlap()),
            thousands(run.bank_conflicts),
        ]);
    }
    table.to_string()
}

/// Formats a share as `97.3 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Formats a number with a comma after every three digits.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build_ptx;

    #[test]
    fn thousands_are_separated_by_commas() {
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn every_kernel_for_tensor_cores_is_counted() {
        let kernels = build_ptx::kernels().unwrap();
        let arches = kernels.kernels().iter().flat_map(|kernel| &kernel.arches);
        for arch in arches.filter(|arch| **arch != Arch::SM_80) {
            assert!(jobs().iter().any(|(counted, ..)| counted == arch), "{arch}");
        }
    }

    #[test]
    fn check_reruns_quick_jobs_of_every_table() {
        let quick: Vec<_> = jobs().into_iter().filter(is_quick).collect();
        assert!(quick.iter().any(|(arch, ..)| *arch == HOPPER) && quick.len() >= 15, "{}", quick.len());
    }

    #[test]
    fn page_shows_recorded_counts() {
        document::whole(PAGE, &page(&read().unwrap()), Mode::Check, COMMAND).unwrap();
    }
}
