//! Whole programs under `ptx-emulator run`: C on the driver API, and C with the registration calls that nvcc generates.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Compiles `tests/run/<name>.c` against one of the libraries.
fn compile(folder: &TempDir, name: &str, library: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/run/{name}.c"));
    let program = folder.path().join(name);
    let library = std::env::current_exe().unwrap().with_file_name(library);
    let compiler = Command::new("cc").arg(&source).arg(&library).arg("-o").arg(&program).output().unwrap();
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    program
}

/// Runs a program with options of `ptx-emulator run`.
fn run(options: &[&str], program: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ptx-emulator"));
    let Output { status, stdout, stderr } =
        command.arg("run").args(options).arg("--").arg(program).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

fn driver(options: &[&str], mode: &str) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    run(options, &compile(&folder, "driver", "libemulated_driver.so"), &[mode])
}

#[test]
fn driver_program_computes_and_keeps_its_exit_code() {
    for (options, card) in [(&[][..], "H200"), (&["--gpu", "b200", "--schedule", "worst", "--level", "strict"], "B200")]
    {
        let (code, out, err) = driver(options, "");
        assert_eq!((code, &*out), (0, &*format!("NVIDIA {card}\n2 4 6 8\n")), "{err}");
        assert!(err.contains("1 launches") && err.contains("  twice\n    1 times, grid 1x1x1, block 4x1x1"), "{err}");
        assert!(err.ends_with("faults: none; warnings: none\n"), "{err}");
    }
    assert_eq!(driver(&[], "seven").0, 7);
}

#[test]
fn launches_are_explored() {
    let (code, out, err) = driver(&["--explore"], "");
    assert_eq!((code, &*out), (0, "NVIDIA H200\n2 4 6 8\n"), "{err}");
    assert!(err.contains("  orders run: 1; launches explored whole: 1, up to the bound: 0, up to a fault: 0"), "{err}");
    let (code, _, err) = driver(&["--explore=5"], "past");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("fault[out-of-bounds]") && err.contains("\n  in the order order:"), "{err}");
    assert!(err.contains("launches explored whole: 0, up to the bound: 0, up to a fault: 1"), "{err}");
    let (code, _, err) = driver(&["--explore=-1"], "");
    assert!(code == 2 && err.contains("expected a number of seconds, such as 60 or 0.5"), "{err}");
}

#[test]
fn launch_times_are_predicted() {
    let (code, out, err) = driver(&["--timed", "b200"], "");
    assert_eq!((code, &*out), (0, "NVIDIA B200\n2 4 6 8\n"), "{err}");
    assert!(err.contains("    predicted ") && err.contains("by the model, not measured"), "{err}");
    let (code, _, err) = driver(&["--timed", "gb10"], "");
    assert_eq!((code, &*err), (2, "error: a program cannot see the GPU gb10; choose the visible GPU with --gpu\n"));
    let (code, _, err) = driver(&["--timed", "h200", "--constant", "speed=1"], "");
    assert!(code == 2 && err.starts_with("error: unknown constant `speed`"), "{err}");
}

#[test]
fn out_of_bounds_fault_names_the_allocation() {
    let (code, out, err) = driver(&[], "past");
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("cuStreamSynchronize(stream): CUDA_ERROR_ILLEGAL_ADDRESS"), "{out}");
    assert!(err.contains("fault[out-of-bounds]") && err.contains("byte 16 of allocation 1 of 16 bytes"), "{err}");
    assert!(err.ends_with("faults: 1 out-of-bounds; warnings: none\n"), "{err}");
}

#[test]
fn graphs_run_late_and_kernels_reach_page_locked_memory() {
    let (code, out, err) = driver(&[], "graph");
    assert_eq!((code, &*out), (0, "NVIDIA H200\n4 8 12 16\n"), "{err}");
    let (code, out, err) = driver(&[], "locked");
    assert_eq!((code, &*out), (0, "NVIDIA H200\n2 4 6 8\n"), "{err}");
}

#[test]
fn managed_memory_is_refused_by_name() {
    let (code, out, err) = driver(&[], "managed");
    assert_eq!(code, 3);
    assert!(out.contains("CUDA_ERROR_NOT_SUPPORTED"), "{out}");
    assert!(err.contains("refused: managed memory"), "{err}");
}

#[test]
fn runtime_program_registers_launches_and_computes() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "runtime", "libemulated_runtime.so");
    let (code, out, err) = run(&[], &program, &[]);
    assert_eq!((code, &*out), (0, "cudaSuccess cudaSuccess cudaSuccess\n3 6 9 12\n"), "{err}");
    assert!(err.contains("scale(unsigned int*, unsigned int)"), "{err}");

    let (code, out, err) = run(&[], &program, &["2000"]);
    let error = "cudaErrorInvalidConfiguration";
    assert_eq!((code, &*out), (0, &*format!("{error} {error} cudaSuccess\n1 2 3 4\n")), "{err}");

    // Its PTX targets only sm_90a.
    let (code, _, err) = run(&["--gpu", "b200"], &program, &[]);
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("PTX for sm_90a only") && err.contains("code=compute_100a"), "{err}");
}

#[test]
fn missing_program_is_bad_input() {
    let (code, _, err) = run(&[], Path::new("/nowhere/at/all"), &[]);
    assert_eq!(code, 2);
    assert!(err.contains("running /nowhere/at/all"), "{err}");
}
