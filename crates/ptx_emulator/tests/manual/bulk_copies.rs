//! `cp.async.bulk`, `cp.reduce.async.bulk` and `st.bulk` (PTX ISA, "Data Movement: cp.async.bulk",
//! "cp.reduce.async.bulk"): copies between global and shared memory and between the shared memories of a cluster, which
//! complete by mbarrier or bulk group. Each element is reduced as by `red`: `inc` is "(old >= value) ? 0 : old + 1",
//! `dec` is "(old == 0 || old > value) ? value : old − 1".

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, HOPPER, INIT_BARRIER, await_phase, copy_in, copy_out, module, noise, poison, program, small_integer,
};

const BYTES: usize = 256;
const TILE: &str = ".shared .align 128 .b8 tile[512];\n.shared .align 8 .b64 bar;";
const ARGUMENTS: &str = "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n";

fn to_shared() -> Program {
    let source = noise(11, BYTES / 4);
    let body = format!(
        "{ARGUMENTS}{INIT_BARRIER}@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {BYTES};\n\
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d2], {BYTES}, [%r3];\n{}{}",
        await_phase(0, "WAIT"),
        copy_out(BYTES, 32)
    );
    program(
        "cp.async.bulk to shared memory",
        module(HOPPER, TILE, ".param .u64 out, .param .u64 src", &body),
        json!({"block": [32, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(BYTES / 4), "src": {"u32": source}}}),
        &[("out", source)],
    )
}

/// A copy or reduction from shared memory to initialized global memory.
fn to_global(name: &str, instruction: &str, source: Vec<u32>, old: Vec<u32>, want: Vec<u32>) -> Program {
    let bytes = 4 * source.len();
    let body = format!(
        "{ARGUMENTS}setp.eq.u32 %p1, %r1, 0;\n{}@!%p1 bra DONE;\n{instruction} [%d1], [%r2], {bytes};\n\
         cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:\n",
        copy_in(bytes, 32)
    );
    program(
        name,
        module(HOPPER, TILE, ".param .u64 out, .param .u64 src", &body),
        json!({"block": [32, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": {"u32": old}, "src": {"u32": source}}}),
        &[("out", want)],
    )
}

/// Copies bytes of one CTA into the other CTA's shared memory. The other CTA's mbarrier counts them.
fn between_ctas(name: &str, instruction: &str, reduce: fn(u32, u32) -> u32) -> Program {
    let source = noise(12, 2 * BYTES / 4);
    // CTA r loads its own half and sends it to the other CTA, which adds it to its own half.
    let body = format!(
        "{ARGUMENTS}mov.u32 %r10, %cluster_ctarank;\nmul.lo.u32 %r11, %r10, {BYTES};\ncvt.u64.u32 %d10, %r11;\n\
         add.u64 %d2, %d2, %d10;\nadd.u64 %d1, %d1, %d10;\n{INIT_BARRIER}{}\
         add.u32 %r20, %r2, {BYTES};\nadd.u32 %r291, %r20, %r290;\nld.shared.u32 %r292, [%r291+-{BYTES}];\n\
         st.shared.u32 [%r291], %r292;\nld.shared.u32 %r292, [%r291+-128];\nst.shared.u32 [%r291+128], %r292;\n\
         @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {BYTES};\n\
         fence.proxy.async.shared::cta;\n\
         barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n\
         xor.b32 %r12, %r10, 1;\nmapa.shared::cluster.u32 %r13, %r2, %r12;\nmapa.shared::cluster.u32 %r14, %r3, %r12;\n\
         @%p1 {instruction} [%r13], [%r20], {BYTES}, [%r14];\n{}{}\
         barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
        copy_in(BYTES, 32),
        await_phase(0, "WAIT"),
        copy_out(BYTES, 32)
    );
    let half = BYTES / 4;
    let want = (0..2 * half).map(|index| reduce(source[index], source[(index + half) % (2 * half)])).collect();
    program(
        name,
        module(HOPPER, TILE, ".param .u64 out, .param .u64 src", &body),
        json!({"grid": [2, 1, 1], "cluster": [2, 1, 1], "block": [32, 1, 1],
               "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(2 * half), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

fn zip(a: &[u32], b: &[u32], f: impl Fn(u32, u32) -> u32) -> Vec<u32> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

/// A 32-bit reduction of random words. Every third word of the source equals the old word.
fn reduction(operation: &str, f: impl Fn(u32, u32) -> u32) -> Program {
    let old = noise(13, 64);
    let mut source = noise(14, 64);
    source.iter_mut().zip(&old).step_by(3).for_each(|(word, old)| *word = *old);
    let want = zip(&old, &source, f);
    let instruction = format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}");
    to_global(&format!("cp.reduce.async.bulk.{operation}"), &instruction, source, old, want)
}

/// A 64-bit reduction.
fn wide_reduction(operation: &str, f: impl Fn(u64, u64) -> u64) -> Program {
    let (old, source) = (noise(15, 64), noise(16, 64));
    let wide = |words: &[u32]| -> Vec<u64> {
        words.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32).collect()
    };
    let pairs = wide(&old).into_iter().zip(wide(&source));
    let want = pairs.flat_map(|(old, source)| [f(old, source) as u32, (f(old, source) >> 32) as u32]).collect();
    let instruction = format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}");
    to_global(&format!("cp.reduce.async.bulk.{operation}"), &instruction, source, old, want)
}

/// Sums of small integers in a 16-bit format, without rounding.
fn half_sum(operation: &str, exponent: u32, mantissa: u32) -> Program {
    let number = |seed| noise(seed, 128).into_iter().map(|word| (word % 101) as i32 - 50).collect::<Vec<_>>();
    let (old, source) = (number(17), number(18));
    let pack = |values: &[i32]| -> Vec<u32> {
        let code = |value: i32| small_integer(value, exponent, mantissa);
        // A sum of zero is +0.
        values.chunks(2).map(|pair| code(pair[0]) | code(pair[1]) << 16).collect()
    };
    let want: Vec<i32> = old.iter().zip(&source).map(|(old, source)| old + source).collect();
    let instruction = format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}");
    let name = format!("cp.reduce.async.bulk.{operation}");
    to_global(&name, &instruction, pack(&source), pack(&old), pack(&want))
}

/// `st.bulk`: one thread writes zeros to some of the words.
fn zeros() -> Program {
    let source = noise(21, BYTES / 4);
    let body = format!(
        "{ARGUMENTS}setp.eq.u32 %p1, %r1, 0;\n{}add.u32 %r20, %r2, 40;\ncvt.u64.u32 %d10, %r20;\nmov.b64 %d11, 96;\n\
         @%p1 st.bulk.weak.shared::cta [%d10], %d11, 0;\nbar.sync 0;\n{}",
        copy_in(BYTES, 32),
        copy_out(BYTES, 32)
    );
    let kept = |at: usize| if (40..136).contains(&at) { 0 } else { source[at / 4] };
    let want = (0..BYTES).step_by(4).map(kept).collect();
    program(
        "st.bulk",
        module(BLACKWELL, TILE, ".param .u64 out, .param .u64 src", &body),
        json!({"block": [32, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(BYTES / 4), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    let source = noise(19, 128);
    let plain = "cp.async.bulk.global.shared::cta.bulk_group";
    let to_cluster = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes";
    let add_to_cluster = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32";
    let signed = |f: fn(i32, i32) -> i32| move |a: u32, b: u32| f(a as i32, b as i32) as u32;
    vec![
        to_shared(),
        zeros(),
        to_global("cp.async.bulk to global memory", plain, source.clone(), noise(20, 128), source),
        between_ctas("cp.async.bulk to another CTA", to_cluster, |_, other| other),
        between_ctas("cp.reduce.async.bulk.add to another CTA", add_to_cluster, u32::wrapping_add),
        reduction("add.u32", u32::wrapping_add),
        reduction("add.s32", u32::wrapping_add),
        reduction("min.u32", u32::min),
        reduction("max.u32", u32::max),
        reduction("min.s32", signed(i32::min)),
        reduction("max.s32", signed(i32::max)),
        reduction("inc.u32", |old, value| if old >= value { 0 } else { old + 1 }),
        reduction("dec.u32", |old, value| if old == 0 || old > value { value } else { old - 1 }),
        reduction("and.b32", |a, b| a & b),
        reduction("or.b32", |a, b| a | b),
        reduction("xor.b32", |a, b| a ^ b),
        wide_reduction("add.u64", u64::wrapping_add),
        wide_reduction("min.s64", |a, b| (a as i64).min(b as i64) as u64),
        wide_reduction("max.u64", u64::max),
        wide_reduction("xor.b64", |a, b| a ^ b),
        half_sum("add.noftz.f16", 5, 10),
        half_sum("add.noftz.bf16", 8, 7),
    ]
}
