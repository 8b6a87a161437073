//! `wgmma` (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): D = ±A·±B + D, A from registers or shared
//! memory, B from shared memory. Layouts follow "Register Fragments and Shared Memory Matrix Layouts", "Strides" and
//! "Matrix-descriptor". Numbers are small integers, so every sum is exact.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, copy_in, module, noise, poison, program, small_integer, words};

const M: usize = 64;
/// Bytes along K per instruction.
const SLICE: usize = 32;

/// An operand's element type.
#[derive(Clone, Copy)]
enum Element {
    /// Exponent and mantissa bits.
    Float(usize, u32, u32),
    S8,
    U8,
}

impl Element {
    fn bytes(self) -> usize {
        if let Element::Float(bytes, ..) = self { bytes } else { 1 }
    }

    fn code(self, value: i32) -> u32 {
        match self {
            // The register of a tf32 number holds its 19 bits at the top.
            Element::Float(4, exponent, mantissa) => small_integer(value, exponent, mantissa) << 13,
            Element::Float(_, exponent, mantissa) => small_integer(value, exponent, mantissa),
            Element::S8 | Element::U8 => value as u32 & 0xff,
        }
    }

    fn value(self, random: u32) -> i32 {
        match self {
            Element::U8 => (random % 17) as i32,
            _ => (random % 9) as i32 - 4,
        }
    }
}

/// Layout of a matrix in shared memory.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// Contiguous core matrices of 8 rows of 16 bytes. Those along K are adjacent.
    Plain,
    /// Rows of this number of bytes along K, swizzled, in groups of 8.
    Swizzled(usize),
    /// 128 bytes along M or N, swizzled, with 8 steps of K per group.
    MnMajor,
}

impl Layout {
    /// Offset of byte `byte` of element `k` (in bytes along K) in row `row` of a matrix of `rows` rows.
    fn place(self, rows: usize, row: usize, k: usize, element: usize) -> usize {
        match self {
            Layout::Plain => row / 8 * 512 + k / 16 * 128 + row % 8 * 16 + k % 16,
            Layout::Swizzled(width) => {
                // Bytes beyond the width start a second region.
                let at = k / width * rows * width + row * width + k % width;
                let line = at / 128;
                at ^ (line % (width / 16) * 16)
            }
            Layout::MnMajor => {
                let step = k / element;
                let at = step * 128 + row * element + k % element;
                at ^ (at / 128 % 8 * 16)
            }
        }
    }

    /// Upper fields of the descriptor, and bytes between slices.
    fn descriptor(self, rows: usize, element: usize) -> (u64, usize) {
        let fields =
            |leading: u64, stride: u64, swizzle: u64| (leading / 16) << 16 | (stride / 16) << 32 | swizzle << 62;
        match self {
            Layout::Plain => (fields(128, 512, 0), 256),
            Layout::Swizzled(width) => {
                let swizzle = match width {
                    128 => 1,
                    64 => 2,
                    _ => 3,
                };
                let step = if width == SLICE { rows * width } else { SLICE };
                (fields(16, 8 * width as u64, swizzle), step)
            }
            Layout::MnMajor => (fields(0, 1024, 1), SLICE / element * 128),
        }
    }

    fn bytes(self, rows: usize, element: usize) -> usize {
        match self {
            Layout::Swizzled(width) => rows * width * (2 * SLICE).div_ceil(width),
            Layout::MnMajor => 2 * SLICE / element * 128,
            Layout::Plain => rows * 2 * SLICE,
        }
    }
}

struct Product {
    name: &'static str,
    /// Types in the order of the instruction: D, A, B.
    types: &'static str,
    element: [Element; 2],
    n: usize,
    layout: [Layout; 2],
    a_in_registers: bool,
}

/// D = A₀·B₀, then D += −A₁·B₁ (for integers +A₁·B₁), with two slices along K.
fn product(case: &Product) -> Program {
    let Product { types, element, n, layout, a_in_registers, .. } = *case;
    let bytes = element.map(Element::bytes);
    let k = 2 * SLICE / bytes[0];
    let half = k / 2;
    let integer = matches!(element[0], Element::S8 | Element::U8);
    let f16_sums = types.starts_with("f16");
    let a: Vec<i32> = noise(71, M * k).into_iter().map(|word| element[0].value(word)).collect();
    let b: Vec<i32> = noise(72, n * k).into_iter().map(|word| element[1].value(word)).collect();

    // Both operands as in shared memory, each at a multiple of 1024.
    let a_bytes = layout[0].bytes(M, bytes[0]).next_multiple_of(1024);
    let mut tile = vec![0u8; a_bytes + layout[1].bytes(n, bytes[1])];
    let mut fill = |values: &[i32], rows: usize, which: usize, start: usize| {
        for (index, &value) in values.iter().enumerate() {
            let (row, at) = (index / k, index % k * bytes[which]);
            let code = element[which].code(value).to_le_bytes();
            for (byte, &code) in code[..bytes[which]].iter().enumerate() {
                tile[start + layout[which].place(rows, row, at + byte, bytes[which])] = code;
            }
        }
    };
    fill(&a, M, 0, 0);
    fill(&b, n, 1, a_bytes);

    let sign = if integer { 1 } else { -1 };
    let sum = |row: usize, column: usize| -> i32 {
        let dot = |at: std::ops::Range<usize>| at.map(|at| a[row * k + at] * b[column * k + at]).sum::<i32>();
        dot(0..half) + sign * dot(half..k)
    };
    let of_word = |value: i32| if integer { value as u32 } else { (value as f32).to_bits() };
    // "D fragment": register i of a thread is row 16·warp + lane/4 + 8·(i/2 mod 2), column 8·(i/4) + 2·(lane mod 4) + i mod 2.
    let registers = n / 2;
    let place = |thread: usize, i: usize| {
        let (warp, lane) = (thread / 32, thread % 32);
        (16 * warp + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
    };
    let mut want = Vec::new();
    for thread in 0..128 {
        let sums: Vec<i32> = (0..registers).map(|i| place(thread, i)).map(|(row, column)| sum(row, column)).collect();
        if f16_sums {
            let code = |value| small_integer(value, 5, 10);
            want.extend(sums.chunks(2).map(|pair| code(pair[0]) | code(pair[1]) << 16));
        } else {
            want.extend(sums.into_iter().map(of_word));
        }
    }
    let d_words = if f16_sums { registers / 2 } else { registers };

    // Fragments of A: each register holds 4 bytes of consecutive K; "A fragment" for 32 bytes along K.
    let fragments: Vec<u32> = (0..128)
        .flat_map(|thread| (0..2 * 4).map(move |register| (thread, register)))
        .map(|(thread, register)| {
            let (slice, register) = (register / 4, register % 4);
            let row = 16 * (thread / 32) + thread % 32 / 4 + register % 2 * 8;
            let first = slice * SLICE + register / 2 * 16 + thread % 4 * 4;
            let part = |byte: usize| {
                let code = element[0].code(a[row * k + (first + byte) / bytes[0]]);
                code.to_le_bytes()[(first + byte) % bytes[0]]
            };
            u32::from_le_bytes([part(0), part(1), part(2), part(3)])
        })
        .collect();

    let descriptor = |register: usize, which: usize, rows: usize, start: usize| {
        let (fields, _) = layout[which].descriptor(rows, bytes[which]);
        format!(
            "add.u32 %r5, %r2, {start};\nshr.u32 %r5, %r5, 4;\ncvt.u64.u32 %d10, %r5;\nor.b64 %d{register}, %d10, {fields};\n"
        )
    };
    let (a_step, b_step) = (layout[0].descriptor(M, bytes[0]).1 / 16, layout[1].descriptor(n, bytes[1]).1 / 16);
    let d_list: Vec<String> = (0..d_words).map(|i| format!("%r{}", 100 + i)).collect();
    let d_list = d_list.join(", ");
    let a_operand = |slice: usize| match a_in_registers {
        true => format!("{{%r{}, %r{}, %r{}, %r{}}}", 80 + 4 * slice, 81 + 4 * slice, 82 + 4 * slice, 83 + 4 * slice),
        false => format!("%d{}", 20 + slice),
    };
    let shape = SLICE / bytes[0];
    let wgmma = |slice: usize, accumulate: u32| {
        let scales = match (integer, slice) {
            (true, _) => "",
            (false, 0) => ", 1, 1",
            _ => ", -1, 1",
        };
        // Only the 16-bit types can be transposed.
        let transposed = |which: usize| u32::from(layout[which] == Layout::MnMajor);
        let transposes = match (bytes[0], integer, a_in_registers) {
            (2, false, true) => format!(", {}", transposed(1)),
            (2, false, false) => format!(", {}, {}", transposed(0), transposed(1)),
            _ => String::new(),
        };
        format!(
            "setp.ne.u32 %p3, {accumulate}, 0;\nwgmma.mma_async.sync.aligned.m64n{n}k{shape}.{types} {{{d_list}}}, {}, %d{}, \
             %p3{scales}{transposes};\n",
            a_operand(slice),
            22 + slice
        )
    };
    let clear: String = (0..d_words).map(|i| format!("mov.b32 %r{}, -1;\n", 100 + i)).collect();
    let loads: String = (0..8).map(|i| format!("ld.global.b32 %r{}, [%d31+{}];\n", 80 + i, 4 * i)).collect();
    let stores: String = (0..d_words).map(|i| format!("st.global.b32 [%d33+{}], %r{};\n", 4 * i, 100 + i)).collect();
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nld.param.u64 %d3, [fragments];\nmov.u32 %r2, tile;\n{}\
         mul.wide.u32 %d30, %r1, 32;\nadd.u64 %d31, %d3, %d30;\n{loads}{}{}add.u64 %d21, %d20, {a_step};\n\
         add.u64 %d23, %d22, {b_step};\n{clear}wgmma.fence.sync.aligned;\n{}{}\
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
         mul.wide.u32 %d32, %r1, {};\nadd.u64 %d33, %d1, %d32;\n{stores}",
        copy_in(tile.len(), 128),
        descriptor(20, 0, M, 0),
        descriptor(22, 1, n, a_bytes),
        wgmma(0, 0),
        wgmma(1, 1),
        4 * d_words
    );
    program(
        &format!("wgmma m64n{n}k{shape}.{types}, {}", case.name),
        module(
            HOPPER,
            ".shared .align 1024 .b8 tile[32768];",
            ".param .u64 out, .param .u64 src, .param .u64 fragments",
            &body,
        ),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}, {"pointer": "fragments"}],
               "buffers": {"out": poison(128 * d_words), "src": {"u32": words(&tile)}, "fragments": {"u32": fragments}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    use Layout::*;
    let (f16, bf16, tf32) = (Element::Float(2, 5, 10), Element::Float(2, 8, 7), Element::Float(4, 8, 10));
    let (e4m3, e5m2) = (Element::Float(1, 4, 3), Element::Float(1, 5, 2));
    let case = |name, types, element, n, layout, a_in_registers| {
        product(&Product { name, types, element, n, layout, a_in_registers })
    };
    vec![
        case("no swizzle", "f32.f16.f16", [f16; 2], 24, [Plain; 2], false),
        case("32-byte swizzle", "f32.f16.f16", [f16; 2], 16, [Swizzled(32); 2], false),
        case("64-byte swizzle", "f32.f16.f16", [f16; 2], 40, [Swizzled(64); 2], false),
        case("128-byte swizzle", "f32.f16.f16", [f16; 2], 128, [Swizzled(128); 2], false),
        case("A in registers", "f32.f16.f16", [f16; 2], 32, [Plain, Swizzled(128)], true),
        case("both transposed", "f32.f16.f16", [f16; 2], 64, [MnMajor; 2], false),
        case("B transposed", "f32.bf16.bf16", [bf16; 2], 64, [Swizzled(128), MnMajor], false),
        case("A in registers, B transposed", "f32.bf16.bf16", [bf16; 2], 64, [Plain, MnMajor], true),
        case("sums in f16", "f16.f16.f16", [f16; 2], 16, [Swizzled(128); 2], false),
        case("128-byte swizzle", "f32.tf32.tf32", [tf32; 2], 16, [Swizzled(128); 2], false),
        case("A in registers", "f32.tf32.tf32", [tf32; 2], 8, [Plain, Swizzled(64)], true),
        case("64-byte swizzle", "f32.e4m3.e5m2", [e4m3, e5m2], 16, [Swizzled(64); 2], false),
        case("A in registers", "f32.e5m2.e4m3", [e5m2, e4m3], 8, [Plain, Swizzled(128)], true),
        case("128-byte swizzle", "s32.s8.u8", [Element::S8, Element::U8], 32, [Swizzled(128); 2], false),
        case("A in registers", "s32.u8.s8", [Element::U8, Element::S8], 16, [Plain; 2], true),
    ]
}
