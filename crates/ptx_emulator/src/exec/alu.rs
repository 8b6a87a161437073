//! Integer and logic instructions (PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic
//! Instructions", "Logic and Shift Instructions").

use super::lane::{for_integer, map1, map2, map3};
use super::undefined::{self, Part};
use crate::code::Flow;
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::operand::{Dst, Src};
use crate::parser::ast::Operand;
use crate::types::Type;

/// Decodes a destination and sources of one type. If registers hold several elements, an undefined source element makes
/// only the same element of the result undefined.
pub fn operands<const N: usize>(i: &mut Parsed<'_>, ty: Type) -> Result<(Dst, [Src; N]), DecodeError> {
    let d = i.dst(0)?;
    let mut sources = [Src::Constant(0); N];
    for (n, s) in sources.iter_mut().enumerate() {
        *s = i.src(n + 1, ty)?;
    }
    let element: u64 = match ty {
        Type::U16x2 | Type::S16x2 | Type::F16x2 | Type::BF16x2 => 0xffff,
        Type::F32x2 => 0xffff_ffff,
        _ => return Ok((d, sources)),
    };
    i.carries(move |w, lane| {
        let undefined = sources.iter().fold(0, |bits, s| bits | w.undefined_bits(*s, lane));
        let elements = (0..64).step_by(element.count_ones() as usize).map(|at| element << at);
        let bits = elements.filter(|element| undefined & element != 0).fold(0, |all, element| all | element);
        d.register.map(|register| (register, bits)).into_iter().collect()
    });
    Ok((d, sources))
}

/// Applies a 16-bit operation to both halves.
fn halves(f: impl Fn(u16, u16) -> u16) -> impl Fn(u32, u32) -> u32 {
    move |a, b| u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

pub fn add(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    if !i.has("sat") && !matches!(ty, Type::U16x2 | Type::S16x2) {
        undefined::sum(i, d, s, ty);
    }
    if i.has("sat") {
        return Ok(map2(d, s, i32::saturating_add));
    }
    if matches!(ty, Type::U16x2 | Type::S16x2) {
        return Ok(map2(d, s, halves(u16::wrapping_add)));
    }
    Ok(for_integer!(ty, T => map2(d, s, T::wrapping_add)))
}

pub fn sub(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    if !i.has("sat") && !matches!(ty, Type::U16x2 | Type::S16x2) {
        undefined::sum(i, d, s, ty);
    }
    if i.has("sat") {
        return Ok(map2(d, s, i32::saturating_sub));
    }
    Ok(for_integer!(ty, T => map2(d, s, T::wrapping_sub)))
}

/// Product of two values of type `ty`, as 128 bits.
fn product(ty: Type, a: u64, b: u64) -> i128 {
    let bits = ty.bits();
    let widen = |x: u64| {
        let x = x & (u64::MAX >> (64 - bits));
        if ty.is_signed() { i128::from((x << (64 - bits)) as i64 >> (64 - bits)) } else { i128::from(x) }
    };
    widen(a).wrapping_mul(widen(b))
}

/// The part of a product that `.lo`, `.hi` or `.wide` selects.
fn part(i: &Parsed<'_>, ty: Type) -> impl Fn(i128) -> u64 + Send + Sync + Copy + use<> {
    let bits = ty.bits();
    let (shift, width) = match i.one_of(&["hi", "lo"]) {
        Some("hi") => (bits, bits),
        Some(_) => (0, bits),
        None => (0, bits * 2),
    };
    move |p| (p >> shift) as u64 & (u64::MAX >> (64 - width))
}

/// Returns the part of the product that an instruction writes.
fn part_of(i: &Parsed<'_>) -> Part {
    match i.one_of(&["hi", "lo"]) {
        Some("hi") => Part::High,
        Some(_) => Part::Low,
        None => Part::Wide,
    }
}

pub fn mul(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    undefined::product(i, (d, s), None, ty, part_of(i));
    match (ty.bits(), i.has("lo"), i.has("wide"), ty.is_signed()) {
        (32, true, _, _) => Ok(map2(d, s, u32::wrapping_mul)),
        (32, _, true, true) => Ok(map2(d, s, |a: i32, b: i32| i64::from(a) * i64::from(b))),
        (32, _, true, false) => Ok(map2(d, s, |a: u32, b: u32| u64::from(a) * u64::from(b))),
        _ => {
            let part = part(i, ty);
            Ok(map2(d, s, move |a: u64, b: u64| part(product(ty, a, b))))
        }
    }
}

pub fn mad(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let wide = i.has("wide");
    let (d, [a, b]) = operands(i, ty)?;
    let c = i.src(3, if wide { wider(ty) } else { ty })?;
    if !i.has("sat") {
        undefined::product(i, (d, [a, b]), Some(c), ty, part_of(i));
    }
    if i.has("sat") {
        return Ok(map3(d, [a, b, c], |a: i32, b: i32, c: i32| {
            let high = ((i64::from(a) * i64::from(b)) >> 32) as i32;
            high.saturating_add(c)
        }));
    }
    if ty.bits() == 32 && i.has("lo") {
        return Ok(map3(d, [a, b, c], |a: u32, b: u32, c: u32| a.wrapping_mul(b).wrapping_add(c)));
    }
    let part = part(i, ty);
    let bits = if wide { ty.bits() * 2 } else { ty.bits() };
    Ok(map3(d, [a, b, c], move |a: u64, b: u64, c: u64| {
        part(product(ty, a, b)).wrapping_add(c) & (u64::MAX >> (64 - bits))
    }))
}

fn wider(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        Type::S32 => Type::S64,
        other => other,
    }
}

/// `mul24`, `mad24`: multiplies the low 24 bits of each factor. `.lo` takes the low 32 bits of the 48-bit product,
/// `.hi` takes the high 32 bits.
pub fn mad24(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a, b]) = operands(i, ty)?;
    let c = if i.opcode() == "mad24" { i.src(3, ty)? } else { Src::Constant(0) };
    let (hi, signed) = (i.has("hi"), ty.is_signed());
    let sat = i.opcode() == "mad24" && i.has("sat");
    if !sat {
        undefined::product(i, (d, [a, b]), Some(c), ty, if hi { Part::High } else { Part::Low });
    }
    Ok(map3(d, [a, b, c], move |a: u32, b: u32, c: u32| {
        let low = |x: u32| {
            if signed { i64::from((x << 8) as i32 >> 8) } else { i64::from(x & 0xff_ffff) }
        };
        let p = low(a) * low(b);
        let p = if hi { (p >> 16) as u32 } else { p as u32 };
        if sat { (p as i32).saturating_add(c as i32) as u32 } else { p.wrapping_add(c) }
    }))
}

pub fn sad(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    Ok(for_integer!(ty, T => map3(d, s, |a: T, b: T, c: T| c.wrapping_add(a.abs_diff(b) as T))))
}

/// The quotient of a division by zero is all ones. The manual leaves it unspecified.
pub fn div(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    Ok(for_integer!(ty, T => map2(d, s, |a: T, b: T| if b == 0 { !0 } else { a.wrapping_div(b) })))
}

pub fn rem(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    Ok(for_integer!(ty, T => map2(d, s, |a: T, b: T| if b == 0 { a } else { a.wrapping_rem(b) })))
}

pub fn abs(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    Ok(match ty {
        Type::S16 => map1(d, a, i16::wrapping_abs),
        Type::S32 => map1(d, a, i32::wrapping_abs),
        _ => map1(d, a, i64::wrapping_abs),
    })
}

pub fn neg(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    undefined::sum(i, d, [a], ty);
    Ok(for_integer!(ty, T => map1(d, a, T::wrapping_neg)))
}

pub fn min(i: &mut Parsed<'_>) -> Decoded {
    extremum(i, true)
}

pub fn max(i: &mut Parsed<'_>) -> Decoded {
    extremum(i, false)
}

fn extremum(i: &mut Parsed<'_>, min: bool) -> Decoded {
    let ty = i.ty()?;
    let (d, s) = operands(i, ty)?;
    if i.has("relu") {
        let clamp = move |a: i32, b: i32| if min { a.min(b) } else { a.max(b) }.max(0);
        let clamp16 = move |a: u16, b: u16| clamp(i32::from(a as i16), i32::from(b as i16)) as u16;
        return Ok(if ty == Type::S16x2 { map2(d, s, halves(clamp16)) } else { map2(d, s, clamp) });
    }
    Ok(match (ty, min) {
        (Type::U16x2, true) => map2(d, s, halves(u16::min)),
        (Type::U16x2, false) => map2(d, s, halves(u16::max)),
        (Type::S16x2, true) => map2(d, s, halves(|a, b| (a as i16).min(b as i16) as u16)),
        (Type::S16x2, false) => map2(d, s, halves(|a, b| (a as i16).max(b as i16) as u16)),
        (ty, true) => for_integer!(ty, T => map2(d, s, |a: T, b: T| a.min(b))),
        (ty, false) => for_integer!(ty, T => map2(d, s, |a: T, b: T| a.max(b))),
    })
}

pub fn popc(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    Ok(map1(d, a, u64::count_ones))
}

pub fn clz(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    Ok(if ty.bits() == 32 { map1(d, a, u32::leading_zeros) } else { map1(d, a, u64::leading_zeros) })
}

pub fn brev(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    Ok(if ty.bits() == 32 { map1(d, a, u32::reverse_bits) } else { map1(d, a, u64::reverse_bits) })
}

/// Finds the most significant bit that is not a sign bit. The result is all ones if no such bit exists.
pub fn bfind(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (d, [a]) = operands(i, ty)?;
    let (bits, signed, shift) = (ty.bits(), ty.is_signed(), i.has("shiftamt"));
    Ok(map1(d, a, move |a: u64| {
        let negative = signed && a >> (bits - 1) & 1 == 1;
        let a = if negative { !a & (u64::MAX >> (64 - bits)) } else { a };
        match a.checked_ilog2() {
            None => u32::MAX,
            Some(top) if shift => bits - 1 - top,
            Some(top) => top,
        }
    }))
}

/// Finds the n-th set bit from a base position: upward if n is positive, downward if it is negative.
pub fn fns(i: &mut Parsed<'_>) -> Decoded {
    let (d, s) = operands(i, Type::B32)?;
    Ok(map3(d, s, |mask: u32, base: u32, offset: i32| {
        if base > 31 {
            return u32::MAX;
        }
        if offset == 0 {
            return if mask >> base & 1 == 1 { base } else { u32::MAX };
        }
        let (mut at, mut left) = (base as i32, offset.unsigned_abs());
        while (0..32).contains(&at) {
            if mask >> at & 1 == 1 {
                left -= 1;
                if left == 0 {
                    return at as u32;
                }
            }
            at += offset.signum();
        }
        u32::MAX
    }))
}

pub fn bfe(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let s = [i.src(1, ty)?, i.src(2, Type::U32)?, i.src(3, Type::U32)?];
    let (bits, signed) = (ty.bits(), ty.is_signed());
    let extract = move |a: u64, pos: u64, len: u64| {
        let (pos, len) = (pos as u32 & 0xff, len as u32 & 0xff);
        let width = u64::MAX >> (64 - bits);
        let a = a & width;
        // The sign bit is the field's top bit, or the top bit of `a` if the field extends beyond `a`.
        let sign_at = (pos + len).saturating_sub(1).min(bits - 1);
        let sign = signed && len > 0 && a >> sign_at & 1 == 1;
        let field = a.checked_shr(pos).unwrap_or(0);
        let have = len.min(bits.saturating_sub(pos));
        let mask = if have == 0 { 0 } else { u64::MAX >> (64 - have) };
        (field & mask | if sign { !mask } else { 0 }) & width
    };
    undefined::moved(i, (d, s, ty), 1, move |[a, pos, len]| extract(a, pos, len));
    Ok(map3(d, s, extract))
}

pub fn bfi(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let ab = [i.src(1, ty)?, i.src(2, ty)?];
    let (pos, len) = (i.src(3, Type::U32)?, i.src(4, Type::U32)?);
    let width = u64::MAX >> (64 - ty.bits());
    let insert = move |a: u64, b: u64, pos: u64, len: u64| {
        let (pos, len) = (pos as u32 & 0xff, len as u32 & 0xff);
        let ones = if len == 0 { 0 } else { u64::MAX >> (64 - len.min(64)) };
        let field = ones.checked_shl(pos).unwrap_or(0) & width;
        b & !field | a.checked_shl(pos).unwrap_or(0) & field
    };
    undefined::moved(i, (d, [ab[0], ab[1], pos, len], ty), 2, move |[a, b, pos, len]| insert(a, b, pos, len));
    Ok(Box::new(move |w, _, mask| {
        let (a, b, pos, len) = (w.get(ab[0]), w.get(ab[1]), w.get(pos), w.get(len));
        let mut out = [0; 32];
        for n in 0..32 {
            out[n] = insert(a[n], b[n], pos[n], len[n]);
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    }))
}

/// Clamps (`.clamp`) or wraps (`.wrap`) a position or width (PTX ISA, "bmsk", "szext").
fn limit(i: &Parsed<'_>) -> impl Fn(u32, u32) -> u32 + Send + Sync + use<> {
    let wrap = i.has("wrap");
    move |x, most| if wrap { x & 31 } else { x.min(most) }
}

pub fn bmsk(i: &mut Parsed<'_>) -> Decoded {
    let (d, s) = operands(i, Type::B32)?;
    let limit = limit(i);
    Ok(map2(d, s, move |pos: u32, len: u32| {
        let (pos, len) = (limit(pos, 32), limit(len, 32));
        let ones = 1u32.checked_shl(len).unwrap_or(0).wrapping_sub(1);
        ones.checked_shl(pos).unwrap_or(0)
    }))
}

pub fn szext(i: &mut Parsed<'_>) -> Decoded {
    let signed = i.ty()?.is_signed();
    let (d, s) = operands(i, Type::B32)?;
    let limit = limit(i);
    Ok(map2(d, s, move |a: u32, n: u32| match limit(n, 32) {
        0 => 0,
        32 => a,
        n if signed => ((a << (32 - n)) as i32 >> (32 - n)) as u32,
        n => a & (u32::MAX >> (32 - n)),
    }))
}

/// `dp4a`, `dp2a`: dot product of bytes with bytes or halves, accumulated in 32 bits.
pub fn dot(i: &mut Parsed<'_>) -> Decoded {
    let types = i.types();
    let [ta, tb] = types[..] else {
        return Err(DecodeError::invalid("expected two types"));
    };
    let (d, s) = operands(i, Type::B32)?;
    let byte = |signed: bool| {
        move |x: u32, n: u32| {
            let b = (x >> (8 * n)) as u8;
            if signed { i32::from(b as i8) } else { i32::from(b) }
        }
    };
    let half = |signed: bool| {
        move |x: u32, n: u32| {
            let h = (x >> (16 * n)) as u16;
            if signed { i32::from(h as i16) } else { i32::from(h) }
        }
    };
    let (b8, a8, a16) = (byte(tb.is_signed()), byte(ta.is_signed()), half(ta.is_signed()));
    if i.opcode() == "dp4a" {
        return Ok(map3(d, s, move |a: u32, b: u32, c: u32| {
            (0..4).fold(c, |sum, n| sum.wrapping_add(a8(a, n).wrapping_mul(b8(b, n)) as u32))
        }));
    }
    let first = if i.has("hi") { 2 } else { 0 };
    Ok(map3(d, s, move |a: u32, b: u32, c: u32| {
        (0..2).fold(c, |sum, n| sum.wrapping_add(a16(a, n).wrapping_mul(b8(b, first + n)) as u32))
    }))
}

/// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`: the carry flag is a hidden predicate register of the kernel.
pub fn carry(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let bits = ty.bits();
    let ones = u64::MAX >> (64 - bits);
    let (d, [a, b]) = operands(i, ty)?;
    let product = match i.opcode() {
        "mad" | "madc" => Some((part(i, ty), i.src(3, ty)?)),
        _ => None,
    };
    let (read, write) = (i.opcode().ends_with('c'), i.has("cc"));
    let flag = i.carry_flag(read, write);
    let subtract = i.opcode().starts_with("sub");
    Ok(Box::new(move |w, _, mask| {
        let (mut a, mut b) = (w.get(a), w.get(b));
        if let Some((part, c)) = product {
            for n in 0..32 {
                a[n] = part(self::product(ty, a[n], b[n]));
            }
            b = w.get(c);
        }
        let old = if read { w.predicate(flag) } else { 0 };
        let (mut out, mut carries) = ([0; 32], 0);
        for n in 0..32 {
            let (x, y) = (u128::from(a[n] & ones), u128::from(b[n] & ones));
            let c = u128::from(old >> n & 1);
            let sum = if subtract { x.wrapping_sub(y).wrapping_sub(c) } else { x + y + c };
            out[n] = sum as u64 & ones;
            carries |= ((sum >> bits & 1) as u32) << n;
        }
        d.write(w, mask, &out);
        if write {
            w.set_predicate(flag, mask, carries);
        }
        Ok(Flow::Next)
    }))
}

/// `and`, `or`, `xor` on bits or predicates.
pub fn logic(i: &mut Parsed<'_>) -> Decoded {
    let op: fn(u64, u64) -> u64 = match i.opcode() {
        "and" => |a, b| a & b,
        "or" => |a, b| a | b,
        _ => |a, b| a ^ b,
    };
    let ty = i.ty()?;
    if ty == Type::Pred {
        let d = i.predicate_dst(0)?;
        let (a, b) = (i.predicate(1)?, i.predicate(2)?);
        undefined::predicates(i, d.0, [a, b], move |[a, b]| op(a, b));
        return Ok(Box::new(move |w, _, mask| {
            let value = op(a.mask(w).into(), b.mask(w).into()) as u32;
            d.write(w, mask, value);
            Ok(Flow::Next)
        }));
    }
    let (d, s) = operands(i, ty)?;
    undefined::bitwise(i, (d, s, ty), move |[a, b]| op(a, b));
    Ok(match i.opcode() {
        "and" => map2(d, s, |a: u64, b: u64| a & b),
        "or" => map2(d, s, |a: u64, b: u64| a | b),
        _ => map2(d, s, |a: u64, b: u64| a ^ b),
    })
}

pub fn not(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    if ty == Type::Pred {
        let (d, a) = (i.predicate_dst(0)?, i.predicate(1)?);
        undefined::predicates(i, d.0, [a], |[a]| !a);
        return Ok(Box::new(move |w, _, mask| {
            let value = !a.mask(w);
            d.write(w, mask, value);
            Ok(Flow::Next)
        }));
    }
    let (d, s) = operands(i, ty)?;
    undefined::bitwise(i, (d, s, ty), |[a]| !a);
    let [a] = s;
    Ok(for_integer!(ty, T => map1(d, a, |a: T| !a)))
}

pub fn cnot(i: &mut Parsed<'_>) -> Decoded {
    let (d, [a]) = operands(i, i.ty()?)?;
    Ok(map1(d, a, |a: u64| u64::from(a == 0)))
}

/// A shift amount above the width counts as the width.
pub fn shl(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let s = [i.src(1, ty)?, i.src(2, Type::U32)?];
    let bits = ty.bits();
    undefined::moved(i, (d, s, ty), 1, move |[a, n]| if n < bits.into() { a << n } else { 0 });
    Ok(for_integer!(ty, T => map2(d, s, |a: T, n: u32| a.checked_shl(n).unwrap_or(0))))
}

pub fn shr(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let s = [i.src(1, ty)?, i.src(2, Type::U32)?];
    let last = ty.bits() - 1;
    let (spare, signed) = (64 - ty.bits(), ty.is_signed());
    undefined::moved(i, (d, s, ty), 1, move |[a, n]| {
        // The sign bit moves in from above.
        let n = n.min(63) as u32;
        if signed {
            ((a << spare) as i64 >> spare >> n) as u64
        } else if n > last {
            0
        } else {
            a >> n
        }
    });
    Ok(for_integer!(ty, T => map2(d, s, move |a: T, n: u32| {
        // An arithmetic shift by width - 1 leaves only sign bits.
        a.checked_shr(n).unwrap_or_else(|| if T::MIN == 0 { 0 } else { a >> last })
    })))
}

/// Funnel shift of `[b:a]`.
pub fn shf(i: &mut Parsed<'_>) -> Decoded {
    let (d, s) = operands(i, Type::B32)?;
    let (left, wrap) = (i.has("l"), i.has("wrap"));
    let shift = move |a: u32, b: u32, c: u32| {
        let n = if wrap { c & 31 } else { c.min(32) };
        let both = u64::from(b) << 32 | u64::from(a);
        if left { (both << n >> 32) as u32 } else { (both >> n) as u32 }
    };
    undefined::moved(i, (d, s, Type::B32), 2, move |[a, b, c]| shift(a as u32, b as u32, c as u32).into());
    Ok(map3(d, s, shift))
}

/// An arbitrary function of three bits, given by its truth table. `.and` or `.or` combines it with a predicate.
pub fn lop3(i: &mut Parsed<'_>) -> Decoded {
    let boolean = i.one_of(&["and", "or"]);
    let (d, p) = match (i.operand(0)?, boolean) {
        (Operand::Pair(d, p), Some(_)) => (i.dst_operand(d)?, Some(i.predicate_dst_operand(p)?)),
        (d, None) => (i.dst_operand(d)?, None),
        _ => {
            return Err(DecodeError::invalid("`.and` and `.or` need a destination `d|p`"));
        }
    };
    let s = [i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?];
    let Src::Constant(table) = i.src(4, Type::B32)? else {
        return Err(DecodeError::invalid("the truth table of lop3 must be a constant"));
    };
    let q = if p.is_some() { Some(i.predicate(5)?) } else { None };
    let minterms: [u32; 8] = std::array::from_fn(|n| if table >> n & 1 == 1 { u32::MAX } else { 0 });
    let f = move |a: u32, b: u32, c: u32| {
        (0..8).fold(0, |r, n: u32| {
            let pick = |x: u32, bit: u32| if n >> bit & 1 == 1 { x } else { !x };
            r | minterms[n as usize] & pick(a, 2) & pick(b, 1) & pick(c, 0)
        })
    };
    let Some((p, q)) = p.zip(q) else {
        undefined::bitwise(i, (d, s, Type::B32), move |[a, b, c]| f(a as u32, b as u32, c as u32).into());
        return Ok(map3(d, s, f));
    };
    let or = boolean == Some("or");
    Ok(Box::new(move |w, _, mask| {
        let [a, b, c] = s.map(|s| w.get(s));
        let (mut out, mut nonzero) = ([0; 32], 0);
        for n in 0..32 {
            let r = f(a[n] as u32, b[n] as u32, c[n] as u32);
            out[n] = r.into();
            nonzero |= u32::from(r != 0) << n;
        }
        let q = q.mask(w);
        d.write(w, mask, &out);
        p.write(w, mask, if or { nonzero | q } else { nonzero & q });
        Ok(Flow::Next)
    }))
}
