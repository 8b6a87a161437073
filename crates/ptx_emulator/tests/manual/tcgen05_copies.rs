//! `tcgen05.cp` and `tcgen05.shift` (PTX ISA, "Tensor Memory Data Movement"): copies of matrix rows from shared memory
//! to lanes. `.warpx2::02_13` and `::01_23` give the pairs of warps whose lanes receive the same rows, `.warpx4` all
//! four warps. `.4x256b` has one row for each warp's lanes. `tcgen05.shift`: "the shifting of 32-byte elements
//! downwards across all the rows, except the last, by one row". It is assumed to mean that each of the 32 rows except
//! the last gets the next row.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{
    BLACKWELL, INIT_BARRIER, await_phase, clear_columns, copy_in, core_matrix, descriptor, module, noise, poison,
    program, store_columns, with_tensor_memory, words,
};

const COLUMNS: usize = 32;
const DECLARATIONS: &str =
    ".shared .align 128 .b8 tile[8192];\n.shared .align 8 .b64 bar;\n.shared .align 4 .b32 slot;";

/// Two copies of the shape, to columns 0 and 16, then an additional operation of thread 0.
fn copied(
    name: &str,
    target: &str,
    shape: &str,
    rows: usize,
    row_bytes: usize,
    besides: &str,
    row_of_lane: impl Fn(usize) -> Option<usize>,
) -> Program {
    let matrices = [noise(111, rows * row_bytes / 4), noise(112, rows * row_bytes / 4)];
    // Rows of 16 bytes are one column of core matrices. Rows of 32 bytes are two columns.
    let place = |row: usize, byte: usize| if row_bytes == 16 { row * 16 + byte } else { core_matrix(row, byte) };
    let tile = rows.next_multiple_of(8) * row_bytes;
    let mut bytes = vec![0u8; 2 * tile];
    for (which, matrix) in matrices.iter().enumerate() {
        for (index, word) in matrix.iter().enumerate() {
            let (row, byte) = (index * 4 / row_bytes, index * 4 % row_bytes);
            let at = which * tile + place(row, byte);
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
    let stride = if row_bytes == 16 { 128 } else { 256 };
    let work = format!(
        "{}{}{}@!%p1 bra ISSUED;\ntcgen05.cp.cta_group::1.{shape} [%r30], %d10;\nadd.u32 %r34, %r30, 16;\n\
         tcgen05.cp.cta_group::1.{shape} [%r34], %d11;\n{besides}\
         tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];\nISSUED:\n{}\
         tcgen05.fence::after_thread_sync;\n{}",
        clear_columns(0, COLUMNS),
        descriptor("%d10", 0, 128, stride),
        descriptor("%d11", tile, 128, stride),
        await_phase(0, "WAIT"),
        store_columns(0, COLUMNS)
    );
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d2, [src];\nmov.u32 %r2, tile;\n{INIT_BARRIER}{}{}",
        copy_in(bytes.len(), 128),
        with_tensor_memory(1, COLUMNS as u32, &work)
    );
    let mut want = vec![0; 128 * COLUMNS];
    for lane in 0..128 {
        let Some(row) = row_of_lane(lane) else { continue };
        for (which, matrix) in matrices.iter().enumerate() {
            let words = &matrix[row * row_bytes / 4..][..row_bytes / 4];
            want[lane * COLUMNS + which * 16..][..words.len()].copy_from_slice(words);
        }
    }
    program(
        name,
        module(target, DECLARATIONS, ".param .u64 out, .param .u64 src", &body),
        json!({"block": [128, 1, 1], "args": [{"pointer": "out"}, {"pointer": "src"}],
               "buffers": {"out": poison(want.len()), "src": {"u32": words(&bytes)}}}),
        &[("out", want)],
    )
}

fn copy(shape: &str, rows: usize, row_bytes: usize, row_of_lane: impl Fn(usize) -> Option<usize>) -> Program {
    copied(&format!("tcgen05.cp.{shape}"), BLACKWELL, shape, rows, row_bytes, "", row_of_lane)
}

/// Shifts all lanes of the first warp by one row, in the eight columns of 32 bytes.
fn shifted() -> Program {
    let shift = "tcgen05.shift.cta_group::1.down [%r30];\ntcgen05.shift.cta_group::1.down [%r34];\n";
    let row = |lane: usize| Some(if lane < 31 { lane + 1 } else { lane });
    copied("tcgen05.shift.down", "sm_100a", "128x256b", 128, 32, shift, row)
}

/// A copy refills the last row of the shift. The manual lists the copy as pipelined after the shift.
fn refilled() -> Program {
    let mut program = shifted();
    program.path = "tcgen05.shift.down, then tcgen05.cp.4x256b".into();
    // One row for each warp's lanes: rows 0 to 3 of the first matrix go to lanes 31, 63, 95 and 127.
    let refill = "add.u32 %r35, %r30, 2031616;\ntcgen05.cp.cta_group::1.4x256b [%r35], %d10;\n";
    let commit = "tcgen05.commit.cta_group::1";
    program.text = program.text.replace(commit, &format!("{refill}{commit}"));
    let want = program.outcome.expect.get_mut("out").expect("a buffer");
    let rows = noise(111, 128 * 8);
    for row in 0..4 {
        want[(32 * row + 31) * COLUMNS..][..8].copy_from_slice(&rows[row * 8..][..8]);
    }
    program
}

pub fn programs() -> Vec<Program> {
    vec![
        copy("128x256b", 128, 32, Some),
        copy("128x128b", 128, 16, Some),
        copy("4x256b", 4, 32, |lane| (lane % 32 == 0).then_some(lane / 32)),
        copy("64x128b.warpx2::02_13", 64, 16, |lane| Some(lane % 64)),
        copy("64x128b.warpx2::01_23", 64, 16, |lane| Some(lane / 64 * 32 + lane % 32)),
        copy("32x128b.warpx4", 32, 16, |lane| Some(lane % 32)),
        shifted(),
        refilled(),
    ]
}
