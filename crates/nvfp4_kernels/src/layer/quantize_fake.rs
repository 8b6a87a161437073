//! Tokens of the kernels that quantize, for the fake driver.

use kernels_gpu::lists::NO_ROW;

use crate::fake::slice;
use nvfp4_core::problem::TokenDtype;

/// Tokens and their rows, as the parameter of `moe_quantize` or `moe_quantize_nvfp4` describes them.
pub(super) struct Tokens {
    pub dtype: TokenDtype,
    /// Number of tokens.
    pub count: u32,
    /// Number of columns.
    pub k: u32,
    pub input: u64,
    pub input_pitch: u64,
    pub input_weights: u64,
    pub places: u64,
    pub top_k: u32,
}

impl Tokens {
    /// Calls `quantize` with the numbers and the rows of each token.
    ///
    /// # Safety
    /// The tokens, weights and places are alive at the addresses.
    pub unsafe fn for_each(&self, mut quantize: impl FnMut(&[u16], &[u32])) {
        let &Self { dtype, count, k, input, input_pitch, input_weights, places, top_k } = self;
        for token in 0..count {
            // SAFETY: the caller guarantees `count` tokens of `k` numbers, and their weights and places if there are any.
            let (bits, rows) = unsafe {
                let mut bits = slice::<u16>(input + u64::from(token) * input_pitch, k as usize).to_vec();
                if input_weights != 0 {
                    let weight = *(input_weights as *const f32).add(token as usize);
                    bits.iter_mut().for_each(|bits| *bits = dtype.round_f32(dtype.decode(*bits) as f32 * weight));
                }
                let places = match places {
                    0 => vec![token],
                    _ => slice::<u32>(places + 4 * u64::from(token * top_k), top_k as usize).to_vec(),
                };
                (bits, places.into_iter().filter(|&row| row != NO_ROW).collect::<Vec<_>>())
            };
            quantize(&bits, &rows);
        }
    }
}
