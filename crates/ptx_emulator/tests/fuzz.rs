//! Arbitrary text never makes the parser or the launch-file reader panic.

use proptest::prelude::*;
use ptx_emulator::Module;
use ptx_emulator::launch_json::LaunchFile;

const PROGRAM: &str = include_str!("pass/nvfp4_scales_missing.ptx");

/// Pieces of PTX, so that random sequences get past the lexer.
const PIECES: [&str; 40] = [
    ".version 8.7\n",
    ".target sm_90a\n",
    ".entry",
    ".func",
    " k",
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    ";",
    ",",
    "@%p1 ",
    "!",
    ".reg ",
    ".b32 ",
    ".pred ",
    "%r<4>",
    "%r1",
    "%p1",
    "add.s32 ",
    "mov.b64 ",
    "ld.global.v4.f32 ",
    "bra ",
    "L:",
    "1",
    "-",
    "0x",
    "0f3F800000",
    "1e9",
    "<<",
    "|",
    "_",
    "bar.sync ",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 ",
    "cp.async.bulk ",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 ",
    ".shared .align 8 .b8 x[4]",
    "cvt.rn.f16.f32 ",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn parsing_never_panics_on_any_text(text in "\\PC*") {
        let _ = Module::parse(&text);
    }

    #[test]
    fn parsing_never_panics_on_pieces_of_ptx(pieces in prop::collection::vec(0..PIECES.len(), 0..60)) {
        let body: String = pieces.iter().map(|&n| PIECES[n]).collect();
        let _ = Module::parse(&body);
        let _ = Module::parse(&format!(
            ".version 8.7\n.target sm_90a\n.entry k(.param .u64 p) {{ .reg .b32 %r<4>; .reg .pred %p<2>; {body} }}"
        ));
    }

    #[test]
    fn parsing_never_panics_on_a_damaged_program(at in 0..PROGRAM.len(), len in 0usize..40, with in "\\PC{0,8}") {
        if let (Some(head), Some(tail)) = (PROGRAM.get(..at), PROGRAM.get((at + len).min(PROGRAM.len())..)) {
            let _ = Module::parse(&format!("{head}{with}{tail}"));
        }
    }

    #[test]
    fn launch_files_never_panic(text in "\\PC*", key in "[a-z_]{1,12}", value in "[-0-9a-z\"\\[\\]{}:,]{0,24}") {
        let _ = LaunchFile::parse(&text);
        if let Ok(file) = LaunchFile::parse(&format!("{{\"ptx\": \"k.ptx\", \"{key}\": {value}}}")) {
            let _ = file.prepare_with(PROGRAM, "".as_ref());
        }
    }
}
