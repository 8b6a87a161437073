//! The comparison of a GPU with the emulator, exercised without a GPU: the fake driver's launches are run by the emulator.

use std::collections::VecDeque;
use std::sync::Mutex;

use fake_cuda::Launch;
use nvfp4_tests::differential::{Buffers, Gpu, difference, emulate, programs};
use ptx_emulator::program::Program;

/// The programs that are being launched, each with what its buffers hold before. The driver knows only the entry's name.
static LAUNCHED: Mutex<VecDeque<(Program, Buffers)>> = Mutex::new(VecDeque::new());

/// Runs the program on a GPU.
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

/// Checks what the driver was given, and writes what the emulator computes where the kernel would.
fn launch_in_emulator(launch: &Launch) {
    let (program, before) = LAUNCHED.lock().unwrap().pop_front().expect("a program");
    let file = &program.launch;
    assert_eq!((launch.grid, launch.block, launch.cluster), (file.grid, file.block, file.cluster));
    assert_eq!(launch.shared_bytes, file.shared_bytes);
    let after = emulate(&program).unwrap();
    for (index, arg) in file.args.iter().enumerate() {
        let Some(name) = &arg.pointer else { continue };
        // SAFETY: this argument is a pointer into a buffer of the fake device's, which is this process's memory.
        let memory = unsafe {
            let first = launch.parameter::<*mut u8>(index).sub(arg.offset as usize);
            std::slice::from_raw_parts_mut(first, after[name].len())
        };
        assert_eq!(*memory, before[name], "`{name}` is not as it was before the launch");
        memory.copy_from_slice(&after[name]);
    }
}

/// The programs whose arguments the fake driver can make: it has no tensor maps.
fn programs_of_the_fake() -> Vec<Program> {
    let mut programs = programs();
    programs.retain(|program| program.launch.args.iter().all(|arg| arg.tensor_map.is_none()));
    programs
}

#[test]
fn every_program_reaches_the_gpu_that_its_target_names_and_comes_back() {
    let fake = fake_cuda::install();
    let mut ran = 0;
    for (major, minor) in [(9, 0), (10, 0), (10, 3), (12, 0)] {
        fake.set_device(major, minor, 132);
        fake.on_launch(launch_in_emulator);
        let gpu = Gpu::open().unwrap();
        for program in programs_of_the_fake().iter().filter(|program| gpu.runs(program)) {
            assert_eq!(difference(program, &run(&gpu, program), &emulate(program).unwrap()), None);
            ran += 1;
        }
    }
    let programs = programs_of_the_fake();
    let of =
        |target: &str| programs.iter().filter(|program| program.text.contains(&format!(".target {target}"))).count();
    let (blackwell, any) = (of("sm_100f"), of("sm_80"));
    assert!(blackwell > 0 && any > 0, "no program for Blackwell, or none for every card");
    // The others run on one card alone.
    assert_eq!(ran, programs.len() + blackwell + 3 * any, "sm_100f runs on 10.0 and 10.3, sm_80 on all four");
}

#[test]
fn a_launch_that_does_nothing_is_found_out() {
    let fake = fake_cuda::install();
    fake.set_device(9, 0, 132);
    let gpu = Gpu::open().unwrap();
    for program in programs_of_the_fake().iter().filter(|program| gpu.runs(program)) {
        let path = program.path.display();
        let found = difference(program, &run(&gpu, program), &emulate(program).unwrap());
        assert!(found.is_some_and(|text| text.starts_with("byte ")), "{path} leaves its buffers as they were");
    }
}

#[test]
fn a_program_that_the_driver_refuses_comes_with_the_compilers_words() {
    let fake = fake_cuda::install();
    fake.set_device(8, 0, 108);
    let gpu = Gpu::open().unwrap();
    let program = &programs()[0];
    assert!(!gpu.runs(program));
    let error = gpu.run(program).unwrap_err().to_string();
    assert_eq!(error, "ptxas fatal : the target is not for this device");
}
