//! Tests the comparison of a GPU with the emulator on a machine without a GPU: the emulator runs the launches of a fake
//! driver.

use std::collections::VecDeque;
use std::sync::Mutex;

use fake_cuda::Launch;
use nvfp4_tests::differential::{Buffers, Gpu, difference, emulate, programs};
use ptx_emulator::program::Program;

/// Programs in the order of their launches, each with its buffers before the launch. The driver knows only the entry's
/// name.
static LAUNCHED: Mutex<VecDeque<(Program, Buffers)>> = Mutex::new(VecDeque::new());

/// Runs a program on the fake GPU.
fn run(gpu: &Gpu, program: &Program) -> Buffers {
    let prepared = program.prepare().unwrap();
    let buffers = prepared.buffers.iter();
    let uploaded = buffers.map(|(name, buffer)| (name.clone(), prepared.device.download(*buffer))).collect();
    let launches = match &program.launch.overlaps {
        None => vec![(program.clone(), uploaded)],
        Some(args) => {
            let mut first = program.clone();
            (first.launch.args, first.launch.overlaps) = (args.clone(), None);
            let between = emulate(&first).unwrap();
            vec![(first, uploaded), (program.clone(), between)]
        }
    };
    *LAUNCHED.lock().unwrap() = launches.into();
    gpu.run(program).unwrap_or_else(|error| panic!("{}: {error:#}", program.path.display()))
}

/// Checks the arguments of a launch, and writes the emulator's results to the buffers.
fn launch_in_emulator(launch: &Launch) {
    let (program, before) = LAUNCHED.lock().unwrap().pop_front().expect("a program for each launch");
    let file = &program.launch;
    assert_eq!((launch.grid, launch.block, launch.cluster), (file.grid, file.block, file.cluster));
    assert_eq!(launch.shared_bytes, file.shared_bytes);
    let after = emulate(&program).unwrap();
    for (index, arg) in file.args.iter().enumerate() {
        let Some(name) = &arg.pointer else { continue };
        // SAFETY: the argument points into a buffer of the fake device, which is memory of this process. The buffer is
        // as long as `after[name]`, and nothing else accesses it during the launch.
        let memory = unsafe {
            let first = launch.parameter::<*mut u8>(index).sub(arg.offset as usize);
            std::slice::from_raw_parts_mut(first, after[name].len())
        };
        assert_eq!(*memory, before[name], "`{name}` has unexpected bytes before the launch");
        memory.copy_from_slice(&after[name]);
    }
}

/// Returns the programs that the fake driver can launch: it has no tensor maps.
fn programs_of_the_fake() -> Vec<Program> {
    let mut programs = programs();
    programs.retain(|program| program.launch.args.iter().all(|arg| arg.tensor_map.is_none()));
    programs
}

/// Returns the target that a program is compiled for.
fn target(program: &Program) -> &str {
    let line = program.text.lines().find_map(|line| line.strip_prefix(".target "));
    line.and_then(|line| line.split([',', ' ']).next()).expect("every program has a target")
}

#[test]
fn every_program_runs_on_the_gpus_of_its_target() {
    let fake = fake_cuda::install();
    let mut ran = 0;
    for (major, minor) in [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)] {
        fake.set_device(major, minor, 132);
        fake.on_launch(launch_in_emulator);
        let gpu = Gpu::open().unwrap();
        for program in programs_of_the_fake().iter().filter(|program| gpu.runs(program)) {
            assert_eq!(difference(program, &run(&gpu, program), &emulate(program).unwrap()), None);
            ran += 1;
        }
    }
    let gpus = |program: &Program| match target(program) {
        "sm_80" | "sm_90" => 5,
        "sm_100f" | "sm_120f" => 2,
        _ => 1,
    };
    let expected: Vec<usize> = programs_of_the_fake().iter().map(gpus).collect();
    assert!(expected.contains(&2) && expected.contains(&5), "expected programs for Blackwell and for every GPU");
    let all = "sm_100f and sm_120f must run on two GPUs, sm_80 and sm_90 on all five, others on one";
    assert_eq!(ran, expected.iter().sum::<usize>(), "{all}");
}

#[test]
fn launch_without_effect_is_found() {
    let fake = fake_cuda::install();
    fake.set_device(9, 0, 132);
    let gpu = Gpu::open().unwrap();
    for program in programs_of_the_fake().iter().filter(|program| gpu.runs(program)) {
        let path = program.path.display();
        let found = difference(program, &run(&gpu, program), &emulate(program).unwrap());
        assert!(found.is_some_and(|text| text.starts_with("byte ")), "{path}: unchanged buffers went unnoticed");
    }
}

#[test]
fn refused_program_reports_the_compiler_log() {
    let fake = fake_cuda::install();
    fake.set_device(8, 0, 108);
    let gpu = Gpu::open().unwrap();
    let program = &programs()[0];
    assert!(!gpu.runs(program));
    let error = gpu.run(program).unwrap_err().to_string();
    assert_eq!(error, "ptxas fatal : the target is not for this device");
}
