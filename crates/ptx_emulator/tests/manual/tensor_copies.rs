//! Tensor copies (PTX ISA, "Data Movement: cp.async.bulk.tensor" and "Tensors"): a box of a tensor of one to five
//! dimensions, with the innermost dimension contiguous in shared memory.
//!
//! - "Out-of-boundary access": elements outside the tensor are read as zero and not written.
//! - "Traversal stride": a box of size `b` in a dimension with stride `s` has ⌈b / s⌉ elements.
//! - "Swizzling modes": pieces of a 128-byte line are permuted by the number of the line.

use ptx_emulator::program::Program;
use serde_json::{Value, json};

use super::common::{
    BLACKWELL, HOPPER, INIT_BARRIER, await_phase, copy_in, copy_out, module, noise, poison, program, words,
};

/// A tensor in global memory, and a box of it.
#[derive(Clone)]
pub struct Tensor {
    /// Name and bytes of the element type.
    pub element: (&'static str, usize),
    /// All lists are innermost first. Strides are in bytes and omit the innermost dimension.
    pub dims: Vec<u64>,
    pub strides: Vec<u64>,
    pub shape: Vec<u64>,
    pub element_strides: Vec<u64>,
    pub at: Vec<i64>,
    pub swizzle: &'static str,
}

/// Swizzled offset of a byte, by the manual's tables, in a tile that starts at a multiple of 1024 bytes.
fn swizzled(mode: &str, byte: usize) -> usize {
    let line = byte / 128;
    match mode {
        "none" => byte,
        "32B" => byte ^ (line % 2 * 16),
        "64B" => byte ^ (line % 4 * 16),
        "128B" => byte ^ (line % 8 * 16),
        "128B_atom_32B" => byte ^ (line % 4 * 32),
        "128B_atom_64B" => byte ^ (line % 2 * 64),
        other => panic!("{other}"),
    }
}

impl Tensor {
    fn new(element: (&'static str, usize), dims: &[u64], shape: &[u64], at: &[i64], swizzle: &'static str) -> Tensor {
        let mut strides = Vec::new();
        let mut stride = element.1 as u64;
        for &dim in &dims[..dims.len() - 1] {
            // Rows are padded to a multiple of 16 bytes, as a tensor map requires.
            stride = (stride * dim).next_multiple_of(16);
            strides.push(stride);
        }
        let element_strides = vec![1; dims.len()];
        Tensor { element, dims: dims.into(), strides, shape: shape.into(), element_strides, at: at.into(), swizzle }
    }

    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> usize {
        let row = self.dims[0] * self.element.1 as u64;
        (self.strides.last().map_or(row, |stride| stride * self.dims[self.rank() - 1]) as usize).next_multiple_of(4)
    }

    /// Elements of the box in each dimension.
    fn counts(&self) -> Vec<u64> {
        let strided = |dim: usize| self.shape[dim].div_ceil(if dim == 0 { 1 } else { self.element_strides[dim] });
        (0..self.rank()).map(strided).collect()
    }

    /// Bytes of the box.
    pub fn tile_bytes(&self) -> usize {
        self.counts().iter().product::<u64>() as usize * self.element.1
    }

    /// For each element of the box: its first byte in the tile, and its first byte in the tensor if it is inside.
    pub fn elements(&self) -> Vec<(usize, Option<usize>)> {
        let counts = self.counts();
        let place = |number: u64| {
            let mut rest = number;
            let mut from = Some(0);
            for (dim, &count) in counts.iter().enumerate() {
                let step = if dim == 0 { 1 } else { self.element_strides[dim] };
                let coordinate = self.at[dim] + (rest % count * step) as i64;
                rest /= count;
                let stride = if dim == 0 { self.element.1 as u64 } else { self.strides[dim - 1] };
                let inside = (0..self.dims[dim] as i64).contains(&coordinate);
                from = from.filter(|_| inside).map(|from| from + (coordinate as u64 * stride) as usize);
            }
            (swizzled(self.swizzle, number as usize * self.element.1), from)
        };
        (0..counts.iter().product()).map(place).collect()
    }

    /// Launch argument for the tensor map.
    pub fn map(&self, buffer: &str) -> Value {
        json!({"tensor_map": {"buffer": buffer, "type": self.element.0, "dims": self.dims, "strides": self.strides,
                              "box": self.shape, "element_strides": self.element_strides, "swizzle": self.swizzle}})
    }

    /// PTX that sets coordinates in registers from `%r40`, and the operand that names them and the map in `%d3`.
    pub fn operand(&self) -> (String, String) {
        let moves = self.at.iter().enumerate().map(|(dim, at)| format!("mov.s32 %r{}, {at};\n", 40 + dim));
        let names: Vec<String> = (0..self.rank()).map(|dim| format!("%r{}", 40 + dim)).collect();
        (moves.collect(), format!("[%d3, {{{}}}]", names.join(", ")))
    }

    pub fn name(&self) -> String {
        let Tensor { element, shape, at, swizzle, .. } = self;
        format!("{}d {} {shape:?} at {at:?}, swizzle {swizzle}", self.rank(), element.0)
    }

    fn target(&self) -> &'static str {
        if self.swizzle.contains("atom") { BLACKWELL } else { HOPPER }
    }
}

/// Declarations of the tile and the mbarrier.
pub const DECLARATIONS: &str = ".shared .align 1024 .b8 tile[16384];\n.shared .align 8 .b64 bar;";
/// PTX that computes the map's address in `%d3`.
pub const MAP_ADDRESS: &str = "mov.b64 %d4, map;\ncvta.param.u64 %d3, %d4;\n";

fn load(tensor: &Tensor) -> Program {
    let source = noise(41, tensor.bytes() / 4);
    let bytes: Vec<u8> = source.iter().flat_map(|word| word.to_le_bytes()).collect();
    let tile = tensor.tile_bytes();
    let (moves, operand) = tensor.operand();
    let rank = tensor.rank();
    let body = format!(
        "ld.param.u64 %d1, [out];\nmov.u32 %r2, tile;\n{MAP_ADDRESS}{moves}{INIT_BARRIER}\
         @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {tile};\n\
         @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], {operand}, \
         [%r3];\n{}{}",
        await_phase(0, "WAIT"),
        copy_out(tile, 128)
    );
    let mut want = vec![0; tile];
    for (to, from) in tensor.elements() {
        let from = from.map_or(vec![0; tensor.element.1], |from| bytes[from..from + tensor.element.1].to_vec());
        want[to..to + tensor.element.1].copy_from_slice(&from);
    }
    program(
        &format!("cp.async.bulk.tensor to shared memory, {}", tensor.name()),
        module(tensor.target(), DECLARATIONS, ".param .u64 out, .param .align 64 .b8 map[128]", &body),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, tensor.map("src")],
               "buffers": {"out": poison(tile / 4), "src": {"u32": source}}}),
        &[("out", words(&want))],
    )
}

/// Store or reduction of a tile. `combine` combines an old element with an element of the tile.
pub fn store(
    tensor: &Tensor,
    instruction: &str,
    source: Vec<u32>,
    old: Vec<u32>,
    combine: impl Fn(&[u8], &[u8]) -> Vec<u8>,
) -> Program {
    let (tile, size) = (tensor.tile_bytes(), tensor.element.1);
    let bytes = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    let (from, mut want) = (bytes(&source), bytes(&old));
    // Rows end at a multiple of 16 bytes, as on an H200.
    let row = tensor.dims[0].next_multiple_of(16 / size as u64);
    let written = Tensor { dims: [&[row], &tensor.dims[1..]].concat(), ..tensor.clone() };
    for (at, to) in written.elements() {
        if let Some(to) = to {
            let new = combine(&want[to..to + size], &from[at..at + size]);
            want[to..to + size].copy_from_slice(&new);
        }
    }
    let (moves, operand) = tensor.operand();
    let body = format!(
        "ld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{MAP_ADDRESS}{moves}{}setp.eq.u32 %p1, %r1, 0;\n@!%p1 bra DONE;\n\
         {instruction} {operand}, [%r2];\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:\n",
        copy_in(tile, 128)
    );
    program(
        &format!("{instruction}, {}", tensor.name()),
        module(tensor.target(), DECLARATIONS, ".param .align 64 .b8 map[128], .param .u64 src", &body),
        json!({"block": [128, 1, 1], "args": [tensor.map("out"), {"pointer": "src"}],
               "buffers": {"out": {"u32": old}, "src": {"u32": source}}}),
        &[("out", words(&want))],
    )
}

/// "tile::gather4", "tile::scatter4": four rows of a 2D tensor are contiguous in shared memory. A row outside the
/// tensor is read as zeros and not written.
fn four_rows(swizzle: &'static str, column: i64, rows: [i64; 4]) -> [Program; 2] {
    let at = [&[column], &rows[..]].concat();
    // As a box: one row. Its coordinates are the column and all four rows.
    let tensor = Tensor { at, ..Tensor::new(("u32", 4), &[40, 12], &[16, 1], &[], swizzle) };
    let (width, tile) = (tensor.shape[0] as usize, 4 * 16 * 4);
    let places = (0..4 * width).map(|number| {
        let (x, y) = (column + (number % width) as i64, rows[number / width]);
        let inside = (0..40).contains(&x) && (0..12).contains(&y);
        (swizzled(swizzle, number * 4) / 4, inside.then(|| y as usize * tensor.strides[0] as usize / 4 + x as usize))
    });
    let places: Vec<(usize, Option<usize>)> = places.collect();
    let (source, old) = (noise(43, tensor.bytes() / 4), vec![u32::MAX; tensor.bytes() / 4]);
    let (mut gathered, mut scattered) = (vec![0; tile / 4], old.clone());
    for &(to, from) in &places {
        gathered[to] = from.map_or(0, |from| source[from]);
        if let Some(from) = from {
            scattered[from] = source[to];
        }
    }
    let moves: String = tensor.at.iter().enumerate().map(|(n, at)| format!("mov.s32 %r{}, {at};\n", 40 + n)).collect();
    let operand = "[%d3, {%r40, %r41, %r42, %r43, %r44}]";
    let gather = format!(
        "ld.param.u64 %d1, [out];\nmov.u32 %r2, tile;\n{MAP_ADDRESS}{moves}{INIT_BARRIER}\
         @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {tile};\n\
         @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], {operand}, \
         [%r3];\n{}{}",
        await_phase(0, "WAIT"),
        copy_out(tile, 128)
    );
    let scatter = format!(
        "ld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{MAP_ADDRESS}{moves}{}setp.eq.u32 %p1, %r1, 0;\n@!%p1 bra DONE;\n\
         cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group {operand}, [%r2];\n\
         cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:\n",
        copy_in(tile, 128)
    );
    let name = |of: &str| format!("{of}, column {column}, rows {rows:?}, swizzle {swizzle}");
    [
        program(
            &name("tile::gather4"),
            module(BLACKWELL, DECLARATIONS, ".param .u64 out, .param .align 64 .b8 map[128]", &gather),
            json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, tensor.map("src")],
                   "buffers": {"out": poison(tile / 4), "src": {"u32": source}}}),
            &[("out", gathered)],
        ),
        program(
            &name("tile::scatter4"),
            module(BLACKWELL, DECLARATIONS, ".param .align 64 .b8 map[128], .param .u64 src", &scatter),
            json!({"block": [128, 1, 1], "args": [tensor.map("out"), {"pointer": "src"}],
                   "buffers": {"out": {"u32": old}, "src": {"u32": source[..tile / 4]}}}),
            &[("out", scattered)],
        ),
    ]
}

pub fn programs() -> Vec<Program> {
    let (bytes, halves, singles) = (("u8", 1), ("f16", 2), ("u32", 4));
    let mut tensors = vec![
        Tensor::new(singles, &[100], &[64], &[-4], "none"),
        Tensor::new(singles, &[100], &[64], &[72], "none"),
        Tensor::new(halves, &[80, 24], &[64, 16], &[8, -2], "128B"),
        Tensor::new(halves, &[80, 24], &[64, 16], &[32, 15], "128B"),
        Tensor::new(bytes, &[96, 40], &[64, 24], &[-16, 20], "64B"),
        Tensor::new(singles, &[20, 40], &[8, 16], &[16, -5], "32B"),
        Tensor::new(halves, &[100, 7, 8], &[64, 4, 3], &[-8, 2, 6], "128B"),
        Tensor::new(halves, &[33, 7, 8], &[16, 4, 8], &[24, 4, 1], "32B"),
        Tensor::new(singles, &[12, 5, 4, 3], &[8, 3, 2, 2], &[8, -1, 3, 2], "none"),
        Tensor::new(singles, &[20, 5, 4, 3], &[16, 4, 2, 2], &[-4, 2, 1, 0], "64B"),
        Tensor::new(bytes, &[40, 3, 4, 3, 3], &[16, 2, 3, 2, 2], &[32, 2, -1, 1, 2], "none"),
        Tensor::new(halves, &[66, 3, 4, 3, 3], &[64, 2, 2, 2, 2], &[8, -1, 3, 0, 2], "128B"),
    ];
    let mut strided = Tensor::new(singles, &[16, 30, 9], &[8, 9, 4], &[4, 5, 0], "none");
    strided.element_strides = vec![1, 2, 3];
    tensors.push(strided);
    // A store may exceed the tensor only at its far ends.
    let corner = |tensor: &Tensor| Tensor { at: tensor.at.iter().map(|&at| at.max(0)).collect(), ..tensor.clone() };
    let stores = tensors.iter().map(corner).map(|tensor| {
        let instruction = format!("cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group", tensor.rank());
        let (source, old) = (noise(42, tensor.tile_bytes() / 4), vec![u32::MAX; tensor.bytes() / 4]);
        store(&tensor, &instruction, source, old, |_, new| new.to_vec())
    });
    let atoms = ["128B_atom_32B", "128B_atom_64B"];
    let atoms = atoms.map(|swizzle| load(&Tensor::new(halves, &[80, 24], &[64, 16], &[8, -2], swizzle)));
    let rows = [("none", 8, [3, 0, 11, 4]), ("64B", 32, [5, 12, 7, 1])];
    let rows = rows.into_iter().flat_map(|(swizzle, column, rows)| four_rows(swizzle, column, rows));
    tensors.iter().map(load).chain(stores).chain(atoms).chain(rows).collect()
}
