//! e2m1 × e4m3 → f16, exactly.

use cuda_std::{
    convert::cvt_rn_f16x2_e4m3x2,
    float::mul_rn_f16x2,
    integer::{lop3_b32, prmt_b32},
};

use super::order::WORD_PAIRS;

/// What [`decode`] leaves out of a value: 2¹⁴, in A and in B.
pub const UNSCALE: f32 = (1 << 28) as f32;

/// Eight e2m1 codes times a scale, twice in a register, as f16: register i has elements i and i+4, in its low and its high half.
///
/// e2m1's exponent and mantissa in the places of f16's are the value times 2⁻¹⁴, subnormal ones too, since the exponents'
/// biases are 1 and 15. The product with the scale has up to 6 bits, is a multiple of 2⁻²⁴ and below 1: f16 has it.
#[inline(always)]
pub fn decode(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    /// Places of `c` from `a`, the others from `b`.
    const SELECT: u32 = 0xe4;
    const SIGNS: u32 = 0x8080_8080;
    const HIGH_BYTES: u32 = 0x8e00_8e00;
    // f16's high bytes of four elements at once, with bits of others between: byte j of `even` is element 2j, of `odd` 2j+1.
    let even = lop3_b32::<SELECT>(codes << 4, codes << 1, SIGNS);
    let odd = lop3_b32::<SELECT>(codes, codes >> 3, SIGNS);
    let low = |bytes: u32| mul_rn_f16x2(bytes << 8 & HIGH_BYTES, scale);
    let high = |bytes: u32| mul_rn_f16x2(bytes & HIGH_BYTES, scale);
    [low(even), low(odd), high(even), high(odd)]
}

/// Two e4m3 as f16.
#[derive(Clone, Copy)]
pub struct Scales(u32);

impl Scales {
    /// Of two bytes.
    #[inline(always)]
    pub fn new(bytes: u16) -> Self {
        Self(cvt_rn_f16x2_e4m3x2(bytes))
    }

    /// The first or the second, in both halves of a register.
    #[inline(always)]
    pub fn twice(self, index: usize) -> u32 {
        prmt_b32(self.0, 0, if index == 0 { 0x1010 } else { 0x3232 })
    }
}
