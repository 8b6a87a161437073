//! The approximate functions of PTX, and correctly rounded division, reciprocal and square root.
//!
//! PTX ISA 9.7.3.8 (`div`), 9.7.3.13–9.7.3.22 (`rcp`, `sqrt`, `rsqrt`, `sin`, `cos`, `lg2`, `ex2`, `tanh`), 9.7.4.9–10
//! (`tanh`, `ex2` in f16 and bf16). The manual bounds the error and fixes special values, but not the bits. Here every
//! approximation is the function in f64, rounded once to nearest. That is inside all of the manual's bounds; a GPU may
//! return other last bits.

use super::number::{self, BF16, F16, F32_NAN, Format, Rounder, Rounding, decode, round_f32};

/// A function with an `.approx` form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Function {
    /// 2ˣ
    Ex2,
    /// log₂ x
    Lg2,
    /// 1/x
    Rcp,
    /// 1/√x
    Rsqrt,
    /// √x
    Sqrt,
    /// sin x
    Sin,
    /// cos x
    Cos,
    /// tanh x
    Tanh,
}

impl Function {
    /// The function in f64. The special values are those of the manual's tables.
    pub fn eval(self, x: f64) -> f64 {
        match self {
            Function::Ex2 => x.exp2(),
            Function::Lg2 => x.log2(),
            Function::Rcp => x.recip(),
            Function::Rsqrt => x.sqrt().recip(),
            Function::Sqrt => x.sqrt(),
            Function::Sin => x.sin(),
            Function::Cos => x.cos(),
            Function::Tanh => x.tanh(),
        }
    }

    /// `.approx{.ftz}.f32`.
    pub fn approx_f32(self, x: f32, ftz: bool) -> f32 {
        let flush = |x: f32| if ftz { flush_f32(x) } else { x };
        let y = self.eval(flush(x).into());
        if y.is_nan() { f32::from_bits(F32_NAN) } else { flush(y as f32) }
    }

    /// `.approx.f16` and `.approx{.ftz}.bf16`, on the bits of `format`.
    pub fn approx_16(self, format: &Format, bits: u16, ftz: bool) -> u16 {
        debug_assert!(*format == F16 || *format == BF16);
        let flush = |bits: u64| if ftz { format.flush(bits) } else { bits };
        let x = decode(format, flush(bits.into()));
        flush(Rounder::new(Rounding::NearestEven).round(format, self.eval(x))) as u16
    }

    /// `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`: only the upper words of argument and result count
    /// (PTX ISA 9.7.3.14 and 9.7.3.17).
    pub fn approx_ftz_f64(self, x: f64) -> f64 {
        const NAN: u64 = 0x7fff_ffff_0000_0000;
        const UPPER: u64 = 0xffff_ffff_0000_0000;
        let flush = |x: f64| {
            if x.is_subnormal() { 0f64.copysign(x) } else { x }
        };
        let x = flush(f64::from_bits(x.to_bits() & UPPER));
        // A flushed −0 of `rsqrt` gives −∞, as the table says.
        let y = self.eval(x);
        let bits = if y.is_nan() { NAN } else { flush(y).to_bits() & UPPER };
        f64::from_bits(bits)
    }
}

/// `.ftz` of an f32: a subnormal becomes the zero of its sign.
pub fn flush_f32(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `rcp.rnd.f32`, correctly rounded.
pub fn rcp_f32(x: f32, rounding: Rounding) -> f32 {
    div_f32(1.0, x, rounding)
}

/// `sqrt.rnd.f32`, correctly rounded.
pub fn sqrt_f32(x: f32, rounding: Rounding) -> f32 {
    round_f32(number::sqrt(x.into()), rounding)
}

/// `div.rnd.f32`, correctly rounded; also good for `div.full.f32`, whose bound is 2 ulp.
pub fn div_f32(a: f32, b: f32, rounding: Rounding) -> f32 {
    round_f32(number::div(a.into(), b.into()), rounding)
}

/// `div.approx.f32`: a divisor of magnitude between 2¹²⁶ and 2¹²⁸ gives a signed zero, or NaN for an infinite dividend.
pub fn div_approx_f32(a: f32, b: f32, ftz: bool) -> f32 {
    const LARGE: f32 = f32::from_bits((126 + 127) << 23);
    let flush = |x: f32| if ftz { flush_f32(x) } else { x };
    let (a, b) = (flush(a), flush(b));
    if b.is_finite() && b.abs() > LARGE {
        if a.is_infinite() || a.is_nan() {
            return f32::from_bits(F32_NAN);
        }
        let negative = a.is_sign_negative() != b.is_sign_negative();
        return if negative { -0.0 } else { 0.0 };
    }
    flush(div_f32(a, b, Rounding::NearestEven))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs and results to 60 digits, rounded to f64, made by `approx_table.py` with mpmath.
    #[test]
    fn f32_results_are_within_the_manuals_bounds() {
        let mut rows = 0;
        for line in include_str!("testdata/approx.csv").lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let function = function(fields[0]);
            let x = f32::from_bits(u32::from_str_radix(fields[1], 16).unwrap());
            let exact = f64::from_bits(u64::from_str_radix(fields[2], 16).unwrap());
            let y = function.approx_f32(x, false);
            let error = (f64::from(y) - exact).abs();
            let relative = error / exact.abs();
            let ulp = f64::from((exact as f32).abs().next_up()) - f64::from((exact as f32).abs());
            let ok = match function {
                Function::Ex2 => error <= 2.0 * ulp,
                Function::Rcp => error <= ulp,
                Function::Lg2 if (0.5..2.0).contains(&x) => error <= 2f64.powi(-22),
                Function::Lg2 => relative <= 2f64.powi(-22),
                Function::Sqrt => relative <= 2f64.powi(-23),
                Function::Rsqrt => relative <= 2f64.powf(-22.9),
                Function::Sin | Function::Cos => error <= 2f64.powf(-20.5),
                Function::Tanh => relative <= 2f64.powi(-11),
            };
            assert!(ok, "{line}: {y:e} instead of {exact:e}");
            rows += 1;
        }
        assert!(rows >= 200, "{rows} rows");
    }

    fn function(name: &str) -> Function {
        match name {
            "ex2" => Function::Ex2,
            "lg2" => Function::Lg2,
            "rcp" => Function::Rcp,
            "rsqrt" => Function::Rsqrt,
            "sqrt" => Function::Sqrt,
            "sin" => Function::Sin,
            "cos" => Function::Cos,
            "tanh" => Function::Tanh,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn special_values_are_the_manuals_tables() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let inputs = [-inf, -1.0, -0.0, 0.0, inf, nan];
        let tables = [
            (Function::Ex2, [0.0, 0.5, 1.0, 1.0, inf, nan]),
            (Function::Lg2, [nan, nan, -inf, -inf, inf, nan]),
            (Function::Rcp, [-0.0, -1.0, -inf, inf, 0.0, nan]),
            (Function::Rsqrt, [nan, nan, -inf, inf, 0.0, nan]),
            (Function::Sqrt, [nan, nan, -0.0, 0.0, inf, nan]),
        ];
        for (function, expected) in tables {
            for (x, y) in inputs.into_iter().zip(expected) {
                let ours = function.approx_f32(x, false).to_bits();
                let y = if y.is_nan() { F32_NAN } else { y.to_bits() };
                assert_eq!(ours, y, "{function:?}({x})");
            }
        }
        assert_eq!(Function::Tanh.approx_f32(-inf, false), -1.0);
        assert_eq!(Function::Tanh.approx_f32(-0.0, false).to_bits(), (-0f32).to_bits());
        assert_eq!(Function::Sin.approx_f32(inf, false).to_bits(), F32_NAN);
        assert_eq!(Function::Cos.approx_f32(0.0, false), 1.0);
    }

    #[test]
    fn ftz_flushes_arguments_and_results() {
        let subnormal = f32::from_bits(1);
        assert_eq!(Function::Rcp.approx_f32(-subnormal, true), f32::NEG_INFINITY);
        assert_eq!(Function::Lg2.approx_f32(subnormal, true), f32::NEG_INFINITY);
        assert_eq!(Function::Lg2.approx_f32(subnormal, false), -149.0);
        assert_eq!(Function::Ex2.approx_f32(-130.0, true), 0.0);
        assert_eq!(Function::Ex2.approx_f32(-130.0, false), 2f32.powi(-130));
        assert_eq!(Function::Ex2.approx_16(&BF16, 0x8001, true), 0x3f80);
    }

    #[test]
    fn half_precision_forms_round_the_exact_value() {
        assert_eq!(Function::Ex2.approx_16(&F16, 0x4900, false), 0x6400, "2^10");
        assert_eq!(Function::Tanh.approx_16(&F16, 0xfc00, false), 0xbc00);
        assert_eq!(Function::Tanh.approx_16(&BF16, 0x7f80, false), 0x3f80);
        assert_eq!(Function::Ex2.approx_16(&F16, 0x7e01, false), 0x7fff);
    }

    #[test]
    fn gross_f64_approximations_use_upper_words_only() {
        let x = f64::from_bits(0x4000_0000_ffff_ffff);
        assert_eq!(Function::Rcp.approx_ftz_f64(x), 0.5);
        assert_eq!(Function::Rcp.approx_ftz_f64(-f64::from_bits(1)), f64::NEG_INFINITY);
        assert_eq!(Function::Rsqrt.approx_ftz_f64(-0.0), f64::NEG_INFINITY);
        assert_eq!(Function::Rsqrt.approx_ftz_f64(-1.0).to_bits(), 0x7fff_ffff_0000_0000);
    }

    #[test]
    fn directed_division_brackets_the_quotient() {
        let (down, up) = (rcp_f32(3.0, Rounding::Down), rcp_f32(3.0, Rounding::Up));
        assert_eq!((down.to_bits(), up.to_bits()), (0x3eaa_aaaa, 0x3eaa_aaab));
        assert_eq!(rcp_f32(-3.0, Rounding::Down), -up);
        assert_eq!(rcp_f32(-3.0, Rounding::TowardZero), -down);
        assert_eq!(div_f32(6.0, 3.0, Rounding::Up), 2.0);
        let (down, up) = (sqrt_f32(2.0, Rounding::Down), sqrt_f32(2.0, Rounding::Up));
        assert_eq!((down.to_bits(), up.to_bits()), (0x3fb5_04f3, 0x3fb5_04f4));
        assert_eq!(sqrt_f32(9.0, Rounding::Up), 3.0);
        assert_eq!(div_f32(1.0, 0.0, Rounding::Down), f32::INFINITY);
    }

    #[test]
    fn approximate_division_by_huge_numbers_is_zero() {
        let huge = 1.5 * 2f32.powi(126);
        assert_eq!(div_approx_f32(huge, -huge, false).to_bits(), (-0f32).to_bits());
        assert!(div_approx_f32(f32::INFINITY, huge, false).is_nan());
        assert_eq!(div_approx_f32(2f32.powi(126), 2f32.powi(126), false), 1.0);
    }
}
