//! E4M3, the 8-bit block scale of NVFP4: four exponent bits of bias 7, three mantissa bits, no infinity.
//!
//! Tensor cores read a scale as *unsigned* E4M3: codes above [`MAX_CODE`] (NaN, and all codes with the sign bit) are
//! not scales. Source: OCP 8-bit Floating Point Specification 1.0; PTX ISA, "Alternate Floating-Point Data Formats"
//! (ue4m3).

/// Number of fractional bits of an E4M3 value: all values are multiples of 2⁻⁹, the smallest subnormal.
pub const FRACTION_BITS: u32 = 9;

/// Largest value.
pub const MAX: f32 = 448.0;

/// Code of [`MAX`], the largest valid scale.
pub const MAX_CODE: u8 = 0x7E;

/// Code of NaN without sign.
pub const NAN_CODE: u8 = 0x7F;

const BIAS: u32 = 7;
const MANTISSA_BITS: u32 = 3;

/// Returns `true` if a code is a valid scale: neither negative nor NaN.
#[inline]
pub const fn is_scale(code: u8) -> bool {
    code <= MAX_CODE
}

/// Returns the value of a scale in units of 2⁻⁹, at most 229,376. Ignores the sign bit, as tensor cores do.
#[inline]
pub const fn fixed_point(code: u8) -> i32 {
    let exponent = (code >> MANTISSA_BITS) & 0xF;
    let mantissa = (code & 7) as i32;
    if exponent == 0 { mantissa } else { (8 + mantissa) << (exponent - 1) }
}

/// Value of each scale code without its sign bit, which tensor cores ignore; NaN for 0x7F.
pub const VALUES: [f32; 128] = {
    let mut values = [f32::NAN; 128];
    let mut code = 0;
    while code <= MAX_CODE {
        values[code as usize] = fixed_point(code) as f32 / (1 << FRACTION_BITS) as f32;
        code += 1;
    }
    values
};

/// Returns the value of any code, including negative codes and NaN.
#[inline]
pub fn decode(code: u8) -> f32 {
    let magnitude = VALUES[usize::from(code & 0x7F)];
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Returns the code of the scale nearest to `x`, ties to the even code, saturated to 0…448. NaN and negative numbers
/// give 0.
#[inline]
pub fn encode(x: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    const DROPPED_BITS: u32 = f32::MANTISSA_DIGITS - 1 - MANTISSA_BITS;
    const REBIAS: u32 = (127 - BIAS) << MANTISSA_BITS;
    #[expect(clippy::manual_clamp, reason = "clamp would keep NaN; max gives 0")]
    let x = x.max(0.0).min(MAX);
    if x < SMALLEST_NORMAL {
        (x * (1 << FRACTION_BITS) as f32).round_ties_even() as u8
    } else {
        let bits = x.to_bits();
        let round = (1 << (DROPPED_BITS - 1)) - 1 + ((bits >> DROPPED_BITS) & 1);
        (((bits + round) >> DROPPED_BITS) - REBIAS) as u8
    }
}

/// Returns the code nearest to any number, ties to the even code, saturated to ±448; [`NAN_CODE`] for NaN, as
/// `cvt.rn.satfinite.e4m3x2.f32` (PTX ISA, "cvt").
#[inline]
pub fn encode_signed(x: f32) -> u8 {
    if x.is_nan() { NAN_CODE } else { encode(x.abs()) | u8::from(x.is_sign_negative()) << 7 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_matches_its_exponent_and_mantissa() {
        for code in 0..=255u8 {
            let (exponent, mantissa) = (i32::from((code >> 3) & 0xF), f64::from(code & 7));
            let magnitude = match (exponent, code & 7) {
                (15, 7) => f64::NAN,
                (0, _) => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let got = f64::from(decode(code));
            assert!(got.abs() == magnitude || (got.is_nan() && magnitude.is_nan()), "code {code:#x}");
            assert_eq!(got.is_sign_negative() && !got.is_nan(), code & 0x80 != 0 && !magnitude.is_nan());
            assert_eq!(is_scale(code), code & 0x80 == 0 && !magnitude.is_nan());
            if is_scale(code) {
                assert_eq!(f64::from(fixed_point(code)), magnitude * 512.0);
            }
        }
    }

    #[test]
    fn every_scale_survives_a_round_trip() {
        for code in 0..=MAX_CODE {
            assert_eq!(encode(decode(code)), code);
        }
    }

    #[test]
    fn midpoints_round_to_the_even_code() {
        for code in 0..MAX_CODE {
            let midpoint = (decode(code) + decode(code + 1)) / 2.0;
            assert_eq!(encode(midpoint), code + (code & 1), "midpoint {midpoint}");
            assert_eq!(encode(midpoint.next_down()), code);
            assert_eq!(encode(midpoint.next_up()), code + 1);
        }
    }

    #[test]
    fn negative_numbers_and_nan_have_codes_too() {
        for code in 0..=255u8 {
            let expected = if code & 0x7F == NAN_CODE { NAN_CODE } else { code };
            assert_eq!(encode_signed(decode(code)), expected);
        }
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY, -0.0].map(encode_signed), [0xFE, 0x7E, 0x80]);
    }

    #[test]
    fn numbers_outside_the_scale_range_saturate() {
        for (x, code) in [(-1.0, 0), (f32::NAN, 0), (449.0, MAX_CODE), (f32::INFINITY, MAX_CODE)] {
            assert_eq!(encode(x), code);
        }
    }
}
