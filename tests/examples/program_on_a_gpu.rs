//! Runs a test program of the emulator on this machine's GPU, each time with fresh buffers:
//!
//! ```console
//! program_on_a_gpu crates/ptx_emulator/tests/reported/cutlass_1094_bug.json 22
//! ```
//!
//! Prints one line of JSON: the number of runs with right memory, the number of runs with wrong memory, and the error that
//! ended the runs (`null`: no error).

use std::path::Path;

use anyhow::{Context, Result};
use nvfp4_tests::differential::Gpu;
use ptx_emulator::program::Program;
use serde_json::json;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, times] = &arguments[..] else { anyhow::bail!("usage: program_on_a_gpu PROGRAM TIMES") };
    let program = Program::read(Path::new(path))?;
    let gpu = Gpu::open()?;
    if !gpu.runs(&program) {
        println!("{}", json!({ "skipped": format!("its .target does not run on {}", gpu.capability()) }));
        return Ok(());
    }
    let (mut right, mut wrong, mut error) = (0, 0, None);
    for _ in 0..times.parse::<u32>().context("TIMES is not a number")? {
        match gpu.run(&program) {
            Ok(buffers) => {
                let is_right = program.outcome.expect.iter().all(|(name, want)| {
                    let got = buffers[name].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
                    got.take(want.len()).eq(want.iter().copied())
                });
                *if is_right { &mut right } else { &mut wrong } += 1;
            }
            // A failed launch destroys the context.
            Err(failure) => {
                error = Some(format!("{failure:#}"));
                break;
            }
        }
    }
    let error = error.or_else(|| gpu.settle().err().map(|error| format!("{error:#}")));
    println!("{}", json!({ "right": right, "wrong memory": wrong, "error": error }));
    Ok(())
}
