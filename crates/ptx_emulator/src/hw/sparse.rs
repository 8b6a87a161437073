//! Structured sparsity of A: two of four neighbors along K are stored, and four bits of metadata give their positions
//! (PTX ISA, "Sparse matrix storage"). Bit positions were compared with CUTLASS's `ELayout`s and `tmem_e_frg`.
//!
//! A neighbor is a number of 8 or 16 bits, or a byte with two 4-bit numbers. One of two 32-bit numbers is stored.
//! Their metadata, `0b0100` or `0b1110`, describes their halves of 16 bits.
//!
//! The emulator expands A to a dense matrix with zeros in the gaps, so a gap is multiplied by the element of B there.
//! If that element is an infinity or NaN, the emulator's result is NaN. A GPU never reads the element.

use super::fragment::Position;

/// Stored neighbors and all neighbors of a group. Metadata has two bits for each stored neighbor, the lower index in
/// the lower bits.
const KEPT: usize = 2;
const NEIGHBOURS: usize = 4;
/// Bits of metadata per group.
const BITS: u32 = 4;

/// Bytes per neighbor for elements of `element_bits` bits.
pub const fn unit_bytes(element_bits: u32) -> usize {
    if element_bits > 8 { 2 } else { 1 }
}

/// Groups of neighbors in `k` elements along K.
pub const fn groups(element_bits: u32, k: usize) -> usize {
    k * element_bits as usize / 8 / unit_bytes(element_bits) / NEIGHBOURS
}

/// Error: metadata gives two numbers of a group the same position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Twice {
    /// Row of A.
    pub row: usize,
    /// Group of neighbors along K.
    pub group: usize,
}

/// Expands the stored parts of A's rows to dense rows, with zeros in the gaps. Each row has `row_bytes` stored bytes,
/// in units of `unit` bytes. `metadata` returns the bits for a row and a group.
///
/// # Errors
/// If the metadata gives two nonzero numbers the same position.
pub fn dense(
    bytes: &[u8],
    row_bytes: usize,
    unit: usize,
    metadata: impl Fn(usize, usize) -> u32,
) -> Result<Vec<u8>, Twice> {
    let mut out = vec![0; 2 * bytes.len()];
    for (row, (from, to)) in bytes.chunks_exact(row_bytes).zip(out.chunks_exact_mut(2 * row_bytes)).enumerate() {
        let kept = from.chunks_exact(KEPT * unit).zip(to.chunks_exact_mut(NEIGHBOURS * unit));
        for (group, (from, to)) in kept.enumerate() {
            let bits = metadata(row, group);
            for (n, number) in from.chunks_exact(unit).enumerate() {
                let place = &mut to[(bits >> (2 * n) & 3) as usize * unit..][..unit];
                if number.iter().all(|&byte| byte == 0) {
                    continue;
                }
                if place.iter().any(|&byte| byte != 0) {
                    return Err(Twice { row, group });
                }
                place.copy_from_slice(number);
            }
        }
    }
    Ok(out)
}

/// Position of a group's metadata for `mma` and `wgmma`: the lane, and the lowest bit in its register. `row` is one of
/// the warp's 16 rows, `groups` is the number of groups per row, and `selector` is the sparsity selector.
///
/// Half a register holds four groups of one row. Rows of four groups take one lane of each four, rows of eight groups
/// take two lanes, and rows of sixteen take all four. For 8-bit elements (`bytes`), each register holds one row. 32
/// elements along K take half of the lanes that 64 take (also on an H200).
pub const fn mma_place(row: u32, group: u32, groups: u32, bytes: bool, selector: u32) -> (u32, u32) {
    let (quad, upper) = (row % 8, row / 8);
    let first = 4 * quad;
    match groups {
        // Each half of the register holds one row.
        4 => (first + selector, 16 * upper + BITS * group),
        8 if !bytes => (first + 2 * selector + group / 4, 16 * upper + BITS * (group % 4)),
        // Each register holds one row.
        _ => (first + 2 * (group / 8 + selector) + upper, BITS * (group % 8)),
    }
}

/// Position of a group's metadata for `tcgen05.mma`: lane (as a row), column relative to the metadata's address, and
/// lowest bit in that cell. `row` is one of the CTA's rows.
///
/// For 16-bit and 32-bit numbers, rows have eight groups: for sixteen rows, eight lanes hold the first half along K and
/// eight lanes the second half, and the sparsity selector gives the column. For other numbers, a lane holds its row's
/// metadata in two columns.
pub const fn tcgen05_place(row: u32, group: u32, groups: u32, selector: u32) -> (Position, u32) {
    if groups == 8 {
        let lane = row / 16 * 16 + row % 8 + 8 * (group / 4);
        return (Position { row: lane, column: selector }, 16 * (row / 8 % 2) + BITS * (group % 4));
    }
    (Position { row, column: group / 8 }, BITS * (group % 8))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hw::cute;

    #[test]
    fn numbers_move_to_the_positions_in_the_metadata() {
        let halves = [1, 0, 2, 0, 3, 0, 4, 0];
        let bits = |_, group| [0b1100, 0b1001][group];
        let expected = [1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4, 0, 0, 0];
        assert_eq!(dense(&halves, 8, 2, bits).unwrap(), expected);
        // A 32-bit number moves as two halves.
        let words = [1, 2, 3, 4, 5, 6, 7, 8];
        let bits = |_, group| [0b1110, 0b0100][group];
        assert_eq!(dense(&words, 8, 2, bits).unwrap(), [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
        assert_eq!(dense(&[7, 9], 2, 1, |_, _| 0b1010), Err(Twice { row: 0, group: 0 }));
        assert_eq!(dense(&[0, 9], 2, 1, |_, _| 0b1010).unwrap(), [0, 0, 9, 0]);
    }

    /// CUTLASS's `ELayout_64x64`, `64x32` and `64x16`: (thread, element of its register) → row + 64 · column. A
    /// register holds the metadata of 32 or 16 adjacent elements.
    #[test]
    fn metadata_registers_match_cutlass_layouts() {
        type Modes = &'static [(u32, u32)];
        // Elements per group, elements along K, thread modes without the selector's bit, modes of the elements in a
        // register.
        let layouts: [(u32, u32, Modes, Modes); 3] = [
            (4, 64, &[(2, 8), (2, 2048), (8, 1), (4, 16)], &[(32, 64)]),
            (4, 32, &[(2, 1024), (2, 0), (8, 1), (4, 16)], &[(16, 64), (2, 8)]),
            (2, 16, &[(2, 512), (2, 0), (8, 1), (4, 16)], &[(8, 64), (2, 8)]),
        ];
        for (of_group, k, threads, values) in layouts {
            let in_register = values.iter().map(|mode| mode.0).product::<u32>();
            for lane in 0..32 {
                for value in (0..in_register).step_by(of_group as usize) {
                    let place = cute(threads, lane) + cute(values, value);
                    let (row, group) = (place % 64, place / 64 / of_group);
                    // With eight groups per row, the selector chooses two lanes of each four.
                    let selector = if k == 64 { 0 } else { lane / 2 % 2 };
                    let bit = value * 32 / in_register;
                    assert_eq!(
                        mma_place(row, group, k / of_group, k == 64, selector),
                        (lane, bit),
                        "K {k}, lane {lane}"
                    );
                }
            }
        }
    }

    /// CUTLASS's `tmem_e_frg` for 8, 16 and 32 bits: (row, element along K) → lane + 128 · element of the lane.
    #[test]
    fn metadata_in_tensor_memory_matches_cutlass_layouts() {
        for row in 0..128 {
            for k in (0..64).step_by(4) {
                let (place, bit) = tcgen05_place(row, k / 4, 16, 0);
                assert_eq!((place.row, 32 * place.column + bit), (row, k));
            }
            for (of_group, k, rows, columns) in [
                (4, 32, [(8, 1), (2, 2048), (8, 16)], [(16, 128), (2, 8)]),
                (2, 16, [(8, 1), (2, 1024), (8, 16)], [(8, 128), (2, 8)]),
            ] {
                for k in (0..k).step_by(of_group) {
                    let expected = cute(&rows, row) + cute(&columns, k);
                    let (place, bit) = tcgen05_place(row, k / of_group as u32, 8, 1);
                    assert_eq!((place.row, bit), (expected % 128, expected / 128 * 4 / of_group as u32));
                    assert_eq!(place.column, 1);
                }
            }
        }
    }
}
