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

/// Names of the workspace's packages.
fn packages(root: &Path) -> Vec<String> {
    let metadata = ["metadata", "--no-deps", "--format-version=1", "--offline"];
    let output = Command::new(env!("CARGO")).args(metadata).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages.map(|package| package["name"].as_str().unwrap().to_owned()).collect()
}

/// Links the compiled dependencies of a target folder into another one. Both folders can share the files, because cargo
/// does not write a compiled dependency again. The workspace's own packages are left out.
fn link_dependencies(from: &Path, to: &Path, own: &[String]) {
    let is_own = |file: &str| {
        let name = file.split('.').next().unwrap();
        let name = name.rsplit_once('-').map_or(name, |(name, _)| name).replace('-', "_");
        own.iter().map(|own| own.replace('-', "_")).any(|own| name == own || name == format!("lib{own}"))
    };
    for part in ["build", "deps", ".fingerprint"] {
        for entry in fs::read_dir(from.join(part)).unwrap().map(Result::unwrap) {
            let name = entry.file_name();
            let is_test = entry.path().extension().is_none() && part == "deps";
            if !is_test && !is_own(&name.to_string_lossy()) {
                link(&entry.path(), &to.join(part).join(name));
            }
        }
    }
}

/// Links a file, or all files below a folder.
fn link(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::read_dir(from).unwrap().for_each(|entry| {
            let entry = entry.unwrap();
            link(&entry.path(), &to.join(entry.file_name()));
        });
    } else if !to.exists() {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::hard_link(from, to).unwrap();
    }
}

/// Runs cargo in a folder as from a shell: without the variables that the outer cargo sets. `own` are the packages of
/// the workspace in the folder.
fn cargo(folder: &Path, own: &[String], arguments: &[impl AsRef<OsStr>]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARGO_") && name != "CARGO_HOME") {
        cargo.env_remove(name);
    }
    // Few of the built programs are run, and an unoptimized build takes half the time. Dependencies keep their profile,
    // so that cargo uses the linked ones.
    let of = |name: &String| ["opt-level=0", "debug=0"].map(|value| format!("profile.dev.package.{name}.{value}"));
    let quick = own.iter().flat_map(of).chain(["build.incremental=false".to_owned()]);
    let quick = quick.flat_map(|value| ["--config".to_owned(), value]);
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
    let own = packages(root);
    let compiled = Path::new(env!("CARGO_BIN_EXE_xtask")).parent().unwrap();
    link_dependencies(compiled, &built.join("target/debug"), &own);

    // cargo builds a package's programs for its integration tests. A second command would build the library
    // again, with other features.
    let tests = ["rows_of_ragged_groups_are_summed", "every_compiled_kernel_has_a_row"];
    let selected = ["--package=nvfp4", "--package=nvfp4-kernels", "--package=xtask", "--features=nvfp4/cli"];
    let targets = ["--lib", "--test=no_driver", "--test=additions", "--"];
    let kernel = cargo(&built, &own, &[&["test"], &selected[..], &targets, &tests].concat());
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
