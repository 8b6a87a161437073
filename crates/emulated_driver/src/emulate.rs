//! Runs a launch in the emulator and logs it.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

use ptx_emulator::{Arg, Fault, FaultKind, LaunchConfig, Report, Timeline, Warning};
use serde_json::{Value, json};

use crate::code::{
    Code, ILLEGAL_ADDRESS, ILLEGAL_INSTRUCTION, INVALID_PTX, INVALID_VALUE, LAUNCH_FAILED, LAUNCH_TIMEOUT,
    MISALIGNED_ADDRESS, NOT_SUPPORTED, TENSOR_MEMORY_LEAK,
};
use crate::state::Driver;
use crate::work::Launch;

/// Bytes through which the CTAs of a cooperative grid wait for each other: a size and a barrier.
const GRID_WORKSPACE: u64 = 8;

/// Returns the driver's code for a fault. Hazards have no code, so they become a failed launch.
fn code_of(kind: FaultKind) -> Code {
    match kind {
        FaultKind::OutOfBounds => ILLEGAL_ADDRESS,
        FaultKind::Misaligned => MISALIGNED_ADDRESS,
        FaultKind::Trap => ILLEGAL_INSTRUCTION,
        FaultKind::InstructionBudget | FaultKind::NoProgress => LAUNCH_TIMEOUT,
        FaultKind::TmemNotFreed => TENSOR_MEMORY_LEAK,
        FaultKind::BadLaunch => INVALID_VALUE,
        FaultKind::Unsupported => NOT_SUPPORTED,
        _ => LAUNCH_FAILED,
    }
}

/// Runs a kernel to its end. `follows`: nothing has run since the previous launch of the same stream.
///
/// # Errors
///
/// The code of the kernel's fault. Then the context is lost, as on a GPU.
pub fn launch(driver: &mut Driver, launch: &Launch, follows: bool) -> Result<(), Code> {
    if let Some(code) = driver.lost {
        return Err(code);
    }
    let [grid, block, cluster] = launch.size;
    driver.launches += 1;
    let mut config = LaunchConfig {
        grid,
        block,
        cluster,
        shared_bytes: launch.shared_bytes,
        schedule: driver.options.schedule,
        sums: driver.options.sums,
        overlaps: launch.overlaps && follows,
        global_races: driver.options.global_races,
        keep_going: driver.options.keep_going,
        alloc_rendezvous: driver.options.alloc_rendezvous,
        allow: driver.options.allow.clone(),
        ..LaunchConfig::linear(1, 1).at_level(driver.options.level)
    };
    driver.options.limits.iter().for_each(|limit| config.limit(*limit));
    let module = launch.code.decoded().map_err(|words| {
        eprintln!("ptx-emulator: {words}");
        INVALID_PTX
    })?;
    let args: Vec<Arg> = launch.parameters.iter().map(|bytes| Arg(bytes.clone())).collect();
    let shown = driver.memory.show_locked();
    let began = Instant::now();
    let Some(device) = driver.memory.emulator() else { return Err(NOT_SUPPORTED) };
    let workspace = launch.cooperative.then(|| device.allocate(GRID_WORKSPACE));
    if let Some(workspace) = workspace {
        device.name(workspace, "the workspace of a cooperative grid");
        config.grid_workspace = workspace.address;
    }
    let result = match &mut driver.timeline {
        Some(timeline) => {
            launch.code.listing(timeline.card().arch).into_iter().for_each(|listing| timeline.add_listing(listing));
            let end_us = |timeline: &Timeline| timeline.launches().last().map_or(0.0, |launch| launch.end_us);
            let before = end_us(timeline);
            let timed = device.time(timeline, module, &launch.name, &config, &args);
            driver.clock += ((end_us(timeline) - before) * 1e3).max(0.0) as u64;
            timed
        }
        None => device.launch(module, &launch.name, &config, &args),
    };
    let seconds = began.elapsed().as_secs_f64();
    workspace.into_iter().for_each(|workspace| device.free(workspace));
    driver.memory.fetch_locked(shown);
    let quiet = driver.options.quiet;
    if let Ok(report) = &result {
        print(report);
        let found = report.hazards.iter();
        found
            .filter(|_| !quiet)
            .for_each(|hazard| eprintln!("ptx-emulator: launch {}: {}", driver.launches, hazard.display("fault")));
    }
    write_down(driver, launch, &result, seconds);
    result.map(drop).map_err(|fault| {
        if !quiet {
            eprintln!("ptx-emulator: launch {}: {fault}", driver.launches);
        }
        let code = code_of(fault.kind);
        driver.lost = Some(code);
        driver.queue.clear();
        code
    })
}

/// Writes the kernel's output to the program's standard output.
fn print(report: &Report) {
    let mut out = std::io::stdout().lock();
    // If the output is closed, the program has chosen so.
    let _ = out.write_all(report.output.as_bytes()).and_then(|()| out.flush());
}

/// Keeps the launch's line for a call that reads it, and appends it to the log.
fn write_down(driver: &mut Driver, launch: &Launch, result: &Result<Report, Fault>, seconds: f64) {
    if driver.options.log.is_none() && driver.reports.is_none() {
        return;
    }
    let line = format!("{}\n", line(driver, launch, result, seconds));
    if let Some(path) = &driver.options.log {
        // Each line is a single write, so that the lines of several processes do not mix.
        let written = OpenOptions::new().create(true).append(true).open(path);
        let written = written.and_then(|mut file| file.write_all(line.as_bytes()));
        if let Err(error) = written {
            eprintln!("ptx-emulator: cannot write {}: {error}", path.display());
        }
    }
    if let Some(reports) = &mut driver.reports {
        reports.push_str(&line);
    }
}

/// A fault or a warning: its text and its fields.
fn described(fault: &Fault, text: &impl ToString) -> Value {
    let mut fields = json!(fault);
    fields["text"] = text.to_string().into();
    fields["remedy"] = fault.kind.remedy().into();
    fields
}

/// The launch's line of JSON.
fn line(driver: &Driver, launch: &Launch, result: &Result<Report, Fault>, seconds: f64) -> Value {
    let [grid, block, cluster] = launch.size;
    let mut line = json!({
        "launch": driver.launches,
        "kernel": launch.name,
        "grid": grid,
        "block": block,
        "cluster": cluster,
        "shared_bytes": launch.shared_bytes,
        "schedule": driver.options.schedule.to_string(),
        "seconds": seconds,
    });
    match result {
        Ok(report) => {
            let list = |hazards: &[Warning], word: &'static str| -> Vec<Value> {
                hazards.iter().map(|hazard| described(&hazard.fault, &hazard.display(word))).collect()
            };
            line["instructions"] = report.total.warp_instructions.into();
            line["loaded"] = (report.total.bytes.global_load + report.total.bulk.global_load).into();
            line["stored"] = (report.total.bytes.global_store + report.total.bulk.global_store).into();
            line["multiply_adds"] = report.total.matrix_multiply_adds.into();
            line["prediction"] = driver
                .timeline
                .as_ref()
                .and_then(|timeline| timeline.launches().last())
                .map_or(Value::Null, |time| json!(time));
            line["warnings"] = list(&report.warnings, "warning").into();
            line["faults"] = list(&report.hazards, "fault").into();
        }
        Err(fault) => {
            line["faults"] = json!([described(fault, fault)]);
        }
    }
    line
}
