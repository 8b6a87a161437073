//! Converts NVFP4 weights to e4m3 codes.

use crate::format::{BLOCK, Matrix, e2m1, e4m3};

/// Divisor of a weight without its global scale: the largest, 6 · 448, becomes 336, which e4m3 can represent.
pub const FOLD: f32 = 8.0;

/// Returns the e4m3 code of a weight: value times block scale, divided by [`FOLD`], rounded once, ties to even. The
/// product is exact in f32.
pub fn fold(value: u8, scale: u8) -> u8 {
    e4m3::encode_signed(e2m1::decode(value) * e4m3::decode(scale) / FOLD)
}

/// Writes the codes of a row of weights, columns in their natural order.
///
/// # Panics
/// Panics if `out` is not K long.
pub fn folded_row(matrix: &Matrix<'_>, row: usize, out: &mut [u8]) {
    assert_eq!(out.len(), matrix.k(), "`out` needs one byte per column");
    let blocks = matrix.row_values(row).chunks_exact(BLOCK / 2).zip(matrix.row_scales(row));
    for (out, (values, &scale)) in out.chunks_exact_mut(BLOCK).zip(blocks) {
        let magnitudes: [u8; 8] = std::array::from_fn(|value| fold(value as u8, scale));
        let code = |value: u8| magnitudes[usize::from(value & 7)] | (value & 8) << 4;
        for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *pair = [code(byte), code(byte >> 4)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folded_weight_is_the_nearest_e4m3() {
        let all: Vec<f64> = (0..=e4m3::MAX_CODE).map(|code| f64::from(e4m3::decode(code))).collect();
        let mut inexact = 0;
        for scale in 0..=e4m3::MAX_CODE {
            for value in 0..16 {
                let exact = f64::from(e2m1::decode(value)) * f64::from(e4m3::decode(scale)) / 8.0;
                let got = f64::from(e4m3::decode(fold(value, scale)));
                let least = all.iter().map(|code| (exact.abs() - code).abs()).fold(f64::INFINITY, f64::min);
                assert_eq!((got - exact).abs(), least, "{value:#x} {scale:#x}");
                assert!(got * exact >= 0.0 && got.abs() <= 336.0);
                inexact += u32::from(got != exact);
            }
        }
        assert!(inexact > 0);
    }

    #[test]
    fn a_row_is_its_weights_folded() {
        let values: Vec<u8> = (0..=255).step_by(17).chain(0..8).map(|i| i as u8).collect();
        let scales = [0x38, 0x7E, 0x01];
        let matrix = Matrix::new(1, 48, values.clone(), scales.to_vec(), 0.25).unwrap();
        let mut row = [0; 48];
        folded_row(&matrix, 0, &mut row);
        for (column, &code) in row.iter().enumerate() {
            let value = values[column / 2] >> (column % 2 * 4) & 0xF;
            assert_eq!(code, fold(value, scales[column / BLOCK]), "column {column}");
        }
    }
}
