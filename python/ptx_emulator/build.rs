//! Builds the libraries and the command that the wheel contains, and puts them into the Python package's `lib`.
//!
//! They are products of the surrounding workspace, which Cargo cannot name as dependencies of a library. If the variable
//! `PTX_EMULATOR_BUILT` names a folder, they are copied from there.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages of the workspace that are built.
const PACKAGES: [&str; 3] = ["emulated_driver", "emulated_runtime", "ptx_emulator"];

/// Cargo's file names, and the names in the wheel.
const FILES: [(&str, &str); 3] = [
    ("libemulated_driver.so", "libcuda.so.1"),
    ("libemulated_runtime.so", "libcudart.so.13"),
    ("ptx-emulator", "ptx-emulator"),
];

fn variable(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_else(|| panic!("Cargo sets {name}")))
}

fn main() {
    let workspace = Path::new("../..");
    for watched in
        ["crates/ptx_emulator/src", "crates/emulated_driver/src", "crates/emulated_runtime/src", "crates/gpu_arch/src"]
    {
        println!("cargo::rerun-if-changed={}", workspace.join(watched).display());
    }
    println!("cargo::rerun-if-changed=../../Cargo.lock");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=PTX_EMULATOR_BUILT");
    let to = Path::new("python/ptx_emulator/lib");
    FILES.iter().for_each(|(_, name)| println!("cargo::rerun-if-changed={}", to.join(name).display()));

    let folder = env::var_os("PTX_EMULATOR_BUILT").map_or_else(|| build(workspace), PathBuf::from);
    fs::create_dir_all(to).expect("cannot create the folder of the libraries");
    for (built, name) in FILES {
        let (from, to) = (folder.join(built), to.join(name));
        fs::copy(&from, &to).unwrap_or_else(|error| panic!("copying {} to {}: {error}", from.display(), to.display()));
    }
}

/// Builds the files, and returns their folder.
fn build(workspace: &Path) -> PathBuf {
    let (target, folder) = (variable("TARGET"), variable("OUT_DIR").join("target"));
    let mut cargo = Command::new(variable("CARGO"));
    // What belongs to the build of the module, such as clippy's wrapper of the compiler, is not for the libraries.
    for name in ["CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS"] {
        cargo.env_remove(name);
    }
    cargo.args(["build", "--release", "--config", "profile.release.strip=true", "--target"]).arg(&target);
    cargo.arg("--manifest-path").arg(workspace.join("Cargo.toml")).arg("--target-dir").arg(&folder);
    PACKAGES.iter().for_each(|package| {
        cargo.args(["--package", package]);
    });
    let status = cargo.status().expect("cannot run cargo");
    assert!(status.success(), "building the libraries failed; see the messages above");
    folder.join(&target).join("release")
}
