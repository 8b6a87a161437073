//! Shared parts of the manual's programs: the frame of a module, buffers, pieces of PTX, numbers.

use std::collections::BTreeMap;

use ptx_emulator::program::{Outcome, Program};
use serde_json::{Value, json};

/// Target architectures. Programs that Hopper can run are written for Hopper.
pub const HOPPER: &str = "sm_90a";
pub const BLACKWELL: &str = "sm_100f";
/// GeForce RTX 50, RTX PRO and DGX Spark.
pub const CONSUMER: &str = "sm_120f";

/// A module with one entry `k` and enough registers of each kind. `%r1` is the thread's index.
pub fn module(target: &str, declarations: &str, parameters: &str, body: &str) -> String {
    let version = if target == BLACKWELL || target == CONSUMER { "8.8" } else { "8.7" };
    format!(
        ".version {version}\n.target {target}\n.address_size 64\n{declarations}\n.visible .entry k({parameters})\n{{\n\
         .reg .pred %p<16>;\n.reg .b16 %h<32>;\n.reg .b32 %r<300>;\n.reg .b64 %d<64>;\n\
         mov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    )
}

/// A program, its launch, and the expected words at the start of buffers after the launch.
pub fn program(name: &str, text: String, launch: Value, expect: &[(&str, Vec<u32>)]) -> Program {
    let expect: BTreeMap<_, _> = expect.iter().map(|(name, words)| (name.to_string(), words.clone())).collect();
    let outcome = Outcome { expect, ..Outcome::default() };
    let launch = serde_json::from_value(launch).expect("a launch description");
    Program { path: name.into(), text, launch, outcome, edited: None }
}

/// An output buffer in which every byte is 0xff.
pub fn poison(words: usize) -> Value {
    json!({"bytes": 4 * words, "fill": "poison"})
}

/// Bytes as little-endian words. Zeros fill the last word.
pub fn words(bytes: &[u8]) -> Vec<u32> {
    let word = |piece: &[u8]| piece.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
    bytes.chunks(4).map(word).collect()
}

/// Numbers that look random: the upper bits of a linear congruential generator.
pub fn noise(seed: u32, count: usize) -> Vec<u32> {
    let mut state = u64::from(seed);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    (0..count).map(|_| next()).collect()
}

/// PTX that computes the addresses of the thread's own word: in `%r291` relative to `%r2`, and in `%d61` relative to
/// `base`.
fn own_places(base: &str) -> String {
    format!(
        "shl.b32 %r290, %r1, 2;\nadd.u32 %r291, %r2, %r290;\ncvt.u64.u32 %d60, %r290;\nadd.u64 %d61, {base}, %d60;\n"
    )
}

/// PTX that executes `instructions` for each word of `bytes`, one word per thread at a time. `{at}` stands for the
/// offset.
fn for_each_word(bytes: usize, threads: usize, instructions: [&str; 2]) -> String {
    let mut out = String::new();
    for at in (0..bytes).step_by(4 * threads) {
        out += &format!("setp.lt.u32 %p15, %r290, {};\n", bytes - at);
        for instruction in instructions {
            out += &format!("@%p15 {}\n", instruction.replace("{at}", &at.to_string()));
        }
    }
    out
}

/// PTX that copies `bytes` bytes of shared memory at `%r2` to the buffer at `%d1`, with `threads` threads.
pub fn copy_out(bytes: usize, threads: usize) -> String {
    let word = ["ld.shared.u32 %r292, [%r291+{at}];", "st.global.u32 [%d61+{at}], %r292;"];
    own_places("%d1") + &for_each_word(bytes, threads, word)
}

/// PTX that copies `bytes` bytes from the buffer at `%d2` to shared memory at `%r2`, with `threads` threads, and makes
/// them visible to the async proxy and to all threads.
pub fn copy_in(bytes: usize, threads: usize) -> String {
    let word = ["ld.global.u32 %r292, [%d61+{at}];", "st.shared.u32 [%r291+{at}], %r292;"];
    own_places("%d2") + &for_each_word(bytes, threads, word) + "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
}

/// PTX with which thread 0 initializes the mbarrier `bar` at `%r3` for one arrival.
pub const INIT_BARRIER: &str = "mov.u32 %r3, bar;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [%r3], 1;\n\
                                @%p1 fence.mbarrier_init.release.cluster;\nbar.sync 0;\n";

/// PTX that waits for a phase of the mbarrier at `%r3`.
pub fn await_phase(parity: u32, label: &str) -> String {
    format!("{label}:\nmbarrier.try_wait.parity.shared.b64 %p14, [%r3], {parity};\n@!%p14 bra {label};\n")
}

/// Code of a small integer in a binary floating-point format with `exponent` and `mantissa` bits.
pub fn small_integer(value: i32, exponent: u32, mantissa: u32) -> u32 {
    let sign = u32::from(value < 0) << (exponent + mantissa);
    let bias = (1 << (exponent - 1)) - 1;
    match value.unsigned_abs() {
        0 => sign,
        m => {
            let top = m.ilog2();
            assert!(top <= mantissa || m.trailing_zeros() >= top - mantissa, "{value} must be exact");
            let fraction = if top <= mantissa { m << (mantissa - top) } else { m >> (top - mantissa) };
            sign | (bias + top) << mantissa | fraction & ((1 << mantissa) - 1)
        }
    }
}

/// PTX around work in tensor memory: warp 0 allocates `columns` columns, whose address is in `%r30`, and frees them at
/// the end. `%r22` is the warp's index in the CTA, and `%r31` is the address of the lanes that the warp can access.
pub fn with_tensor_memory(group: u32, columns: u32, body: &str) -> String {
    format!(
        "shr.u32 %r22, %r1, 5;\nsetp.eq.u32 %p1, %r1, 0;\nsetp.eq.u32 %p2, %r22, 0;\nmov.u32 %r21, slot;\n\
         @!%p2 bra ALLOCATED;\ntcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r21], {columns};\n\
         tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;\nALLOCATED:\n{SYNCHRONISE}\
         ld.shared.u32 %r30, [%r21];\nand.b32 %r31, %r22, 3;\nshl.b32 %r31, %r31, 21;\nadd.u32 %r31, %r31, %r30;\n{body}\
         {SYNCHRONISE}@!%p2 bra FREED;\n\
         tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r30, {columns};\nFREED:\n"
    )
}

/// PTX that orders accesses to tensor memory between all threads of the CTA.
pub const SYNCHRONISE: &str = "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n";

/// A list of registers, starting with `%rFIRST`.
pub fn registers(first: usize, count: usize) -> String {
    let names: Vec<String> = (first..first + count).map(|register| format!("%r{register}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// PTX that fills columns of every lane with zeros.
pub fn clear_columns(first: usize, count: usize) -> String {
    let zeros: String = (0..count).map(|register| format!("mov.b32 %r{}, 0;\n", 100 + register)).collect();
    let list = registers(100, count);
    format!(
        "{zeros}add.u32 %r32, %r31, {first};\ntcgen05.st.sync.aligned.32x32b.x{count}.b32 [%r32], {list};\n\
         tcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}"
    )
}

/// PTX that writes columns of the thread's lane to its place in the buffer at `%d1`.
pub fn store_columns(first: usize, count: usize) -> String {
    let list = registers(100, count);
    let stores: String = (0..count).map(|at| format!("st.global.b32 [%d41+{}], %r{};\n", 4 * at, 100 + at)).collect();
    format!(
        "add.u32 %r32, %r31, {first};\ntcgen05.ld.sync.aligned.32x32b.x{count}.b32 {list}, [%r32];\n\
         tcgen05.wait::ld.sync.aligned;\nmul.wide.u32 %d40, %r1, {};\nadd.u64 %d41, %d1, %d40;\n{stores}",
        4 * count
    )
}

/// PTX for a shared-memory descriptor of `tcgen05` in a register, without swizzle: start at a byte offset from `%r2`,
/// distance between adjacent 16 bytes along K, and distance between groups of 8 rows (PTX ISA, "Shared memory
/// descriptor").
pub fn descriptor(register: &str, start: usize, leading: u64, stride: u64) -> String {
    const FIXED: u64 = 1 << 46;
    let fields = FIXED | (leading / 16) << 16 | (stride / 16) << 32;
    format!(
        "add.u32 %r33, %r2, {start};\nshr.u32 %r33, %r33, 4;\ncvt.u64.u32 {register}, %r33;\n\
         or.b64 {register}, {register}, {fields};\n"
    )
}

/// Offset of byte `byte` in row `row` of a matrix without swizzle. Core matrices have 8 rows of 16 bytes. The core
/// matrices of 32 bytes along K are adjacent.
pub fn core_matrix(row: usize, byte: usize) -> usize {
    row / 8 * 256 + byte / 16 * 128 + row % 8 * 16 + byte % 16
}
