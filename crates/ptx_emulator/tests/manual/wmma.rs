//! `wmma` (PTX ISA, "Warp Level Matrix Instructions: wmma.load, wmma.store, wmma.mma"): D = A·B + C of matrices in
//! memory, in row-major or column-major order with a stride. The machine chooses which lane holds which element, so the
//! programs load, multiply and store.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, module, noise, program, small_integer, words};

/// An element type: name, bytes, and the function that gives the code of a small integer.
#[derive(Clone, Copy)]
struct Element(&'static str, usize, fn(i32) -> u64);

const F16: Element = Element("f16", 2, |value| small_integer(value, 5, 10).into());
const F32: Element = Element("f32", 4, |value| (value as f32).to_bits().into());
const F64: Element = Element("f64", 8, |value| f64::from(value).to_bits());
const S32: Element = Element("s32", 4, |value| value as u64);

/// A matrix of rows × columns in memory: its bytes, and the distance between lines in elements.
fn stored(
    values: &dyn Fn(usize, usize) -> i32,
    [rows, columns]: [usize; 2],
    layout: &str,
    element: Element,
) -> (Vec<u8>, usize) {
    let Element(_, bytes, code) = element;
    let [lines, length] = if layout == "row" { [rows, columns] } else { [columns, rows] };
    // Lines are longer than the matrix, by 16 bytes.
    let stride = length + 16 / bytes;
    let mut memory = vec![0; lines * stride * bytes];
    for row in 0..rows {
        for column in 0..columns {
            let at = if layout == "row" { row * stride + column } else { column * stride + row };
            memory[at * bytes..][..bytes].copy_from_slice(&code(values(row, column)).to_le_bytes()[..bytes]);
        }
    }
    (memory, stride)
}

fn product(
    [m, n, k]: [usize; 3],
    [a_layout, b_layout, c_layout, d_layout]: [&str; 4],
    element: Element,
    sum: Element,
    registers: [usize; 3],
) -> Program {
    let small = |word: u32| (word % 7) as i32 - 3;
    let [a, b, c] = [(91, m * k), (92, k * n), (93, m * n)]
        .map(|(seed, count)| -> Vec<i32> { noise(seed, count).into_iter().map(small).collect() });
    let (a_bytes, a_stride) = stored(&|row, column| a[row * k + column], [m, k], a_layout, element);
    let (b_bytes, b_stride) = stored(&|row, column| b[row * n + column], [k, n], b_layout, element);
    let (c_bytes, c_stride) = stored(&|row, column| c[row * n + column], [m, n], c_layout, sum);
    let dot = |row: usize, column: usize| {
        (0..k).map(|at| a[row * k + at] * b[at * n + column]).sum::<i32>() + c[row * n + column]
    };
    let (d_bytes, d_stride) = stored(&dot, [m, n], d_layout, sum);
    let file = if element.0 == "f64" { 'd' } else { 'r' };
    let list = |first: usize, count: usize| {
        format!("{{{}}}", (first..first + count).map(|r| format!("%{file}{r}")).collect::<Vec<_>>().join(", "))
    };
    let [in_a, in_b, in_sum] = registers;
    let (ra, rb, rc, rd) = (list(10, in_a), list(20, in_b), list(30, in_sum), list(40, in_sum));
    let (Element(name, ..), Element(of_sum, ..)) = (element, sum);
    let types = if name == "f16" { format!("{of_sum}.{of_sum}") } else { format!("{of_sum}.{name}.{name}.{of_sum}") };
    let shape = format!("m{m}n{n}k{k}");
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [a];\nld.param.u64 %d3, [b];\nld.param.u64 %d4, [c];\n\
         wmma.load.a.sync.aligned.{a_layout}.{shape}.global.{name} {ra}, [%d2], {a_stride};\n\
         wmma.load.b.sync.aligned.{b_layout}.{shape}.{name} {rb}, [%d3], {b_stride};\n\
         wmma.load.c.sync.aligned.{c_layout}.{shape}.{of_sum} {rc}, [%d4], {c_stride};\n\
         wmma.mma.sync.aligned.{a_layout}.{b_layout}.{shape}.{types} {rd}, {ra}, {rb}, {rc};\n\
         wmma.store.d.sync.aligned.{d_layout}.{shape}.global.{of_sum} [%d1], {rd}, {d_stride};\n"
    );
    let layouts = [a_layout, b_layout, c_layout, d_layout].join(" ");
    program(
        &format!("wmma {shape}.{types}, {layouts}"),
        module(HOPPER, "", ".param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c", &body),
        json!({"block": [32, 1, 1], "args": [{"pointer": "out"}, {"pointer": "a"}, {"pointer": "b"}, {"pointer": "c"}],
               "buffers": {"out": {"u32": vec![0; d_bytes.len().div_ceil(4)]}, "a": {"u32": words(&a_bytes)},
                           "b": {"u32": words(&b_bytes)}, "c": {"u32": words(&c_bytes)}}}),
        &[("out", words(&d_bytes))],
    )
}

pub fn programs() -> Vec<Program> {
    let bf16 = Element("bf16", 2, |value| small_integer(value, 8, 7).into());
    let tf32 = Element("tf32", 4, |value| u64::from(small_integer(value, 8, 10)) << 13);
    let s8 = Element("s8", 1, |value| value as u64);
    let (square, flat, tall) = ([16, 16, 16], [8, 32, 16], [32, 8, 16]);
    let mixed = ["col", "row", "col", "row"];
    vec![
        product(square, ["row", "col", "row", "row"], F16, F32, [8, 8, 8]),
        product(square, mixed, F16, F16, [8, 8, 4]),
        product(flat, ["row", "row", "row", "col"], F16, F32, [8, 8, 8]),
        product(tall, ["col", "col", "row", "row"], F16, F32, [8, 8, 8]),
        product(square, ["row", "col", "col", "row"], bf16, F32, [4, 4, 8]),
        product(flat, ["col", "col", "row", "row"], bf16, F32, [2, 8, 8]),
        product([16, 16, 8], ["row", "row", "row", "row"], tf32, F32, [4, 4, 8]),
        product(square, ["row", "col", "row", "col"], s8, S32, [2, 2, 8]),
        product(tall, mixed, s8, S32, [4, 1, 8]),
        product([8, 8, 4], ["row", "col", "row", "row"], F64, F64, [1, 1, 2]),
        product([8, 8, 4], ["col", "row", "col", "col"], F64, F64, [1, 1, 2]),
    ]
}
