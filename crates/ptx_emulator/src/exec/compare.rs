//! Comparison and selection (PTX ISA, "Comparison and Selection Instructions", "Half Precision Comparison
//! Instructions").

use std::sync::Arc;

use super::lane::{Lane, for_integer, map3};
use super::undefined;
use crate::code::Flow;
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::number::{self, BF16, F16, Format};
use crate::operand::{PredicateDst, PredicateSrc, Row, Src};
use crate::parser::ast::Operand;
use crate::types::Type;

const OPERATORS: [&str; 18] = [
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

/// Computes the mask of lanes in which a comparison holds.
type Compare = Box<dyn Fn(&Row, &Row) -> u32 + Send + Sync>;

fn lanes<T: Lane>(f: impl Fn(T, T) -> bool + Send + Sync + 'static) -> Compare {
    Box::new(move |a, b| {
        let mut mask = 0;
        for n in 0..32 {
            mask |= u32::from(f(T::of(a[n]), T::of(b[n]))) << n;
        }
        mask
    })
}

fn ordered<T: Lane + PartialOrd>(op: &str) -> Option<Compare> {
    Some(match op {
        "eq" => lanes(|a: T, b| a == b),
        "ne" => lanes(|a: T, b| a != b),
        "lt" | "lo" => lanes(|a: T, b| a < b),
        "le" | "ls" => lanes(|a: T, b| a <= b),
        "gt" | "hi" => lanes(|a: T, b| a > b),
        "ge" | "hs" => lanes(|a: T, b| a >= b),
        _ => return None,
    })
}

/// Floating-point comparison. If an operand is NaN, operators without `u` are false and operators with `u` are true.
fn float(op: &str, read: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Option<Compare> {
    let holds: fn(f64, f64) -> bool = match op {
        "eq" => |a, b| a == b,
        "ne" => |a, b| a.partial_cmp(&b).is_some_and(|o| o.is_ne()),
        "lt" => |a, b| a < b,
        "le" => |a, b| a <= b,
        "gt" => |a, b| a > b,
        "ge" => |a, b| a >= b,
        "equ" => |a, b| a == b || a.is_nan() || b.is_nan(),
        "neu" => |a, b| a != b,
        "ltu" => |a, b| !matches!(a.partial_cmp(&b), Some(o) if o.is_ge()),
        "leu" => |a, b| !matches!(a.partial_cmp(&b), Some(o) if o.is_gt()),
        "gtu" => |a, b| !matches!(a.partial_cmp(&b), Some(o) if o.is_le()),
        "geu" => |a, b| !matches!(a.partial_cmp(&b), Some(o) if o.is_lt()),
        "num" => |a, b| !a.is_nan() && !b.is_nan(),
        "nan" => |a, b| a.is_nan() || b.is_nan(),
        _ => return None,
    };
    Some(lanes(move |a: u64, b: u64| holds(read(a), read(b))))
}

/// Function that converts the bits of a floating-point register of type `ty` to f64.
pub fn reader(ty: Type, ftz: bool) -> Option<fn(u64) -> f64> {
    fn half(format: &Format, bits: u64, ftz: bool) -> f64 {
        number::decode(format, if ftz { format.flush(bits & 0xffff) } else { bits & 0xffff })
    }
    Some(match (ty, ftz) {
        (Type::F64, _) => f64::from_bits,
        (Type::F32, false) => |b| f32::from_bits(b as u32).into(),
        (Type::F32, true) => |b| crate::hw::approx::flush_f32(f32::from_bits(b as u32)).into(),
        (Type::F16, false) => |b| half(&F16, b, false),
        (Type::F16, true) => |b| half(&F16, b, true),
        (Type::BF16, _) => |b| half(&BF16, b, false),
        _ => return None,
    })
}

fn compare(i: &Parsed<'_>, ty: Type) -> Result<Compare, DecodeError> {
    let Some(op) = i.one_of(&OPERATORS) else {
        return Err(DecodeError::invalid("the comparison operator is missing"));
    };
    let found = match reader(ty, i.has("ftz")) {
        Some(read) => float(op, read),
        None => match (ty, op) {
            // `lo`, `ls`, `hi` and `hs` compare as unsigned integers, whatever the type.
            (Type::S16 | Type::B16, "lo" | "ls" | "hi" | "hs") => ordered::<u16>(op),
            _ => for_integer!(ty, T => ordered::<T>(op)),
        },
    };
    found.ok_or_else(|| DecodeError::invalid(format!("`.{op}` does not compare {ty:?}")))
}

pub fn setp(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let boolean = i.one_of(&["and", "or", "xor"]);
    let packed = match ty {
        Type::F16x2 => Some(Type::F16),
        Type::BF16x2 => Some(Type::BF16),
        _ => None,
    };
    let compare = compare(i, packed.unwrap_or(ty))?;
    let (p, q) = match i.operand(0)? {
        Operand::Pair(p, q) => (i.predicate_dst_operand(p)?, Some(i.predicate_dst_operand(q)?)),
        p => (i.predicate_dst_operand(p)?, None),
    };
    let (a, b) = (i.src(1, ty)?, i.src(2, ty)?);
    let c = if boolean.is_some() { Some(i.predicate(3)?) } else { None };
    let combine: fn(u32, u32) -> u32 = match boolean {
        Some("or") => |t, c| t | c,
        Some("xor") => |t, c| t ^ c,
        Some(_) => |t, c| t & c,
        None => |t, _| t,
    };
    let compare = Arc::new(compare);
    decide(i, [(p, false), (q.unwrap_or(PredicateDst(None)), packed.is_none())], (a, b, ty), c, combine, &compare);
    Ok(Box::new(move |w, _, mask| {
        let (a, b) = (w.get(a), w.get(b));
        let c = c.map_or(0, |c| c.mask(w));
        let t = compare(&a, &b);
        p.write(w, mask, combine(t, c));
        if let Some(q) = q {
            // Packed types compare their halves separately. For other types, the second predicate is the complement.
            let t = if packed.is_some() { compare(&a.map(|v| v >> 16), &b.map(|v| v >> 16)) } else { !t };
            q.write(w, mask, combine(t, c));
        }
        Ok(Flow::Next)
    }))
}

/// Propagates undefined bits to the predicates of a comparison: each predicate, and whether it is the complement.
fn decide(
    i: &mut Parsed<'_>,
    out: [(PredicateDst, bool); 2],
    (a, b, ty): (Src, Src, Type),
    c: Option<PredicateSrc>,
    combine: fn(u32, u32) -> u32,
    compare: &Arc<Compare>,
) {
    let equality = i.has("eq") || i.has("ne");
    let signed = ty.is_signed() && i.one_of(&["lo", "ls", "hi", "hs"]).is_none();
    let is_integer = reader(ty, false).is_none() && !matches!(ty, Type::F16x2 | Type::BF16x2);
    let compare = Arc::clone(compare);
    i.decides(move |w, missing| {
        let one = |x: u64, y: u64| compare(&[x; 32], &[y; 32]) & 1 == 1;
        let open = if is_integer {
            undefined::comparison(w, [a, b], ty, (equality, signed), one)
        } else {
            let any = |&lane: &usize| w.undefined_bits(a, lane) | w.undefined_bits(b, lane) != 0;
            crate::operand::lanes(missing).filter(any).fold(0, |mask, lane| mask | 1 << lane)
        };
        let t = compare(&w.get(a), &w.get(b));
        let (c, open_c) = c.map_or((0, 0), |c| (c.mask(w), !c.defined(w)));
        let decided = |(p, complement): (PredicateDst, bool)| {
            let t = if complement { !t } else { t };
            let values =
                [(t & !open, c & !open_c), (t | open, c & !open_c), (t & !open, c | open_c), (t | open, c | open_c)];
            let results = values.map(|(t, c)| combine(t, c));
            let (all, any) = (results.iter().fold(u32::MAX, |a, r| a & r), results.iter().fold(0, |a, r| a | r));
            Some((p.0?, all ^ any))
        };
        out.into_iter().filter_map(decided).collect()
    });
}

pub fn set(i: &mut Parsed<'_>) -> Decoded {
    let types = i.types();
    let [to, ty] = types[..] else {
        return Err(DecodeError::invalid("expected two types"));
    };
    let boolean = i.one_of(&["and", "or", "xor"]);
    let packed = match ty {
        Type::F16x2 => Some(Type::F16),
        Type::BF16x2 => Some(Type::BF16),
        _ => None,
    };
    let compare = compare(i, packed.unwrap_or(ty))?;
    let d = i.dst(0)?;
    let (a, b) = (i.src(1, ty)?, i.src(2, ty)?);
    let c = if boolean.is_some() { Some(i.predicate(3)?) } else { None };
    let (yes, yes_high): (u64, u64) = match to {
        Type::F32 => (0x3f80_0000, 0),
        Type::F16 => (0x3c00, 0),
        Type::BF16 => (0x3f80, 0),
        Type::F16x2 => (0x3c00, 0x3c00_0000),
        Type::BF16x2 => (0x3f80, 0x3f80_0000),
        Type::U16 | Type::S16 => (0xffff, 0),
        _ if packed.is_some() => (0xffff, 0xffff_0000),
        _ => (0xffff_ffff, 0),
    };
    let or = boolean == Some("or");
    let xor = boolean == Some("xor");
    Ok(Box::new(move |w, _, mask| {
        let (a, b) = (w.get(a), w.get(b));
        let c = c.map_or(u32::MAX, |c| c.mask(w));
        let combine = |t: u32| {
            if or {
                t | c
            } else if xor {
                t ^ c
            } else {
                t & c
            }
        };
        let low = combine(compare(&a, &b));
        let high = if yes_high != 0 { combine(compare(&a.map(|v| v >> 16), &b.map(|v| v >> 16))) } else { 0 };
        let out = std::array::from_fn(|n| (yes * u64::from(low >> n & 1)) | (yes_high * u64::from(high >> n & 1)));
        d.write(w, mask, &out);
        Ok(Flow::Next)
    }))
}

pub fn selp(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let (a, b) = (i.src(1, ty)?, i.src(2, ty)?);
    let c = i.predicate(3)?;
    // The undefined bits of the source that is not selected have no effect.
    i.carries(move |w, lane| {
        let first = (c.defined(w) >> lane & 1 == 1).then(|| c.mask(w) >> lane & 1 == 1);
        let bits = undefined::selected(w, [a, b], first, lane);
        d.register.map(|register| (register, bits)).into_iter().collect()
    });
    Ok(Box::new(move |w, _, mask| {
        let (a, b, c) = (w.get(a), w.get(b), c.mask(w));
        let mut out = [0; 32];
        for n in 0..32 {
            let pick = u64::from(c >> n & 1).wrapping_neg();
            out[n] = a[n] & pick | b[n] & !pick;
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    }))
}

/// `d = c >= 0 ? a : b`. A NaN selects `b`.
pub fn slct(i: &mut Parsed<'_>) -> Decoded {
    let types = i.types();
    let [ty, by] = types[..] else {
        return Err(DecodeError::invalid("expected two types"));
    };
    let d = i.dst(0)?;
    let s = [i.src(1, ty)?, i.src(2, ty)?, i.src(3, by)?];
    let ftz = i.has("ftz");
    i.carries(move |w, lane| {
        let bits = w.lane(s[2], lane) as u32;
        let yes = if by == Type::F32 { f32::from_bits(bits) >= 0.0 } else { bits as i32 >= 0 };
        let first = (undefined::of(w, s[2], 32, lane) == 0).then_some(yes);
        d.register.map(|register| (register, undefined::selected(w, [s[0], s[1]], first, lane))).into_iter().collect()
    });
    Ok(match by {
        Type::F32 => map3(d, s, move |a: u64, b: u64, c: f32| {
            let c = if ftz { crate::hw::approx::flush_f32(c) } else { c };
            if c >= 0.0 { a } else { b }
        }),
        _ => map3(d, s, |a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
    })
}

/// `testp`: the class of a floating-point number.
pub fn testp(i: &mut Parsed<'_>) -> Decoded {
    let double = i.has("f64");
    let p = i.predicate_dst(0)?;
    let a: Src = i.src(1, if double { Type::F64 } else { Type::F32 })?;
    let test: fn(f64) -> bool = match i.one_of(&["finite", "infinite", "number", "notanumber", "normal", "subnormal"]) {
        Some("finite") => |x| x.is_finite(),
        Some("infinite") => |x| x.is_infinite(),
        Some("number") => |x| !x.is_nan(),
        Some("notanumber") => |x| x.is_nan(),
        Some("normal") => |x| x.is_normal(),
        _ => |x| x.is_subnormal(),
    };
    let test32: fn(f32) -> bool = match i.one_of(&["normal", "subnormal"]) {
        Some("normal") => |x| x.is_normal(),
        Some(_) => |x| x.is_subnormal(),
        None => |_| false,
    };
    let by_format = i.has("normal") || i.has("subnormal");
    Ok(Box::new(move |w, _, mask| {
        let mut value = 0;
        for (n, bits) in w.get(a).into_iter().enumerate() {
            let yes = match (double, by_format) {
                (true, _) => test(f64::from_bits(bits)),
                (false, true) => test32(f32::from_bits(bits as u32)),
                (false, false) => test(f32::from_bits(bits as u32).into()),
            };
            value |= u32::from(yes) << n;
        }
        p.write(w, mask, value);
        Ok(Flow::Next)
    }))
}
