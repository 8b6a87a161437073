//! e2m1 × e4m3 → f16 or bf16, exactly.

use cuda_std::{
    convert::{CONVERTS_E4M3, cvt_rn_f16x2_e4m3x2},
    float::{mul_rn_bf16x2, mul_rn_f16x2},
    integer::{half_twice_b16, lop3_b32, prmt_b32},
};

use super::WORD_PAIRS;

/// Factor that undoes the scaling of numbers made by [`decode`] or [`decode_weights`].
pub const F16_UNSCALE: f32 = (1 << 14) as f32;

/// Decodes eight e2m1 codes, multiplied by a scale, to f16 that are 2¹⁴ times too small. Register i has element i in
/// its low half and element i+4 in its high half. `scale` is an f16, the same in both halves.
///
/// e2m1's exponent and mantissa go to the places of f16's. The result is the value times 2⁻¹⁴, for subnormal values
/// too, because the exponents' biases are 1 and 15. Multiplied by the scale, it is a multiple of 2⁻²⁴ below 1 with at
/// most 6 significant bits, which f16 holds exactly.
#[inline(always)]
pub fn decode(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    scaled(select_signs(codes << 4, codes << 1), select_signs(codes, codes >> 3), [scale; 2])
}

/// Like [`decode`], for codes in the order of weights packed for f16
/// ([`OperandType::pack`](crate::units::OperandType::pack)).
#[inline(always)]
pub fn decode_weights(codes: u32, scale: u32) -> [u32; WORD_PAIRS] {
    decode_weights_of_two(codes, [scale; 2])
}

/// Like [`decode_weights`], with one scale for the first two registers and another for the last two.
#[inline(always)]
pub fn decode_weights_of_two(codes: u32, scales: [u32; 2]) -> [u32; WORD_PAIRS] {
    scaled(codes, select_signs(codes << 7, codes >> 3), scales)
}

/// Four high bytes of f16: the signs from `signs`, all other bits from `others`.
#[inline(always)]
fn select_signs(signs: u32, others: u32) -> u32 {
    /// The table of `lop3` that selects the bits of `a` where `c` has ones, and the bits of `b` elsewhere.
    const SELECT: u32 = 0xe4;
    lop3_b32::<SELECT>(signs, others, 0x8080_8080)
}

/// Eight elements, multiplied by one scale for the first two registers and one for the last two. The elements come as
/// high bytes of f16: byte j of `even` is element 2j, byte j of `odd` is element 2j+1. Other bits in these bytes are
/// masked out.
#[inline(always)]
fn scaled(even: u32, odd: u32, scales: [u32; 2]) -> [u32; WORD_PAIRS] {
    const HIGH_BYTES: u32 = 0x8e00_8e00;
    let low = |bytes: u32| mul_rn_f16x2(bytes << 8 & HIGH_BYTES, scales[0]);
    let high = |bytes: u32| mul_rn_f16x2(bytes & HIGH_BYTES, scales[1]);
    [low(even), low(odd), high(even), high(odd)]
}

/// Two scales.
#[derive(Clone, Copy)]
pub struct Scales(u32);

impl Scales {
    /// Two e4m3 as f16. They are finite and have no sign.
    #[inline(always)]
    pub fn new(bytes: u16) -> Self {
        if CONVERTS_E4M3 {
            return Self(cvt_rn_f16x2_e4m3x2(bytes));
        }
        /// Two f16 of 2⁸.
        const TWICE_256: u32 = 0x5c00_5c00;
        // Exponent and mantissa in the places of f16's are the value times 2⁻⁸, because the exponents' biases are 7 and
        // 15.
        let halves = prmt_b32(u32::from(bytes), 0, 0x4140) << 7;
        Self(mul_rn_f16x2(halves, TWICE_256))
    }

    /// Scale number `index`, 0 or 1, in both halves of a register.
    #[inline(always)]
    pub fn twice(self, index: usize) -> u32 {
        prmt_b32(self.0, 0, if index == 0 { 0x1010 } else { 0x3232 })
    }

    /// Scale number `index`, 0 or 1, as both halves of a register. It takes no instruction: a multiplication of pairs
    /// can name the half to use.
    #[inline(always)]
    pub fn half_twice(self, index: usize) -> u32 {
        if index == 0 { half_twice_b16::<false>(self.0) } else { half_twice_b16::<true>(self.0) }
    }
}

/// Factor that undoes the scaling of numbers made by [`decode_weights_bf16`].
pub const BF16_UNSCALE: f32 = (1 << 7) as f32;

/// Like [`decode_weights`], to bf16 that are 2⁷ times too small. The word is packed for bf16
/// ([`BF16_BITS`](crate::units::BF16_BITS)), and [`Bf16Scales::half_twice`] makes the scale.
///
/// Exponent and mantissa of an e2m1 in bits 8 to 6 of a bf16 are the value times 2⁻¹²⁶, a subnormal number for 0.5.
/// Multiplied by the scale, e4m3 times 2¹¹⁹, the result is exact: 2⁻⁷ times at most 6 significant bits.
#[inline(always)]
pub fn decode_weights_bf16(word: u32, scale: u32) -> [u32; WORD_PAIRS] {
    decode_weights_bf16_of_two(word, [scale; 2])
}

/// Like [`decode_weights_bf16`], with one scale for the first two registers and another for the last two.
#[inline(always)]
pub fn decode_weights_bf16_of_two(word: u32, [first, last]: [u32; 2]) -> [u32; WORD_PAIRS] {
    const PLACES: u32 = 0x81c0_81c0;
    // The third bit of the last register's magnitudes lies apart.
    let fourth = word & 0x8180_8180 | word >> 8 & 0x0040_0040;
    [
        mul_rn_bf16x2(word << 6 & PLACES, first),
        mul_rn_bf16x2(word.rotate_left(12) & PLACES, first),
        mul_rn_bf16x2(word << 2 & PLACES, last),
        mul_rn_bf16x2(fourth, last),
    ]
}

/// Two scales, packed for bf16 ([`OperandType::pack_scale`](crate::units::OperandType::pack_scale)).
#[derive(Clone, Copy)]
pub struct Bf16Scales(u32);

impl Bf16Scales {
    /// Two packed scales, times 2¹¹⁹.
    #[inline(always)]
    pub fn new(bytes: u16) -> Self {
        Self::of_four(u32::from(bytes), 0)
    }

    /// The first two of four packed scales (`pair` 0), or the last two (`pair` 1), times 2¹¹⁹.
    #[inline(always)]
    pub fn of_four(bytes: u32, pair: usize) -> Self {
        Self((prmt_b32(bytes, 0, if pair == 0 { 0x4140 } else { 0x4342 }) << 4) + 0x7000_7000)
    }

    /// Scale number `index`, 0 or 1, as both halves of a register. It takes no instruction: a multiplication of pairs
    /// can name the half to use.
    #[inline(always)]
    pub fn half_twice(self, index: usize) -> u32 {
        if index == 0 { half_twice_b16::<false>(self.0) } else { half_twice_b16::<true>(self.0) }
    }
}
