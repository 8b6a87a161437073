//! `clusterlaunchcontrol` and `setmaxnreg` (PTX ISA, "Parallel Synchronization: clusterlaunchcontrol", "setmaxnreg"). A
//! canceled CTA is not launched, and its index goes to a running CTA. Every index is processed once, by whichever CTA.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{BLACKWELL, HOPPER, INIT_BARRIER, module, poison, program};

/// Each CTA counts its own index and the indices that it takes over.
fn canceled(ctas: usize) -> Program {
    let body = format!(
        "ld.param.u64 %d1, [out];\nmov.u32 %r2, response;\n{INIT_BARRIER}mov.u32 %r4, %ctaid.x;\nmov.u32 %r5, 0;\n\
         @!%p1 bra DONE;\nNEXT:\nmul.wide.u32 %d2, %r4, 4;\nadd.u64 %d3, %d1, %d2;\nred.global.add.u32 [%d3], 1;\n\
         mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16;\nfence.proxy.async.shared::cta;\n\
         clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r2], [%r3];\n\
         WAIT:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r5;\n@!%p2 bra WAIT;\nxor.b32 %r5, %r5, 1;\n\
         {{\n.reg .b128 %q;\nld.shared.b128 %q, [%r2];\n\
         clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q;\n\
         @%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r4, %r6, %r7, %r8}}, %q;\n}}\n\
         @%p3 bra NEXT;\nDONE:\n"
    );
    program(
        &format!("clusterlaunchcontrol over {ctas} CTAs"),
        module(BLACKWELL, ".shared .align 16 .b8 response[16];\n.shared .align 8 .b64 bar;", ".param .u64 out", &body),
        json!({"grid": [ctas, 1, 1], "block": [32, 1, 1], "args": [{"pointer": "out"}],
               "buffers": {"out": {"bytes": 4 * ctas, "fill": "zero"}}}),
        &[("out", vec![1; ctas])],
    )
}

/// `setmaxnreg`: 128 registers per thread at launch (65,536 for two CTAs of 256 threads). Half of the warps give 32
/// registers per thread to the others. The results do not change.
fn registers() -> Program {
    let body = "ld.param.u64 %d1, [out];\nmul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\nsetp.lt.u32 %p1, %r1, 128;\n\
                @%p1 bra LESS;\nsetmaxnreg.inc.sync.aligned.u32 160;\nadd.u32 %r2, %r1, 1000;\nbra DONE;\nLESS:\n\
                setmaxnreg.dec.sync.aligned.u32 96;\nadd.u32 %r2, %r1, 2000;\nDONE:\nst.global.u32 [%d3], %r2;\n";
    let text = module(HOPPER, "", ".param .u64 out", body).replacen("\n{", "\n.maxntid 256\n.minnctapersm 2\n{", 1);
    program(
        "setmaxnreg",
        text,
        json!({"block": [256, 1, 1], "args": [{"pointer": "out"}], "buffers": {"out": poison(256)}}),
        &[("out", (0..256).map(|thread| thread + if thread < 128 { 2000 } else { 1000 }).collect())],
    )
}

pub fn programs() -> Vec<Program> {
    vec![canceled(1), canceled(7), canceled(40), registers()]
}
