//! f64 arithmetic in any rounding mode (PTX ISA, "Floating Point Instructions": `.rn`, `.rz`, `.rm`, `.rp`).
//!
//! The host rounds to nearest. To find on which side of that result the exact value lies, the module sums products
//! exactly, with all bits that products of f64 can have (Kulisch's accumulator). The result is then the nearest f64 or
//! one of its neighbors.

use std::cmp::Ordering;

use super::number::Rounding;

/// `a + b`.
pub fn add(a: f64, b: f64, rounding: Rounding) -> f64 {
    fma(1.0, a, b, rounding)
}

/// `a · b`.
pub fn mul(a: f64, b: f64, rounding: Rounding) -> f64 {
    // Adding a zero with the product's sign changes nothing.
    let zero = if is_negative(a, b) { -0.0 } else { 0.0 };
    fma(a, b, zero, rounding)
}

/// `a · b + c`.
pub fn fma(a: f64, b: f64, c: f64, rounding: Rounding) -> f64 {
    let nearest = a.mul_add(b, c);
    if rounding == Rounding::NearestEven || ![a, b, c].iter().all(|x| x.is_finite()) {
        return nearest;
    }
    let side = beyond(nearest, || sign_of_sum(&[(a, b), (c, 1.0), (-nearest, 1.0)]));
    if side == Ordering::Equal && nearest == 0.0 {
        // If values of opposite sign cancel, the zero is −0 when rounding down (IEEE 754, 6.3).
        let canceled = is_negative(a, b) != c.is_sign_negative();
        return if canceled && rounding == Rounding::Down { -0.0 } else { nearest };
    }
    step(nearest, side, rounding)
}

/// `a / b`.
pub fn div(a: f64, b: f64, rounding: Rounding) -> f64 {
    let nearest = a / b;
    if rounding == Rounding::NearestEven || !a.is_finite() || !b.is_finite() || b == 0.0 {
        return nearest;
    }
    let side = beyond(nearest, || {
        let remainder = sign_of_sum(&[(a, 1.0), (-nearest, b)]);
        if b < 0.0 { remainder.reverse() } else { remainder }
    });
    step(nearest, side, rounding)
}

/// Square root of `a`.
pub fn sqrt(a: f64, rounding: Rounding) -> f64 {
    let nearest = a.sqrt();
    if rounding == Rounding::NearestEven || !nearest.is_finite() {
        return nearest;
    }
    step(nearest, sign_of_sum(&[(a, 1.0), (-nearest, nearest)]), rounding)
}

fn is_negative(a: f64, b: f64) -> bool {
    a.is_sign_negative() != b.is_sign_negative()
}

/// Compares a finite exact value with its nearest f64, which is infinite if the exact value is too large.
fn beyond(nearest: f64, compare: impl Fn() -> Ordering) -> Ordering {
    match nearest {
        f64::INFINITY => Ordering::Less,
        f64::NEG_INFINITY => Ordering::Greater,
        _ => compare(),
    }
}

/// Rounds in a direction, given the nearest f64 and the side on which the exact value lies.
fn step(nearest: f64, side: Ordering, rounding: Rounding) -> f64 {
    let negative = nearest.is_sign_negative();
    match (rounding, side) {
        (Rounding::Up, Ordering::Greater) => nearest.next_up(),
        (Rounding::TowardZero, Ordering::Greater) if negative => nearest.next_up(),
        (Rounding::Down, Ordering::Less) => nearest.next_down(),
        (Rounding::TowardZero, Ordering::Less) if !negative => nearest.next_down(),
        _ => nearest,
    }
}

/// Exponent of the lowest bit that a product of two f64 can have.
const LAST: i32 = 2 * -1074;
/// 64-bit limbs from that bit to above the largest product, with room for sums and a sign: more than 2148 + 2048 bits.
const LIMBS: usize = 66;

/// Compares a sum of a few products of finite values with zero, exactly.
fn sign_of_sum(products: &[(f64, f64)]) -> Ordering {
    let mut sum = [0u64; LIMBS];
    for &(a, b) in products {
        let ((a_significand, a_exponent), (b_significand, b_exponent)) = (parts(a), parts(b));
        let place = (a_exponent + b_exponent - LAST) as usize;
        add_shifted(&mut sum, u128::from(a_significand) * u128::from(b_significand), place, is_negative(a, b));
    }
    if sum.iter().all(|limb| *limb == 0) {
        Ordering::Equal
    } else if sum[LIMBS - 1] >> 63 == 1 {
        Ordering::Less
    } else {
        Ordering::Greater
    }
}

/// Splits the magnitude of a finite value into an integer and the exponent of a power of two.
fn parts(x: f64) -> (u64, i32) {
    let (mantissa, exponent) = (x.to_bits() & ((1 << 52) - 1), (x.to_bits() >> 52 & 0x7ff) as i32);
    if exponent == 0 { (mantissa, -1074) } else { (mantissa | 1 << 52, exponent - 1075) }
}

/// Adds `value`·2^`place` to a number in two's complement, or subtracts it if `negative`.
fn add_shifted(sum: &mut [u64; LIMBS], value: u128, place: usize, negative: bool) {
    let (first, shift) = (place / 64, place % 64);
    let above = if shift == 0 { 0 } else { (value >> (128 - shift)) as u64 };
    let shifted = [(value << shift) as u64, (value << shift >> 64) as u64, above];
    let mut carry = false;
    for (n, limb) in sum[first..].iter_mut().enumerate() {
        let part = shifted.get(n).copied().unwrap_or(0);
        let ((once, a), (twice, b));
        if negative {
            (once, a) = limb.overflowing_sub(part);
            (twice, b) = once.overflowing_sub(carry.into());
        } else {
            (once, a) = limb.overflowing_add(part);
            (twice, b) = once.overflowing_add(carry.into());
        }
        (*limb, carry) = (twice, a || b);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIRECTED: [Rounding; 3] = [Rounding::TowardZero, Rounding::Down, Rounding::Up];

    #[test]
    fn exact_results_are_equal_in_every_rounding_mode() {
        for mode in DIRECTED {
            assert_eq!(add(1.5, 2.25, mode), 3.75);
            assert_eq!(mul(-3.0, 0.5, mode), -1.5);
            assert_eq!(fma(3.0, 5.0, -14.0, mode), 1.0);
            assert_eq!(div(1.0, -4.0, mode), -0.25);
            assert_eq!(sqrt(2.25, mode), 1.5);
            assert!(sqrt(-1.0, mode).is_nan() && div(0.0, 0.0, mode).is_nan());
            assert_eq!(div(-1.0, 0.0, mode), f64::NEG_INFINITY);
            assert!(mul(-0.0, 2.0, mode).is_sign_negative());
        }
    }

    #[test]
    fn inexact_results_round_in_the_direction_of_the_mode() {
        let third: f64 = 1.0 / 3.0;
        assert_eq!(DIRECTED.map(|mode| div(1.0, 3.0, mode)), [third, third, third.next_up()], "the nearest is below");
        assert_eq!(DIRECTED.map(|mode| div(-1.0, 3.0, mode)), [-third, -third.next_up(), -third]);
        let root = 2f64.sqrt();
        assert_eq!(
            DIRECTED.map(|mode| sqrt(2.0, mode)),
            [root.next_down(), root.next_down(), root],
            "the nearest is above"
        );
    }

    #[test]
    fn overflow_and_underflow_round_in_the_direction_of_the_mode() {
        let tiny = f64::from_bits(1);
        assert_eq!(DIRECTED.map(|mode| mul(f64::MAX, 2.0, mode)), [f64::MAX, f64::MAX, f64::INFINITY]);
        assert_eq!(DIRECTED.map(|mode| add(-f64::MAX, -1.0, mode)), [-f64::MAX, f64::NEG_INFINITY, -f64::MAX]);
        assert_eq!(DIRECTED.map(|mode| mul(tiny, tiny, mode)), [0.0, 0.0, tiny]);
        assert_eq!(DIRECTED.map(|mode| mul(tiny, -tiny, mode)), [0.0, -tiny, 0.0]);
        assert_eq!(DIRECTED.map(|mode| div(tiny, 3.0, mode)), [0.0, 0.0, tiny]);
        assert_eq!(DIRECTED.map(|mode| fma(tiny, tiny, 1.0, mode)), [1.0, 1.0, 1f64.next_up()]);
        assert_eq!(DIRECTED.map(|mode| fma(tiny, -tiny, 1.0, mode)), [1f64.next_down(), 1f64.next_down(), 1.0]);
    }

    #[test]
    fn canceling_sums_give_minus_zero_when_rounding_down() {
        assert_eq!(DIRECTED.map(|mode| add(1.5, -1.5, mode).is_sign_negative()), [false, true, false]);
        assert_eq!(DIRECTED.map(|mode| fma(-2.0, 1.0, 2.0, mode).is_sign_negative()), [false, true, false]);
        assert!(DIRECTED.iter().all(|mode| add(-0.0, -0.0, *mode).is_sign_negative()));
    }

    proptest! {
        #[test]
        fn products_and_quotients_of_integers_are_bracketed(a in 1i64..1 << 53, b in 1i64..1 << 53) {
            let (x, y) = (a as f64, b as f64);
            let [zero, down, up] = DIRECTED.map(|mode| mul(x, y, mode));
            let exact = i128::from(a) * i128::from(b);
            prop_assert!(down as i128 <= exact && exact <= up as i128 && zero == down);
            prop_assert_eq!(up, if down as i128 == exact { down } else { down.next_up() });
            // The quotient's bounds times the divisor enclose the dividend.
            let [zero, down, up] = DIRECTED.map(|mode| div(x, y, mode));
            prop_assert!(zero == down && (up == down || up == down.next_up()));
            prop_assert!(mul(down, y, Rounding::Down) <= x && x <= mul(up, y, Rounding::Up));
        }

        #[test]
        fn negated_operands_mirror_the_result(a: f64, b: f64, c: f64) {
            let same = |x: f64, y: f64| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            prop_assert!(same(fma(a, b, c, Rounding::Up), -fma(-a, b, -c, Rounding::Down)));
            prop_assert!(same(div(a, b, Rounding::Up), -div(-a, b, Rounding::Down)));
            let [zero, down, up] = DIRECTED.map(|mode| fma(a, b, c, mode));
            let toward_zero = if up <= 0.0 { up } else { down };
            prop_assert!(same(zero, toward_zero));
        }

        #[test]
        fn sums_of_integers_are_bracketed(a in -(1i64 << 53)..1 << 53, b in -(1i64 << 53)..1 << 53, shift in 0..60) {
            let exact = (i128::from(a) << shift) + i128::from(b);
            let [_, down, up] = DIRECTED.map(|mode| fma(a as f64, 2f64.powi(shift), b as f64, mode));
            prop_assert!(down as i128 <= exact && exact <= up as i128);
            prop_assert_eq!(up, if down as i128 == exact { down } else { down.next_up() });
        }
    }
}
