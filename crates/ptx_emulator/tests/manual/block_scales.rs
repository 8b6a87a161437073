//! `mma.sync` with block scales (PTX ISA, "Block Scaling for mma.sync" and the tables of "Matrix Fragments for
//! mma.m16n8k64" and "mma.m16n8k32"), and the `ldmatrix` that widens narrow elements for it.
//!
//! Scales in the manual's words: "thread-id-a … a pair of threads within a quad" supplies the scales of A: threads 0
//! and 1 of each four for selector 0, threads 2 and 3 for selector 1. The first thread of the pair supplies row
//! groupID, the second supplies row groupID + 8. "thread-id-b … a single thread in a quad" supplies the scales of
//! column groupID of B. byte-id gives the first byte.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{CONSUMER, copy_in, module, noise, poison, program};

const LANES: usize = 32;
const M: usize = 16;
const N: usize = 8;

/// An element type of A or B: name, bits, and eight times the value of each code below 16.
#[derive(Clone, Copy)]
struct Element(&'static str, usize, fn(u32) -> i32);

/// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
const E2M1: Element = Element("e2m1", 4, |code| [0, 4, 8, 12, 16, 24, 32, 48][code as usize & 7] * sign(code, 4));
/// Two exponent bits with a bias of 1, three mantissa bits: values below 2 in steps of 1/8.
const E2M3: Element = Element("e2m3", 6, |code| (code & 0xf) as i32 * sign(code, 6));
/// Four exponent bits with a bias of 7, three mantissa bits. Codes 0x38 … 0x3f are 1 to 1.875 in steps of 1/8.
const E4M3: Element = Element("e4m3", 8, |code| (8 + (code & 7) as i32) * sign(code, 8));

const fn sign(code: u32, bits: u32) -> i32 {
    if code >> (bits - 1) & 1 == 1 { -1 } else { 1 }
}

impl Element {
    /// Makes a code of this type from 32 random bits.
    fn code(self, random: u32) -> u32 {
        match self.1 {
            4 => random & 0xf,
            6 => random & 0x2f,
            _ => 0x38 | random & 0x87,
        }
    }
}

/// One form of the instruction.
struct Form {
    kind: &'static str,
    vector: &'static str,
    a: Element,
    b: Element,
    k: usize,
    /// Scales per row, name of their type, and the code of a power of two.
    scales: usize,
    scale_type: &'static str,
    power: fn(i32) -> u32,
}

/// Byte selector and thread selector, of A and of B.
type Selectors = [(usize, usize); 2];

/// D = (A · scale A) · (B · scale B) + C with exact sums: the scales are powers of two.
fn mma(form: &Form, [(a_byte, a_thread), (b_byte, b_thread)]: Selectors) -> Program {
    let &Form { kind, vector, a: a_type, b: b_type, k, scales, scale_type, power } = form;
    let codes = |seed, count, of: Element| noise(seed, count).into_iter().map(|word| of.code(word)).collect::<Vec<_>>();
    let exponents =
        |seed, rows: usize| noise(seed, rows * scales).into_iter().map(|word| (word % 3) as i32).collect::<Vec<_>>();
    let (a, b) = (codes(91, M * k, a_type), codes(92, N * k, b_type));
    let (a_scales, b_scales) = (exponents(93, M), exponents(94, N));
    let c: Vec<i32> = noise(95, M * N).into_iter().map(|word| (word % 9) as i32).collect();
    // A register has 8 elements of 4 bits, or 4 containers of 8 bits. A 4-bit element starts at bit 2 of its container.
    let per_register = if k == 64 { 8 } else { 4 };
    let pack = |of: Element, code: &dyn Fn(usize) -> u32| {
        let shift = if k == 32 && of.1 == 4 { 2 } else { 0 };
        (0..per_register).fold(0, |word, at| word | code(at) << shift << (at * 32 / per_register))
    };
    let mut fragments = Vec::new();
    let mut want = Vec::new();
    for lane in 0..LANES {
        let (group, thread) = (lane / 4, lane % 4);
        // a: rows groupID and groupID + 8, then the same rows half of K further.
        for register in 0..4 {
            let (row, first) = (group + register % 2 * 8, thread * per_register + register / 2 * k / 2);
            fragments.push(pack(a_type, &|at| a[row * k + first + at]));
        }
        for register in 0..2 {
            let first = thread * per_register + register * k / 2;
            fragments.push(pack(b_type, &|at| b[group * k + first + at]));
        }
        let place = |i: usize| (group + i / 2 * 8, thread * 2 + i % 2);
        fragments.extend((0..4).map(|i| (c[place(i).0 * N + place(i).1] as f32).to_bits()));
        // Registers of other lanes hold zeros.
        let word = |exponents: &[i32], byte: usize| {
            exponents.iter().enumerate().fold(0, |word, (at, &exponent)| word | power(exponent) << (8 * (byte + at)))
        };
        let of_row = |all: &[i32], row: usize| all[row * scales..][..scales].to_vec();
        let a_lane = (thread / 2 == a_thread).then(|| word(&of_row(&a_scales, group + thread % 2 * 8), a_byte));
        let b_lane = (thread == b_thread).then(|| word(&of_row(&b_scales, group), b_byte));
        fragments.extend([a_lane.unwrap_or(0), b_lane.unwrap_or(0)]);
        for i in 0..4 {
            let (row, column) = place(i);
            // In units of 1/64.
            let dot: i64 = (0..k)
                .map(|at| {
                    let block = at * scales / k;
                    let exponent = a_scales[row * scales + block] + b_scales[column * scales + block];
                    i64::from((a_type.2)(a[row * k + at]) * (b_type.2)(b[column * k + at])) << exponent
                })
                .sum();
            let sum = dot as f64 / 64.0 + f64::from(c[row * N + column]);
            assert_eq!(f64::from(sum as f32), sum, "the sum must be exact");
            want.push((sum as f32).to_bits());
        }
    }
    let loads: String = (0..12).map(|i| format!("ld.global.b32 %r{}, [%d5+{}];\n", 10 + i, 4 * i)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d7+{}], %r{};\n", 4 * i, 30 + i)).collect();
    let name = format!("{kind}.block_scale{vector}.f32.{}.{}.f32.{scale_type}", a_type.0, b_type.0);
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmul.wide.u32 %d4, %r1, 48;\nadd.u64 %d5, %d2, %d4;\n{loads}\
         mma.sync.aligned.m16n8k{k}.row.col.kind::{name} {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}}, \
         {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}}, %r20, {{{a_byte}, {a_thread}}}, %r21, {{{b_byte}, {b_thread}}};\n\
         mul.wide.u32 %d6, %r1, 16;\nadd.u64 %d7, %d1, %d6;\n{stores}"
    );
    program(
        &format!("mma.m16n8k{k}.{name} {{{a_byte}, {a_thread}}}, {{{b_byte}, {b_thread}}}"),
        module(CONSUMER, "", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": fragments}}}),
        &[("out", want)],
    )
}

/// `ldmatrix.m8n16`: "each row of a matrix … 16 bytes", which starts with elements of `bits` bits, followed by padding.
/// Each element becomes a byte. Four threads hold a row, four bytes each.
fn widening_ldmatrix(source: &str, bits: usize) -> Program {
    let codes: Vec<u32> = noise(96, 2 * 8 * 16).into_iter().map(|word| word & ((1 << bits) - 1)).collect();
    let mut rows = vec![0_u32; 2 * 8 * 4];
    for (index, code) in codes.iter().enumerate() {
        let (row, at) = (index / 16, index % 16 * bits);
        rows[row * 4 + at / 32] |= code << (at % 32);
        if at % 32 + bits > 32 {
            rows[row * 4 + at / 32 + 1] |= code >> (32 - at % 32);
        }
    }
    let want = (0..LANES)
        .flat_map(|lane| (0..2).map(move |matrix| (matrix * 8 + lane / 4) * 16 + lane % 4 * 4))
        .map(|first| (0..4).fold(0, |word, at| word | codes[first + at] << (8 * at)))
        .collect();
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{}\
         and.b32 %r4, %r1, 15;\nshl.b32 %r4, %r4, 4;\nadd.u32 %r4, %r2, %r4;\n\
         ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.{source} {{%r20, %r21}}, [%r4];\n\
         mul.wide.u32 %d4, %r1, 8;\nadd.u64 %d5, %d1, %d4;\nst.global.b32 [%d5], %r20;\nst.global.b32 [%d5+4], %r21;\n",
        copy_in(256, LANES)
    );
    program(
        &format!("ldmatrix.m8n16.x2.{source}"),
        module(CONSUMER, ".shared .align 128 .b8 tile[256];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(64), "src": {"u32": rows}}}),
        &[("out", want)],
    )
}

/// `ldmatrix.m16n16`, which always transposes: rows of 16 bytes that start with elements of `bits` bits. Four threads
/// hold a column, four bytes each. The first register's columns come before the second register's.
fn tall_ldmatrix(types: &str, bits: usize) -> Program {
    let codes: Vec<u32> = noise(97, 2 * 16 * 16).into_iter().map(|word| word & ((1 << bits) - 1)).collect();
    let mut rows = vec![0_u32; 2 * 16 * 4];
    for (index, code) in codes.iter().enumerate() {
        let (row, at) = (index / 16, index % 16 * bits);
        rows[row * 4 + at / 32] |= code << (at % 32);
        if at % 32 + bits > 32 {
            rows[row * 4 + at / 32 + 1] |= code >> (32 - at % 32);
        }
    }
    let want = (0..LANES)
        .flat_map(|lane| (0..4).map(move |register| (lane, register)))
        .map(|(lane, register)| {
            let (matrix, column) = (register / 2, register % 2 * 8 + lane / 4);
            (0..4).fold(0, |word, at| word | codes[(matrix * 16 + lane % 4 * 4 + at) * 16 + column] << (8 * at))
        })
        .collect();
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d5+{}], %r{};\n", 4 * i, 20 + i)).collect();
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{}\
         shl.b32 %r4, %r1, 4;\nadd.u32 %r4, %r2, %r4;\n\
         ldmatrix.sync.aligned.m16n16.x2.trans.shared.{types} {{%r20, %r21, %r22, %r23}}, [%r4];\n\
         mul.wide.u32 %d4, %r1, 16;\nadd.u64 %d5, %d1, %d4;\n{stores}",
        copy_in(512, LANES)
    );
    program(
        &format!("ldmatrix.m16n16.x2.trans.{types}"),
        module(CONSUMER, ".shared .align 128 .b8 tile[512];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(128), "src": {"u32": rows}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    /// ue4m3: a bias of 7 and three mantissa bits.
    const UE4M3: fn(i32) -> u32 = |exponent| (7 + exponent as u32) << 3;
    /// ue8m0: a bias of 127.
    const UE8M0: fn(i32) -> u32 = |exponent| 127 + exponent as u32;
    let fours = |kind, vector, scales, scale_type, power| Form {
        kind,
        vector,
        a: E2M1,
        b: E2M1,
        k: 64,
        scales,
        scale_type,
        power,
    };
    let eights = |a, b| Form {
        kind: "mxf8f6f4",
        vector: ".scale_vec::1X",
        a,
        b,
        k: 32,
        scales: 1,
        scale_type: "ue8m0",
        power: UE8M0,
    };
    let mut all = Vec::new();
    let four = fours("mxf4nvf4", ".scale_vec::4X", 4, "ue4m3", UE4M3);
    for (a_thread, b_thread) in [(0, 0), (1, 1), (0, 2), (1, 3)] {
        all.push(mma(&four, [(0, a_thread), (0, b_thread)]));
    }
    let two = fours("mxf4", ".scale_vec::2X", 2, "ue8m0", UE8M0);
    for selectors in [[(0, 0), (2, 3)], [(2, 1), (0, 1)]] {
        all.push(mma(&two, selectors));
    }
    all.push(mma(&fours("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0", UE8M0), [(2, 0), (2, 2)]));
    all.push(mma(&fours("mxf4", "", 2, "ue8m0", UE8M0), [(0, 1), (0, 0)]));
    for (form, selectors) in [
        (eights(E4M3, E2M1), [(3, 1), (1, 2)]),
        (eights(E2M1, E2M3), [(0, 0), (2, 3)]),
        (eights(E2M3, E4M3), [(1, 0), (3, 0)]),
    ] {
        all.push(mma(&form, selectors));
    }
    all.push(widening_ldmatrix("b4x16_p64", 4));
    all.push(widening_ldmatrix("b6x16_p32", 6));
    for (types, bits) in [("b8", 8), ("b8x16.b4x16_p64", 4), ("b8x16.b6x16_p32", 6)] {
        all.push(tall_ldmatrix(types, bits));
    }
    all
}
