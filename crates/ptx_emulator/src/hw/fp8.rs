//! `wgmma` of 8-bit floats with f32 accumulators, bit-exact with an H200.
//!
//! The H200's tensor core keeps far fewer bits than its f32 accumulators could hold, which is visible in results: a sum
//! of 14336 products of one sign loses a fifth of its value. These sums therefore follow the GPU, and are not exact
//! like the sums in [`matmul`](super::matmul). PTX leaves them unspecified. The rules were derived from 114,720 results
//! of an H200. A test compares some of them (`fp8_h200.txt`).
//!
//! 1. A product of two elements is exact. Its exponent is the sum of its factors' exponents. A subnormal element has
//!    the exponent of the smallest normal element. The accumulator has its own exponent. A zero has no exponent.
//! 2. All 32 products and the accumulator are truncated, toward zero, to multiples of 2⁻¹³ times the power of two with
//!    the largest of these exponents.
//! 3. They are added exactly. The sum is truncated, toward zero, to 13 bits after its leading bit.

use super::descriptor::Element;
use super::number::{self, E4M3, E5M2};

/// Bits after the leading bit that an addend and the sum keep.
const KEPT_BITS: i32 = 13;

/// Bits after the leading bit of an element's significand in [`Scaled`].
const ELEMENT_BITS: i32 = 3;

/// Bits after the leading bit of an f32's significand.
const F32_BITS: i32 = 23;

/// A finite number as an integer times a power of two.
#[derive(Clone, Copy, Debug, Default)]
struct Scaled {
    /// An element's significand is below 16 in magnitude, and at least 8 if the element is normal. A zero has 0.
    significand: i32,
    /// Exponent of bit 3 of the significand.
    exponent: i32,
    /// The value, if it is infinite or NaN.
    special: Option<f32>,
}

impl Scaled {
    /// Decodes an element.
    fn element(element: Element, code: u8) -> Self {
        let format = if element == Element::E5m2 { E5M2 } else { E4M3 };
        let value = number::decode(&format, code.into());
        if !value.is_finite() {
            return Self { special: Some(value as f32), ..Self::default() };
        }
        let mantissa_bits = format.mantissa_bits as i32;
        let (field, bias) = (i32::from(code & 0x7f) >> mantissa_bits, (1 << (format.exponent_bits - 1)) - 1);
        // Subnormal elements have the exponent of the smallest normal elements.
        let exponent = field.max(1) - bias;
        let significand = (value * f64::from(ELEMENT_BITS - exponent).exp2()) as i32;
        Self { significand, exponent, special: None }
    }

    /// Decodes rows of elements.
    fn decode(element: Element, codes: &[u8]) -> Vec<Self> {
        let table: Vec<Self> = (0..=u8::MAX).map(|code| Self::element(element, code)).collect();
        codes.iter().map(|&code| table[usize::from(code)]).collect()
    }
}

/// `significand · 2^exponent`, truncated toward zero to an integer.
fn cut(significand: i64, exponent: i32) -> i64 {
    match exponent {
        0.. => significand << exponent,
        -62..0 => (significand.abs() >> -exponent) * significand.signum(),
        _ => 0,
    }
}

/// D = A·Bᵀ + D for 8-bit elements. A and B are rows of `k` codes. `d` is M × N, row by row.
///
/// # Panics
/// If `d` has another length.
pub fn multiply_f32(a: (Element, &[u8]), b: (Element, &[u8]), k: usize, d: &mut [f32]) {
    let (a, b) = (Scaled::decode(a.0, a.1), Scaled::decode(b.0, b.1));
    assert_eq!(d.len() * k * k, a.len() * b.len(), "D must be M × N");
    for (a, d) in a.chunks_exact(k).zip(d.chunks_exact_mut((b.len() / k).max(1))) {
        for (b, d) in b.chunks_exact(k).zip(d) {
            *d = dot(a, b, *d);
        }
    }
}

/// Computes one element of D.
fn dot(a: &[Scaled], b: &[Scaled], c: f32) -> f32 {
    let products = || a.iter().zip(b).map(|(a, b)| (a.significand * b.significand, a.exponent + b.exponent));
    let is_special = |number: &Scaled| number.special.is_some();
    if !c.is_finite() || a.iter().any(is_special) || b.iter().any(is_special) {
        return special(a, b, c);
    }
    let (c_significand, c_exponent) = parts(c);
    let of_c = (c_significand != 0).then_some(c_exponent);
    let largest = products().filter(|product| product.0 != 0).map(|product| product.1).chain(of_c).max();
    let Some(largest) = largest else {
        return 0.0;
    };
    let addend =
        |(significand, exponent): (i32, i32), bits: i32| cut(significand.into(), exponent - bits - largest + KEPT_BITS);
    let sum: i64 = products().map(|product| addend(product, 2 * ELEMENT_BITS)).sum::<i64>()
        + addend((c_significand, c_exponent), F32_BITS);
    // Number of bits below the sum's last kept bit.
    let below = (sum.unsigned_abs().checked_ilog2().unwrap_or(0) as i32 - KEPT_BITS).max(0);
    let sum = cut(sum, -below) << below;
    (sum as f64 * f64::from(largest - KEPT_BITS).exp2()) as f32
}

/// Splits a finite f32 into an integer, in units of 2⁻²³, and the exponent of the power of two that multiplies it.
fn parts(x: f32) -> (i32, i32) {
    let (bits, sign) = (x.to_bits(), if x.is_sign_negative() { -1 } else { 1 });
    let (field, mantissa) = ((bits >> F32_BITS & 0xff) as i32, (bits & 0x7f_ffff) as i32);
    if field == 0 { (sign * mantissa, -126) } else { (sign * (mantissa | 1 << F32_BITS), field - 127) }
}

/// Sum by the rules of IEEE 754 if an element or the accumulator is infinite or NaN.
#[cold]
fn special(a: &[Scaled], b: &[Scaled], c: f32) -> f32 {
    let value = |x: &Scaled| x.special.unwrap_or(x.significand as f32);
    let sum = a.iter().zip(b).map(|(a, b)| value(a) * value(b)).fold(c, |sum, product| sum + product);
    if sum.is_nan() { f32::from_bits(number::F32_NAN) } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of an H200. Each line holds the types of A and B, 32 codes of each, and the accumulator's bits before
    /// and after.
    const CARD: &str = include_str!("fp8_h200.txt");

    #[test]
    fn sums_match_an_h200() {
        let bytes = |hex: &str| -> Vec<u8> {
            hex.as_bytes()
                .chunks(2)
                .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect()
        };
        let element = |name: &str| if name == "e4m3" { Element::E4m3 } else { Element::E5m2 };
        let mut lines = 0;
        for line in CARD.lines() {
            let [a_type, b_type, a, b, c, d] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let bits = |hex| u32::from_str_radix(hex, 16).unwrap();
            let mut sum = [f32::from_bits(bits(c))];
            multiply_f32((element(a_type), &bytes(a)), (element(b_type), &bytes(b)), 32, &mut sum);
            assert_eq!(sum[0].to_bits(), bits(d), "{line}: found {}, expected {}", sum[0], f32::from_bits(bits(d)));
            lines += 1;
        }
        assert!(lines >= 100, "{lines} lines");
    }

    #[test]
    fn small_integers_are_exact_but_small_addends_are_lost() {
        const ONE: u8 = 0x38;
        let mut sum = [3.0];
        multiply_f32((Element::E4m3, &[ONE; 32]), (Element::E4m3, &[ONE; 32]), 32, &mut sum);
        assert_eq!(sum, [35.0]);
        let mut sum = [8192.0];
        multiply_f32((Element::E4m3, &[ONE; 32]), (Element::E4m3, &[0x30; 32]), 32, &mut sum);
        // The products are halves, which are lost next to 2¹³.
        assert_eq!(sum, [8192.0]);
    }
}
