//! Floating-point arithmetic (PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions",
//! "Mixed Precision Floating Point Instructions"). An operation is computed in f64, exactly or rounded to odd, and
//! [`number::Rounder`] rounds the result once. f32 in the default rounding mode uses the host's instructions, which
//! round in the same way. Directed rounding of f64 is in [`exact`].

use super::alu::operands;
use super::lane::{Lane, map1, map2, map3};
use crate::code::Flow;
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::approx::{self, Function, flush_f32};
use crate::hw::exact;
use crate::hw::number::{self, BF16, F16, F32, F32_NAN, Format, Rounder, Rounding};
use crate::operand::{Dst, Row, Src};
use crate::types::Type;

/// The rounding mode among the modifiers; nearest-even by default.
pub fn rounding(i: &Parsed<'_>) -> Rounding {
    match i.one_of(&["rz", "rm", "rp"]) {
        Some("rz") => Rounding::TowardZero,
        Some("rm") => Rounding::Down,
        Some(_) => Rounding::Up,
        None => Rounding::NearestEven,
    }
}

/// Treatment of an operation's operands and of its exact result.
#[derive(Clone, Copy)]
struct Rules {
    rounding: Rounding,
    /// Subnormal operands and results become zeros.
    ftz: bool,
    /// Results are clamped to [0, 1].
    sat: bool,
    /// Negative results become zeros.
    relu: bool,
}

impl Rules {
    const NEAREST: Rules = Rules { rounding: Rounding::NearestEven, ftz: false, sat: false, relu: false };

    /// `true` if the operation rounds to nearest and neither saturates nor clamps its result.
    fn is_plain(self) -> bool {
        self.rounding == Rounding::NearestEven && !self.sat && !self.relu
    }
}

/// The format of one element, and the number of elements per register.
pub fn format(ty: Type) -> Option<(&'static Format, u32)> {
    Some(match ty {
        Type::F32 => (&F32, 1),
        Type::F32x2 => (&F32, 2),
        Type::F16 => (&F16, 1),
        Type::F16x2 => (&F16, 2),
        Type::BF16 => (&BF16, 1),
        Type::BF16x2 => (&BF16, 2),
        _ => return None,
    })
}

fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(F32_NAN) } else { x }
}

/// An element-wise operation on the elements of a register: decodes them as `f64` and rounds the result.
fn elementwise<const N: usize>(
    rules: Rules,
    ty: Type,
    d: Dst,
    s: [Src; N],
    op: impl Fn([f64; N], Rounding) -> f64 + Send + Sync + 'static,
) -> Decoded {
    let (format, count) = format(ty).ok_or_else(|| DecodeError::unsupported(format!("type {ty:?}")))?;
    let Rules { rounding: mode, ftz, sat, relu } = rules;
    let rounder = if relu { Rounder::new(mode).relu() } else { Rounder::new(mode) };
    let width = format.width();
    let ones = (1u64 << width) - 1;
    let flush = move |bits: u64| if ftz { format.flush(bits) } else { bits };
    Ok(Box::new(move |w, _, mask| {
        let rows = s.map(|s| w.get(s));
        let mut out: Row = [0; 32];
        for lane in 0..32 {
            for element in 0..count {
                let at = element * width;
                let x = rows.each_ref().map(|r| number::decode(format, flush(r[lane] >> at & ones)));
                let y = op(x, mode);
                let y = if sat { number::saturate(y) } else { y };
                out[lane] |= flush(rounder.round(format, y)) << at;
            }
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    }))
}

/// `add`, `sub`, `mul`.
pub fn binary(i: &mut Parsed<'_>) -> Decoded {
    if let [Type::F32, narrow @ (Type::F16 | Type::BF16)] = i.types()[..] {
        return mixed(i, narrow);
    }
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    let rules = Rules { rounding: rounding(i), ftz: i.has("ftz"), sat: i.has("sat"), relu: false };
    let plain = ty == Type::F32 && rules.is_plain();
    let (mode, directed) = (rules.rounding, ty == Type::F64 && !rules.is_plain());
    macro_rules! op {
        ($exact:expr, $op:tt) => {
            if ty == Type::F64 && rules.is_plain() {
                Ok(map2(d, s, |a: f64, b: f64| a $op b))
            } else if plain && rules.ftz {
                Ok(map2(d, s, |a: f32, b: f32| flush_f32(canonical(flush_f32(a) $op flush_f32(b)))))
            } else if plain {
                Ok(map2(d, s, |a: f32, b: f32| canonical(a $op b)))
            } else {
                elementwise(rules, ty, d, s, $exact)
            }
        };
    }
    match i.opcode() {
        "add" if directed => Ok(map2(d, s, move |a: f64, b: f64| exact::add(a, b, mode))),
        "sub" if directed => Ok(map2(d, s, move |a: f64, b: f64| exact::add(a, -b, mode))),
        "mul" if directed => Ok(map2(d, s, move |a: f64, b: f64| exact::mul(a, b, mode))),
        "add" => op!(|[a, b], mode| number::add(a, b, mode), +),
        "sub" => op!(|[a, b], mode| number::add(a, -b, mode), -),
        _ => op!(|[a, b], _| number::mul(a, b), *),
    }
}

/// `fma`, `mad`.
pub fn fma(i: &mut Parsed<'_>) -> Decoded {
    if let [Type::F32, narrow @ (Type::F16 | Type::BF16)] = i.types()[..] {
        return mixed(i, narrow);
    }
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    if ty == Type::F64 {
        let mode = rounding(i);
        return Ok(map3(d, s, move |a: f64, b: f64, c: f64| exact::fma(a, b, c, mode)));
    }
    let relu = i.opcode() == "fma" && i.has("relu");
    let rules = Rules { rounding: rounding(i), ftz: i.has("ftz"), sat: i.has("sat"), relu };
    if ty == Type::F32 && rules.is_plain() && !rules.ftz {
        return Ok(map3(d, s, |a: f32, b: f32, c: f32| canonical(number::fma_f32(a, b, c, Rounding::NearestEven))));
    }
    elementwise(rules, ty, d, s, |[a, b, c], mode| number::fma(a, b, c, mode))
}

/// `add`, `sub` and `fma` with narrow factors and an f32 addend and result, such as `add.f32.f16 d, a, c`.
fn mixed(i: &mut Parsed<'_>, narrow: Type) -> Decoded {
    let (format, _) =
        format(narrow).ok_or_else(|| DecodeError::invalid("the instruction mixes f32 with f16 or bf16 only"))?;
    let d = i.dst(0)?;
    let a = i.src(1, narrow)?;
    let fma = i.opcode() == "fma";
    let b = if fma { i.src(2, narrow)? } else { Src::Constant(0) };
    let c = i.src(if fma { 3 } else { 2 }, Type::F32)?;
    let (mode, sat, sub) = (rounding(i), i.has("sat"), i.opcode() == "sub");
    Ok(map3(d, [a, b, c], move |a: u16, b: u16, c: f32| {
        let a = number::decode(format, a.into());
        let a = if fma { a * number::decode(format, b.into()) } else { a };
        let c = f64::from(if sub { -c } else { c });
        let y = number::add(a, c, mode);
        canonical(number::round_f32(if sat { number::saturate(y) } else { y }, mode))
    }))
}

pub fn div(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    let ftz = i.has("ftz");
    if ty == Type::F64 {
        let mode = rounding(i);
        return Ok(map2(d, s, move |a: f64, b: f64| exact::div(a, b, mode)));
    }
    if i.has("approx") {
        return Ok(map2(d, s, move |a: f32, b: f32| approx::div_approx_f32(a, b, ftz)));
    }
    elementwise(Rules { rounding: rounding(i), ftz, ..Rules::NEAREST }, ty, d, s, |[a, b], _| number::div(a, b))
}

/// `abs`, `neg`: the sign bit, with subnormals flushed on request.
pub fn sign(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    let abs = i.opcode() == "abs";
    let bit = match ty {
        Type::F64 => 1 << 63,
        Type::F32 => 1 << 31,
        Type::F16x2 | Type::BF16x2 => 0x8000_8000,
        Type::F32x2 => 0x8000_0000_8000_0000,
        _ => 0x8000u64,
    };
    let ftz = i.has("ftz");
    if ftz && ty != Type::F32 {
        return elementwise(Rules { ftz, ..Rules::NEAREST }, ty, d, [a], move |[x], _| if abs { x.abs() } else { -x });
    }
    Ok(map1(d, a, move |a: u64| {
        let a = if ftz { flush_f32(f32::of(a)).bits() } else { a };
        if abs { a & !bit } else { a ^ bit }
    }))
}

/// `min`, `max`, with two or three sources, `.NaN` and `.xorsign.abs`.
pub fn extremum(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let min = i.opcode() == "min";
    let (nan, xorsign) = (i.has("NaN"), i.has("xorsign"));
    // Between equal zeros, -0 is the smaller.
    let pick = move |a: f64, b: f64| {
        if a.is_nan() || b.is_nan() {
            return if nan || a.is_nan() && b.is_nan() {
                f64::NAN
            } else if a.is_nan() {
                b
            } else {
                a
            };
        }
        let (x, y) = if xorsign { (a.abs(), b.abs()) } else { (a, b) };
        let less = x < y || x == y && x.is_sign_negative();
        let r = if less == min { x } else { y };
        if xorsign && (a.is_sign_negative() != b.is_sign_negative()) { -r } else { r }
    };
    if ty == Type::F64 {
        let (d, s) = operands(i, ty)?;
        return Ok(map2(d, s, pick));
    }
    let rules = Rules { ftz: i.has("ftz"), ..Rules::NEAREST };
    if i.operands().len() == 4 {
        let (d, s) = operands(i, ty)?;
        return elementwise(rules, ty, d, s, move |[a, b, c], _| pick(pick(a, b), c));
    }
    let (d, s) = operands(i, ty)?;
    elementwise(rules, ty, d, s, move |[a, b], _| pick(a, b))
}

/// `copysign d, a, b`: the magnitude of `b` with the sign of `a`.
pub fn copysign(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    let sign = 1u64 << (ty.bits() - 1);
    Ok(map2(d, s, move |a: u64, b: u64| a & sign | b & !sign))
}

/// `rcp` and `sqrt` in a rounding mode, and all `.approx` functions.
pub fn function(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    let function = match i.opcode() {
        "rcp" => Function::Rcp,
        "sqrt" => Function::Sqrt,
        "rsqrt" => Function::Rsqrt,
        "sin" => Function::Sin,
        "cos" => Function::Cos,
        "lg2" => Function::Lg2,
        "ex2" => Function::Ex2,
        _ => Function::Tanh,
    };
    let ftz = i.opcode() != "tanh" && i.has("ftz");
    if ty == Type::F64 {
        if i.has("approx") {
            return Ok(map1(d, a, move |x: f64| function.approx_ftz_f64(x)));
        }
        let mode = rounding(i);
        return Ok(map1(d, a, move |x: f64| match function {
            Function::Rcp => exact::div(1.0, x, mode),
            _ => exact::sqrt(x, mode),
        }));
    }
    match format(ty) {
        Some((format, 1)) if format.width() == 16 => Ok(map1(d, a, move |x: u16| function.approx_16(format, x, ftz))),
        Some((format, 2)) if format.width() == 16 => Ok(map1(d, a, move |x: u32| {
            let half = |x: u16| u32::from(function.approx_16(format, x, ftz));
            half(x as u16) | half((x >> 16) as u16) << 16
        })),
        _ if !i.has("approx") => elementwise(
            Rules { rounding: rounding(i), ftz, ..Rules::NEAREST },
            ty,
            d,
            [a],
            move |[x], _| match function {
                Function::Rcp => number::div(1.0, x),
                _ => number::sqrt(x),
            },
        ),
        _ => Ok(map1(d, a, move |x: f32| function.approx_f32(x, ftz))),
    }
}
