//! Branch-free conversions of numbers, so that the compiler vectorizes loops over them.

use crate::format::{BLOCK, e2m1, e4m3};

/// Code of the smallest positive scale, 2⁻⁹; a block scale of zero would turn the whole block into zeros.
pub(super) const SMALLEST_SCALE: u32 = 1;

/// Code of scale 1, for blocks of zeros.
pub(super) const SCALE_OF_ZEROS: u32 = 0x38;

/// 2²³: adding it to a smaller number leaves no bits for a fraction, so the sum is rounded to an integer, ties to even.
const ROUNDS_TO_ONE: f32 = 8_388_608.0;

/// 2²²: adding it rounds to halves, the smallest step of E2M1.
pub(super) const ROUNDS_TO_HALF: f32 = ROUNDS_TO_ONE / 2.0;

/// Joins the halves of an array repeatedly until one element remains.
#[inline(always)]
pub(super) fn tree<T: Copy>(lanes: [T; BLOCK], join: impl Fn(T, T) -> T) -> T {
    let eight: [T; 8] = std::array::from_fn(|lane| join(lanes[lane], lanes[lane + 8]));
    let four: [T; 4] = std::array::from_fn(|lane| join(eight[lane], eight[lane + 4]));
    join(join(four[0], four[2]), join(four[1], four[3]))
}

/// Branch-free [`e4m3::encode`] of a non-negative number.
#[inline(always)]
pub(super) fn e4m3_bits(x: f32) -> u32 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    const DROPPED_BITS: u32 = f32::MANTISSA_DIGITS - 1 - 3;
    let x = if x > e4m3::MAX { e4m3::MAX } else { x };
    let subnormal = (x * (1 << e4m3::FRACTION_BITS) as f32 + ROUNDS_TO_ONE).to_bits() & 0xF;
    let bits = x.to_bits();
    let rounded = bits + (1 << (DROPPED_BITS - 1)) - 1 + (bits >> DROPPED_BITS & 1);
    let normal = (rounded >> DROPPED_BITS).wrapping_sub(E4M3_REBIAS);
    if x < SMALLEST_NORMAL { subnormal } else { normal }
}

/// Value of a scale's code, as [`e4m3::decode`] but without a table.
#[inline(always)]
pub(super) fn e4m3_value(code: u32) -> f32 {
    let subnormal = code as i32 as f32 / (1 << e4m3::FRACTION_BITS) as f32;
    let normal = f32::from_bits((code + E4M3_REBIAS) << (f32::MANTISSA_DIGITS - 1 - 3));
    if code < 8 { subnormal } else { normal }
}

/// Difference of the f32 and E4M3 exponent biases, above three bits of mantissa.
const E4M3_REBIAS: u32 = (127 - 7) << 3;

/// Returns the E2M1 value nearest to a magnitude, ties to the even code.
#[inline(always)]
pub(super) fn nearest_value(magnitude: f32) -> f32 {
    let within = if magnitude > e2m1::MAX { e2m1::MAX } else { magnitude };
    // The step between E2M1 values is ½ up to 2, then 1, then 2: half of the power of two below the number.
    let power = f32::from_bits(within.to_bits() & f32::INFINITY.to_bits());
    let rounds = if power > 1.0 { power } else { 1.0 } * ROUNDS_TO_HALF;
    (within + rounds) - rounds
}
