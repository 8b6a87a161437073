//! `cargo xtask card`: learns everything about a GPU in one command. It runs the kernels' self-tests and all tests,
//! measures the time model's probes and every variant of every kernel, and writes a proposal for the plan that a person
//! decides on.
//!
//! A failed step does not stop the others; the failures are listed at the end. Results go to
//! `benches/lab/measurements/card-*`, where `cargo xtask experiments` reads them.

pub mod times;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use times::{OnShape, PREFIX, Row, SCHEDULES, Time, Times, instance};

use crate::{
    emulate::Nvfp4,
    experiments,
    table::{Table, geomean},
    tools, workspace,
};

/// Measure everything on the GPU of this machine, and write it to benches/lab/measurements
#[derive(clap::Args)]
pub struct Args {
    /// Print the steps and exit
    #[arg(long)]
    plan: bool,
}

/// Folder of the result files.
const FOLDER: &str = "benches/lab/measurements";

/// Shapes that variants are timed on: shapes of the kernel competition, of MoE layers and of decoding.
const SHAPES: [&str; 15] = [
    "moe-1",
    "moe-2",
    "moe-3",
    "moe-4",
    "dual-1",
    "dual-2",
    "dual-3",
    "dual-4",
    "group-1",
    "group-2",
    "group-3",
    "group-4",
    "decode-1",
    "decode-4",
    "decode-16",
];

/// Timed MoE layers, and their numbers of tokens.
const LAYERS: [&str; 3] = ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b"];
const LAYER_TOKENS: [usize; 4] = [1, 8, 64, 512];

/// N and K of timed linear layers, and their numbers of tokens.
const LINEAR: [(usize, usize); 2] = [(7168, 2048), (4096, 7168)];
const LINEAR_TOKENS: [usize; 5] = [1, 16, 64, 512, 4096];

/// Rounds per contender, and consecutive runs per round.
const ROUNDS: usize = 6;
const RUNS: usize = 20;

/// Bytes of weights that runs rotate through before they reuse the first: more than any L2 holds.
const ROTATED_BYTES: usize = 600 << 20;

/// Minimum relative gain over the plan's choice for an instance to be proposed.
const WORTH: f64 = 0.03;

/// Descriptions of the steps.
const STEPS: [&str; 6] = [
    "self-test: every instance against the exact references, each kernel in its own process",
    "tests: `cargo test --release`, which use the GPU",
    "probes: benches/probes, the constants of the time model",
    "times: every variant of every kernel that passed, on 15 shapes; MoE and linear layers",
    "proposal: where another instance is faster than the plan's choice",
    "scorecard: benches/lab/experiments.md",
];

/// Runs every step.
pub fn run(args: &Args) -> anyhow::Result<()> {
    println!(
        "`cargo xtask card` takes one to two hours on device 0 (CUDA_VISIBLE_DEVICES selects another); run nothing else on the GPU:"
    );
    for (number, step) in STEPS.iter().enumerate() {
        println!("  {}. {step}", number + 1);
    }
    if args.plan {
        return Ok(());
    }
    cuda_driver::probe()
        .map_err(|reason| anyhow!("no CUDA device: {reason}; this command needs a machine with an NVIDIA GPU"))?;
    let nvfp4 = Nvfp4::build()?;
    let verdicts = self_test(nvfp4.path())?;
    let tried = verdicts.first().context("no kernel runs on this GPU")?;
    let files = Files { slug: slug(&tried.card) };
    println!(
        "{}, compute capability {}.{}, driver {}",
        tried.card, tried.capability.0, tried.capability.1, tried.driver
    );
    files.write("selftest.json", &(serde_json::to_string_pretty(&verdicts)? + "\n"))?;

    let mut failed: Vec<String> = verdicts.iter().flat_map(Verdict::failures).collect();
    let mut step = |number: usize, result: anyhow::Result<()>| {
        if let Err(error) = result {
            println!("step {} failed: {error:#}", number + 1);
            failed.push(format!("{}: {error:#}", STEPS[number]));
        }
    };
    step(1, tests(&files));
    step(2, probes(&files));
    let times = times(nvfp4.path(), &verdicts)?;
    files.write("times.json", &(serde_json::to_string_pretty(&times)? + "\n"))?;
    files.write("proposal.md", &proposal(&tried.card, &times)?)?;
    step(5, experiments::renew());

    println!("\nresults: {FOLDER}/{PREFIX}{}-*, and benches/lab/experiments.md", files.slug);
    for failure in &failed {
        println!("FAILED: {failure}");
    }
    println!(
        "to contribute: run `git add docs && git commit -m \"Measured on {}\"` and open a pull request, or send the files",
        tried.card
    );
    ensure!(failed.is_empty(), "{} failures, listed above; all other results were written", failed.len());
    Ok(())
}

/// Result files of a GPU.
struct Files {
    slug: String,
}

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        workspace::root().join(FOLDER).join(format!("{PREFIX}{}-{name}", self.slug))
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        println!("writes {}", path.display());
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Returns a GPU's name as part of a file name: `geforce-rtx-5090`.
fn slug(card: &str) -> String {
    let name = card.strip_prefix("NVIDIA ").unwrap_or(card).to_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// A kernel's verdict, as `nvfp4 selftest` prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Verdict {
    subject: String,
    card: String,
    capability: (u32, u32),
    driver: String,
    passed: Vec<String>,
    failed: Vec<FailedPart>,
    seconds: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct FailedPart {
    part: String,
    why: String,
}

impl Verdict {
    fn failures(&self) -> impl Iterator<Item = String> + '_ {
        self.failed.iter().map(|FailedPart { part, why }| format!("self-test of {}, {part}: {why}", self.subject))
    }

    /// Returns the variants to time on shapes of an operation: all schedules, and the instances that passed.
    fn variants(&self, op: &str) -> Vec<String> {
        // Parts with further words run an instance that another part runs too.
        let instances = self.passed.iter().filter_map(|part| part.strip_prefix(op)?.strip_prefix(' '));
        let instances = instances.filter(|name| !name.contains(' '));
        let schedules = SCHEDULES.into_iter().filter(|schedule| op == "gated" || *schedule != "unfused");
        let name = |word: &str| if word.is_empty() { self.subject.clone() } else { format!("{},{word}", self.subject) };
        schedules.chain(instances).map(name).collect()
    }

    /// Whether the verdict belongs to a kernel for groups.
    fn is_of_groups(&self) -> bool {
        self.subject.starts_with("gated_")
    }
}

fn self_test(nvfp4: &Path) -> anyhow::Result<Vec<Verdict>> {
    let output = Command::new(nvfp4).args(["selftest", "--again", "--json"]).stderr(Stdio::inherit()).output();
    let output = output.context("cannot run nvfp4")?;
    // 1: a part failed; the verdicts name it.
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "nvfp4 selftest cannot run the kernels; see its message above"
    );
    let text = String::from_utf8(output.stdout).context("the output of nvfp4 is not UTF-8")?;
    text.lines()
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("cannot parse the output of nvfp4 selftest: {line}"))
        })
        .collect()
}

/// Runs all tests and writes the results, skipped tests and failures.
fn tests(files: &Files) -> anyhow::Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(workspace::root()).args(["test", "--release", "--no-fail-fast"]);
    let output = cargo.output().context("cannot run cargo")?;
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    files.write("tests.txt", &said_by_tests(&text))?;
    ensure!(output.status.success(), "some tests failed; see {}", files.path("tests.txt").display());
    Ok(())
}

/// Returns the lines of the tests' output with results, skipped tests and failures.
fn said_by_tests(text: &str) -> String {
    let is_kept = |line: &&str| {
        ["test result:", "skipped:", "error"].iter().any(|begin| line.starts_with(begin))
            || line.contains("Running ")
            || line.ends_with("FAILED")
            || line.contains("panicked at")
    };
    text.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect()
}

/// Builds and runs the probes.
fn probes(files: &Files) -> anyhow::Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(workspace::root()).args([
        "run",
        "--release",
        "--locked",
        "--manifest-path",
        "benches/probes/Cargo.toml",
    ]);
    let (text, _) = tools::output(&mut cargo)?;
    files.write("probes.txt", &text)
}

/// Times every variant in its own process, so that a failure affects one variant only.
fn times(nvfp4: &Path, verdicts: &[Verdict]) -> anyhow::Result<Times> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(workspace::root()).args(["build", "--release", "--package", "nvfp4-benches", "--bin", "hopper"]);
    ensure!(cargo.status().context("cannot run cargo")?.success(), "cannot build the benchmark");
    let bench = workspace::target_dir().join("release/hopper");
    let mut shapes = BTreeMap::new();
    for shape in SHAPES {
        let sizes = Bench::start(&bench)?.ask(&json!({"command": "describe", "shape": shape}))?;
        let op = sizes["op"].as_str().context("the benchmark describes no operation")?.to_owned();
        let (mut us, mut missing) = (BTreeMap::new(), BTreeMap::new());
        for verdict in verdicts.iter().filter(|verdict| verdict.is_of_groups()) {
            for variant in verdict.variants(&op) {
                match time(&bench, shape, &variant) {
                    Ok(time) => {
                        println!("{shape} {variant}: {:.1} µs", time.median);
                        us.insert(variant, time);
                    }
                    Err(error) => {
                        println!("{shape} {variant}: {error:#}");
                        missing.insert(variant, format!("{error:#}"));
                    }
                }
            }
        }
        let [bytes, operations] = ["bytes", "operations"].map(|name| sizes[name].as_f64().unwrap_or_default());
        shapes.insert(shape.to_owned(), OnShape { op, bytes: bytes as u64, operations, us, missing });
    }
    let layers_us = layers(nvfp4, verdicts);
    Ok(Times { conditions: conditions(&verdicts[0])?, rounds: ROUNDS, runs: RUNS, shapes, layers_us })
}

fn time(bench: &Path, shape: &str, variant: &str) -> anyhow::Result<Time> {
    let mut bench = Bench::start(bench)?;
    bench.ask(&json!({"command": "prepare", "shape": shape, "kernels": [variant], "rotate_bytes": ROTATED_BYTES}))?;
    let mut us = Vec::new();
    // The first round raises the clocks and does not count.
    for round in 0..=ROUNDS {
        let answer = bench.ask(&json!({"command": "round", "kernel": variant, "runs": RUNS}))?;
        let times: Vec<f64> = serde_json::from_value(answer["us"].clone())?;
        us.extend(times.into_iter().filter(|_| round > 0));
    }
    Ok(Time::of(us))
}

/// The benchmark's process. It reads one JSON line per command and answers with one.
struct Bench {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Bench {
    fn start(program: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (to, from) =
            (child.stdin.take().context("stdin has no pipe")?, child.stdout.take().context("stdout has no pipe")?);
        Ok(Self { child, to, from: BufReader::new(from) })
    }

    fn ask(&mut self, command: &Value) -> anyhow::Result<Value> {
        // If the process has ended, the read below reports it.
        let _ = writeln!(self.to, "{command}");
        let mut line = String::new();
        if self.from.read_line(&mut line)? > 0 {
            return serde_json::from_str(&line).with_context(|| format!("cannot parse the benchmark's answer: {line}"));
        }
        let mut words = String::new();
        if let Some(error) = &mut self.child.stderr {
            std::io::Read::read_to_string(error, &mut words)?;
        }
        bail!(
            "{}",
            words
                .lines()
                .rfind(|line| !line.trim().is_empty())
                .unwrap_or("the benchmark ended without an error message")
        )
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The process may have ended already; both errors are harmless.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Times layers with the kernels that passed their self-test.
fn layers(nvfp4: &Path, verdicts: &[Verdict]) -> BTreeMap<String, f64> {
    let passed = |name: &str| verdicts.iter().any(|verdict| verdict.subject == name && verdict.failed.is_empty());
    let mut runs: Vec<(String, Vec<String>)> = Vec::new();
    let words = |text: String| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    for (layer, tokens) in LAYERS.iter().flat_map(|layer| LAYER_TOKENS.map(|tokens| (layer, tokens))) {
        if passed("moe") {
            runs.push((
                format!("{layer}, {tokens} tokens"),
                words(format!("--op moe --shape {layer} --tokens {tokens}")),
            ));
        }
    }
    for ((n, k), tokens) in LINEAR.iter().flat_map(|sizes| LINEAR_TOKENS.map(|tokens| (sizes, tokens))) {
        if passed("linear") {
            runs.push((
                format!("linear {n}×{k}, {tokens} tokens"),
                words(format!("--op linear --shape {tokens},{n},{k}")),
            ));
        }
    }
    let mut us = BTreeMap::new();
    for (name, words) in runs {
        let mut command = Command::new(nvfp4);
        command.args(["run", "--backend", "cuda", "--verify", "sample", "--repeat", "50", "--json"]).args(words);
        let median = tools::output(&mut command).and_then(|(text, _)| {
            serde_json::from_str::<Value>(&text)?["time_us"]["median"]
                .as_f64()
                .context("the JSON output of nvfp4 has no median")
        });
        match median {
            Ok(median) => {
                println!("{name}: {median:.1} µs");
                us.insert(name, median);
            }
            Err(error) => println!("{name}: {error:#}"),
        }
    }
    us
}

/// Returns date, GPU and commit of the measurement.
fn conditions(verdict: &Verdict) -> anyhow::Result<BTreeMap<String, String>> {
    let root = workspace::root();
    let line = |command: &mut Command| tools::output(command).map(|(text, _)| text.trim().to_owned());
    let date = line(Command::new("date").args(["--utc", "+%Y-%m-%d"]))?;
    let commit =
        line(Command::new("git").current_dir(root).args(["describe", "--always", "--dirty"])).unwrap_or_default();
    // The GPU's name comes first, as in every other measurement. Its clocks follow if nvidia-smi reports them.
    let query = ["--id=0", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"];
    let gpu = line(Command::new("nvidia-smi").args(query)).unwrap_or_default();
    let gpu = if gpu.starts_with(&verdict.card) { gpu } else { format!("{}, {}", verdict.card, verdict.driver) };
    let note = format!("cargo xtask card, kernels of commit {commit}; no operand in the L2 cache");
    Ok([("date", date), ("gpu", gpu), ("note", note)].map(|(name, text)| (name.to_owned(), text)).into())
}

/// Renders the proposal: where another instance is faster than the plan's choice.
fn proposal(card: &str, times: &Times) -> anyhow::Result<String> {
    let rows = times.rows();
    let mut kernels: Vec<_> = rows.iter().map(|row| row.kernel).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut text = format!(
        "# {card}: proposed changes of the plan\n\nWritten by `cargo xtask card`. Nothing is changed automatically: a person decides.\n"
    );
    for kernel in kernels {
        let of_kernel = || rows.iter().filter(|row| row.kernel == kernel);
        let worth: Vec<_> = of_kernel().filter(|row| row.us < row.unasked * (1.0 - WORTH)).collect();
        let gain = geomean(of_kernel().map(|row| row.unasked / row.us.min(row.unasked)));
        text += &format!(
            "\n## {kernel}\n\nThe plan's choice is within {:.0} % of the fastest instance on {} of {} shapes. With the fastest instance \
             everywhere the geometric mean would be {gain:.2}× as fast.\n",
            100.0 * WORTH,
            of_kernel().count() - worth.len(),
            of_kernel().count()
        );
        if worth.is_empty() {
            continue;
        }
        let mechanism = workspace::kernel_mechanism(kernel)?;
        let plan = format!("crates/nvfp4_kernels/src/{mechanism}/{kernel}/plan.rs");
        text += &format!("`choose` in `{plan}` makes the choice. Shapes on which it is slower:\n\n");
        let mut table = Table::new(1, &["shape", "the plan's choice, µs", "fastest instance", "µs", "gain"]);
        for Row { shape, unasked, fastest, us, .. } in worth {
            let gain = format!("{:.2}×", unasked / us);
            table.row([
                (*shape).to_owned(),
                format!("{unasked:.1}"),
                instance(fastest).to_owned(),
                format!("{us:.1}"),
                gain,
            ]);
        }
        text += &table.to_string();
    }
    text += "\nConstants of the time model: the table at the end of the probes' file in this folder uses the names of \
             `crates/ptx_emulator/src/timing/card.rs`.\n";
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_files_are_named_after_the_gpu() {
        assert_eq!(
            ["NVIDIA B200", "NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell (Max-Q)"].map(slug),
            ["b200", "geforce-rtx-5090", "rtx-pro-6000-blackwell-max-q"]
        );
    }

    fn verdict(passed: &[&str]) -> Verdict {
        Verdict {
            subject: "gated_sm100".into(),
            card: "NVIDIA B200".into(),
            capability: (10, 0),
            driver: "13.0".into(),
            passed: passed.iter().map(|&part| part.into()).collect(),
            failed: vec![FailedPart { part: "gated t8".into(), why: "it hung".into() }],
            seconds: 1.0,
        }
    }

    #[test]
    fn passed_instances_are_timed_on_shapes_of_their_operation() {
        let verdict = verdict(&["gated t64", "plain t8"]);
        let gated = verdict.variants("gated");
        assert_eq!(gated[..2], ["gated_sm100", "gated_sm100,per-group"]);
        assert_eq!(gated[4..], ["gated_sm100,unfused", "gated_sm100,t64"]);
        assert_eq!(verdict.variants("plain")[3..], ["gated_sm100,graph", "gated_sm100,t8"]);
        assert_eq!(verdict.failures().collect::<Vec<_>>(), ["self-test of gated_sm100, gated t8: it hung"]);
    }

    fn times(us: &[(&str, f64)]) -> Times {
        let time = |us: f64| Time { median: us, p10: us, p90: us, runs: 1 };
        let us = us.iter().map(|&(name, us)| (name.to_owned(), time(us))).collect();
        let missing = [("gated_sm100,t8".to_owned(), "group 2: 130 tokens".to_owned())].into();
        let on = OnShape { op: "gated".into(), bytes: 2_000_000, operations: 4e9, us, missing };
        let conditions = [("gpu".to_owned(), "NVIDIA B200, 1".to_owned())].into();
        Times { conditions, rounds: 6, runs: 20, shapes: [("moe-1".to_owned(), on)].into(), layers_us: BTreeMap::new() }
    }

    #[test]
    fn faster_instance_is_proposed_but_no_schedule() {
        let of = |t96| {
            [("gated_sm100", 20.0), ("gated_sm100,t64", 20.2), ("gated_sm100,t96", t96), ("gated_sm100,graph", 5.0)]
        };
        let text = proposal("NVIDIA B200", &times(&of(16.0))).unwrap();
        assert!(text.contains("| moe-1 |") && text.contains(" t96 | 16.0 | 1.25× |"), "{text}");
        assert!(
            text.contains("on 0 of 1 shapes") && text.contains("crates/nvfp4_kernels/src/tcgen05/gated_sm100/plan.rs"),
            "{text}"
        );
        let text = proposal("NVIDIA B200", &times(&of(19.9))).unwrap();
        assert!(text.contains("on 1 of 1 shapes") && !text.contains("| moe-1 |"), "{text}");
    }

    #[test]
    fn report_shows_rates_and_missing_contenders() {
        let text = times(&[("gated_sm100", 20.0), ("gated_sm100,t96", 16.0)]).report();
        assert!(text.starts_with("NVIDIA B200, 1; "), "{text}");
        assert!(text.contains("| moe-1 | gated_sm100 |        20.0 |     200 | 0.10 |"), "{text}");
        assert!(text.ends_with("moe-1: gated_sm100,t8 not measured: group 2: 130 tokens\n"), "{text}");
    }

    #[test]
    fn failed_and_skipped_tests_are_kept() {
        let text = "   Compiling x\n     Running unittests\ntest a ... ok\ntest b ... FAILED\nskipped: b on a GPU: none\ntest result: ok. 3\n";
        assert_eq!(said_by_tests(text).lines().count(), 4);
    }

    #[test]
    fn shapes_and_layers_are_built_in() {
        assert!(SHAPES.iter().all(|shape| nvfp4::shape::find(shape).is_ok()));
        assert!(LAYERS.iter().all(|layer| nvfp4::moe::shape::find(layer).is_ok()));
    }
}
