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
    scaled(select_signs(codes << 4, codes << 1), select_signs(codes, codes >> 3), scale)
}

/// As [`decode`], of codes as they lie in a slab ([`crate::gated_sm90::abi::slab_byte`]).
#[inline(always)]
pub fn decode_weights(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    scaled(codes, select_signs(codes << 7, codes >> 3), scale)
}

/// The signs of four high bytes of f16 from `signs`, the rest from `others`.
#[inline(always)]
fn select_signs(signs: u32, others: u32) -> u32 {
    /// Places of `c` from `a`, the others from `b`.
    const SELECT: u32 = 0xe4;
    lop3_b32::<SELECT>(signs, others, 0x8080_8080)
}

/// f16's high bytes of eight elements, with bits of others between, times a scale: byte j of `even` is element 2j, of `odd`
/// 2j+1.
#[inline(always)]
fn scaled(even: u32, odd: u32, scale: u32) -> [u32; WORD_PAIRS] {
    const HIGH_BYTES: u32 = 0x8e00_8e00;
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
