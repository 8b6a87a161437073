//! `tcgen05.ld` and `tcgen05.st` (PTX ISA, "Tensor Memory Load and Store"): the cell of each register of each thread,
//! for every shape. The manual draws the cells. CUTLASS defines the drawings as layouts
//! (`Copy_Traits<SM100_TMEM_LOAD_…>`), whose strides are used here.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, SYNCHRONISE, module, noise, poison, program, registers, store_columns, with_tensor_memory,
};

const COLUMNS: usize = 32;

struct Shape {
    name: &'static str,
    count: usize,
    registers: usize,
    /// Operand after the address.
    split: &'static str,
    /// Lane and column of a thread's register.
    cell: fn(usize, usize) -> (usize, usize),
}

const SHAPES: [Shape; 5] = [
    Shape { name: "32x32b", count: 32, registers: 32, split: "", cell: |thread, register| (thread, register) },
    Shape {
        name: "16x64b",
        count: 16,
        registers: 16,
        split: "",
        cell: |thread, register| (thread / 4 + thread % 2 * 8, thread / 2 % 2 + register * 2),
    },
    Shape {
        name: "16x128b",
        count: 8,
        registers: 16,
        split: "",
        cell: |thread, register| (thread / 4 + register % 2 * 8, thread % 4 + register / 2 * 4),
    },
    Shape {
        name: "16x256b",
        count: 4,
        registers: 16,
        split: "",
        cell: |thread, register| (thread / 4 + register / 2 % 2 * 8, thread % 4 * 2 + register % 2 + register / 4 * 8),
    },
    Shape {
        name: "16x32bx2",
        count: 16,
        registers: 16,
        split: ", 16",
        cell: |thread, register| (thread % 16, register + thread / 16 * 16),
    },
];

/// PTX that loads registers, starting at `%r100`, from the thread's place in the buffer at `%d2`.
fn load_registers(count: usize) -> String {
    let loads: String = (0..count).map(|at| format!("ld.global.b32 %r{}, [%d43+{}];\n", 100 + at, 4 * at)).collect();
    format!("mul.wide.u32 %d42, %r1, {};\nadd.u64 %d43, %d2, %d42;\n{loads}", 4 * count)
}

fn launched(name: &str, body: &str, source: Vec<u32>, want: Vec<u32>) -> Program {
    let body =
        format!("ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\n{}", with_tensor_memory(1, COLUMNS as u32, body));
    program(
        name,
        module(BLACKWELL, ".shared .align 4 .b32 slot;", ".param .u64 out, .param .u64 src", &body),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": source}}}),
        &[("out", want)],
    )
}

/// Cells are written lane by lane and read in the shape. If the shape has 16 lanes, both halves of a warp's lanes are
/// read.
fn load(shape: &Shape) -> Program {
    let Shape { name, count, registers: per_thread, split, cell } = *shape;
    let cells = noise(101, 128 * COLUMNS);
    let halves = if name == "32x32b" { 1 } else { 2 };
    let mut body = format!(
        "{}tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31], {};\ntcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}\
         mul.wide.u32 %d44, %r1, {};\nadd.u64 %d45, %d1, %d44;\n",
        load_registers(COLUMNS),
        registers(100, COLUMNS),
        4 * halves * per_thread
    );
    for half in 0..halves {
        let list = registers(150, per_thread);
        body += &format!(
            "add.u32 %r32, %r31, {};\ntcgen05.ld.sync.aligned.{name}.x{count}.b32 {list}, [%r32]{split};\n\
             tcgen05.wait::ld.sync.aligned;\n",
            half << 20
        );
        for register in 0..per_thread {
            body += &format!("st.global.b32 [%d45+{}], %r{};\n", 4 * (half * per_thread + register), 150 + register);
        }
    }
    let mut want = Vec::new();
    for thread in 0..128 {
        for half in 0..halves {
            for register in 0..per_thread {
                let (lane, column) = cell(thread % 32, register);
                want.push(cells[(thread / 32 * 32 + half * 16 + lane) * COLUMNS + column]);
            }
        }
    }
    launched(&format!("tcgen05.ld.{name}.x{count}"), &body, cells, want)
}

/// Cells are written in the shape and read lane by lane.
fn store(shape: &Shape) -> Program {
    let Shape { name, count, registers: per_thread, split, cell } = *shape;
    let halves = if name == "32x32b" { 1 } else { 2 };
    let source = noise(102, halves * 128 * per_thread);
    let mut body = load_registers(halves * per_thread);
    for half in 0..halves {
        let list = registers(100 + half * per_thread, per_thread);
        body += &format!(
            "add.u32 %r32, %r31, {};\ntcgen05.st.sync.aligned.{name}.x{count}.b32 [%r32]{split}, {list};\n",
            half << 20
        );
    }
    body += &format!("tcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}{}", store_columns(0, COLUMNS));
    let mut want = vec![0; 128 * COLUMNS];
    for thread in 0..128 {
        for half in 0..halves {
            for register in 0..per_thread {
                let (lane, column) = cell(thread % 32, register);
                want[(thread / 32 * 32 + half * 16 + lane) * COLUMNS + column] =
                    source[(thread * halves + half) * per_thread + register];
            }
        }
    }
    launched(&format!("tcgen05.st.{name}.x{count}"), &body, source, want)
}

/// `.pack::16b`: "packs two 16-bit elements from adjacent columns into a single 32-bit element"; `.unpack::16b` the reverse.
fn packed() -> [Program; 2] {
    let words = noise(103, 128 * COLUMNS / 2);
    let unpack = format!(
        "{}tcgen05.st.sync.aligned.32x32b.x16.unpack::16b.b32 [%r31], {};\ntcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}{}",
        load_registers(COLUMNS / 2),
        registers(100, COLUMNS / 2),
        store_columns(0, COLUMNS)
    );
    let halves = words.iter().flat_map(|word| [word & 0xffff, word >> 16]).collect::<Vec<_>>();
    let list = registers(150, COLUMNS / 2);
    let mut pack = format!(
        "{}tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31], {};\ntcgen05.wait::st.sync.aligned;\n{SYNCHRONISE}\
         tcgen05.ld.sync.aligned.32x32b.x16.pack::16b.b32 {list}, [%r31];\ntcgen05.wait::ld.sync.aligned;\n\
         mul.wide.u32 %d44, %r1, {};\nadd.u64 %d45, %d1, %d44;\n",
        load_registers(COLUMNS),
        registers(100, COLUMNS),
        2 * COLUMNS
    );
    for register in 0..COLUMNS / 2 {
        pack += &format!("st.global.b32 [%d45+{}], %r{};\n", 4 * register, 150 + register);
    }
    [
        launched("tcgen05.st.unpack::16b", &unpack, words.clone(), halves.clone()),
        launched("tcgen05.ld.pack::16b", &pack, halves, words),
    ]
}

pub fn programs() -> Vec<Program> {
    SHAPES.iter().map(load).chain(SHAPES.iter().map(store)).chain(packed()).collect()
}
