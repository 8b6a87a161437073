//! Packing of an MoE layer's weights into units (`kernels-gpu/src/units.rs`) on the host. An independent implementation
//! of what the kernel does on the device. Knows no device.

use kernels_gpu::format::BLOCK;
use kernels_gpu::units::{
    OperandType, ROW_LANES, SLAB_ROWS, UNIT_ROWS, WORD_ELEMENTS, block_columns, block_start, element, k_blocks,
    lane_place, lane_words, matrix_bytes, row_unit_bytes, scale_place, unit_offset,
};
use rayon::prelude::*;

use super::row_order::RowOrder;
use nvfp4_core::format::Matrix;

/// Returns the units of a matrix for operands of a type. Rows and columns must be multiples of 16.
pub fn pack(matrix: &Matrix<'_>, order: RowOrder, operand_type: OperandType) -> Vec<u8> {
    let (rows, k) = (matrix.rows() as u32, matrix.k() as u32);
    let mut units = vec![0; matrix_bytes(rows, k) as usize];
    let slab_bytes = (SLAB_ROWS / UNIT_ROWS) as usize * row_unit_bytes(k) as usize;
    units.par_chunks_mut(slab_bytes).enumerate().for_each(|(slab, to)| {
        let first = slab as u32 * SLAB_ROWS;
        let start = unit_offset(rows, k, first / UNIT_ROWS, 0);
        for row in first..rows.min(first + SLAB_ROWS) {
            let from = order.source(rows, row) as usize;
            let (values, scales) = (matrix.row_values(from), matrix.row_scales(from));
            for k_block in 0..k_blocks(k) {
                let at = unit_offset(rows, k, row / UNIT_ROWS, k_block) - start;
                let to = &mut to[at as usize..];
                pack_row(
                    to,
                    row % UNIT_ROWS,
                    block_columns(k, k_block),
                    block_start(k, k_block),
                    values,
                    scales,
                    operand_type,
                );
            }
        }
    });
    units
}

/// Packs a row's columns of one k-block into `unit`. `row` is the row in the unit, `start` the k-block's first column.
fn pack_row(
    unit: &mut [u8],
    row: u32,
    columns: u32,
    start: u32,
    values: &[u8],
    scales: &[u8],
    operand_type: OperandType,
) {
    for lane in 0..ROW_LANES {
        for word in 0..lane_words(columns) {
            // All elements of a word belong to one block.
            let scale =
                element(columns, lane, word, 0).map_or(0, |element| scales[((start + element) / BLOCK) as usize]);
            // A packed scale for bf16 cannot be zero, so the codes become zero instead.
            let is_zero = scale == 0 && operand_type == OperandType::Bf16;
            let code = |nibble| {
                let element = element(columns, lane, word, nibble).filter(|_| !is_zero).map(|element| start + element);
                element.map_or(0, |element| u32::from(values[element as usize / 2] >> (element % 2 * 4) & 0xf))
            };
            let codes = (0..WORD_ELEMENTS).fold(0, |codes, nibble| codes | code(nibble) << (4 * nibble));
            let at = (lane_place(columns, row, lane) + 4 * word) as usize;
            unit[at..][..4].copy_from_slice(&operand_type.pack(codes).to_le_bytes());
            unit[(scale_place(columns, row, lane) + word / 2) as usize] = operand_type.pack_scale(scale);
        }
    }
}

/// Returns the numbers of a matrix `[rows, k]`, row-major: rows in packed order, columns in natural order.
#[cfg(any(test, feature = "fake"))]
pub fn unpack(units: &[u8], rows: u32, k: u32, operand_type: OperandType) -> Vec<f64> {
    let unpacked = crate::unpacked::Unpacked::new(operand_type);
    let mut numbers = vec![0.0; rows as usize * k as usize];
    for (row, k_block) in (0..rows).flat_map(|row| (0..k_blocks(k)).map(move |k_block| (row, k_block))) {
        let (columns, start) = (block_columns(k, k_block), block_start(k, k_block));
        let unit = &units[unit_offset(rows, k, row / UNIT_ROWS, k_block) as usize..];
        for (lane, word) in (0..ROW_LANES).flat_map(|lane| (0..lane_words(columns)).map(move |word| (lane, word))) {
            let at = (lane_place(columns, row % UNIT_ROWS, lane) + 4 * word) as usize;
            let packed = u32::from_le_bytes(unit[at..][..4].try_into().expect("the slice has four bytes"));
            let scale = unpacked.scale(unit[(scale_place(columns, row % UNIT_ROWS, lane) + word / 2) as usize]);
            for nibble in 0..WORD_ELEMENTS {
                if let Some(element) = element(columns, lane, word, nibble) {
                    let number = unpacked.number(packed, nibble) * scale;
                    numbers[row as usize * k as usize + (start + element) as usize] = number;
                }
            }
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unpacked::Unpacked;
    use kernels_gpu::units::element_at;

    /// Returns a matrix whose rows hold the codes and scales in different orders.
    fn matrix(rows: usize, k: usize) -> Matrix<'static> {
        let values: Vec<u8> = (0..rows * k / 2).map(|i| (i * 97 + i / 251) as u8).collect();
        let scales: Vec<u8> = (0..rows * k / 16).map(|i| (i * 31 % 127) as u8).collect();
        Matrix::new(rows, k, values, scales, 1.0).unwrap()
    }

    #[test]
    fn codes_and_scales_are_packed_as_units_document() {
        for (rows, k) in [(16, 16), (272, 96), (144, 352), (96, 720), (720, 48), (128, 256)] {
            let matrix = matrix(rows, k);
            let (n, k) = (rows as u32, k as u32);
            for operand_type in [OperandType::F16, OperandType::Bf16, OperandType::E4m3] {
                let unpacked = Unpacked::new(operand_type);
                let units = pack(&matrix, RowOrder::Kept, operand_type);
                assert_eq!(units.len() as u64, matrix_bytes(n, k));
                for (row, k_block) in (0..n).flat_map(|row| (0..k_blocks(k)).map(move |k_block| (row, k_block))) {
                    let (columns, start) = (block_columns(k, k_block), block_start(k, k_block));
                    let unit = &units[unit_offset(n, k, row / UNIT_ROWS, k_block) as usize..];
                    for (lane, word) in
                        (0..ROW_LANES).flat_map(|lane| (0..lane_words(columns)).map(move |word| (lane, word)))
                    {
                        let at = (lane_place(columns, row % UNIT_ROWS, lane) + 4 * word) as usize;
                        let packed = u32::from_le_bytes(unit[at..][..4].try_into().unwrap());
                        let found_scale = unit[(scale_place(columns, row % UNIT_ROWS, lane) + word / 2) as usize];
                        for nibble in 0..WORD_ELEMENTS {
                            let Some(element) = element(columns, lane, word, nibble) else {
                                assert_eq!(unpacked.code(packed, nibble), 0);
                                continue;
                            };
                            let column = (start + element) as usize;
                            let scale = matrix.row_scales(row as usize)[column / 16];
                            let code = matrix.row_values(row as usize)[column / 2] >> (column % 2 * 4) & 0xf;
                            let is_zero = scale == 0 && operand_type == OperandType::Bf16;
                            let expected = if is_zero { 0 } else { code };
                            assert_eq!(unpacked.code(packed, nibble), expected, "{rows}×{k}: {row}, {column}");
                            assert_eq!(found_scale, operand_type.pack_scale(scale));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_can_be_packed_in_the_order_of_k() {
        for rows in [16, 48, 96, 176, 352, 720, 768] {
            let matrix = matrix(rows, 32);
            let n = rows as u32;
            let mut from: Vec<_> = (0..n).map(|row| RowOrder::OfK.source(n, row)).collect();
            for k_block in 0..k_blocks(n) {
                let (columns, start) = (block_columns(n, k_block), block_start(n, k_block));
                for position in 0..columns {
                    assert_eq!(from[(start + position) as usize], start + element_at(columns, position));
                }
            }
            let ordered: Vec<_> = from.iter().map(|&row| row as usize).collect();
            let values: Vec<u8> = ordered.iter().flat_map(|&row| matrix.row_values(row).to_vec()).collect();
            let scales: Vec<u8> = ordered.iter().flat_map(|&row| matrix.row_scales(row).to_vec()).collect();
            let moved = Matrix::new(rows, 32, values, scales, 1.0).unwrap();
            let kept = pack(&moved, RowOrder::Kept, OperandType::Bf16);
            assert_eq!(pack(&matrix, RowOrder::OfK, OperandType::Bf16), kept);
            from.sort_unstable();
            assert!(from.into_iter().eq(0..n));
        }
    }
}
