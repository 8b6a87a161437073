//! `tcgen05` with `.cta_group::2` (PTX ISA, "CTA pair", "tcgen05.mma: data path layouts", "tcgen05.commit"): one thread
//! of the even CTA issues work for both CTAs.
//!
//! - For M = 256, each CTA has 128 rows of A and D. For M = 128, each has 64 rows, and its upper 64 lanes hold the
//!   upper half of N.
//! - Each CTA has half of the rows of B. A row of D is the product with both halves.
//! - Scale factors of A belong to the CTA's own rows. Scale factors of B belong to all columns.
//! - `tcgen05.commit` with `.multicast::cluster` arrives at the barrier in each CTA of the mask.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, INIT_BARRIER, SYNCHRONISE, await_phase, copy_in, core_matrix, descriptor, module, poison, program,
    store_columns, with_tensor_memory, words,
};
use super::tcgen05_mma::{HALVES, Kind, NVFP4, Operands, SCALES};

const ROW: usize = 32;
const BOTH_CTAS: &str = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";

fn product(kind: Kind, m: usize, n: usize) -> Program {
    let operands = Operands::new(kind, m, n, 141);
    // Shared memory of each CTA: its rows of A₀ A₁ B₀ B₁, the scale factors of its rows of A, and the scale factors of all of B.
    let (rows_a, rows_b) = (m / 2, n / 2);
    let mut halves: [Vec<u8>; 2] = [Vec::new(), Vec::new()];
    for (cta, bytes) in halves.iter_mut().enumerate() {
        for (side, rows) in [(0, rows_a), (1, rows_b)] {
            for slice in 0..2 {
                let start = operands.matrix(side, slice) + core_matrix(cta * rows, 0);
                bytes.extend(&operands.bytes[start..start + rows * ROW]);
            }
        }
        if kind.scale.is_some() {
            for slice in 0..2 {
                // The blocks of 128 rows of A follow each other.
                let start = 2 * (m + n) * ROW + slice * m.div_ceil(128) * 512 + cta * 512;
                bytes.extend(&operands.bytes[start..start + 512]);
            }
            for slice in 0..2 {
                let start = 2 * (m + n) * ROW + 2 * m.div_ceil(128) * 512 + slice * 512;
                bytes.extend(&operands.bytes[start..start + 512]);
            }
        }
    }
    let bytes = halves[0].len();
    let mut issue = String::new();
    if kind.scale.is_some() {
        for at in 0..4 {
            issue += &descriptor("%d12", 2 * (rows_a + rows_b) * ROW + at * 512, 128, 128);
            issue += &format!(
                "add.u32 %r38, %r30, {};\ntcgen05.cp.cta_group::2.32x128b.warpx4 [%r38], %d12;\n",
                SCALES + 4 * at
            );
        }
    }
    for slice in 0..2 {
        let scales = match kind.scale {
            None => "",
            Some(_) => {
                let [a, b] = [0, 1].map(|side| SCALES + 4 * (2 * side + slice));
                issue += &format!("add.u32 %r40, %r30, {a};\nadd.u32 %r41, %r30, {b};\n");
                "[%r40], [%r41], "
            }
        };
        issue += &descriptor("%d10", slice * rows_a * ROW, 128, 256);
        issue += &descriptor("%d11", (2 * rows_a + slice * rows_b) * ROW, 128, 256);
        issue += &format!(
            "mov.b32 %r42, {};\nsetp.ne.u32 %p3, {slice}, 0;\n\
             tcgen05.mma.cta_group::2.{} [%r30], %d10, %d11, %r42, {scales}%p3;\n",
            kind.instruction_descriptor(m, n),
            kind.name
        );
    }
    // For M = 128, a lane holds half a row of D.
    let columns = if m == 128 { n / 2 } else { n };
    let work = format!(
        "{SYNCHRONISE}{BOTH_CTAS}tcgen05.fence::after_thread_sync;\nsetp.eq.u32 %p4, %r10, 0;\nand.pred %p4, %p4, %p1;\n\
         @!%p4 bra ISSUED;\n{issue}mov.b16 %h1, 3;\n\
         tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r3], %h1;\nISSUED:\n{}\
         tcgen05.fence::after_thread_sync;\n{}{BOTH_CTAS}",
        await_phase(0, "WAIT"),
        store_columns(0, columns)
    );
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\nmov.u32 %r10, %cluster_ctarank;\n\
         mul.wide.u32 %d20, %r10, {bytes};\nadd.u64 %d2, %d2, %d20;\nmul.wide.u32 %d21, %r10, {};\n\
         add.u64 %d1, %d1, %d21;\n{INIT_BARRIER}{}{}{BOTH_CTAS}",
        4 * 128 * columns,
        copy_in(bytes, 128),
        with_tensor_memory(2, 128, &work)
    );
    let mut want = Vec::new();
    for cta in 0..2 {
        for lane in 0..128 {
            let (row, first) = if m == 128 { (lane % 64, lane / 64 * columns) } else { (lane, 0) };
            want.extend((first..first + columns).map(|column| operands.sum(cta * rows_a + row, column)));
        }
    }
    program(
        &format!("tcgen05.mma.cta_group::2.{} {m}x{n}", kind.name),
        module(
            BLACKWELL,
            ".shared .align 128 .b8 tile[16384];\n.shared .align 8 .b64 bar;\n.shared .align 4 .b32 slot;",
            ".param .u64 out, .param .u64 src",
            &body,
        ),
        json!({"grid": [2, 1, 1], "cluster": [2, 1, 1], "block": [128, 1, 1],
               "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": words(&halves.concat())}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    vec![product(HALVES, 256, 32), product(HALVES, 128, 32), product(NVFP4, 256, 32)]
}
