//! Rows of tokens quantized to FP8 or NVFP4.

use crate::format::BLOCK;
use crate::problem::{TokenDtype, TokenFormat};
use crate::{fp4, fp8};

/// Invalid as an e2m1 code, and a NaN that no device computes.
const POISON: u8 = 0xFF;

/// Rows of e4m3 or e2m1 codes with scales. Equality compares bits.
#[derive(Clone, Debug, Default)]
pub struct QuantizedRows {
    /// Codes `[rows, K]`, one per byte, columns in their natural order.
    pub codes: Vec<u8>,
    /// E4M3 block scales of NVFP4, `[rows, K / 16]`; empty for FP8.
    pub block_scales: Vec<u8>,
    /// Scale per row, `[rows]`.
    pub scales: Vec<f32>,
}

impl PartialEq for QuantizedRows {
    fn eq(&self, other: &Self) -> bool {
        let bits = |scales: &[f32]| -> Vec<u32> { scales.iter().map(|scale| scale.to_bits()).collect() };
        (&self.codes, &self.block_scales, bits(&self.scales))
            == (&other.codes, &other.block_scales, bits(&other.scales))
    }
}

impl Eq for QuantizedRows {}

impl QuantizedRows {
    /// Returns rows of NaN.
    pub fn poisoned(format: TokenFormat, rows: usize, k: usize) -> Self {
        let block_scales = if format == TokenFormat::Nvfp4 { rows * k / BLOCK } else { 0 };
        Self { codes: vec![POISON; rows * k], block_scales: vec![POISON; block_scales], scales: vec![f32::NAN; rows] }
    }

    /// Fills all rows with NaN, so that elements that a device does not write are found.
    pub fn poison(&mut self) {
        self.codes.fill(POISON);
        self.block_scales.fill(POISON);
        self.scales.fill(f32::NAN);
    }

    /// Appends rows.
    pub fn append(&mut self, mut rows: Self) {
        self.codes.append(&mut rows.codes);
        self.block_scales.append(&mut rows.block_scales);
        self.scales.append(&mut rows.scales);
    }

    /// Quantizes rows of K numbers of a token type: to NVFP4, with an input scale or with one global scale per row, or to
    /// FP8, with one scale per row.
    ///
    /// # Panics
    /// Panics if K is 0.
    pub fn of(format: TokenFormat, dtype: TokenDtype, bits: &[u16], k: usize, input_scale: Option<f32>) -> Self {
        let mut rows = Self::poisoned(format, bits.len() / k, k);
        let blocks = k / BLOCK;
        for (row, bits) in bits.chunks_exact(k).enumerate() {
            let codes = &mut rows.codes[row * k..][..k];
            rows.scales[row] = if format == TokenFormat::Nvfp4 {
                let block_scales = &mut rows.block_scales[row * blocks..][..blocks];
                fp4::quantize_token(dtype, bits, input_scale, codes, block_scales)
            } else {
                fp8::quantize_token(dtype, bits, codes)
            };
        }
        rows
    }
}
