//! Warp-wide matrix instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate"): fragments of `mma.sync` as in the
//! sections "Matrix Fragments for mma.m16n8k…"; `ldmatrix`, `stmatrix` and `movmatrix` with "each row of a matrix … 16
//! bytes … thread i: row i / 4, two elements from column 2·(i mod 4)".

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, copy_out, module, noise, poison, program, small_integer};

const LANES: usize = 32;

/// An element type of A and B: name, bits, and the function that gives the code of a small integer.
#[derive(Clone, Copy)]
struct Element(&'static str, usize, fn(i32) -> u32);

/// D = A·B + C with exact sums: 16 × 8, with 32 bytes of K.
fn mma(sums: &'static str, Element(name, bits, code): Element, k: usize) -> Program {
    let small = |word: u32| (word % 7) as i32 - 3;
    let a: Vec<i32> = noise(81, 16 * k).into_iter().map(small).collect();
    let b: Vec<i32> = noise(82, 8 * k).into_iter().map(small).collect();
    let c: Vec<i32> = noise(83, 16 * 8).into_iter().map(small).collect();
    let word = |value: i32| if sums == "s32" { value as u32 } else { (value as f32).to_bits() };
    let per_word = 32 / bits;
    // Half of the instruction's K. The upper registers start there.
    let half = k / 2;
    let pack = |values: &dyn Fn(usize) -> i32| {
        (0..per_word)
            .fold(0, |word, at| word | (code(values(at)) & (u64::from(u32::MAX) >> (32 - bits)) as u32) << (at * bits))
    };
    let d_place = |lane: usize, i: usize| (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
    let mut fragments = Vec::new();
    let mut want = Vec::new();
    for lane in 0..LANES {
        for register in 0..4 {
            let (row, first) = (lane / 4 + register % 2 * 8, lane % 4 * per_word + register / 2 * half);
            fragments.push(pack(&|at| a[row * k + first + at]));
        }
        for register in 0..2 {
            let (column, first) = (lane / 4, lane % 4 * per_word + register * half);
            fragments.push(pack(&|at| b[column * k + first + at]));
        }
        for i in 0..4 {
            let (row, column) = d_place(lane, i);
            fragments.push(word(c[row * 8 + column]));
            let dot: i32 = (0..k).map(|at| a[row * k + at] * b[column * k + at]).sum();
            want.push(word(dot + c[row * 8 + column]));
        }
    }
    let loads: String = (0..10).map(|i| format!("ld.global.b32 %r{}, [%d5+{}];\n", 10 + i, 4 * i)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d7+{}], %r{};\n", 4 * i, 20 + i)).collect();
    let types = format!("{sums}.{name}.{name}.{sums}");
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmul.wide.u32 %d4, %r1, 40;\nadd.u64 %d5, %d2, %d4;\n{loads}\
         mma.sync.aligned.m16n8k{k}.row.col.{types} {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, \
         {{%r16, %r17, %r18, %r19}};\nmul.wide.u32 %d6, %r1, 16;\nadd.u64 %d7, %d1, %d6;\n{stores}"
    );
    program(
        &format!("mma.m16n8k{k}.{types}"),
        module(HOPPER, "", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": fragments}}}),
        &[("out", want)],
    )
}

/// Element (row, column) of matrix `matrix`. There are four 8×8 matrices of 16-bit elements.
fn element(matrix: usize, row: usize, column: usize) -> u32 {
    (matrix << 12 | row << 8 | column << 4 | 5) as u32
}

/// A thread's register for a matrix.
fn fragment(matrix: usize, lane: usize, transposed: bool) -> u32 {
    let at = |row, column| if transposed { element(matrix, column, row) } else { element(matrix, row, column) };
    at(lane / 4, lane % 4 * 2) | at(lane / 4, lane % 4 * 2 + 1) << 16
}

/// The four matrices, one after another, in rows of 16 bytes.
fn matrices() -> Vec<u32> {
    let pair = |index: usize| {
        let (matrix, row, column) = (index / 32, index / 4 % 8, index % 4 * 2);
        element(matrix, row, column) | element(matrix, row, column + 1) << 16
    };
    (0..128).map(pair).collect()
}

fn ldmatrix(transposed: bool) -> Program {
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d5+{}], %r{};\n", 4 * i, 20 + i)).collect();
    let trans = if transposed { ".trans" } else { "" };
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{}\
         shl.b32 %r4, %r1, 4;\nadd.u32 %r4, %r2, %r4;\n\
         ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r4];\n\
         mul.wide.u32 %d4, %r1, 16;\nadd.u64 %d5, %d1, %d4;\n{stores}",
        super::common::copy_in(512, LANES)
    );
    let want = (0..LANES).flat_map(|lane| (0..4).map(move |matrix| fragment(matrix, lane, transposed))).collect();
    program(
        &format!("ldmatrix.x4{trans}"),
        module(HOPPER, ".shared .align 128 .b8 tile[512];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(128), "src": {"u32": matrices()}}}),
        &[("out", want)],
    )
}

/// `stmatrix` of the fragments must store the matrices.
fn stmatrix(transposed: bool) -> Program {
    let fragments: Vec<u32> =
        (0..LANES).flat_map(|lane| (0..4).map(move |matrix| fragment(matrix, lane, transposed))).collect();
    let trans = if transposed { ".trans" } else { "" };
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\nmul.wide.u32 %d4, %r1, 16;\n\
         add.u64 %d5, %d2, %d4;\nld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d5];\nshl.b32 %r4, %r1, 4;\n\
         add.u32 %r4, %r2, %r4;\nstmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r4], {{%r20, %r21, %r22, %r23}};\n\
         bar.sync 0;\n{}",
        copy_out(512, LANES)
    );
    program(
        &format!("stmatrix.x4{trans}"),
        module(HOPPER, ".shared .align 128 .b8 tile[512];", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(128), "src": {"u32": fragments}}}),
        &[("out", matrices())],
    )
}

fn movmatrix() -> Program {
    let body = "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmul.wide.u32 %d4, %r1, 4;\nadd.u64 %d5, %d2, %d4;\n\
                add.u64 %d6, %d1, %d4;\nld.global.b32 %r4, [%d5];\nmovmatrix.sync.aligned.m8n8.trans.b16 %r5, %r4;\n\
                st.global.b32 [%d6], %r5;\n";
    let fragments = |transposed| (0..LANES).map(|lane| fragment(0, lane, transposed)).collect::<Vec<_>>();
    program(
        "movmatrix.trans",
        module(HOPPER, "", ".param .u64 out, .param .u64 src", body),
        json!({"block": [LANES, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(LANES), "src": {"u32": fragments(false)}}}),
        &[("out", fragments(true))],
    )
}

pub fn programs() -> Vec<Program> {
    vec![
        mma("f32", Element("f16", 16, |value| small_integer(value, 5, 10)), 16),
        mma("f32", Element("bf16", 16, |value| small_integer(value, 8, 7)), 16),
        mma("f32", Element("tf32", 32, |value| small_integer(value, 8, 10) << 13), 8),
        mma("f32", Element("e4m3", 8, |value| small_integer(value, 4, 3)), 32),
        mma("f32", Element("e5m2", 8, |value| small_integer(value, 5, 2)), 32),
        mma("s32", Element("s8", 8, |value| value as u32), 32),
        ldmatrix(false),
        ldmatrix(true),
        stmatrix(false),
        stmatrix(true),
        movmatrix(),
    ]
}
