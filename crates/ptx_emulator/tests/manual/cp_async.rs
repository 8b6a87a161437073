//! `cp.async` (PTX ISA, "Data Movement: cp.async"). Rules in the manual's words:
//!
//! - "cp-size … 4, 8 and 16"; "if src-size is less than cp-size … the remaining bytes in the destination are filled
//!   with zeros".
//! - `wait_group N`: "until only N or fewer of the most recent cp.async-groups are pending and all the prior ones
//!   complete".
//! - `cp.async.mbarrier.arrive.noinc`: the pending count of the mbarrier includes the arrive-on that it triggers.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, module, noise, poison, program, words};

const THREADS: usize = 32;

/// Each thread copies `size` bytes. Only some of them come from the source.
fn sizes(form: &str, size: usize) -> Program {
    let source = noise(1, THREADS * size / 4);
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n\
         mul.lo.u32 %r4, %r1, {size};\nadd.u32 %r5, %r2, %r4;\ncvt.u64.u32 %d3, %r4;\nadd.u64 %d4, %d2, %d3;\n\
         rem.u32 %r6, %r1, {};\n\
         cp.async.{form}.shared.global [%r5], [%d4], {size}, %r6;\ncp.async.commit_group;\ncp.async.wait_group 0;\n\
         bar.sync 0;\n{}",
        size + 1,
        super::common::copy_out(THREADS * size, THREADS)
    );
    let bytes: Vec<u8> = source.iter().flat_map(|word| word.to_le_bytes()).collect();
    let copied = |(index, &byte): (usize, &u8)| if index % size < index / size % (size + 1) { byte } else { 0 };
    let want: Vec<u8> = bytes.iter().enumerate().map(copied).collect();
    program(
        &format!("cp.async.{form}, {size} bytes"),
        module(HOPPER, ".shared .align 128 .b8 tile[512];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [THREADS, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(source.len()), "src": {"u32": source}}}),
        &[("out", words(&want))],
    )
}

/// Three groups. The oldest group is read while two may still be in flight, then the next, then the last.
fn groups() -> Program {
    let source = noise(2, 3 * THREADS);
    let mut body = String::from(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\nshl.b32 %r4, %r1, 2;\n\
         add.u32 %r5, %r2, %r4;\ncvt.u64.u32 %d3, %r4;\nadd.u64 %d4, %d2, %d3;\nadd.u64 %d5, %d1, %d3;\n",
    );
    for group in 0..3 {
        let at = group * 4 * THREADS;
        body += &format!("cp.async.ca.shared.global [%r5+{at}], [%d4+{at}], 4;\ncp.async.commit_group;\n");
    }
    for group in 0..3 {
        let at = group * 4 * THREADS;
        body += &format!("cp.async.wait_group {};\nld.shared.u32 %r6, [%r5+{at}];\n", 2 - group);
        body += &format!("st.global.u32 [%d5+{at}], %r6;\n");
    }
    program(
        "cp.async.wait_group",
        module(HOPPER, ".shared .align 128 .b8 tile[512];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [THREADS, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(source.len()), "src": {"u32": source}}}),
        &[("out", source)],
    )
}

/// Every thread's copies arrive at one mbarrier. Each thread then reads its neighbor's words.
fn arrival() -> Program {
    let source = noise(3, THREADS);
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\nshl.b32 %r4, %r1, 2;\n\
         mov.u32 %r3, bar;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [%r3], {THREADS};\nbar.sync 0;\n\
         add.u32 %r5, %r2, %r4;\ncvt.u64.u32 %d3, %r4;\nadd.u64 %d4, %d2, %d3;\nadd.u64 %d5, %d1, %d3;\n\
         cp.async.ca.shared.global [%r5], [%d4], 4;\ncp.async.mbarrier.arrive.noinc.shared.b64 [%r3];\n{}\
         add.u32 %r6, %r4, 4;\nand.b32 %r6, %r6, {};\nadd.u32 %r6, %r2, %r6;\nld.shared.u32 %r7, [%r6];\n\
         st.global.u32 [%d5], %r7;\n",
        super::common::await_phase(0, "WAIT"),
        4 * THREADS - 1
    );
    let want = (0..THREADS).map(|thread| source[(thread + 1) % THREADS]).collect();
    program(
        "cp.async.mbarrier.arrive.noinc",
        module(
            HOPPER,
            ".shared .align 128 .b8 tile[128];\n.shared .align 8 .b64 bar;",
            ".param .u64 out, .param .u64 src",
            &body,
        ),
        json!({"block": [THREADS, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(source.len()), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    vec![sizes("ca", 4), sizes("ca", 8), sizes("ca", 16), sizes("cg", 16), groups(), arrival()]
}
