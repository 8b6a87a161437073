//! Multicast (PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor": `.multicast::cluster`): "each bit position in the 16-bit
//! ctaMask operand corresponds to the %ctaid of the destination CTA"; "the source data is multicast to the same CTA-relative
//! offset as dstMem in the shared memory of each destination CTA. The mbarrier signal is also multicast to the same
//! CTA-relative offset as mbar."

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, INIT_BARRIER, await_phase, copy_out, module, noise, poison, program};

const CTAS: usize = 4;
const WORDS: usize = 64;
const BYTES: usize = 4 * WORDS;

/// CTA 0 sends to the CTAs of the mask, and CTA 1 sends to all CTAs. Each sends its own words to its own place. Every
/// CTA writes out both places; one of them may be untouched.
fn sent(name: &str, copy: &str, parameters: &str, mask: u32, launch: serde_json::Value, source: Vec<u32>) -> Program {
    let body = format!(
        "ld.param.u64 %d1, [out];\nmov.u32 %r2, tile;\nmov.u32 %r10, %cluster_ctarank;\n\
         mul.lo.u32 %r11, %r10, {};\ncvt.u64.u32 %d10, %r11;\nadd.u64 %d1, %d1, %d10;\n\
         shl.b32 %r4, %r1, 2;\nadd.u32 %r5, %r2, %r4;\nmov.u32 %r6, 7;\n\
         st.shared.u32 [%r5], %r6;\nst.shared.u32 [%r5+128], %r6;\nst.shared.u32 [%r5+256], %r6;\n\
         st.shared.u32 [%r5+384], %r6;\nfence.proxy.async.shared::cta;\n\
         {INIT_BARRIER}shl.b32 %r12, 1, %r10;\nand.b32 %r12, %r12, {mask};\nsetp.ne.u32 %p2, %r12, 0;\n\
         selp.u32 %r13, {}, {BYTES}, %p2;\n@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], %r13;\n\
         barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n\
         setp.eq.u32 %p3, %r10, 0;\nsetp.eq.u32 %p4, %r10, 1;\nand.pred %p3, %p3, %p1;\nand.pred %p4, %p4, %p1;\n\
         mov.b16 %h1, {mask};\nmov.b16 %h2, 15;\nadd.u32 %r14, %r2, {BYTES};\n{copy}{}{}\
         barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
        2 * BYTES,
        2 * BYTES,
        await_phase(0, "WAIT"),
        copy_out(2 * BYTES, 32)
    );
    let want = (0..CTAS).flat_map(|cta| {
        let of_first = if mask >> cta & 1 == 1 { source[..WORDS].to_vec() } else { vec![7; WORDS] };
        [of_first, source[WORDS..].to_vec()].concat()
    });
    let declarations = ".shared .align 128 .b8 tile[512];\n.shared .align 8 .b64 bar;";
    program(name, module(HOPPER, declarations, parameters, &body), launch, &[("out", want.collect())])
}

pub fn programs() -> Vec<Program> {
    let source = noise(31, 2 * WORDS);
    let launch = |second: serde_json::Value| {
        json!({"grid": [CTAS, 1, 1], "cluster": [CTAS, 1, 1], "block": [32, 1, 1], "args": [{"pointer": "out"}, second],
               "buffers": {"out": poison(2 * CTAS * WORDS), "src": {"u32": source}}})
    };
    let bulk = format!(
        "ld.param.u64 %d2, [src];\n\
         @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d2], {BYTES}, \
         [%r3], %h1;\n\
         @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r14], [%d2+{BYTES}], \
         {BYTES}, [%r3], %h2;\n"
    );
    let form = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster";
    let tensor = format!(
        "mov.b64 %d3, map;\ncvta.param.u64 %d2, %d3;\nmov.u32 %r15, 0;\nmov.u32 %r16, 4;\n\
         @%p3 {form} [%r2], [%d2, {{%r15, %r15}}], [%r3], %h1;\n@%p4 {form} [%r14], [%d2, {{%r15, %r16}}], [%r3], %h2;\n"
    );
    let map = json!({"tensor_map": {"buffer": "src", "type": "u32", "dims": [16, 8], "strides": [64], "box": [16, 4]}});
    let with_map = ".param .u64 out, .param .align 64 .b8 map[128]";
    let with_pointer = ".param .u64 out, .param .u64 src";
    let pointer = json!({"pointer": "src"});
    vec![
        sent("cp.async.bulk, multicast", &bulk, with_pointer, 0b1010, launch(pointer), source.clone()),
        sent("cp.async.bulk.tensor, multicast", &tensor, with_map, 0b0101, launch(map), source.clone()),
    ]
}
