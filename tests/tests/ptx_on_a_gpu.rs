//! Runs the emulator's test programs on this machine's GPU and compares the bits with the emulator.

#[path = "../../crates/ptx_emulator/tests/manual/mod.rs"]
mod manual;

use cuda_driver::Unavailable;
use nvfp4_tests::differential::{Gpu, agreement, difference, emulate, programs};
use nvfp4_tests::skip;

#[test]
fn gpu_and_emulator_agree_bit_for_bit() {
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) if error.is::<Unavailable>() => return skip("a GPU", error),
        Err(error) => panic!("{error:#}"),
    };
    let (there, elsewhere): (Vec<_>, Vec<_>) =
        programs().into_iter().chain(manual::programs()).partition(|program| gpu.runs(program));
    for program in &elsewhere {
        skip(&program.name(), format!("its .target does not run on {}", gpu.capability()));
    }
    let mut wrong = Vec::new();
    let mut ran_before = Vec::new();
    for program in &there {
        let name = program.name();
        let emulated = emulate(program).unwrap_or_else(|fault| panic!("{name} in the emulator: {fault:#}"));
        // The first failed launch ends the test, because it destroys the GPU's context.
        let ran = gpu.run(program).unwrap_or_else(|error| {
            panic!("on the GPU, {name} failed (or, with a late error, one of {ran_before:?}): {error:#}")
        });
        match difference(program, &ran, &emulated) {
            None => eprintln!("{}", agreement(program, &ran)),
            Some(text) => wrong.push(format!("{name}: {text}")),
        }
        ran_before.push(name);
    }
    gpu.settle().unwrap_or_else(|error| panic!("on the GPU, one of {ran_before:?} failed: {error:#}"));
    eprintln!("{} programs ran on {}, {} differ", there.len(), gpu.capability(), wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}
