//! Runs the probes on emulated GPUs: without a fault, and with the clock of the time model, whose constants they then
//! measure.

#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Returns the output of the probes on a GPU of the emulator.
fn run(card: &str, settings: &[(&str, &str)]) -> String {
    let library = env::current_exe().unwrap().with_file_name("libemulated_driver.so");
    let folder = tempfile::tempdir().unwrap();
    symlink(library, folder.path().join("libcuda.so.1")).unwrap();
    // Without a PATH, and outside of a build folder, ptxas is not found. If it were, its machine code would change the
    // times.
    let program = folder.path().join("probes");
    let mut command = Command::new(&program);
    command.current_dir(folder.path()).env("PATH", "").env_remove("CUDA_PATH").env_remove("CARGO_TARGET_DIR");
    command.arg("--quick").env("LD_LIBRARY_PATH", folder.path()).env("PTX_EMULATOR_GPU", card);
    settings.iter().for_each(|(name, value)| _ = command.env(format!("PTX_EMULATOR_{name}"), value));
    let child = {
        // A process that another test starts during the copy inherits the open file, and Linux refuses to execute a file
        // that is open for writing.
        static START: Mutex<()> = Mutex::new(());
        let _one_at_a_time = START.lock();
        fs::copy(env!("CARGO_BIN_EXE_probes"), &program).unwrap();
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let output = child.wait_with_output().unwrap();
    let [out, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success() && errors.is_empty(), "{card}: {errors}\n{out}");
    out
}

#[test]
fn probes_run_without_a_fault() {
    for (card, skipped) in [
        ("h200", &["tcgen05", "block_scale"][..]),
        ("b200", &["wgmma", "block_scale"]),
        ("rtx-5090", &["wgmma", "tcgen05"]),
    ] {
        let out = run(card, &[("LEVEL", "strict")]);
        let named: Vec<&str> =
            out.lines().filter_map(|line| line.strip_prefix("# skipped: `")?.split('`').next()).collect();
        assert_eq!(named, skipped, "{card}");
    }
}

/// Returns the table's rows: the model's value and the measured value.
fn table(out: &str) -> BTreeMap<String, [f64; 2]> {
    let rows = out.lines().filter(|line| line.starts_with("| "));
    let cells = rows.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    cells.filter_map(|cells| Some((cells[1].to_owned(), [cells[3].parse().ok()?, cells[4].parse().ok()?]))).collect()
}

/// Tolerances of measured constants: relative to the constant, and in cycles for the probe's own instructions, at one
/// cycle per PTX instruction.
const TOLERANCES: &[(&str, f64, f64)] = &[
    ("clock", 0.001, 0.0),
    ("launch-gap", 0.05, 0.0),
    ("dependent-start", 0.05, 0.0),
    ("grid-end", 0.05, 0.0),
    ("cta-start", 0.0, 60.0),
    ("shared-latency", 0.0, 6.0),
    ("l1-latency", 0.0, 6.0),
    ("shared-bytes", 0.02, 0.0),
    ("l2-latency", 0.03, 0.0),
    ("dram-latency", 0.03, 0.0),
    ("intake", 0.08, 0.0),
    ("mbarrier-wake", 0.0, 15.0),
    ("barrier-latency", 0.0, 12.0),
    ("tensor-rate", 0.02, 0.0),
    ("mma-latency", 0.0, 2.0),
    ("cluster-latency", 0.0, 15.0),
    ("cluster-barrier", 0.0, 15.0),
    ("cluster-fence", 0.0, 15.0),
];

/// Tolerances of constants that only some GPUs have. A group of `wgmma` also makes the descriptors of its products.
const OF_HOPPER: &[(&str, f64, f64)] = &[("matrix-latency", 0.0, 35.0), ("matrix-floor", 0.0, 3.0)];
const OF_BLACKWELL: &[(&str, f64, f64)] = &[
    ("matrix-latency", 0.0, 15.0),
    ("pair-latency", 0.0, 15.0),
    ("tcgen05-cp", 0.03, 0.0),
    ("tmem-bytes", 0.01, 0.0),
    ("tmem-latency", 0.0, 15.0),
];

#[test]
fn probes_measure_the_models_constants_with_its_clock() {
    // On one GPU some constants are changed, which shows that they are measured and not copied.
    let others = [
        // The few lines of a quick run are not on both dies alike.
        ("far-latency", 0.0),
        ("l2-latency", 400.0),
        ("mbarrier-wake", 200.0),
        ("tcgen05-cp", 32.0),
        ("matrix-latency", 300.0),
        ("l1-latency", 60.0),
        ("tensor-rate", 1024.0),
        ("tmem-latency", 90.0),
        ("cluster-latency", 300.0),
        ("cluster-fence", 400.0),
    ];
    for (card, own, others) in [("h200", OF_HOPPER, &[][..]), ("b200", OF_BLACKWELL, &others)] {
        let changed: String = others.iter().map(|(name, value)| format!(",{name}={value}")).collect();
        let out = run(card, &[("TIMED", card), ("CONSTANTS", &format!("l2-capacity=24{changed}"))]);
        let table = table(&out);
        for (name, share, cycles) in TOLERANCES.iter().chain(own) {
            let [model, measured] = table[*name];
            let constant = others.iter().find(|other| other.0 == *name).map_or(model, |other| other.1);
            let error = (measured - constant).abs();
            assert!(error <= share * constant + cycles, "{card}: {name} is {constant}, measured {measured}\n{out}");
        }
    }
}
