//! e2m1 × e4m3 → f16, exactly.

use cuda_std::{
    convert::cvt_rn_f16x2_e4m3x2,
    float::mul_rn_f16x2,
    integer::{lop3_b32, prmt_b32},
};

use super::order::WORD_PAIRS;

/// What a product lacks of its value: [`decode`] leaves out 2¹⁴ in A and in B.
pub const UNSCALE: f32 = (1 << 28) as f32;

/// Eight e2m1 codes times a scale, as f16, without a factor of 2¹⁴. Register i has element i in its low half and element i+4
/// in its high half. `scale` is an f16, the same in both halves.
///
/// e2m1's exponent and mantissa are put in the places of f16's. The result is the value times 2⁻¹⁴, for subnormal values
/// too, since the exponents' biases are 1 and 15. Times the scale it is a multiple of 2⁻²⁴ below 1 with at most 6
/// significant bits, which f16 holds exactly.
#[inline(always)]
pub fn decode(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    scaled(select_signs(codes << 4, codes << 1), select_signs(codes, codes >> 3), scale)
}

/// As [`decode`], of codes in the order in which they lie in a slab ([`crate::gated_sm90::abi::slab_byte`]).
#[inline(always)]
pub fn decode_weights(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    scaled(codes, select_signs(codes << 7, codes >> 3), scale)
}

/// Four high bytes of f16: the signs from `signs`, all other bits from `others`.
#[inline(always)]
fn select_signs(signs: u32, others: u32) -> u32 {
    /// The table of `lop3` that takes the bits of `a` where `c` has ones, and those of `b` elsewhere.
    const SELECT: u32 = 0xe4;
    lop3_b32::<SELECT>(signs, others, 0x8080_8080)
}

/// Eight elements times a scale, from the high bytes of their f16: byte j of `even` is element 2j, byte j of `odd` element
/// 2j+1. The bytes may hold other bits besides an element's, which are masked out.
#[inline(always)]
fn scaled(even: u32, odd: u32, scale: u32) -> [u32; WORD_PAIRS] {
    const HIGH_BYTES: u32 = 0x8e00_8e00;
    let low = |bytes: u32| mul_rn_f16x2(bytes << 8 & HIGH_BYTES, scale);
    let high = |bytes: u32| mul_rn_f16x2(bytes & HIGH_BYTES, scale);
    [low(even), low(odd), high(even), high(odd)]
}

/// Two scale factors.
#[derive(Clone, Copy)]
pub struct Scales(u32);

impl Scales {
    /// Two e4m3 as f16.
    #[inline(always)]
    pub fn new(bytes: u16) -> Self {
        Self(cvt_rn_f16x2_e4m3x2(bytes))
    }

    /// The scale of this index, 0 or 1, in both halves of a register.
    #[inline(always)]
    pub fn twice(self, index: usize) -> u32 {
        prmt_b32(self.0, 0, if index == 0 { 0x1010 } else { 0x3232 })
    }
}
