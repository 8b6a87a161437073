//! Floating-point formats of PTX and the conversions between them, bit by bit.
//!
//! PTX ISA sections: 5.2.1–5.2.5 (formats), 9.7.3.3–9.7.3.6, 9.7.3.11–12 (f32 `add`, `mul`, `fma`, `min`, `max`),
//! 9.7.4.1–9.7.4.8 (the same in f16 and bf16), 9.7.9.21 (`cvt`), 9.7.9.22 (`cvt.pack`).
//!
//! All conversions use two functions: [`decode`], which converts exactly to `f64`, and [`Rounder::round`], which rounds
//! an exact value into a format once. Arithmetic is exact, or rounded to odd in `f64`. The 53 bits of `f64` are more
//! than twice the bits of any target format, so a second rounding gives the same result as a single rounding of the
//! exact value (Boldo & Melquiond, "When double rounding is odd", 2005).
//!
//! A NaN result is the format's canonical NaN (all exponent and mantissa bits set, sign clear).

/// Meaning of a format's largest exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Infinities and NaNs, as in IEEE 754.
    Ieee,
    /// No infinity. The magnitude with all bits set is NaN (`e4m3`).
    NanOnly,
    /// Every code is a finite number (`e2m1`, `e2m3`, `e3m2`).
    None,
}

/// A binary floating-point format with a sign bit, an exponent and a mantissa, most significant first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the mantissa field, without the implicit leading bit.
    pub mantissa_bits: u32,
    /// Meaning of the largest exponent.
    pub specials: Specials,
}

/// IEEE double precision.
pub const F64: Format = Format { exponent_bits: 11, mantissa_bits: 52, specials: Specials::Ieee };
/// IEEE single precision.
pub const F32: Format = Format { exponent_bits: 8, mantissa_bits: 23, specials: Specials::Ieee };
/// IEEE half precision.
pub const F16: Format = Format { exponent_bits: 5, mantissa_bits: 10, specials: Specials::Ieee };
/// The upper half of an f32.
pub const BF16: Format = Format { exponent_bits: 8, mantissa_bits: 7, specials: Specials::Ieee };
/// `tf32` as a 19-bit format. In a register it occupies the upper bits of a `.b32`: see [`tf32_to_register`].
pub const TF32: Format = Format { exponent_bits: 8, mantissa_bits: 10, specials: Specials::Ieee };
/// 8 bits, maximum 448, no infinity.
pub const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, specials: Specials::NanOnly };
/// 8 bits, maximum 57344, with infinities and NaNs.
pub const E5M2: Format = Format { exponent_bits: 5, mantissa_bits: 2, specials: Specials::Ieee };
/// 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
pub const E2M1: Format = Format { exponent_bits: 2, mantissa_bits: 1, specials: Specials::None };
/// 6 bits, maximum 7.5.
pub const E2M3: Format = Format { exponent_bits: 2, mantissa_bits: 3, specials: Specials::None };
/// 6 bits, maximum 28.
pub const E3M2: Format = Format { exponent_bits: 3, mantissa_bits: 2, specials: Specials::None };

/// The NaN of [`Format::canonical_nan`] for f32.
pub const F32_NAN: u32 = 0x7fff_ffff;
/// NaN of `ue8m0`.
pub const UE8M0_NAN: u8 = 0xff;
/// Largest value of `ue8m0`, 2¹²⁷.
pub const UE8M0_MAX: u8 = 0xfe;
/// NaN of `ue4m3`.
pub const UE4M3_NAN: u8 = 0x7f;
/// Special NaN that tensor copies write for elements outside a tensor in `OOB-NaN` mode, as an f16 or bf16.
///
/// The manual does not give its bits. The hardware is known to write all ones. No arithmetic in the emulator produces
/// this value.
pub const OOB_NAN_16: u16 = 0xffff;

impl Format {
    /// Bits per value, including the sign.
    pub const fn width(&self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    /// Exponent bias: half of the exponent range.
    pub const fn bias(&self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// Sign bit.
    pub const fn sign_bit(&self) -> u64 {
        1 << (self.width() - 1)
    }

    /// Bits of infinity; `None` if the format has no infinity.
    pub const fn infinity(&self) -> Option<u64> {
        match self.specials {
            Specials::Ieee => Some(((1 << self.exponent_bits) - 1) << self.mantissa_bits),
            Specials::NanOnly | Specials::None => None,
        }
    }

    /// Bits of the largest finite value.
    pub const fn max_finite(&self) -> u64 {
        let all = self.sign_bit() - 1;
        match self.specials {
            Specials::Ieee => (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1,
            Specials::NanOnly => all - 1,
            Specials::None => all,
        }
    }

    /// NaN that conversions and arithmetic produce; `None` if the format has no NaN.
    pub const fn canonical_nan(&self) -> Option<u64> {
        match self.specials {
            Specials::Ieee | Specials::NanOnly => Some(self.sign_bit() - 1),
            Specials::None => None,
        }
    }

    /// Whether `bits` is a NaN.
    pub const fn is_nan(&self, bits: u64) -> bool {
        let magnitude = bits & (self.sign_bit() - 1);
        match self.specials {
            Specials::Ieee => magnitude > ((1 << self.exponent_bits) - 1) << self.mantissa_bits,
            Specials::NanOnly => magnitude == self.sign_bit() - 1,
            Specials::None => false,
        }
    }

    /// Whether `bits` is a subnormal (not zero).
    pub const fn is_subnormal(&self, bits: u64) -> bool {
        let magnitude = bits & (self.sign_bit() - 1);
        magnitude != 0 && magnitude >> self.mantissa_bits == 0
    }

    /// `.ftz`: turns a subnormal into a zero of the same sign.
    pub const fn flush(&self, bits: u64) -> u64 {
        if self.is_subnormal(bits) { bits & self.sign_bit() } else { bits }
    }
}

/// Exact value of `bits` in `format`. Bits above the format's width are ignored.
#[inline]
pub const fn decode(format: &Format, bits: u64) -> f64 {
    if format.mantissa_bits == 52 {
        return f64::from_bits(bits);
    }
    let magnitude = bits & (format.sign_bit() - 1);
    let sign = (bits & format.sign_bit()) >> (format.width() - 1) << 63;
    let special = match format.infinity() {
        Some(infinity) if magnitude == infinity => Some(f64::INFINITY.to_bits()),
        _ if format.is_nan(bits) => Some(f64::NAN.to_bits()),
        _ => None,
    };
    if let Some(value) = special {
        return f64::from_bits(sign | value);
    }
    let exponent = magnitude >> format.mantissa_bits;
    if exponent == 0 {
        // A subnormal is an integer of at most 23 bits times the format's smallest step. Both factors are normal in
        // f64.
        let step = f64::from_bits(((1 - format.bias() - format.mantissa_bits as i32 + 1023) as u64) << 52);
        return f64::from_bits(sign | (magnitude as f64 * step).to_bits());
    }
    let rebias = (1023 - format.bias()) as u64;
    f64::from_bits(sign | ((magnitude << (52 - format.mantissa_bits)) + (rebias << 52)))
}

/// Value of a `ue8m0` scale factor, 2^(code − 127). 0xff is NaN.
pub const fn decode_ue8m0(code: u8) -> f64 {
    if code == UE8M0_NAN { f64::NAN } else { f64::from_bits((code as u64 + 1023 - 127) << 52) }
}

/// Value of a `ue4m3` scale factor. `None` if the top bit is set, which must be zero.
pub const fn decode_ue4m3(code: u8) -> Option<f64> {
    if code & 0x80 == 0 { Some(decode(&E4M3, code as u64)) } else { None }
}

/// Rounding of an inexact value (PTX ISA 9.7.9.21, "Floating Point Notes").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// `.rn`: nearest, ties to even.
    NearestEven,
    /// `.rna`: nearest, ties away from zero.
    NearestAway,
    /// `.rz`: toward zero.
    TowardZero,
    /// `.rm`: toward minus infinity.
    Down,
    /// `.rp`: toward plus infinity.
    Up,
    /// `.rs`: away from zero if the first `width` discarded bits plus `random` carry out.
    Stochastic {
        /// Random bits, in the low `width` bits.
        random: u32,
        /// Number of random bits: 13 for f16, 16 for bf16.
        width: u32,
    },
}

/// One rounding step into a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounder {
    /// The rounding mode.
    pub rounding: Rounding,
    /// `.satfinite`: magnitudes above the largest finite value, including infinity, become that value. Formats without
    /// an infinity always do this.
    pub satfinite: bool,
    /// `.relu`: negative results become +0.
    pub relu: bool,
}

impl Rounder {
    /// Rounds in `rounding` mode, with neither `.satfinite` nor `.relu`.
    pub const fn new(rounding: Rounding) -> Self {
        Rounder { rounding, satfinite: false, relu: false }
    }

    /// Adds `.satfinite`.
    pub const fn satfinite(self) -> Self {
        Rounder { satfinite: true, ..self }
    }

    /// Adds `.relu`.
    pub const fn relu(self) -> Self {
        Rounder { relu: true, ..self }
    }

    /// Rounds `x` once and returns its bits in `format`.
    ///
    /// A NaN becomes the canonical NaN, or the largest value if the format has no NaN (PTX ISA 9.7.9.21, `.satfinite`).
    pub fn round(&self, format: &Format, x: f64) -> u64 {
        if x.is_nan() {
            return format.canonical_nan().unwrap_or(format.max_finite());
        }
        let negative = x.is_sign_negative();
        if x.is_infinite() {
            return self.signed(format, negative, self.overflow(format));
        }
        let bits = x.to_bits();
        let (mantissa, exponent) = (bits & ((1 << 52) - 1), (bits >> 52 & 0x7ff) as i32);
        if exponent == 0 {
            self.round_exact(format, negative, mantissa, -1074)
        } else {
            self.round_exact(format, negative, mantissa | 1 << 52, exponent - 1075)
        }
    }

    /// Rounds the integer `x` once and returns its bits in `format` (`cvt` from an integer type).
    pub fn round_integer(&self, format: &Format, x: i128) -> u64 {
        let magnitude = u64::try_from(x.unsigned_abs()).expect("PTX integers have at most 64 bits");
        self.round_exact(format, x < 0, magnitude, 0)
    }

    /// Rounds ±`significand`·2^`exponent`.
    fn round_exact(&self, format: &Format, negative: bool, significand: u64, exponent: i32) -> u64 {
        if significand == 0 {
            return self.signed(format, negative, 0);
        }
        let min_exponent = 1 - format.bias();
        let top = exponent + 63 - significand.leading_zeros() as i32;
        // Weight of the result's last bit, and number of significand bits below it.
        let last = top.max(min_exponent) - format.mantissa_bits as i32;
        let discard = last - exponent;
        let rounded = match discard {
            ..=0 => significand << -discard,
            1..=64 => {
                let kept = significand.checked_shr(discard as u32).unwrap_or(0);
                let rest = significand << (64 - discard);
                kept + u64::from(self.rounds_away(negative, kept & 1 == 1, rest))
            }
            // The discarded value is less than half of the last bit. Every mode only tests whether it is zero.
            _ => u64::from(self.rounds_away(negative, false, 1)),
        };
        // The implicit leading bit adds 1 to the exponent field, and so does a carry out of the mantissa.
        let field = ((top - min_exponent).max(0) as u64) << format.mantissa_bits;
        let magnitude = field + rounded;
        if magnitude <= format.max_finite() {
            return self.signed(format, negative, magnitude);
        }
        let toward_zero = match self.rounding {
            Rounding::TowardZero => true,
            Rounding::Down => !negative,
            Rounding::Up => negative,
            Rounding::NearestEven | Rounding::NearestAway | Rounding::Stochastic { .. } => false,
        };
        self.signed(format, negative, if toward_zero { format.max_finite() } else { self.overflow(format) })
    }

    /// Whether the magnitude rounds up, given whether its last kept bit is `odd` and the discarded bits `rest` (top
    /// bit: half of the last kept bit).
    fn rounds_away(&self, negative: bool, odd: bool, rest: u64) -> bool {
        const HALF: u64 = 1 << 63;
        match self.rounding {
            Rounding::NearestEven => rest > HALF || rest == HALF && odd,
            Rounding::NearestAway => rest >= HALF,
            Rounding::TowardZero => false,
            Rounding::Down => negative && rest != 0,
            Rounding::Up => !negative && rest != 0,
            Rounding::Stochastic { random, width } => {
                let random = u64::from(random).checked_shl(64 - width).unwrap_or(0);
                rest.checked_add(random).is_none()
            }
        }
    }

    fn overflow(&self, format: &Format) -> u64 {
        match format.infinity() {
            Some(infinity) if !self.satfinite => infinity,
            _ => format.max_finite(),
        }
    }

    fn signed(&self, format: &Format, negative: bool, magnitude: u64) -> u64 {
        match (negative, self.relu) {
            (false, _) => magnitude,
            (true, true) => 0,
            (true, false) => magnitude | format.sign_bit(),
        }
    }

    /// Returns the `ue8m0` code of |`x`|: a power of two from 2⁻¹²⁷ to 2¹²⁷. There is no zero. Without `.satfinite`,
    /// values that are too large become NaN. PTX has `.rz` and `.rp`. The sign is ignored (PTX ISA 9.7.9.21).
    pub fn round_ue8m0(&self, x: f64) -> u8 {
        if x.is_nan() {
            return UE8M0_NAN;
        }
        let (bits, smallest) = (x.abs().to_bits(), (1023 - 127) << 52);
        let fraction = bits & ((1 << 52) - 1);
        let up = self.rounding == Rounding::Up && fraction != 0;
        let code = (bits.max(smallest) >> 52) - (1023 - 127) + u64::from(up && bits > smallest);
        match u8::try_from(code) {
            Ok(code) if code <= UE8M0_MAX => code,
            _ if self.satfinite => UE8M0_MAX,
            _ => UE8M0_NAN,
        }
    }
}

/// A 19-bit `tf32` in a 32-bit register: an f32 whose low 13 bits are zero.
pub const fn tf32_to_register(tf32: u64) -> u32 {
    (tf32 as u32) << 13
}

/// An f32 rounded to the nearest `tf32`, ties to even, as tensor copies round: NaN becomes 0x7fffe000 (an H200's).
pub const fn f32_to_tf32(bits: u32) -> u32 {
    const DROPPED: u32 = 13;
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return 0x7fff_e000;
    }
    let odd = bits >> DROPPED & 1;
    bits.wrapping_add((1 << (DROPPED - 1)) - 1 + odd) >> DROPPED << DROPPED
}

/// Bits of a 32-bit `tf32` operand that the tensor core reads. It ignores the low 13 bits of the register.
pub const fn tf32_from_register(register: u32) -> u64 {
    (register >> 13) as u64
}

/// Clamps to [0, 1]. A NaN becomes +0 (`.sat` of floating-point results).
pub fn saturate(x: f64) -> f64 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// Rounds to an integral value in the mode of `.rni`, `.rzi`, `.rmi` or `.rpi`. The sign of a zero is kept.
pub fn round_to_integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::NearestEven => x.round_ties_even(),
        Rounding::NearestAway => x.round(),
        Rounding::TowardZero | Rounding::Stochastic { .. } => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

/// An integer type of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntType {
    /// Width: 2 to 64.
    pub bits: u32,
    /// `true` for `.s*`, `false` for `.u*`.
    pub signed: bool,
}

impl IntType {
    /// Smallest value of the type.
    pub const fn min(&self) -> i128 {
        if self.signed { -(1 << (self.bits - 1)) } else { 0 }
    }

    /// Largest value of the type.
    pub const fn max(&self) -> i128 {
        (1 << (self.bits - self.signed as u32)) - 1
    }

    /// `.sat`: nearest value of the type.
    pub fn saturate(&self, x: i128) -> i128 {
        x.clamp(self.min(), self.max())
    }
}

/// `cvt.*i.<int>.<float>`: rounds to an integer and clamps to the type's range. A NaN gives zero, or 1 << (width − 1)
/// if the source is f64 or the destination has 64 bits (PTX ISA 9.7.9.21, "Integer Notes").
pub fn float_to_int(x: f64, source: &Format, rounding: Rounding, to: IntType) -> i128 {
    if x.is_nan() {
        let wide = *source == F64 || to.bits == 64;
        return match (wide, to.signed) {
            (false, _) => 0,
            (true, true) => to.min(),
            (true, false) => 1 << (to.bits - 1),
        };
    }
    // `as` saturates at the range of i128, which is far larger than any PTX type.
    to.saturate(round_to_integral(x, rounding) as i128)
}

/// `cvt.pack.sat` (PTX ISA 9.7.9.22): packs `a` above `b`, each saturated to `to` (2 to 16 bits), and the bits of `c`
/// above them. Results of 16 bits fill the word and leave no room for `c`.
pub fn cvt_pack(to: IntType, a: i32, b: i32, c: u32) -> u32 {
    let mask = (1u64 << to.bits) - 1;
    let field = |x: i32| to.saturate(i128::from(x)) as u64 & mask;
    let packed = u64::from(c) << (2 * to.bits) | field(a) << to.bits | field(b);
    packed as u32
}

/// Turns a sum or quotient rounded to nearest into the same value rounded to odd: an inexact result with an even last
/// bit moves one step toward the exact value.
///
/// `error` has the sign of (exact value − `rounded`), or is NaN if `rounded` is not finite. The code has no branches,
/// so the compiler can vectorize loops over it.
#[inline(always)]
pub(super) fn to_odd(rounded: f64, error: f64) -> f64 {
    let bits = rounded.to_bits();
    let inexact = (error > 0.0) | (error < 0.0);
    let step = u64::from(inexact) & !bits & 1;
    let shrink = (bits ^ error.to_bits()) >> 63;
    // +step, or −step if the error has the opposite sign.
    f64::from_bits(bits.wrapping_add((step ^ shrink.wrapping_neg()).wrapping_add(shrink)))
}

/// `a + b` rounded to odd. The operands must not be near the overflow of f64. Values of the narrower formats and their
/// products never are.
#[inline(always)]
pub(super) fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    // Knuth's TwoSum: sum + error = a + b exactly.
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    to_odd(sum, error)
}

/// An exact zero sum of operands with different signs is −0 when rounding down, and +0 otherwise (IEEE 754, 6.3).
fn signed_zero(sum: f64, a: f64, b: f64, rounding: Rounding) -> f64 {
    let canceled = sum == 0.0 && a.is_sign_negative() != b.is_sign_negative();
    if canceled && rounding == Rounding::Down { -0.0 } else { sum }
}

/// `a + b` for formats of at most 24 significant bits, to be rounded by [`Rounder::round`].
pub fn add(a: f64, b: f64, rounding: Rounding) -> f64 {
    signed_zero(add_to_odd(a, b), a, b, rounding)
}

/// `a · b`, exact for formats of at most 24 significant bits.
pub fn mul(a: f64, b: f64) -> f64 {
    a * b
}

/// `a · b + c` for formats of at most 24 significant bits, to be rounded by [`Rounder::round`].
pub fn fma(a: f64, b: f64, c: f64, rounding: Rounding) -> f64 {
    add(a * b, c, rounding)
}

/// `a / b` for formats of at most 24 significant bits, to be rounded by [`Rounder::round`].
pub fn div(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    let remainder = (-quotient).mul_add(b, a);
    to_odd(quotient, if b < 0.0 { -remainder } else { remainder })
}

/// Square root for formats of at most 24 significant bits, to be rounded by [`Rounder::round`].
pub fn sqrt(a: f64) -> f64 {
    let root = a.sqrt();
    to_odd(root, (-root).mul_add(root, a))
}

/// `add.f32` in any rounding mode, without flushing or saturation.
pub fn add_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    round_f32(add(a.into(), b.into(), rounding), rounding)
}

/// `mul.f32` in any rounding mode, without flushing or saturation.
pub fn mul_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    round_f32(mul(a.into(), b.into()), rounding)
}

/// `fma.f32` in any rounding mode, without flushing or saturation.
pub fn fma_f32(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    round_f32(fma(a.into(), b.into(), c.into(), rounding), rounding)
}

/// Rounds once from f64 to f32, in any mode.
pub fn round_f32(x: f64, rounding: Rounding) -> f32 {
    if rounding == Rounding::NearestEven && !x.is_nan() {
        return x as f32;
    }
    f32::from_bits(Rounder::new(rounding).round(&F32, x) as u32)
}

/// Rounds to f16, nearest-even: the most common case.
pub fn round_f16(x: f64) -> u16 {
    Rounder::new(Rounding::NearestEven).round(&F16, x) as u16
}

/// Rounds to bf16, nearest-even: the most common case.
pub fn round_bf16(x: f64) -> u16 {
    Rounder::new(Rounding::NearestEven).round(&BF16, x) as u16
}

/// Exact value of an f16.
pub const fn decode_f16(bits: u16) -> f64 {
    decode(&F16, bits as u64)
}

/// Exact value of a bf16.
pub const fn decode_bf16(bits: u16) -> f64 {
    decode(&BF16, bits as u64)
}

/// `min` or `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extremum {
    /// The smaller operand.
    Min,
    /// The larger operand.
    Max,
}

/// `min` or `max` on the bits of one format (PTX ISA 9.7.3.11, 9.7.4.7). −0 is below +0. If one operand is NaN, the
/// result is the other operand, or NaN with `propagate_nan` (`.NaN`). A NaN result is canonical.
pub fn extremum(format: &Format, which: Extremum, a: u64, b: u64, propagate_nan: bool) -> u64 {
    let nan = format.canonical_nan().unwrap_or(0);
    match (format.is_nan(a), format.is_nan(b)) {
        (true, true) => nan,
        (true, false) | (false, true) if propagate_nan => nan,
        (true, false) => b,
        (false, true) => a,
        (false, false) => {
            let order = decode(format, a).total_cmp(&decode(format, b));
            if order.is_lt() == (which == Extremum::Min) { a } else { b }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RN: Rounder = Rounder::new(Rounding::NearestEven);
    const S32: IntType = IntType { bits: 32, signed: true };

    /// `number_tables.py` enumerates each format's values as fractions and rounds by a search among them. It also
    /// checks its decoding against ml_dtypes and numpy.
    #[test]
    fn rounding_matches_a_search_among_all_values() {
        let table = include_str!("testdata/rounding.csv");
        let mut rows = 0;
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let format = match fields[0] {
                "f16" => F16,
                "bf16" => BF16,
                "tf32" => TF32,
                "e4m3" => E4M3,
                "e5m2" => E5M2,
                "e2m1" => E2M1,
                "e2m3" => E2M3,
                "e3m2" => E3M2,
                other => panic!("{other}"),
            };
            let rounding = match fields[1] {
                "rn" => Rounding::NearestEven,
                "rna" => Rounding::NearestAway,
                "rz" => Rounding::TowardZero,
                "rm" => Rounding::Down,
                "rp" => Rounding::Up,
                other => panic!("{other}"),
            };
            let x = f64::from_bits(u64::from_str_radix(fields[2], 16).unwrap());
            let plain = u64::from_str_radix(fields[3], 16).unwrap();
            let saturated = u64::from_str_radix(fields[4], 16).unwrap();
            assert_eq!(Rounder::new(rounding).round(&format, x), plain, "{line}");
            assert_eq!(Rounder::new(rounding).satfinite().round(&format, x), saturated, "{line}");
            rows += 1;
        }
        assert!(rows > 5000, "{rows} rows");
    }

    #[test]
    fn small_formats_match_the_ocp_tables() {
        let e2m1: Vec<f64> = (0..8).map(|code| decode(&E2M1, code)).collect();
        assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(decode(&E2M1, 0xf), -6.0);
        assert_eq!(decode(&E4M3, 0x7e), 448.0);
        assert_eq!(decode(&E4M3, 0x01), 2f64.powi(-9));
        assert!(decode(&E4M3, 0x7f).is_nan() && decode(&E4M3, 0xff).is_nan());
        assert_eq!(decode(&E5M2, 0x7b), 57344.0);
        assert_eq!(decode(&E5M2, 0x01), 2f64.powi(-16));
        assert_eq!(decode(&E5M2, 0xfc), f64::NEG_INFINITY);
        assert_eq!(decode(&E2M3, 0x1f), 7.5);
        assert_eq!(decode(&E2M3, 0x01), 0.125);
        assert_eq!(decode(&E3M2, 0x1f), 28.0);
        assert_eq!(decode(&E3M2, 0x01), 0.0625);
        assert_eq!(decode_ue8m0(0), 2f64.powi(-127));
        assert_eq!(decode_ue8m0(254), 2f64.powi(127));
        assert!(decode_ue8m0(255).is_nan());
        assert_eq!(decode_ue4m3(0x38), Some(1.0));
        assert_eq!(decode_ue4m3(0xb8), None);
    }

    #[test]
    fn codes_of_small_formats_survive_a_round_trip() {
        for format in [F16, BF16, TF32, E4M3, E5M2, E2M1, E2M3, E3M2] {
            for code in 0..1 << format.width() {
                let value = decode(&format, code);
                assert_eq!(value.is_nan(), format.is_nan(code), "{format:?} {code:#x}");
                if !value.is_nan() {
                    assert_eq!(RN.round(&format, value), code, "{format:?} {code:#x}");
                }
            }
        }
        for code in 0..=UE8M0_MAX {
            assert_eq!(RN.round_ue8m0(decode_ue8m0(code)), code);
        }
    }

    #[test]
    fn nan_becomes_canonical_or_the_largest_value() {
        assert_eq!(RN.round(&F16, f64::NAN), 0x7fff);
        assert_eq!(RN.round(&BF16, f64::NAN), 0x7fff);
        assert_eq!(RN.round(&E4M3, -f64::NAN), 0x7f);
        assert_eq!(RN.round(&E5M2, f64::NAN), 0x7f);
        assert_eq!(RN.round(&E2M1, f64::NAN), 0x7);
        assert_eq!(RN.round(&E3M2, -f64::NAN), 0x1f);
        assert_eq!(RN.relu().round(&F16, f64::NAN), 0x7fff);
    }

    #[test]
    fn relu_turns_negatives_and_minus_zero_into_plus_zero() {
        assert_eq!(RN.relu().round(&F16, -2.0), 0);
        assert_eq!(RN.relu().round(&F16, f64::NEG_INFINITY), 0);
        assert_eq!(RN.relu().round(&F16, 2.0), 0x4000);
    }

    #[test]
    fn ue8m0_ignores_the_sign_and_has_no_zero() {
        let (up, down) = (Rounder::new(Rounding::Up), Rounder::new(Rounding::TowardZero));
        assert_eq!(up.round_ue8m0(0.0), 0);
        assert_eq!(up.round_ue8m0(2f64.powi(-127)), 0);
        assert_eq!(up.round_ue8m0(2f64.powi(-127) * 1.5), 1);
        assert_eq!(down.round_ue8m0(2f64.powi(-127) * 1.5), 0);
        assert_eq!(up.round_ue8m0(2f64.powi(-140)), 0);
        assert_eq!(up.round_ue8m0(-1.0), 127);
        assert_eq!(up.round_ue8m0(1.25), 128);
        assert_eq!(down.round_ue8m0(1.25), 127);
        assert_eq!(up.round_ue8m0(f32::MAX.into()), 0xff);
        assert_eq!(up.satfinite().round_ue8m0(f32::MAX.into()), 0xfe);
        assert_eq!(down.round_ue8m0(f64::INFINITY), 0xff);
        assert_eq!(down.satfinite().round_ue8m0(f64::INFINITY), 0xfe);
        assert_eq!(down.satfinite().round_ue8m0(f64::NAN), 0xff);
    }

    #[test]
    fn stochastic_rounding_carries_from_the_discarded_bits() {
        // 1 + 2⁻²³: f16 discards 13 bits, and only the lowest one is set. Only random bits of all ones carry.
        let x = f64::from(f32::from_bits(0x3f80_0001));
        let rs = |random| Rounder::new(Rounding::Stochastic { random, width: 13 }).round(&F16, x);
        assert_eq!(rs(0x1ffe), 0x3c00);
        assert_eq!(rs(0x1fff), 0x3c01);
        // Halfway to the next bf16: any random bits with the top bit set carry.
        let x = f64::from(f32::from_bits(0x3f80_8000));
        let rs = |random| Rounder::new(Rounding::Stochastic { random, width: 16 }).round(&BF16, x);
        assert_eq!(rs(0x7fff), 0x3f80);
        assert_eq!(rs(0x8000), 0x3f81);
    }

    #[test]
    fn integers_convert_with_one_rounding() {
        assert_eq!(RN.round_integer(&F32, (1 << 24) + 1), u64::from(16777216f32.to_bits()));
        assert_eq!(RN.round_integer(&F64, u64::MAX.into()), 2f64.powi(64).to_bits());
        let down = Rounder::new(Rounding::TowardZero);
        assert_eq!(down.round_integer(&F64, u64::MAX.into()), (2f64.powi(64).next_down()).to_bits());
        assert_eq!(RN.round_integer(&F16, 65520), 0x7c00);
        assert_eq!(down.round_integer(&F16, 65520), 0x7bff);
        assert_eq!(RN.round_integer(&F32, -3), u64::from((-3f32).to_bits()));
        // 2⁶² + 2³⁸ + 1 is slightly above a tie of f32. A conversion through f64 would lose the 1 and round to even.
        let just_above_tie = (1i128 << 62) + (1 << 38) + 1;
        assert_eq!(RN.round_integer(&F32, just_above_tie), u64::from((2f32.powi(62)).next_up().to_bits()));
    }

    #[test]
    fn float_to_int_clamps_and_maps_nan_by_the_manual() {
        let u = |bits| IntType { bits, signed: false };
        let s = |bits| IntType { bits, signed: true };
        assert_eq!(float_to_int(1e20, &F32, Rounding::TowardZero, S32), i32::MAX.into());
        assert_eq!(float_to_int(-1e20, &F32, Rounding::TowardZero, S32), i32::MIN.into());
        assert_eq!(float_to_int(-1.0, &F32, Rounding::TowardZero, u(32)), 0);
        assert_eq!(float_to_int(f64::INFINITY, &F32, Rounding::TowardZero, u(64)), u64::MAX.into());
        assert_eq!(float_to_int(f64::NAN, &F32, Rounding::TowardZero, S32), 0);
        assert_eq!(float_to_int(f64::NAN, &F16, Rounding::TowardZero, u(8)), 0);
        assert_eq!(float_to_int(f64::NAN, &F32, Rounding::TowardZero, s(64)), i64::MIN.into());
        assert_eq!(float_to_int(f64::NAN, &F32, Rounding::TowardZero, u(64)), 1 << 63);
        assert_eq!(float_to_int(f64::NAN, &F64, Rounding::TowardZero, S32), i32::MIN.into());
        assert_eq!(float_to_int(f64::NAN, &F64, Rounding::TowardZero, u(16)), 1 << 15);
        let modes = [Rounding::NearestEven, Rounding::TowardZero, Rounding::Down, Rounding::Up];
        assert_eq!(modes.map(|mode| float_to_int(-2.5, &F32, mode, S32)), [-2, -2, -3, -2]);
        assert_eq!(modes.map(|mode| float_to_int(3.5, &F32, mode, S32)), [4, 3, 3, 4]);
    }

    /// Example of the manual: `cvt.pack.sat.u8.s32.b32 %r7, %r8, %r9, %r4` after `%r4 = pack(%r5, %r6)` leaves the new
    /// pair in the low half and the old pair above it.
    #[test]
    fn cvt_pack_shifts_older_pairs_up() {
        let u8 = IntType { bits: 8, signed: false };
        let first = cvt_pack(u8, 0x11, 300, 0);
        assert_eq!(first, 0x11ff);
        assert_eq!(cvt_pack(u8, -5, 0x44, first), 0x11ff_0044);
        assert_eq!(cvt_pack(IntType { bits: 16, signed: true }, -40000, 5, 0xdead_beef), 0x8000_0005);
        assert_eq!(cvt_pack(IntType { bits: 4, signed: true }, 9, -9, 0xa), 0xa78);
    }

    #[test]
    fn min_and_max_order_zeros_and_follow_the_nan_mode() {
        let (zero, minus_zero, one, nan) = (0u64, 0x8000, 0x3c00, 0x7e01);
        let min = |a, b, propagate| extremum(&F16, Extremum::Min, a, b, propagate);
        let max = |a, b, propagate| extremum(&F16, Extremum::Max, a, b, propagate);
        assert_eq!((min(zero, minus_zero, false), min(minus_zero, zero, false)), (minus_zero, minus_zero));
        assert_eq!((max(zero, minus_zero, false), max(minus_zero, zero, false)), (zero, zero));
        assert_eq!((min(nan, one, false), max(one, nan, false)), (one, one));
        assert_eq!((min(nan, one, true), max(one, nan, true), min(nan, nan, false)), (0x7fff, 0x7fff, 0x7fff));
    }

    #[test]
    fn exact_cancellation_is_minus_zero_only_when_rounding_down() {
        assert!(add_f32(1.5, -1.5, Rounding::Down).is_sign_negative());
        assert!(add_f32(1.5, -1.5, Rounding::TowardZero).is_sign_positive());
        assert!(add_f32(-0.0, -0.0, Rounding::Up).is_sign_negative());
    }

    #[test]
    fn directed_sums_differ_by_one_step_around_the_exact_value() {
        let (one, tiny) = (1f32, 1e-30f32);
        assert_eq!(add_f32(one, tiny, Rounding::Down), 1.0);
        assert_eq!(add_f32(one, tiny, Rounding::Up), 1f32.next_up());
        assert_eq!(add_f32(one, -tiny, Rounding::TowardZero), 1f32.next_down());
        assert_eq!(add_f32(one, -tiny, Rounding::NearestEven), 1.0);
        assert_eq!(add_f32(f32::MAX, f32::MAX, Rounding::TowardZero), f32::MAX);
        assert_eq!(add_f32(f32::MAX, f32::MAX, Rounding::Up), f32::INFINITY);
    }

    #[test]
    fn fma_in_f16_rounds_once() {
        // 1·(1 + 2⁻¹⁰) + 2⁻¹¹ + a tiny addend: the tie is broken upward only if nothing was rounded earlier.
        let a = decode_f16(0x3c01);
        let exact = fma(a, 1.0, 2f64.powi(-11), Rounding::NearestEven);
        assert_eq!(round_f16(exact), 0x3c02, "a tie goes to even");
        // (2048 + 2) · 1 + 2⁻²⁴: the step of f16 is 2 at this magnitude.
        let sum = fma(decode_f16(0x6801), 1.0, 1.0 + 2f64.powi(-24), Rounding::NearestEven);
        assert_eq!(round_f16(sum), 0x6802);
    }

    #[test]
    fn saturation_clamps_to_the_unit_interval() {
        assert_eq!([saturate(-1.0), saturate(0.25), saturate(7.0), saturate(f64::NAN)], [0.0, 0.25, 1.0, 0.0]);
        assert!(saturate(-0.0).is_sign_positive());
    }

    proptest! {
        #[test]
        fn f32_to_f32_is_the_identity(bits: u32) {
            let x = f32::from_bits(bits);
            prop_assume!(!x.is_nan());
            for rounding in [Rounding::NearestEven, Rounding::TowardZero, Rounding::Down, Rounding::Up] {
                prop_assert_eq!(Rounder::new(rounding).round(&F32, x.into()), u64::from(bits));
            }
            prop_assert_eq!(decode(&F32, bits.into()).to_bits(), f64::from(x).to_bits());
        }

        #[test]
        fn nearest_rounding_to_f32_matches_the_cpu(bits: u64) {
            let x = f64::from_bits(bits);
            prop_assume!(!x.is_nan());
            prop_assert_eq!(RN.round(&F32, x) as u32, (x as f32).to_bits());
        }

        #[test]
        fn nearest_f32_arithmetic_matches_the_cpu(a: u32, b: u32, c: u32) {
            let (a, b, c) = (f32::from_bits(a), f32::from_bits(b), f32::from_bits(c));
            let same = |ours: f32, cpu: f32| ours.to_bits() == cpu.to_bits() || ours.is_nan() && cpu.is_nan();
            let rn = Rounding::NearestEven;
            prop_assert!(same(add_f32(a, b, rn), a + b));
            prop_assert!(same(mul_f32(a, b, rn), a * b));
            prop_assert!(same(fma_f32(a, b, c, rn), a.mul_add(b, c)));
            prop_assert!(same(round_f32(div(a.into(), b.into()), rn), a / b));
            prop_assert!(same(round_f32(sqrt(a.into()), rn), a.sqrt()));
        }

        /// Operands with close exponents, so that sums are inexact and ties are common.
        #[test]
        fn directed_results_bracket_the_exact_sum(a in -1e6f32..1e6, b in -1e6f32..1e6, c in -1e6f32..1e6) {
            let down = fma_f32(a, b, c, Rounding::Down);
            let up = fma_f32(a, b, c, Rounding::Up);
            let zero = fma_f32(a, b, c, Rounding::TowardZero);
            let nearest = a.mul_add(b, c);
            prop_assert!(up == down || up == down.next_up());
            prop_assert!(nearest == down || nearest == up);
            prop_assert_eq!(zero, if up > 0.0 { down } else { up });
            // In f64 the residual of the f32 sums is exact, so its sign gives the side of the exact sum.
            let product = f64::from(a) * f64::from(b);
            prop_assert!(f64::from(down) - product <= f64::from(c) && f64::from(up) - product >= f64::from(c));
        }
    }
}
