//! The command's exit codes and output.

use std::path::Path;
use std::process::{Command, Output};

fn run(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ptx-emulator"));
    command.current_dir(folder).args(args).output().unwrap()
}

fn launch(ptx: &str, threads: u32) -> (tempfile::TempDir, Output) {
    let folder = tempfile::tempdir().unwrap();
    let kernel = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n.reg .b32 %r<3>; .reg .b64 %d<4>;\n\
         ld.param.u64 %d1, [p];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\n{ptx}\nret;\n}}\n"
    );
    std::fs::write(folder.path().join("k.ptx"), kernel).unwrap();
    let file = format!(
        r#"{{"ptx": "k.ptx", "block": [{threads}, 1, 1], "buffers": {{"c": {{"bytes": 16, "fill": "poison"}}}},
            "args": [{{"pointer": "c"}}], "save": {{"c": "c.bin"}}}}"#
    );
    std::fs::write(folder.path().join("launch.json"), file).unwrap();
    let output = run(folder.path(), &["launch", "launch.json", "--json"]);
    (folder, output)
}

#[test]
fn a_launch_saves_its_buffers_and_prints_its_report() {
    let (folder, output) = launch("st.global.u32 [%d3], %r1;", 4);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let saved = std::fs::read(folder.path().join("c.bin")).unwrap();
    assert_eq!(saved, [0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["total"]["bytes"]["global_store"], 16);
    assert_eq!(report["total"]["by_class"]["memory"], 8, "a load of the parameter and a store in each of 4 threads");
}

#[test]
fn a_fault_is_exit_code_1() {
    let (_folder, output) = launch("st.global.u32 [%d3], %r1;", 5);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let fault: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&fault["kind"], &fault["lane"]), (&"out-of-bounds".into(), &4.into()));
}

#[test]
fn bad_input_is_exit_code_2_with_its_line() {
    let (_folder, output) = launch("st.global.u32 %d3, %r1;", 4);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 10"), "{output:?}");
}

#[test]
fn what_is_not_supported_is_exit_code_4() {
    let (folder, output) = launch("multimem.ld_reduce.global.add.u32 %r2, [%d3];", 4);
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert_eq!(run(folder.path(), &["check", "k.ptx"]).status.code(), Some(4));
}

#[test]
fn coverage_lists_every_opcode() {
    let output = run(Path::new("."), &["coverage"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, ptx_emulator::coverage());
}
