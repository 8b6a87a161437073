//! Mapping of matrix elements to threads and registers, for `mma.sync`, `wgmma` and the `ldmatrix` family.
//!
//! PTX ISA 9.7.14.5.3–9.7.14.5.13 (`mma` fragments), 9.7.14.5.15–17 (`ldmatrix`, `stmatrix`, `movmatrix`), 9.7.14.3
//! (lanes that supply `mma`'s scale factors), 9.7.15.5.1.1 (`wgmma` fragments, drawn in the manual; CUTLASS's
//! `mma_traits_sm90_gmma.hpp` defines them as CuTe layouts).
//!
//! One rule covers the many tables of the manual. A lane is `group = lane / 4` and `thread = lane % 4`. A register of A
//! or B holds E consecutive elements along K (E = 32 / element bits; 1 for f64), and four adjacent threads hold 4E.
//!
//! Not covered: `mma.m8n8k4` in f16, sparse A, and the 16×8 forms of `stmatrix`.

/// Row and column of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// Index in M for A and C/D, in K for B, and in the 8×8 matrix for the `ldmatrix` family.
    pub row: u32,
    /// Index in K for A, and in N for B and C/D.
    pub column: u32,
}

/// A of `mma.m16n8k*`, and of `m8n8k*`, which has only the first register: element `index` of `register`, with
/// `per_register` elements per register.
pub const fn mma_a(lane: u32, register: u32, index: u32, per_register: u32) -> Position {
    Position { row: lane / 4 + register % 2 * 8, column: (register / 2 * 4 + lane % 4) * per_register + index }
}

/// B of `mma.m16n8k*` and `m8n8k*`.
pub const fn mma_b(lane: u32, register: u32, index: u32, per_register: u32) -> Position {
    Position { row: (register * 4 + lane % 4) * per_register + index, column: lane / 4 }
}

/// Element `index` (c0, c1, …) of a lane's C or D of `mma.m16n8k*` and `m8n8k*`. An f16 register holds two elements,
/// the lower index in its lower half.
pub const fn mma_c(lane: u32, index: u32) -> Position {
    Position { row: lane / 4 + index / 2 * 8, column: lane % 4 * 2 + index % 2 }
}

/// Lane whose `scale-a-data` scales row `row` of A (`thread-id-a` 0 or 1; PTX ISA 9.7.14.3). In each group, the
/// selected pair of threads supplies rows `group` and `group + 8`.
pub const fn mma_scale_a_lane(row: u32, thread_id: u32) -> u32 {
    row % 8 * 4 + thread_id * 2 + row / 8
}

/// Lane whose `scale-b-data` scales column `column` of B (`thread-id-b` 0 to 3).
pub const fn mma_scale_b_lane(column: u32, thread_id: u32) -> u32 {
    column * 4 + thread_id
}

/// A of `wgmma.m64nNk*` in registers: as in `mma`, with 16 rows per warp. `thread` is 0 to 127 in the warpgroup.
pub const fn wgmma_a(thread: u32, register: u32, index: u32, per_register: u32) -> Position {
    let Position { row, column } = mma_a(thread % 32, register, index, per_register);
    Position { row: thread / 32 * 16 + row, column }
}

/// Element `index` (d0, d1, …) of a thread's D of `wgmma.m64nN`: as in `mma`, with 16 rows per warp, repeated every
/// eight columns. An f16 register holds two elements, the lower index in its lower half.
pub const fn wgmma_d(thread: u32, index: u32) -> Position {
    let Position { row, column } = mma_c(thread % 32, index % 4);
    Position { row: thread / 32 * 16 + row, column: index / 4 * 8 + column }
}

/// Lane that supplies the address of a 16-byte matrix row to `ldmatrix` and `stmatrix`: lanes 0–7 for the first matrix,
/// 8–15 for the second, …
pub const fn ldmatrix_address_lane(matrix: u32, row: u32) -> u32 {
    matrix * 8 + row
}

/// 16-bit element of an 8×8 matrix in half `half` (0 low, 1 high) of a lane's register for that matrix. With `trans`,
/// the matrix is read column by column.
pub const fn ldmatrix(lane: u32, half: u32, trans: bool) -> Position {
    let (line, along) = (lane / 4, lane % 4 * 2 + half);
    if trans { Position { row: along, column: line } } else { Position { row: line, column: along } }
}

/// 8-bit element of a 16×16 matrix in byte `byte` of a lane's first or second register for that matrix. The matrix is
/// read column by column (`.m16n16.trans`).
pub const fn ldmatrix_m16n16(lane: u32, register: u32, byte: u32) -> Position {
    Position { row: lane % 4 * 4 + byte, column: register * 8 + lane / 4 }
}

/// Source lane and source half of half `half` of a lane's result of `movmatrix.trans`.
pub const fn movmatrix_source(lane: u32, half: u32) -> (u32, u32) {
    let Position { row, column } = ldmatrix(lane, half, true);
    (row * 4 + column / 2, column % 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hw::cute;
    use std::collections::BTreeSet;

    /// Formulas of PTX ISA 9.7.14.5.7–11 for element i, as printed in the manual.
    #[test]
    fn mma_operands_match_the_formulas_of_the_manual() {
        for lane in 0..32 {
            let (group, thread) = (lane >> 2, lane % 4);
            let check_a = |i: u32, per_register: u32, row: u32, column: u32| {
                let ours = mma_a(lane, i / per_register, i % per_register, per_register);
                assert_eq!(ours, Position { row, column }, "A: lane {lane}, a{i}, {per_register} per register");
            };
            let check_b = |i: u32, per_register: u32, row: u32| {
                let ours = mma_b(lane, i / per_register, i % per_register, per_register);
                assert_eq!(ours, Position { row, column: group }, "B: lane {lane}, b{i}");
            };
            // m16n8k16, f16 and bf16.
            for i in 0..8 {
                let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
                let column = thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
                check_a(i, 2, row, column);
            }
            for i in 0..4 {
                check_b(i, 2, thread * 2 + (i & 1) + if i >= 2 { 8 } else { 0 });
            }
            // m16n8k8, tf32.
            for i in 0..4 {
                let row = if i == 0 || i == 2 { group } else { group + 8 };
                check_a(i, 1, row, if i < 2 { thread } else { thread + 4 });
            }
            check_b(0, 1, thread);
            check_b(1, 1, thread + 4);
            // m16n8k32, 8 bits.
            for i in 0..16 {
                let row = if i < 4 || (8..12).contains(&i) { group } else { group + 8 };
                check_a(i, 4, row, thread * 4 + (i & 3) + if i >= 8 { 16 } else { 0 });
            }
            for i in 0..8 {
                check_b(i, 4, thread * 4 + (i & 3) + if i >= 4 { 16 } else { 0 });
            }
            // m16n8k64, 4 bits.
            for i in 0..32 {
                let row = if i < 8 || (16..24).contains(&i) { group } else { group + 8 };
                check_a(i, 8, row, thread * 8 + (i & 7) + if i >= 16 { 32 } else { 0 });
            }
            for i in 0..16 {
                check_b(i, 8, thread * 8 + (i & 7) + if i >= 8 { 32 } else { 0 });
            }
            // C and D.
            for i in 0..4 {
                let row = if i < 2 { group } else { group + 8 };
                assert_eq!(mma_c(lane, i), Position { row, column: thread * 2 + (i & 1) });
            }
        }
    }

    /// CUTLASS's `ALayout_64x8`, `64x16`, `64x32` and `CLayout_64xN`: (thread, value) → row + 64 · column.
    #[test]
    fn wgmma_fragments_match_cutlass_layouts() {
        type Modes = &'static [(u32, u32)];
        let position = |index: u32| Position { row: index % 64, column: index / 64 };
        let a: [(u32, Modes, Modes); 3] = [
            (1, &[(4, 64), (8, 1), (4, 16)], &[(2, 8), (2, 256)]),
            (2, &[(4, 128), (8, 1), (4, 16)], &[(2, 64), (2, 8), (2, 512)]),
            (4, &[(4, 256), (8, 1), (4, 16)], &[(4, 64), (2, 8), (2, 1024)]),
        ];
        for thread in 0..128 {
            for (per_register, threads, values) in a {
                for value in 0..4 * per_register {
                    let expected = position(cute(threads, thread) + cute(values, value));
                    let ours = wgmma_a(thread, value / per_register, value % per_register, per_register);
                    assert_eq!(ours, expected, "A: thread {thread}, value {value}, {per_register}");
                }
            }
            for value in 0..96 / 2 {
                let threads = [(4, 128), (8, 1), (4, 16)];
                let expected = cute(&threads, thread) + cute(&[(2, 64), (2, 8), (12, 512)], value);
                assert_eq!(wgmma_d(thread, value), position(expected), "D: thread {thread}, d{value}");
            }
        }
    }

    /// CUTLASS's SFALayout and SFBLayout for `sm_120`: lanes that differ only in bit 1 (A) or in the two low bits (B)
    /// hold the same row.
    #[test]
    fn scale_factor_lanes_invert_cutlass_layouts() {
        for lane in 0..32 {
            let row = cute(&[(2, 8), (2, 0), (8, 1)], lane);
            assert_eq!(mma_scale_a_lane(row, lane / 2 % 2), lane);
            let column = cute(&[(4, 0), (8, 1)], lane);
            assert_eq!(mma_scale_b_lane(column, lane % 4), lane);
        }
    }

    /// "A group of four consecutive threads loads an entire row": 16 bytes in order, or a column with `.trans`.
    #[test]
    fn ldmatrix_gives_four_threads_a_row() {
        for line in 0..8 {
            for along in 0..8 {
                let (lane, half) = (line * 4 + along / 2, along % 2);
                assert_eq!(ldmatrix(lane, half, false), Position { row: line, column: along });
                assert_eq!(ldmatrix(lane, half, true), Position { row: along, column: line });
            }
        }
        assert_eq!(ldmatrix_address_lane(3, 5), 29);
    }

    /// CUTLASS's `SM100_U8x8_LDSM_T` swaps the middle bytes of the two registers and assigns row addresses to other
    /// lanes.
    #[test]
    fn ldmatrix_of_bytes_matches_cutlass() {
        for (lane, index) in (0..32).flat_map(|lane| (0..8).map(move |index| (lane, index))) {
            // Row that a lane's address selects, and position of a lane's value, both as bit offsets from the start of
            // the matrix.
            let row_of = |lane| cute(&[(2, 128), (2, 1024), (4, 256)], lane) / 128;
            let place = (cute(&[(4, 256), (8, 8)], lane) + cute(&[(2, 128), (2, 64), (2, 1024)], index)) / 8;
            let (register, byte) = (index / 2 % 2, index % 2 + index / 4 * 2);
            let Position { row, column } = ldmatrix_m16n16(lane, register, byte);
            assert_eq!((row_of(row), column), (place / 16, place % 16), "lane {lane}, value {index}");
        }
    }

    #[test]
    fn transposing_a_matrix_twice_restores_it() {
        let all: BTreeSet<(u32, u32)> =
            (0..32).flat_map(|lane| (0..2).map(move |half| movmatrix_source(lane, half))).collect();
        assert_eq!(all.len(), 64);
        for lane in 0..32 {
            for half in 0..2 {
                let (from, from_half) = movmatrix_source(lane, half);
                assert_eq!(movmatrix_source(from, from_half), (lane, half));
            }
        }
        assert_eq!(movmatrix_source(1, 0), (8, 0), "result (0, 2) must come from source (2, 0)");
    }
}
