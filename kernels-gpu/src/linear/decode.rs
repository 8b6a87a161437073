//! Decoding of weight words to operands, for each token type.

use cuda_std::wgmma;

use crate::decoding::decode::{
    BF16_UNSCALE, Bf16Scales, F16_UNSCALE, Scales, decode_weights_bf16_of_two, decode_weights_of_two,
};

/// Decoding of weights for a token type.
pub(crate) trait Decode {
    /// Factor that undoes the scaling of the decoded operands.
    const UNSCALE: f32;
    /// Type of the decoded operands.
    type Number: wgmma::Number;

    /// Decodes a word. Its two scales are the first two of four bytes (`pair` 0) or the last two (`pair` 1); each scale
    /// is for two registers.
    fn decode(word: u32, scales: u32, pair: usize) -> [u32; 4];
}

/// Weights packed for bf16, or for f16.
pub(crate) struct Packed<const BF16: bool>;

impl Decode for Packed<false> {
    const UNSCALE: f32 = F16_UNSCALE;
    type Number = wgmma::F16;

    #[inline(always)]
    fn decode(word: u32, scales: u32, pair: usize) -> [u32; 4] {
        let scales = Scales::new((scales >> (16 * pair)) as u16);
        decode_weights_of_two(word, [scales.half_twice(0), scales.half_twice(1)])
    }
}

impl Decode for Packed<true> {
    const UNSCALE: f32 = BF16_UNSCALE;
    type Number = wgmma::Bf16;

    #[inline(always)]
    fn decode(word: u32, scales: u32, pair: usize) -> [u32; 4] {
        let scales = Bf16Scales::of_four(scales, pair);
        decode_weights_bf16_of_two(word, [scales.half_twice(0), scales.half_twice(1)])
    }
}
