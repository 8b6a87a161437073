//! Products with a sparse A: `mma.sp`, `wgmma.mma_async.sp` and `tcgen05.mma.sp` (PTX ISA, "Sparse matrix storage" of
//! each). Two of four neighbors along K are stored, and two bits of metadata for each give its index. One of two 32-bit
//! numbers is stored, and its four bits are `0b0100` or `0b1110`. Every sum is exact.
//!
//! Metadata in registers: a row has four bits for each group of neighbors, lowest group first.
//!
//! - Rows of 16 bits: one thread of each four holds row groupID in the lower half of its register and row groupID + 8
//!   in the upper half.
//! - Rows of 32 bits: two threads. The first thread holds the first half of each row. For 8-bit elements, the first
//!   thread holds row groupID and the second holds row groupID + 8 (an H200).
//! - Rows of 64 bits: all four threads. The first two hold rows groupID and groupID + 8 of the first half.
//!
//! The selector gives the thread, or the two threads.
//!
//! Metadata in tensor memory: rows of 64 bits take two columns of their lane. Sixteen rows of 32 bits share one column,
//! which the selector gives: lane 8·h + r of them holds half h of row r, and above it half h of row r + 8.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, HOPPER, INIT_BARRIER, SYNCHRONISE, await_phase, clear_columns, copy_in, core_matrix, descriptor, module,
    noise, poison, program, small_integer, store_columns, with_tensor_memory, words,
};

/// An element type: name, bits, exponent bits and mantissa bits. An integer has neither exponent nor mantissa bits.
#[derive(Clone, Copy)]
struct Element(&'static str, usize, u32, u32);

const F16: Element = Element("f16", 16, 5, 10);
const BF16: Element = Element("bf16", 16, 8, 7);
const TF32: Element = Element("tf32", 32, 8, 10);
const E4M3: Element = Element("e4m3", 8, 4, 3);
const S8: Element = Element("s8", 8, 0, 0);

impl Element {
    fn is_integer(self) -> bool {
        self.2 == 0
    }

    fn code(self, value: i32) -> u32 {
        match self.1 {
            _ if self.is_integer() => value as u32 & 0xff,
            32 => small_integer(value, self.2, self.3) << 13,
            _ => small_integer(value, self.2, self.3),
        }
    }

    fn sums(self) -> &'static str {
        if self.is_integer() { "s32" } else { "f32" }
    }

    fn sum(self, value: i32) -> u32 {
        if self.is_integer() { value as u32 } else { (value as f32).to_bits() }
    }

    /// Packs adjacent elements into a register.
    fn pack(self, values: &[i32]) -> u32 {
        values.iter().enumerate().fold(0, |word, (n, &value)| word | self.code(value) << (n * self.1))
    }

    /// Neighbors per group.
    fn of_group(self) -> usize {
        if self.1 == 32 { 2 } else { 4 }
    }

    fn bytes(self, values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|&value| self.code(value).to_le_bytes()[..self.1 / 8].to_vec()).collect()
    }
}

/// A sparse matrix: rows of `k` elements, the stored numbers, and four bits for each group.
struct Sparse {
    element: Element,
    k: usize,
    all: Vec<i32>,
    there: Vec<i32>,
    metadata: Vec<u32>,
}

impl Sparse {
    fn new(element: Element, rows: usize, k: usize, seed: u32) -> Sparse {
        let of_group = element.of_group();
        let (mut all, mut there, mut metadata) = (vec![0; rows * k], Vec::new(), Vec::new());
        for (group, random) in noise(seed, rows * k / of_group).into_iter().enumerate() {
            let places = if of_group == 2 {
                let place = random as usize & 1;
                metadata.push([0b0100, 0b1110][place]);
                vec![place]
            } else {
                let [low, high] = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]][random as usize % 6];
                metadata.push((low | high << 2) as u32);
                vec![low, high]
            };
            for place in places {
                let value = (random >> (8 + 4 * place)) as i32 % 7 - 3;
                all[group * of_group + place] = value;
                there.push(value);
            }
        }
        Sparse { element, k, all, there, metadata }
    }

    fn row(&self, row: usize) -> &[i32] {
        &self.all[row * self.k..][..self.k]
    }

    /// `count` stored numbers of a row, starting at `first`.
    fn kept(&self, row: usize, first: usize, count: usize) -> &[i32] {
        &self.there[row * self.k / 2 + first..][..count]
    }

    fn groups(&self) -> usize {
        self.k / self.element.of_group()
    }

    /// Metadata of adjacent groups.
    fn bits(&self, row: usize, group: usize, count: usize) -> u32 {
        let bits = &self.metadata[row * self.groups() + group..][..count];
        bits.iter().enumerate().fold(0, |word, (n, bits)| word | bits << (4 * n))
    }

    /// A warp's metadata register, and its registers of the rows from `first`: the registers of `mma` with half of K.
    fn registers(&self, first: usize, lane: usize, selector: usize) -> Vec<u32> {
        let (group, thread) = (first + lane / 4, lane % 4);
        let both = |from| self.bits(group, from, 4) | self.bits(group + 8, from, 4) << 16;
        let metadata = match self.groups() {
            4 if thread == selector => both(0),
            8 if thread / 2 == selector && self.element.1 == 8 => self.bits(group + thread % 2 * 8, 0, 8),
            8 if thread / 2 == selector => both(thread % 2 * 4),
            16 => self.bits(group + thread % 2 * 8, thread / 2 * 8, 8),
            // The instruction does not read this lane's metadata.
            _ => 0xffff_ffff,
        };
        let per_word = 32 / self.element.1;
        let count = self.k * self.element.1 / 128;
        let a = (0..count).map(|register| {
            let at = (thread + register / 2 * 4) * per_word;
            self.element.pack(self.kept(group + register % 2 * 8, at, per_word))
        });
        [metadata].into_iter().chain(a).collect()
    }
}

fn small(seed: u32, count: usize) -> Vec<i32> {
    noise(seed, count).into_iter().map(|word| (word % 7) as i32 - 3).collect()
}

fn dot(a: &[i32], b: &[i32]) -> i32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn list(first: usize, count: usize) -> String {
    super::common::registers(first, count)
}

/// D = A·B + C in a warp's registers.
fn mma(ordered: &str, element: Element, k: usize, selector: usize) -> Program {
    let a = Sparse::new(element, 16, k, 171);
    let (b, c) = (small(172, 8 * k), small(173, 16 * 8));
    let per_word = 32 / element.1;
    let (of_a, of_b) = (k * element.1 / 128, k * element.1 / 128);
    let (mut fragments, mut want) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        fragments.extend(a.registers(0, lane, selector));
        for register in 0..of_b {
            let at = lane / 4 * k + (lane % 4 + register * 4) * per_word;
            fragments.push(element.pack(&b[at..at + per_word]));
        }
        for i in 0..4 {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            fragments.push(element.sum(c[row * 8 + column]));
            want.push(element.sum(dot(a.row(row), &b[column * k..][..k]) + c[row * 8 + column]));
        }
    }
    let count = 1 + of_a + of_b + 4;
    let loads: String = (0..count).map(|i| format!("ld.global.b32 %r{}, [%d5+{}];\n", 10 + i, 4 * i)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d7+{}], %r{};\n", 4 * i, 50 + i)).collect();
    let (Element(name, ..), sums) = (element, element.sums());
    let name = format!("mma.sp{ordered}.sync.aligned.m16n8k{k}.row.col.{sums}.{name}.{name}.{sums}");
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmul.wide.u32 %d4, %r1, {};\nadd.u64 %d5, %d2, %d4;\n{loads}\
         {name} {}, {}, {}, {}, %r10, {selector};\nmul.wide.u32 %d6, %r1, 16;\nadd.u64 %d7, %d1, %d6;\n{stores}",
        4 * count,
        list(50, 4),
        list(11, of_a),
        list(11 + of_a, of_b),
        list(11 + of_a + of_b, 4),
    );
    program(
        &format!("{name}, selector {selector}"),
        module(HOPPER, "", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [32, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": fragments}}}),
        &[("out", want)],
    )
}

/// D = A·B of a warpgroup, with B of 8 columns in shared memory.
fn wgmma(element: Element, selector: usize, a_in_registers: bool) -> Program {
    // A has rows of 32 bytes, B has rows of 64.
    let k = 512 / element.1;
    let a = Sparse::new(element, 64, k, 181);
    let b = small(182, 8 * k);
    let mut tile = vec![0; 64 * 32 + 8 * 64];
    for (at, byte) in element.bytes(&a.there).into_iter().enumerate() {
        tile[core_matrix(at / 32, at % 32)] = byte;
    }
    for (at, byte) in element.bytes(&b).into_iter().enumerate() {
        tile[64 * 32 + at % 64 / 16 * 128 + at / 64 * 16 + at % 16] = byte;
    }
    let (mut fragments, mut want) = (Vec::new(), Vec::new());
    for thread in 0..128 {
        let (warp, lane) = (thread / 32, thread % 32);
        fragments.extend(a.registers(16 * warp, lane, selector));
        for i in 0..4 {
            let (row, column) = (16 * warp + lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            want.push(element.sum(dot(a.row(row), &b[column * k..][..k])));
        }
    }
    let loads: String = (0..5).map(|i| format!("ld.global.b32 %r{}, [%d31+{}];\n", 80 + i, 4 * i)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.b32 [%d33+{}], %r{};\n", 4 * i, 100 + i)).collect();
    let matrix = |register: usize, start: usize, stride: u64| {
        let fields = 8u64 << 16 | (stride / 16) << 32;
        format!(
            "add.u32 %r33, %r2, {start};\nshr.u32 %r33, %r33, 4;\ncvt.u64.u32 %d{register}, %r33;\n\
             or.b64 %d{register}, %d{register}, {fields};\n"
        )
    };
    let Element(name, ..) = element;
    let constants = match (element.is_integer(), element.1, a_in_registers) {
        (true, ..) => "",
        (_, 16, true) => ", 1, 1, 0",
        (_, 16, false) => ", 1, 1, 0, 0",
        _ => ", 1, 1",
    };
    let name = format!("wgmma.mma_async.sp.sync.aligned.m64n8k{k}.{}.{name}.{name}", element.sums());
    let from = if a_in_registers { list(81, 4) } else { "%d20".into() };
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nld.param.u64 %d3, [fragments];\nmov.u32 %r2, tile;\n{}\
         mul.wide.u32 %d30, %r1, 20;\nadd.u64 %d31, %d3, %d30;\n{loads}{}{}setp.ne.u32 %p3, 0, 0;\n\
         wgmma.fence.sync.aligned;\n{name} {}, {from}, %d21, %r80, {selector}, %p3{constants};\n\
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
         mul.wide.u32 %d32, %r1, 16;\nadd.u64 %d33, %d1, %d32;\n{stores}",
        copy_in(tile.len(), 128),
        matrix(20, 0, 256),
        matrix(21, 64 * 32, 512),
        list(100, 4),
    );
    let place = if a_in_registers { "registers" } else { "shared memory" };
    program(
        &format!("{name}, A in {place}, selector {selector}"),
        module(
            HOPPER,
            ".shared .align 1024 .b8 tile[4096];",
            ".param .u64 out, .param .u64 src, .param .u64 fragments",
            &body,
        ),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}, {"pointer": "fragments"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": words(&tile)}, "fragments": {"u32": fragments}}}),
        &[("out", want)],
    )
}

/// D = A·B with 128 rows and 16 columns in tensor memory.
fn tcgen05(kind: &str, element: Element, type_code: u32, selector: usize) -> Program {
    const N: usize = 16;
    /// Column of the metadata.
    const METADATA: usize = 32;
    let k = 512 / element.1;
    let a = Sparse::new(element, 128, k, 191);
    let b = small(192, N * k);
    let mut tile = vec![0; 128 * 32 + N * 64];
    for (at, byte) in element.bytes(&a.there).into_iter().enumerate() {
        tile[core_matrix(at / 32, at % 32)] = byte;
    }
    for (at, byte) in element.bytes(&b).into_iter().enumerate() {
        let (row, at) = (at / 64, at % 64);
        tile[128 * 32 + row / 8 * 512 + at / 16 * 128 + row % 8 * 16 + at % 16] = byte;
    }
    let metadata: Vec<u32> = (0..128)
        .flat_map(|lane| {
            if a.groups() == 16 {
                return [a.bits(lane, 0, 8), a.bits(lane, 8, 8)];
            }
            let (row, half) = (lane / 16 * 16 + lane % 8, lane % 16 / 8);
            let mut columns = [0xffff_ffff; 2];
            columns[selector] = a.bits(row, 4 * half, 4) | a.bits(row + 8, 4 * half, 4) << 16;
            columns
        })
        .collect();
    let source = [words(&tile), metadata].concat();
    let instruction = selector as u32 | 1 << 2 | 1 << 4 | type_code << 7 | type_code << 10 | 2 << 17 | 8 << 24;
    let work = format!(
        "{}mul.wide.u32 %d30, %r1, 8;\nadd.u64 %d31, %d2, %d30;\nld.global.b32 %r80, [%d31+{}];\nld.global.b32 %r81, [%d31+{}];\n\
         add.u32 %r37, %r31, {METADATA};\ntcgen05.st.sync.aligned.32x32b.x2.b32 [%r37], {};\ntcgen05.wait::st.sync.aligned;\n\
         {SYNCHRONISE}@!%p1 bra ISSUED;\n{}{}add.u32 %r39, %r30, {METADATA};\nmov.b32 %r42, {instruction};\n\
         setp.ne.u32 %p3, 0, 0;\ntcgen05.mma.sp.cta_group::1.{kind} [%r30], %d10, %d11, [%r39], %r42, %p3;\n\
         tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];\n\
         ISSUED:\n{}tcgen05.fence::after_thread_sync;\n{}",
        clear_columns(0, N),
        tile.len(),
        tile.len() + 4,
        list(80, 2),
        descriptor("%d10", 0, 128, 256),
        descriptor("%d11", 128 * 32, 128, 512),
        await_phase(0, "WAIT"),
        store_columns(0, N)
    );
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{INIT_BARRIER}{}{}",
        copy_in(tile.len(), 128),
        with_tensor_memory(1, 64, &work)
    );
    let want: Vec<u32> = (0..128 * N).map(|at| element.sum(dot(a.row(at / N), &b[at % N * k..][..k]))).collect();
    program(
        &format!("tcgen05.mma.sp.{kind} of {}, selector {selector}", element.0),
        module(
            BLACKWELL,
            ".shared .align 128 .b8 tile[8192];\n.shared .align 8 .b64 bar;\n.shared .align 4 .b32 slot;",
            ".param .u64 out, .param .u64 src",
            &body,
        ),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

pub fn programs() -> Vec<Program> {
    const ORDERED: &str = "::ordered_metadata";
    vec![
        mma(ORDERED, F16, 16, 0),
        mma(ORDERED, F16, 16, 3),
        mma("", F16, 32, 1),
        mma(ORDERED, BF16, 32, 0),
        mma(ORDERED, TF32, 8, 2),
        mma(ORDERED, TF32, 16, 1),
        mma(ORDERED, S8, 32, 0),
        mma(ORDERED, S8, 32, 1),
        mma(ORDERED, S8, 64, 0),
        mma("", E4M3, 64, 0),
        wgmma(F16, 0, false),
        wgmma(BF16, 1, true),
        wgmma(TF32, 1, false),
        wgmma(E4M3, 0, true),
        wgmma(S8, 0, false),
        tcgen05("kind::f16", F16, 0, 0),
        tcgen05("kind::f16", BF16, 1, 1),
        tcgen05("kind::tf32", TF32, 2, 0),
        tcgen05("kind::f8f6f4", E4M3, 0, 0),
    ]
}
