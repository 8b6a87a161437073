//! `nvfp4 doctor`: says what is wrong with a model, what each engine makes of it, and what to do.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::TypedValueParser;
use nvfp4::checkpoint::{Effect, Engine, Examination, Finding};
use nvfp4::printable;
use serde_json::{Value, json};

use super::{exit, failure, parse};

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Examine a model before it is served: faults, what each engine makes of them, and remedies
#[derive(clap::Args)]
#[command(after_help = "\
Runs all checks of `nvfp4 inspect`, reads all NVFP4 weights once, and looks for the files that a server needs. Facts about \
engines come from a table with the versions and sources that were read; --json prints them.

The exit code is 1 if a requested engine refuses the model or computes something else.

Examples:
  nvfp4 doctor model-nvfp4/
  nvfp4 doctor model-nvfp4/ --backend vllm --json")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "MODEL", value_hint = clap::ValueHint::AnyPath)]
    path: PathBuf,
    /// Engine that will serve the model; can be repeated. By default nvfp4 and vllm.
    #[arg(long, value_name = "ENGINE", value_parser = engines())]
    backend: Vec<Engine>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn engines() -> impl TypedValueParser<Value = Engine> {
    parse::named(&Engine::ALL, |engine| engine.name())
}

/// Examines the model and prints findings, verdicts and remedies.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = doctor(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn doctor(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let examination = Examination::of(&args.path)?;
    let engines = match &args.backend[..] {
        [] => &[Engine::Nvfp4, Engine::Vllm][..],
        engines => engines,
    };
    if args.json {
        writeln!(out, "{}", to_json(args, &examination, engines))?;
    } else {
        print(&examination, engines, out)?;
    }
    let fails = |engine: &Engine| examination.verdict(*engine).is_some_and(|effect| effect > Effect::Note);
    Ok(if engines.iter().any(fails) { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
}

/// Word for what an engine makes of a model.
fn verdict(effect: Option<Effect>) -> &'static str {
    match effect {
        None | Some(Effect::Note) => "serves it",
        Some(Effect::Refused) => "refuses it, or a part of it",
        Some(Effect::Wrong) => "serves it with wrong results",
    }
}

/// Findings that concern one of the engines, or are faults.
fn concerning<'e>(examination: &'e Examination, engines: &[Engine]) -> Vec<&'e Finding> {
    let concerns = |finding: &&Finding| {
        let has_rules = Engine::ALL.iter().any(|engine| finding.rules(*engine).next().is_some());
        finding.is_fault || !has_rules || engines.iter().any(|engine| finding.effect(*engine).is_some())
    };
    examination.findings.iter().filter(concerns).collect()
}

fn print(examination: &Examination, engines: &[Engine], out: &mut impl Write) -> anyhow::Result<()> {
    let findings = concerning(examination, engines);
    for finding in &findings {
        let kind = if finding.is_fault { "fault" } else { "finding" };
        writeln!(out, "{kind} [{}]: {}", finding.code, printable(&finding.message))?;
        for engine in engines {
            for rule in finding.rules(*engine) {
                let (name, versions, effect) = (engine.name(), rule.versions, rule.effect.name());
                writeln!(out, "  {name} {versions}: {effect}; {}", rule.remedy)?;
            }
        }
    }
    if !findings.is_empty() {
        writeln!(out)?;
    }
    writeln!(out, "NVFP4 weights: {}, findings: {}", examination.weights, findings.len())?;
    for engine in engines {
        writeln!(out, "{}: {}", engine.name(), verdict(examination.verdict(*engine)))?;
    }
    Ok(())
}

fn to_json(args: &Args, examination: &Examination, engines: &[Engine]) -> Value {
    let finding = |finding: &&Finding| {
        let rules = engines.iter().flat_map(|engine| finding.rules(*engine)).map(|rule| {
            json!({"engine": rule.engine.name(), "versions": rule.versions, "effect": rule.effect.name(),
                "remedy": rule.remedy, "source": rule.source})
        });
        json!({"code": finding.code, "fault": finding.is_fault, "message": finding.message,
            "engines": rules.collect::<Vec<_>>()})
    };
    let verdicts = engines.iter().map(|engine| {
        let effect = examination.verdict(*engine);
        json!({"engine": engine.name(), "effect": effect.map(Effect::name), "verdict": verdict(effect)})
    });
    json!({
        "schema_version": SCHEMA,
        "path": args.path.display().to_string(),
        "weights": examination.weights,
        "findings": concerning(examination, engines).iter().map(finding).collect::<Vec<_>>(),
        "verdicts": verdicts.collect::<Vec<_>>(),
    })
}
