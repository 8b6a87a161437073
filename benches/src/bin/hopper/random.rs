//! Random numbers, the same in every run.

use nvfp4::format::Matrix;
use rayon::prelude::*;

/// Seed of tokens, weights and compared samples.
pub const SEED: u64 = 0;

/// Returns a matrix with all codes and with scales from 1/4 to 1, with numbers of about 1/√K.
pub fn random_matrix(rows: usize, k: usize, seed: u64) -> anyhow::Result<Matrix<'static>> {
    /// Root mean square of the matrix: 2.9 for all codes, 0.6 for the scales.
    const RMS: f32 = 2.9 * 0.6;
    let (mut values, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / 16]);
    fill_random(&mut values, 2 * seed + 1);
    fill_random(&mut scales, 2 * seed + 2);
    scales.par_iter_mut().for_each(|scale| *scale = 0x28 + *scale % 0x11);
    // Every matrix has a different global scale.
    let factor = 1.0 + (seed % 7) as f32 / 16.0;
    Ok(Matrix::new(rows, k, values, scales, factor / (RMS * (k as f32).sqrt()))?)
}

/// Fills bytes with random numbers: xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift
/// generators, scrambled"), with one state per piece.
fn fill_random(bytes: &mut [u8], seed: u64) {
    const PIECE: usize = 1 << 16;
    bytes.par_chunks_mut(PIECE).enumerate().for_each(|(piece, bytes)| {
        let mut state = ((seed << 32) | (piece as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for word in bytes.chunks_mut(8) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let random = state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes();
            word.copy_from_slice(&random[..word.len()]);
        }
    });
}
