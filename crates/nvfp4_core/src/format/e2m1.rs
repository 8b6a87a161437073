//! E2M1, the 4-bit value of NVFP4: sign, two exponent bits of bias 1, one mantissa bit; no infinity, no NaN.
//!
//! Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.

/// Number of fractional bits of an E2M1 value: all values are multiples of ½.
pub const FRACTION_BITS: u32 = 1;

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Value of each code times 2, an exact integer.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Value of each code.
pub const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the value of a code; the upper four bits are ignored.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code & 0xF)]
}

/// Returns the code nearest to `x`, ties to the even code; magnitudes above 6 saturate. NaN gives ±0, so callers refuse
/// NaN first.
#[inline]
pub fn encode(x: f32) -> u8 {
    let magnitude = x.abs();
    // A midpoint rounds to the neighbor with the even code, hence the alternating `>` and `>=`.
    let code = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    code | (u8::from(x.is_sign_negative()) << 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_matches_its_sign_exponent_and_mantissa() {
        for code in 0..16u8 {
            let (exponent, mantissa) = ((code >> 1) & 3, f32::from(code & 1));
            let magnitude =
                if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * f32::from(1u8 << (exponent - 1)) };
            let value = if code & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(decode(code).to_bits(), value.to_bits(), "code {code}");
            assert_eq!(f32::from(DOUBLED[usize::from(code)]), 2.0 * value, "code {code}");
        }
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..16 {
            assert_eq!(encode(decode(code)), code);
        }
    }

    #[test]
    fn midpoints_round_to_the_even_code() {
        for code in 0..7u8 {
            let midpoint = (decode(code) + decode(code + 1)) / 2.0;
            assert_eq!(encode(midpoint), code + (code & 1), "midpoint {midpoint}");
            assert_eq!(encode(midpoint.next_down()), code);
            assert_eq!(encode(midpoint.next_up()), code + 1);
        }
        assert_eq!(encode(f32::MAX), 7);
        assert_eq!(encode(f32::NEG_INFINITY), 15);
    }
}
