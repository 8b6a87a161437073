//! Applies the additions of CONTRIBUTING.md to a copy of the repository, builds the copy and runs the added code.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Copies the sources below a folder. `unless_same`: copies only files that differ, so that cargo rebuilds only what
/// depends on them.
fn copy(from: &Path, to: &Path, unless_same: bool) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (source, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        let target = to.join(&name);
        if source.is_dir() {
            let name = name.to_string_lossy();
            let is_source = name != "target" && (!name.starts_with('.') || name == ".cargo");
            if is_source {
                copy(&source, &target, unless_same);
            }
        } else if !unless_same || fs::read(&source).unwrap() != fs::read(&target).unwrap_or_default() {
            fs::copy(&source, &target).unwrap();
        }
    }
}

/// Folder with the kernels' PTX and a stamp per file. With both, LLVM runs only for kernels that the additions change.
const KERNELS: &str = "kernels-gpu/target";

fn copy_ptx(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let source = entry.unwrap().path();
        if source.extension().is_some_and(|extension| extension == "ptx" || extension == "stamp") {
            fs::copy(&source, to.join(source.file_name().unwrap())).unwrap();
        }
    }
}

/// Runs cargo in a folder as from a shell: without the variables that the outer cargo sets.
fn cargo(folder: &Path, arguments: &[impl AsRef<OsStr>]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARGO_") && name != "CARGO_HOME") {
        cargo.env_remove(name);
    }
    // Few of the built programs are run, and an unoptimized build takes half the time.
    let packages = ["nvfp4", "nvfp4-core", "nvfp4-checkpoint", "nvfp4-kernels", "ptx_emulator"];
    let packages = packages.map(|package| format!("profile.dev.package.{package}.opt-level=0"));
    let quick = ["profile.dev.opt-level=0", "profile.dev.debug=0", "build.incremental=false"].map(String::from);
    let quick = quick.into_iter().chain(packages).flat_map(|value| ["--config".to_owned(), value]);
    let output = cargo.current_dir(folder).args(quick).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    out.into_owned()
}

#[test]
fn additions_of_the_page_build_and_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let made = tempfile::tempdir().unwrap();
    copy(root, made.path(), false);
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    assert!(xtask.args(["additions", "--into"]).arg(made.path()).status().unwrap().success());
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("additions");
    copy(made.path(), &built, true);
    copy_ptx(&root.join(KERNELS), &built.join(KERNELS));
    // The copy has its own target folder: cargo cannot tell a workspace from its copy, and would mix up the artifacts
    // of both.

    // cargo builds a package's programs for its integration tests. A second command would build the library
    // again, with other features.
    let tests = ["rows_of_ragged_groups_are_summed", "every_compiled_kernel_has_a_row"];
    let packages = ["--package=nvfp4", "--package=nvfp4-kernels", "--package=xtask", "--features=nvfp4/cli"];
    let targets = ["--lib", "--test=no_driver", "--test=additions", "--"];
    let kernel = cargo(&built, &[&["test"], &packages[..], &targets, &tests].concat());
    for test in tests {
        assert!(kernel.lines().any(|line| line.contains(test) && line.ends_with("... ok")), "{kernel}");
    }
    let program = |name: &str, argument: &str| {
        let output = Command::new(built.join("target/debug").join(name)).arg(argument).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(program("nvfp4", "formats").lines().count(), 1);
    assert_eq!(Path::new(program("xtask", "hello").trim()), built);
}
