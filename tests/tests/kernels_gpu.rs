//! The tests of `kernels-gpu`, of those parts of a kernel that run on the host too. That crate's target is a GPU, so it is no
//! member of this workspace, and a `cargo test` here would not run them otherwise.

use std::path::Path;
use std::process::Command;

use nvfp4_tests::say;

/// The number of passed tests of each test program in a run.
fn passed(output: &str) -> impl Iterator<Item = usize> {
    output.lines().filter_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse().ok())
}

#[test]
fn the_kernels_own_tests_pass() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-gpu/Cargo.toml");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels-gpu-tests");
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
fn passed_tests_are_counted_over_all_programs() {
    let output =
        "running 2 tests\ntest result: ok. 2 passed; 0 failed; 1 ignored\n\ntest result: ok. 11 passed; 0 failed\n";
    assert_eq!(passed(output).collect::<Vec<_>>(), [2, 11]);
}
