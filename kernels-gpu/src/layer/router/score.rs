//! Order of scores and arithmetic of weights, in f32 by operations with IEEE 754 rounding, so host and device compute
//! the same bits.

use crate::exp::exp_of_negative;
pub use crate::exp::sigmoid;

/// Number added to a sum of sigmoids before division by it, as in DeepSeek-V3's code.
pub const LEAST_SUM: f32 = 1e-20;

/// Number of partial sums over experts. Each partial sum adds its experts one after another; the partial sums are added
/// in pairs.
pub const LANES: usize = 32;

/// Key of a NaN, below the key of every number.
const NAN: u32 = 1;

/// Returns a key with the order of scores: both zeros have one key, and NaN has the lowest. A key is never 0.
#[inline(always)]
pub const fn key(score: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    // -0 + 0 is 0.
    let bits = (score + 0.0).to_bits();
    if score.is_nan() {
        NAN
    } else if bits & SIGN == 0 {
        bits | SIGN
    } else {
        !bits
    }
}

/// Returns the score of a key; 0 for both zeros.
#[inline(always)]
pub const fn score_of(key: u32) -> f32 {
    const SIGN: u32 = 1 << 31;
    if key == NAN {
        f32::NAN
    } else if key & SIGN == 0 {
        f32::from_bits(!key)
    } else {
        f32::from_bits(key ^ SIGN)
    }
}

/// Returns e to the power of the distance of a logit from the largest one; 1 for equal ones, also for infinite ones.
#[inline(always)]
pub fn power(logit: f32, largest: f32) -> f32 {
    if logit == largest { 1.0 } else { exp_of_negative(logit - largest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_order_of_scores() {
        let scores = [f32::NEG_INFINITY, f32::MIN, -1.0, -1e-45, 0.0, 1e-45, 1.0, f32::MAX, f32::INFINITY];
        assert!(scores.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
        assert!(scores.iter().all(|&score| score_of(key(score)) == score && key(score) > key(f32::NAN)));
        assert_eq!(key(-0.0), key(0.0));
        assert!(key(f32::NAN) > 0 && key(-f32::NAN) == key(f32::NAN) && score_of(key(f32::NAN)).is_nan());
    }

    #[test]
    fn powers_of_infinite_logits_are_one_or_zero() {
        assert_eq!(power(f32::INFINITY, f32::INFINITY), 1.0);
        assert_eq!(power(f32::NEG_INFINITY, f32::NEG_INFINITY), 1.0);
        assert_eq!([power(3.0, f32::INFINITY), power(f32::NEG_INFINITY, 3.0)], [0.0; 2]);
    }
}
