//! `tcgen05.mma` (PTX ISA, "Tensorcore 5th Generation Instructions: tcgen05.mma"): D = A·B + D in tensor memory. Every
//! sum is exact in f32.
//!
//! - Operands are in core matrices without swizzle ("Canonical Layouts").
//! - Types and sizes are in the instruction descriptor ("Instruction descriptor").
//! - Scale factors take 32 rows per column and four bytes per cell, the same in each quarter of the lanes ("Scale
//!   Factor Layout").
//! - D has one row per lane for M = 128, and 16 rows in each quarter for M = 64 ("Data path layouts").

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, INIT_BARRIER, SYNCHRONISE, await_phase, clear_columns, copy_in, core_matrix, descriptor, module, noise,
    poison, program, registers, small_integer, store_columns, with_tensor_memory, words,
};

/// Bytes along K per instruction.
const ROW: usize = 32;
/// Values of e2m1 by code, doubled ("Alternate floating-point data formats": `s e e m`, bias 1).
const E2M1_DOUBLED: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// An element type: its code in the instruction descriptor, the bits per element in shared memory, and a function that
/// makes a code and its doubled value from random bits.
#[derive(Clone, Copy)]
pub struct Element {
    pub code: u32,
    pub bits: usize,
    pub draw: fn(u32) -> (u32, i32),
}

fn float(random: u32, exponent: u32, mantissa: u32) -> (u32, i32) {
    let value = (random % 9) as i32 - 4;
    (small_integer(value, exponent, mantissa), 2 * value)
}

pub const F16: Element = Element { code: 0, bits: 16, draw: |random| float(random, 5, 10) };
const BF16: Element = Element { code: 1, bits: 16, draw: |random| float(random, 8, 7) };
const TF32: Element = Element {
    code: 2,
    bits: 32,
    draw: |random| {
        let (code, value) = float(random, 8, 10);
        (code << 13, value)
    },
};
const E4M3: Element = Element { code: 0, bits: 8, draw: |random| float(random, 4, 3) };
const E5M2: Element = Element { code: 1, bits: 8, draw: |random| float(random, 5, 2) };
/// In the 8-bit kinds, sixteen 4-bit elements are at the start of 16 bytes ("Packing formats").
const E2M1_PADDED: Element =
    Element { code: 5, bits: 4, draw: |random| (random % 16, E2M1_DOUBLED[random as usize % 16]) };
const U8: Element = Element { code: 0, bits: 8, draw: |random| (random % 256, 2 * (random % 256) as i32) };
const S8: Element = Element { code: 1, bits: 8, draw: |random| (random % 256, 2 * i32::from(random as i8)) };
/// In the 4-bit kinds, elements are dense and have another code.
pub const E2M1: Element =
    Element { code: 1, bits: 4, draw: |random| (random % 16, E2M1_DOUBLED[random as usize % 16]) };

/// A kind of instruction.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// Elements along K.
    pub k: usize,
    pub a: Element,
    pub b: Element,
    /// D's code in the instruction descriptor: f16, f32 or s32.
    d: u32,
    pub scale: Option<Scale>,
}

/// Block scaling.
#[derive(Clone, Copy)]
pub struct Scale {
    /// Number of blocks along K. Each has a scale factor.
    pub blocks: usize,
    /// `true`: ue8m0. `false`: ue4m3.
    ue8m0: bool,
    /// Scale factor ids of A and B: the first byte of the cell that is used.
    pub ids: [usize; 2],
}

impl Scale {
    /// Makes a random scale factor from 1/2 to 2: its code, and its value as a multiple of 2⁻⁴.
    pub fn draw(self, random: u32) -> (u8, i64) {
        if self.ue8m0 {
            let exponent = random % 3;
            (126 + exponent as u8, 8 << exponent)
        } else {
            // ue4m3 with an exponent of −1 or 0: (8 + m)·2^(e − 7 − 3).
            let (e, m) = (6 + random % 2, random / 2 % 8);
            ((e << 3 | m) as u8, i64::from(8 + m) << (e - 6))
        }
    }
}

impl Kind {
    pub fn instruction_descriptor(&self, m: usize, n: usize) -> u32 {
        let types = self.a.code << 7 | self.b.code << 10 | (n as u32 >> 3) << 17;
        match self.scale {
            None => self.d << 4 | types | (m as u32 >> 4) << 24,
            Some(scale) => {
                let [a, b] = scale.ids.map(|id| id as u32);
                b << 4 | types | u32::from(scale.ue8m0) << 23 | (m as u32 >> 7) << 27 | a << 29
            }
        }
    }

    /// Codes in rows of 32 bytes, and doubled values.
    pub fn matrix(&self, element: Element, rows: usize, seed: u32) -> (Vec<u8>, Vec<i32>) {
        let mut bytes = vec![0; rows * ROW];
        let mut values = Vec::new();
        // 32 elements of 4 bits in 32 bytes are padded. 64 elements are dense.
        let padded = element.bits == 4 && self.k == ROW;
        for (index, random) in noise(seed, rows * self.k).into_iter().enumerate() {
            let (row, k) = (index / self.k, index % self.k);
            let (code, value) = (element.draw)(random);
            let bit = if padded { k / 16 * 128 + k % 16 * 4 } else { k * element.bits };
            let at = row * ROW + bit / 8;
            for (byte, part) in (code << (bit % 8)).to_le_bytes()[..element.bits.div_ceil(8)].iter().enumerate() {
                bytes[at + byte] |= part;
            }
            values.push(value);
        }
        (bytes, values)
    }
}

/// Scale factors of rows: 32 rows of 16 bytes as `tcgen05.cp.32x128b.warpx4` reads them, and values by row and block.
pub fn scale_factors(scale: Scale, rows: usize, id: usize, seed: u32) -> (Vec<u8>, Vec<i64>) {
    let columns = rows.div_ceil(128) * 4;
    let mut bytes = vec![0; 32 * 4 * columns];
    let mut values = Vec::new();
    for (index, random) in noise(seed, rows * scale.blocks).into_iter().enumerate() {
        let (row, block) = (index / scale.blocks, index % scale.blocks);
        let (code, value) = scale.draw(random);
        bytes[row / 128 * 512 + row % 32 * 16 + row / 32 % 4 * 4 + id + block] = code;
        values.push(value);
    }
    (bytes, values)
}

/// Matrices of two accumulating instructions, as in shared memory: A₀ A₁ B₀ B₁, then scale factors in the same order.
pub struct Operands {
    pub kind: Kind,
    pub rows: [usize; 2],
    pub bytes: Vec<u8>,
    values: [[Vec<i32>; 2]; 2],
    scales: [[Vec<i64>; 2]; 2],
}

impl Operands {
    pub fn new(kind: Kind, m: usize, n: usize, seed: u32) -> Operands {
        let (mut bytes, mut scale_bytes) = (Vec::new(), Vec::new());
        let mut values = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
        let mut scales = values.clone().map(|side| side.map(|_| Vec::new()));
        for (side, (element, rows)) in [(kind.a, m), (kind.b, n)].into_iter().enumerate() {
            for slice in 0..2 {
                let seed = seed + 10 * side as u32 + slice as u32;
                let (codes, numbers) = kind.matrix(element, rows, seed);
                let start = bytes.len();
                bytes.resize(start + rows * ROW, 0);
                for (at, code) in codes.into_iter().enumerate() {
                    bytes[start + core_matrix(at / ROW, at % ROW)] = code;
                }
                values[side][slice] = numbers;
                if let Some(scale) = kind.scale {
                    let (codes, numbers) = scale_factors(scale, rows, scale.ids[side], seed + 100);
                    scale_bytes.extend(codes);
                    scales[side][slice] = numbers;
                }
            }
        }
        bytes.extend(scale_bytes);
        Operands { kind, rows: [m, n], bytes, values, scales }
    }

    /// Start of a matrix.
    pub fn matrix(&self, side: usize, slice: usize) -> usize {
        let [m, n] = self.rows;
        [0, 2 * m * ROW][side] + slice * [m, n][side] * ROW
    }

    /// Start of a block of 512 bytes of scale factors.
    pub fn scale(&self, side: usize, slice: usize) -> usize {
        let [m, n] = self.rows;
        2 * (m + n) * ROW + (side * 2 + slice) * 512
    }

    /// D's bits after both instructions. The second instruction may negate A.
    pub fn sum(&self, row: usize, column: usize) -> u32 {
        let k = self.kind.k;
        let mut total = 0i64;
        let mut unit = 4;
        for slice in 0..2 {
            for at in 0..k {
                let product = self.values[0][slice][row * k + at] * self.values[1][slice][column * k + at];
                let scale = match self.kind.scale {
                    None => 1,
                    Some(Scale { blocks, .. }) => {
                        unit = 4 * 16 * 16;
                        let block = at * blocks / k;
                        self.scales[0][slice][row * blocks + block] * self.scales[1][slice][column * blocks + block]
                    }
                };
                total += i64::from(product) * scale;
            }
        }
        match self.kind.d {
            S32 => (total / 4) as u32,
            0 => small_integer((total / 4) as i32, 5, 10),
            _ => {
                let single = total as f32 / unit as f32;
                assert_eq!(f64::from(single) * f64::from(unit), total as f64, "an exact sum");
                single.to_bits()
            }
        }
    }
}

/// D's code for 32-bit integers.
const S32: u32 = 2;

/// Columns of the accumulators, of A in tensor memory, and of the first scale factors.
const D: usize = 0;
const A: usize = 32;
pub const SCALES: usize = 64;

fn product(kind: Kind, m: usize, n: usize, a_in_tensor_memory: bool) -> Program {
    form(kind, m, n, a_in_tensor_memory, "mma")
}

/// `mma.ws`. With 64 rows, the upper half of N is in lanes 64 to 127. With 32 rows, each quarter of N is in a quarter
/// of the lanes.
fn weight_stationary(kind: Kind, m: usize, n: usize) -> Program {
    form(kind, m, n, false, "mma.ws")
}

fn form(kind: Kind, m: usize, n: usize, a_in_tensor_memory: bool, mma: &str) -> Program {
    let split = if mma == "mma.ws" { 128 / m } else { 1 };
    let operands = Operands::new(kind, m, n, 121);
    let mut setup = String::new();
    if a_in_tensor_memory {
        // Each thread stores its row of both slices of A, with eight columns each.
        let loads: String = (0..16)
            .map(|word| {
                let at = operands.matrix(0, word / 8) + core_matrix(0, word % 8 * 4);
                format!("ld.shared.b32 %r{}, [%r36+{at}];\n", 200 + word)
            })
            .collect();
        // Position of the row in its core matrices.
        setup += &format!(
            "shr.u32 %r34, %r1, 3;\nshl.b32 %r34, %r34, 8;\nand.b32 %r35, %r1, 7;\nshl.b32 %r35, %r35, 4;\n\
             add.u32 %r36, %r34, %r35;\nadd.u32 %r36, %r36, %r2;\n{loads}add.u32 %r37, %r31, {A};\n\
             tcgen05.st.sync.aligned.32x32b.x16.b32 [%r37], {};\ntcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}",
            registers(200, 16)
        );
    }
    let mut issue = String::new();
    if kind.scale.is_some() {
        for at in 0..4 {
            let column = SCALES + 4 * at;
            issue += &descriptor("%d12", operands.scale(at / 2, at % 2), 128, 128);
            issue += &format!("add.u32 %r38, %r30, {column};\ntcgen05.cp.cta_group::1.32x128b.warpx4 [%r38], %d12;\n");
        }
    }
    for slice in 0..2 {
        let a = if a_in_tensor_memory { "[%r39]" } else { "%d10" };
        let scales = match kind.scale {
            None => String::new(),
            Some(_) => {
                let [a, b] = [0, 1].map(|side| SCALES + 4 * (2 * side + slice));
                issue += &format!("add.u32 %r40, %r30, {a};\nadd.u32 %r41, %r30, {b};\n");
                "[%r40], [%r41], ".into()
            }
        };
        issue += &descriptor("%d10", operands.matrix(0, slice), 128, 256);
        issue += &descriptor("%d11", operands.matrix(1, slice), 128, 256);
        issue += &format!(
            "add.u32 %r39, %r30, {};\nmov.b32 %r42, {};\nsetp.ne.u32 %p3, {slice}, 0;\n\
             tcgen05.{mma}.cta_group::1.{} [%r30], {a}, %d11, %r42, {scales}%p3;\n",
            A + 8 * slice,
            kind.instruction_descriptor(m, n),
            kind.name
        );
    }
    let columns = n.next_power_of_two() / split;
    let work = format!(
        "{}{setup}@!%p1 bra ISSUED;\n{issue}tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];\n\
         ISSUED:\n{}tcgen05.fence::after_thread_sync;\n{}",
        clear_columns(D, columns),
        await_phase(0, "WAIT"),
        store_columns(D, columns)
    );
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{INIT_BARRIER}{}{}",
        copy_in(operands.bytes.len(), 128),
        with_tensor_memory(1, 128, &work)
    );
    let mut want = vec![0; 128 * columns];
    for row in 0..m {
        let lane = if m == 64 && split == 1 { row / 16 * 32 + row % 16 } else { row };
        for column in 0..n {
            let part = if split == 1 { 0 } else { column / columns };
            want[(lane + part * m) * columns + column % columns] = operands.sum(row, column);
        }
    }
    let where_a = if a_in_tensor_memory { ", A in tensor memory" } else { "" };
    program(
        &format!("tcgen05.{mma}.{} {m}x{n}{where_a}", kind.name),
        module(
            // The family target sm_100f has no integer kind.
            if kind.d == S32 { "sm_100a" } else { BLACKWELL },
            ".shared .align 128 .b8 tile[16384];\n.shared .align 8 .b64 bar;\n.shared .align 4 .b32 slot;",
            ".param .u64 out, .param .u64 src",
            &body,
        ),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": words(&operands.bytes)}}}),
        &[("out", want)],
    )
}

/// NVFP4: blocks of 16 with ue4m3 scale factors.
pub const NVFP4: Kind = Kind {
    name: "kind::mxf4nvf4.block_scale.block16",
    k: 64,
    a: E2M1,
    b: E2M1,
    d: 1,
    scale: Some(Scale { blocks: 4, ue8m0: false, ids: [0, 0] }),
};
pub const HALVES: Kind = Kind { name: "kind::f16", k: 16, a: F16, b: F16, d: 1, scale: None };

pub fn programs() -> Vec<Program> {
    let blocks = |blocks, ids| Some(Scale { blocks, ue8m0: true, ids });
    let kind = |name, k, a, b, d| Kind { name, k, a, b, d, scale: None };
    vec![
        product(HALVES, 128, 16, false),
        product(HALVES, 64, 24, false),
        product(HALVES, 128, 32, true),
        product(kind("kind::f16", 16, BF16, BF16, 1), 128, 32, false),
        product(kind("kind::f16", 16, F16, F16, 0), 128, 16, false),
        product(kind("kind::tf32", 8, TF32, TF32, 1), 128, 16, false),
        product(kind("kind::f8f6f4", 32, E4M3, E5M2, 1), 128, 16, false),
        product(kind("kind::f8f6f4", 32, E2M1_PADDED, E4M3, 1), 128, 32, false),
        product(kind("kind::i8", 32, U8, S8, S32), 128, 16, false),
        product(kind("kind::i8", 32, S8, S8, S32), 64, 16, false),
        product(
            Kind { scale: blocks(1, [2, 1]), ..kind("kind::mxf8f6f4.block_scale", 32, E4M3, E2M1_PADDED, 1) },
            128,
            32,
            false,
        ),
        product(Kind { scale: blocks(2, [2, 0]), ..kind("kind::mxf4.block_scale", 64, E2M1, E2M1, 1) }, 128, 16, false),
        product(
            Kind { scale: blocks(2, [0, 2]), ..kind("kind::mxf4nvf4.block_scale.block32", 64, E2M1, E2M1, 1) },
            128,
            32,
            false,
        ),
        product(
            Kind { scale: blocks(4, [0, 0]), ..kind("kind::mxf4nvf4.block_scale.block16", 64, E2M1, E2M1, 1) },
            128,
            16,
            false,
        ),
        product(NVFP4, 128, 16, false),
        product(NVFP4, 128, 24, false),
        weight_stationary(HALVES, 32, 64),
        weight_stationary(HALVES, 64, 64),
        weight_stationary(kind("kind::f8f6f4", 32, E4M3, E5M2, 1), 128, 64),
    ]
}
