//! e2m1 × e4m3 → f16, exactly.

use cuda_std::{float::mul_rn_f16x2, integer::prmt_b32};

use super::order::WORD_PAIRS;

/// What [`decode`] leaves out of a value: 2⁷, in A and in B.
pub const UNSCALE: f32 = (1 << 14) as f32;

/// Eight e2m1 codes times a scale of [`scales`], as f16: register i has elements i and i+4, in its low and its high half.
///
/// e2m1's exponent and mantissa in the places of f16's are the value times 2⁻¹⁴, subnormal ones too, since the exponents'
/// biases are 1 and 15. So the product is the value times the scale times 2⁻⁷: up to 6 bits that are a multiple of
/// 2⁻¹⁷ and below 32, which f16 has.
#[inline(always)]
pub fn decode(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    // f16's high bytes of four elements at once: byte j of `even` is element 2j, of `odd` element 2j+1.
    const SIGNS: u32 = 0x8080_8080;
    const MAGNITUDES: u32 = 0x0e0e_0e0e;
    let even = codes << 4 & SIGNS | codes << 1 & MAGNITUDES;
    let odd = codes & SIGNS | codes >> 3 & MAGNITUDES;
    let low = |bytes| mul_rn_f16x2(prmt_b32(bytes, 0, 0x2404), scale);
    let high = |bytes| mul_rn_f16x2(bytes & 0xff00_ff00, scale);
    [low(even), low(odd), high(even), high(odd)]
}

/// Two e4m3, of bytes 0 and 2 with zeros between them, times 2⁷, each in both halves of a register.
///
/// Their bits in the places of f16's are the scale times 2⁻⁸, since the biases are 7 and 15. Whatever the bytes are, the
/// results are finite: padding times the zeros that stand in for what is outside is 0.
#[inline(always)]
pub fn scales(bytes: u32) -> [u32; 2] {
    /// 2¹⁵, twice.
    const UNBIAS: u32 = 0x7800_7800;
    let both = mul_rn_f16x2(bytes << 7 & 0x3f80_3f80, UNBIAS);
    [prmt_b32(both, 0, 0x1010), prmt_b32(both, 0, 0x3232)]
}
