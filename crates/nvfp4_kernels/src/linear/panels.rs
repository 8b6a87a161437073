//! Packing of a linear layer's weights into panels (`kernels-gpu/src/linear/mod.rs`) on the host. An independent
//! implementation of what the kernel does on the device. Knows no device.

use kernels_gpu::decoding::{K_BLOCK, LANE_WORDS};
use kernels_gpu::linear::{
    LANE_BYTES, PANEL_BYTES, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_LANES, ROW_SCALES, column, k_blocks, matrix_bytes,
};
use kernels_gpu::units::OperandType;
use rayon::prelude::*;

use nvfp4_core::format::{BLOCK, Matrix};

/// Returns the panels of a matrix for operands of a type. Rows and columns must be multiples of 16.
pub fn pack(matrix: &Matrix<'_>, operand_type: OperandType) -> Vec<u8> {
    let (n, k) = (matrix.rows() as u32, matrix.k() as u32);
    let mut panels = vec![0; matrix_bytes(n, k) as usize];
    panels.par_chunks_mut(PANEL_BYTES as usize).enumerate().for_each(|(index, panel)| {
        let (first_row, k_block) = (index as u32 / k_blocks(k) * PANEL_ROWS, index as u32 % k_blocks(k));
        for row in 0..PANEL_ROWS {
            let from = (first_row + row < n).then_some((first_row + row) as usize);
            let scale = |block: u32| {
                let block = (k_block * ROW_SCALES + block) as usize;
                from.filter(|_| block < k as usize / BLOCK).map_or(0, |row| matrix.row_scales(row)[block])
            };
            let code = |column: u32| {
                // A packed scale for bf16 cannot be zero, so the codes become zero instead.
                let is_zero = scale(column / BLOCK as u32) == 0 && operand_type == OperandType::Bf16;
                let at = (k_block * K_BLOCK + column) as usize;
                let from = from.filter(|_| at < k as usize && !is_zero);
                from.map_or(0, |row| u32::from(matrix.row_values(row)[at / 2] >> (at % 2 * 4) & 0xf))
            };
            for (lane, word) in places() {
                let codes = (0..8).fold(0, |codes, nibble| codes | code(column(lane, word, nibble)) << (4 * nibble));
                panel[word_place(row, lane, word)..][..4].copy_from_slice(&operand_type.pack(codes).to_le_bytes());
            }
            for block in 0..ROW_SCALES {
                panel[scale_place(row, block)] = operand_type.pack_scale(scale(block));
            }
        }
    });
    panels
}

/// Returns every pair of lane and word.
fn places() -> impl Iterator<Item = (u32, u32)> {
    (0..ROW_LANES).flat_map(|lane| (0..LANE_WORDS as u32).map(move |word| (lane, word)))
}

/// Returns the offset of a word in a panel, in bytes.
fn word_place(row: u32, lane: u32, word: u32) -> usize {
    (row * ROW_BYTES + lane * LANE_BYTES + 4 * word) as usize
}

/// Returns the offset of a scale in a panel, in bytes.
fn scale_place(row: u32, block: u32) -> usize {
    (PANEL_SCALES + row * ROW_SCALES + block) as usize
}

/// Returns the numbers of a matrix `[n, k]`, row-major, without its global scale.
#[cfg(any(test, feature = "fake"))]
pub fn unpack(panels: &[u8], n: u32, k: u32, operand_type: OperandType) -> Vec<f64> {
    use kernels_gpu::linear::panel_offset;

    let unpacked = crate::unpacked::Unpacked::new(operand_type);
    let mut numbers = vec![0.0; n as usize * k as usize];
    for (row, k_block) in (0..n).flat_map(|row| (0..k_blocks(k)).map(move |block| (row, block))) {
        let panel = &panels[panel_offset(row / PANEL_ROWS, k_block, k) as usize..][..PANEL_BYTES as usize];
        for (lane, word) in places() {
            let bytes = &panel[word_place(row % PANEL_ROWS, lane, word)..][..4];
            let packed = u32::from_le_bytes(bytes.try_into().expect("the slice has four bytes"));
            for nibble in 0..8 {
                let column = column(lane, word, nibble);
                let scale = unpacked.scale(panel[scale_place(row % PANEL_ROWS, column / BLOCK as u32)]);
                let number = unpacked.number(packed, nibble) * scale;
                if k_block * K_BLOCK + column < k {
                    numbers[row as usize * k as usize + (k_block * K_BLOCK + column) as usize] = number;
                } else {
                    assert_eq!(number, 0.0, "column beyond the matrix");
                }
            }
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use kernels_gpu::linear::panel_offset;

    use super::*;

    #[test]
    fn codes_and_scales_are_packed_and_padding_is_zero() {
        for (n, k) in [(16usize, 16usize), (80, 144), (64, 128), (144, 272)] {
            // Rows hold the codes and scales in different orders.
            let values: Vec<u8> = (0..n * k / 2).map(|i| (i * 97 + i / 251) as u8).collect();
            let scales: Vec<u8> = (0..n * k / 16).map(|i| (i * 31 % 127) as u8).collect();
            let matrix = Matrix::new(n, k, values, scales, 1.0).unwrap();
            for operand_type in [OperandType::F16, OperandType::Bf16] {
                let panels = pack(&matrix, operand_type);
                assert_eq!(panels.len() as u64, matrix_bytes(n as u32, k as u32));
                let mut row = vec![0f32; k];
                for (at, found) in unpack(&panels, n as u32, k as u32, operand_type).chunks(k).enumerate() {
                    matrix.numbers_row(at, &mut row);
                    assert!(
                        found.iter().zip(&row).all(|(found, &number)| *found == f64::from(number)),
                        "{n}×{k}: {at}"
                    );
                }
                for row in n as u32..(n as u32).next_multiple_of(PANEL_ROWS) {
                    let panel = &panels[panel_offset(row / PANEL_ROWS, 0, k as u32) as usize..];
                    assert!(places().all(|(lane, word)| panel[word_place(row % 64, lane, word)..][..4] == [0; 4]));
                }
            }
        }
    }
}
