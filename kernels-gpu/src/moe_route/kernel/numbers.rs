//! Numbers of 16 bits, two in a word.

use cuda_std::convert::cvt_f32_f16;

use crate::format::OUTPUT_BF16;

/// Two numbers of a word, of a format: [`OUTPUT_BF16`], or else f16.
#[inline(always)]
pub(super) fn decode(format: u32, word: u32) -> [f32; 2] {
    // A bfloat16 is the upper half of an f32.
    if format == OUTPUT_BF16 {
        [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
    } else {
        [cvt_f32_f16(word as u16), cvt_f32_f16((word >> 16) as u16)]
    }
}
