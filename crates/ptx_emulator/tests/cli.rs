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
fn launch_saves_buffers_and_prints_a_report() {
    let (folder, output) = launch("st.global.u32 [%d3], %r1;", 4);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let saved = std::fs::read(folder.path().join("c.bin")).unwrap();
    assert_eq!(saved, [0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["total"]["bytes"]["global_store"], 16);
    assert_eq!(report["total"]["by_class"]["memory"], 8, "a load of the parameter and a store in each of 4 threads");
}

#[test]
fn fault_gives_exit_code_1() {
    let (_folder, output) = launch("st.global.u32 [%d3], %r1;", 5);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let fault: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&fault["kind"], &fault["lane"]), (&"out-of-bounds".into(), &4.into()));
}

#[test]
fn bad_input_gives_exit_code_2_and_its_line() {
    let (_folder, output) = launch("st.global.u32 %d3, %r1;", 4);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 10"), "{output:?}");
}

#[test]
fn unsupported_feature_gives_exit_code_4() {
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

/// Kernel with a parameter for every form of argument. It stores each argument.
const ARGUMENTS: &str = r#"
.version 8.7
.target sm_90a
.address_size 64
.shared .align 128 .b8 tile[64];
.shared .align 8 .b64 bar;
.visible .entry k(.param .u64 out, .param .u32 a, .param .u64 b, .param .f32 c, .param .f64 d, .param .align 4 .b8 e[4],
    .param .align 64 .b8 s[144])
{
    .reg .pred %p<2>; .reg .b32 %r<20>; .reg .b64 %d<20>;
    ld.param.u64 %d1, [out];
    ld.param.u32 %r1, [a];
    ld.param.u64 %d2, [b];
    ld.param.b32 %r2, [c];
    ld.param.b64 %d3, [d];
    ld.param.b32 %r3, [e];
    ld.param.u64 %d4, [s+128];
    ld.param.b64 %d5, [s+136];
    ld.global.u32 %r4, [%d4];
    st.global.u32 [%d1], %r1;
    st.global.u32 [%d1+4], %r2;
    st.global.u64 [%d1+8], %d2;
    st.global.u64 [%d1+16], %d3;
    st.global.u32 [%d1+24], %r3;
    st.global.u32 [%d1+28], %r4;
    st.global.u64 [%d1+32], %d5;
    mov.u32 %r5, tile;
    mov.u32 %r6, bar;
    mov.u32 %r7, 0;
    mov.b64 %d6, s;
    cvta.param.u64 %d7, %d6;
    mbarrier.init.shared.b64 [%r6], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r6], 16;
    cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%d7, {%r7}], [%r6];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r6], 0;
    @!%p1 bra WAIT;
    ld.shared.u64 %d8, [%r5+8];
    st.global.u64 [%d1+40], %d8;
    ret;
}
"#;

#[test]
fn every_form_of_argument_reaches_the_kernel() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("k.ptx"), ARGUMENTS).unwrap();
    std::fs::write(folder.path().join("data.bin"), (0..32).collect::<Vec<u8>>()).unwrap();
    std::fs::write(folder.path().join("params.bin"), [7; 144]).unwrap();
    let file = r#"{"ptx": "k.ptx", "buffers": {"c": {"bytes": 48, "fill": "poison"}, "data": {"file": "data.bin"}},
        "args": [{"pointer": "c"}, {"i32": -5}, {"i64": -2}, {"f32": 1.5}, {"f64": -0.5}, {"hex": "00ff10aa"},
                 {"file": "params.bin", "patches": [
                     {"at": 0, "tensor_map": {"buffer": "data", "offset": 16, "type": "u8", "dims": [16], "strides": [],
                                              "box": [16]}},
                     {"at": 128, "pointer": "data", "offset": 4}]}],
        "save": {"c": "c.bin"}, "schedule": "worst"}"#;
    std::fs::write(folder.path().join("launch.json"), file).unwrap();
    let output = run(folder.path(), &["launch", "launch.json"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let want = [
        (-5i32).to_le_bytes().to_vec(),
        1.5f32.to_le_bytes().to_vec(),
        (-2i64).to_le_bytes().to_vec(),
        (-0.5f64).to_le_bytes().to_vec(),
        vec![0, 0xff, 0x10, 0xaa],
        vec![4, 5, 6, 7],
        vec![7; 8],
        (24..32).collect(),
    ];
    assert_eq!(std::fs::read(folder.path().join("c.bin")).unwrap(), want.concat());
}

#[test]
fn limits_end_a_loop_that_does_not_repeat_itself() {
    let (folder, _) = launch("st.global.u32 [%d3], %r1;", 1);
    let text = std::fs::read_to_string(folder.path().join("k.ptx")).unwrap();
    let looped = text.replace("ret;", "L:\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%d3], %r1;\nbra L;\nret;");
    std::fs::write(folder.path().join("k.ptx"), looped).unwrap();
    for (limit, words) in [("1000", "has executed 1000 instructions"), ("0.05s", "has run for 0.05 s")] {
        let output = run(folder.path(), &["launch", "launch.json", "--limit", limit]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code() == Some(1) && text.contains("fault[instruction-budget]"), "{text}");
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(run(folder.path(), &["launch", "launch.json", "--limit", "soon"]).status.code(), Some(2));
}
