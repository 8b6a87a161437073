//! Clusters (PTX ISA, "Parallel Synchronization: barrier.cluster", "mapa", "Data Movement: st.async", "Memory
//! Consistency Model"): a CTA writes to the same offset of another CTA's shared memory with generic stores, atomics,
//! `st.async` and `red.async`. The data is read after a cluster barrier (release, acquire) or an mbarrier's phase.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, INIT_BARRIER, await_phase, module, noise, poison, program};

const CTAS: usize = 4;
const THREADS: usize = 32;
const ARRIVE_AND_WAIT: &str = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";

/// Each thread has a word at `%r5` and in the output at `%d5`, and its rank in `%r10`. `%r11` is the next rank.
const PLACES: &str = "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\nshl.b32 %r4, %r1, 2;\n\
                      add.u32 %r5, %r2, %r4;\nmov.u32 %r10, %cluster_ctarank;\nadd.u32 %r11, %r10, 1;\n\
                      and.b32 %r11, %r11, 3;\nshl.b32 %r12, %r10, 5;\nadd.u32 %r12, %r12, %r1;\n\
                      mul.wide.u32 %d3, %r12, 4;\nadd.u64 %d4, %d2, %d3;\nadd.u64 %d5, %d1, %d3;\nld.global.u32 %r13, [%d4];\n";

fn across(name: &str, body: &str, want: impl Fn(usize, usize, &[u32]) -> u32) -> Program {
    let source = noise(91, CTAS * THREADS);
    let text = format!("{PLACES}{body}st.global.u32 [%d5], %r14;\n{ARRIVE_AND_WAIT}");
    let want = (0..CTAS * THREADS).map(|index| want(index / THREADS, index % THREADS, &source)).collect();
    program(
        name,
        module(
            HOPPER,
            ".shared .align 128 .b8 tile[256];\n.shared .align 8 .b64 bar;",
            ".param .u64 out, .param .u64 src",
            &text,
        ),
        json!({"grid": [CTAS, 1, 1], "cluster": [CTAS, 1, 1], "block": [THREADS, 1, 1],
               "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(CTAS * THREADS), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    let word = |cta: usize, thread: usize, source: &[u32]| source[cta % CTAS * THREADS + thread];
    let store = format!(
        "mapa.shared::cluster.u32 %r15, %r5, %r11;\n{ARRIVE_AND_WAIT}st.shared::cluster.u32 [%r15], %r13;\n{ARRIVE_AND_WAIT}\
         ld.shared.u32 %r14, [%r5];\n"
    );
    let load = format!(
        "st.shared.u32 [%r5], %r13;\nmapa.shared::cluster.u32 %r15, %r5, %r11;\n{ARRIVE_AND_WAIT}\
         ld.shared::cluster.u32 %r14, [%r15];\n"
    );
    let generic = format!(
        "st.shared.u32 [%r5], %r13;\ncvta.shared.u32 %r16, %r5;\n{ARRIVE_AND_WAIT}cvt.u64.u32 %d6, %r5;\n\
         cvta.shared.u64 %d7, %d6;\nmapa.u64 %d8, %d7, %r11;\nld.u32 %r14, [%d8];\n"
    )
    .replace("cvta.shared.u32 %r16, %r5;\n", "");
    // All threads of all CTAs add to the words of CTA 0.
    let atomic = format!(
        "mov.u32 %r14, 0;\nst.shared.u32 [%r5], %r14;\nmov.u32 %r16, 0;\nmapa.shared::cluster.u32 %r15, %r5, %r16;\n\
         {ARRIVE_AND_WAIT}atom.relaxed.cluster.shared::cluster.add.u32 %r17, [%r15], %r13;\n{ARRIVE_AND_WAIT}\
         ld.shared::cluster.u32 %r14, [%r15];\n"
    );
    // "st.async … mbarrier::complete_tx::bytes": each store completes the number of bytes that it writes.
    let asynchronous = format!(
        "{INIT_BARRIER}@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {};\nmapa.shared::cluster.u32 %r15, %r5, %r11;\n\
         mapa.shared::cluster.u32 %r16, %r3, %r11;\n{ARRIVE_AND_WAIT}\
         st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r15], %r13, [%r16];\n{}ld.shared.u32 %r14, [%r5];\n",
        4 * THREADS,
        await_phase(0, "WAIT")
    );
    let reduction = asynchronous
        .replacen(INIT_BARRIER, &format!("{INIT_BARRIER}st.shared.u32 [%r5], %r13;\n"), 1)
        .replace("st.async.shared::cluster", "red.async.relaxed.cluster.shared::cluster")
        .replace("bytes.u32 [%r15]", "bytes.add.u32 [%r15]");
    // Each CTA tells the next CTA, by an arrival of every thread, that its words are written.
    let remote_arrival = format!(
        "mov.u32 %r3, bar;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [%r3], {THREADS};\n\
         @%p1 fence.mbarrier_init.release.cluster;\n{ARRIVE_AND_WAIT}mapa.shared::cluster.u32 %r15, %r5, %r11;\n\
         mapa.shared::cluster.u32 %r16, %r3, %r11;\nst.shared::cluster.u32 [%r15], %r13;\n\
         mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r16];\nWAIT:\n\
         mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p14, [%r3], 0;\n@!%p14 bra WAIT;\n\
         xor.b32 %r6, %r4, 124;\nadd.u32 %r6, %r2, %r6;\nld.shared.u32 %r14, [%r6];\n"
    );
    vec![
        across("remote store", &store, |cta, thread, source| word(cta + CTAS - 1, thread, source)),
        across("remote load", &load, |cta, thread, source| word(cta + 1, thread, source)),
        across("remote load by generic address", &generic, |cta, thread, source| word(cta + 1, thread, source)),
        across("remote atomic", &atomic, |_, thread, source| {
            (0..CTAS).fold(0, |sum, cta| sum.wrapping_add(word(cta, thread, source)))
        }),
        across("st.async", &asynchronous, |cta, thread, source| word(cta + CTAS - 1, thread, source)),
        across("red.async", &reduction, |cta, thread, source| {
            word(cta, thread, source).wrapping_add(word(cta + CTAS - 1, thread, source))
        }),
        across("remote arrival", &remote_arrival, |cta, thread, source| {
            word(cta + CTAS - 1, THREADS - 1 - thread, source)
        }),
    ]
}
