//! Words of weights to the numbers that are multiplied, for each type of tokens.

use cuda_std::wgmma;

use crate::decoding::decode::{
    BF16_UNSCALE, Bf16Scales, F16_UNSCALE, Scales, decode_weights_bf16_of_two, decode_weights_of_two,
};

/// How weights are decoded for a type of tokens.
pub(crate) trait Decode {
    /// What a decoded weight lacks of its value.
    const UNSCALE: f32;
    /// The numbers that are multiplied.
    type Number: wgmma::Number;

    /// Decodes a word, whose scales are the first two of four bytes, one for two registers and one for the others, or the last two.
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
