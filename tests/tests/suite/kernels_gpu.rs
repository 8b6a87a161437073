//! Runs the tests of `kernels-gpu` for those parts of a kernel that also run on the host. That crate targets a GPU and
//! is not a member of this workspace, so `cargo test` would not run them otherwise.

use std::path::Path;
use std::process::Command;

use nvfp4_tests::say;

/// Returns the number of passed tests per test program.
fn passed(output: &str) -> impl Iterator<Item = usize> {
    output.lines().filter_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse().ok())
}

#[test]
fn tests_of_kernels_gpu_pass() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-gpu/Cargo.toml");
    // The workspace's folder has compiled dependencies.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("Cargo's folder `tmp` is in the target folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--all-features", "--manifest-path"]).arg(manifest).arg("--target-dir").arg(target);
    let output = cargo.output().expect("cargo runs");
    let [out, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{errors}{out}");
    let passed: usize = passed(&out).sum();
    assert!(passed > 0, "kernels-gpu has no tests: {out}");
    say(&format!("kernels-gpu: {passed} tests passed"));
}

#[test]
fn passed_tests_are_summed_over_all_programs() {
    let output =
        "running 2 tests\ntest result: ok. 2 passed; 0 failed; 1 ignored\n\ntest result: ok. 11 passed; 0 failed\n";
    assert_eq!(passed(output).collect::<Vec<_>>(), [2, 11]);
}
