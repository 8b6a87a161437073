//! Checks that the header is cbindgen's output, and that a C program computes a layer with it.

use std::path::{Path, PathBuf};
use std::process::Command;

// Without this import Cargo would not build the package's library for this test.
use nvfp4_c as _;

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder of the cdylib: the folder of this test's program.
fn library_folder() -> PathBuf {
    let program = std::env::current_exe().expect("a program's path");
    program.parent().expect("target/PROFILE/deps").to_path_buf()
}

/// `NVFP4_BLESS=1` writes the header anew.
#[test]
fn header_matches_cbindgen() {
    let config = cbindgen::Config::from_file(folder().join("cbindgen.toml")).unwrap();
    let mut header = Vec::new();
    cbindgen::Builder::new().with_crate(folder()).with_config(config).generate().unwrap().write(&mut header);
    let (header, path) = (String::from_utf8(header).unwrap(), folder().join("nvfp4.h"));
    if std::env::var_os("NVFP4_BLESS").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), header, "renew it with `NVFP4_BLESS=1 cargo test -p nvfp4-c`");
}

/// Compiles the example with every warning as an error, and runs it.
#[cfg(target_os = "linux")]
#[test]
fn c_program_computes_layers_on_the_cpu() {
    let temporary = tempfile::tempdir().unwrap();
    let program = temporary.path().join("layer");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(folder())
        .arg(folder().join("example/layer.c"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(library_folder())
        .args(["-lnvfp4_c", "-lm"])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let run = Command::new(&program).env("LD_LIBRARY_PATH", library_folder()).output().unwrap();
    let [stdout, stderr] = [&run.stdout, &run.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(run.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("of the rounding bound") && stdout.contains("intermediate size 24"), "{stdout}");
}
