//! Conversions (PTX ISA, "Data Movement and Conversion Instructions: cvt, cvt.pack, cvta, isspacep"). The arithmetic is
//! in [`crate::hw::number`].

use super::compare::reader;
use super::float::{format, rounding};
use super::lane::{map1, map2, map3};
use super::{mov, undefined};
use crate::code::Flow;
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::approx::flush_f32;
use crate::hw::number::{self, E2M1, E2M3, E3M2, E4M3, E5M2, F64, Format, IntType, Rounder, Rounding, TF32};
use crate::machine::address::{space_of, window};
use crate::operand::{Dst, Src};
use crate::types::{Space, Type};

/// A narrow packed format, and the bits per element of its field.
fn packed(ty: Type) -> Option<(&'static Format, u32)> {
    Some(match ty {
        Type::E4M3x2 | Type::E4M3x4 => (&E4M3, 8),
        Type::E5M2x2 | Type::E5M2x4 => (&E5M2, 8),
        Type::E2M3x2 | Type::E2M3x4 => (&E2M3, 8),
        Type::E3M2x2 | Type::E3M2x4 => (&E3M2, 8),
        Type::E2M1x2 | Type::E2M1x4 => (&E2M1, 4),
        Type::F16x2 => (&number::F16, 16),
        Type::BF16x2 => (&number::BF16, 16),
        _ => return None,
    })
}

fn int_type(ty: Type) -> Option<IntType> {
    ty.is_integer().then(|| IntType { bits: ty.bits(), signed: ty.is_signed() })
}

/// Sign-extends or zero-extends the low bits of a register, as `ty` requires.
pub fn extend(ty: Type, bits: u64) -> i128 {
    let shift = 64 - ty.bits();
    if ty.is_signed() { i128::from((bits << shift) as i64 >> shift) } else { i128::from(bits << shift >> shift) }
}

/// The conversion that a `cvt` performs.
struct Conversion {
    to: Type,
    from: Type,
    ftz: bool,
    sat: bool,
    rounder: Rounder,
    /// Rounding to an integer: `.rni`, `.rzi`, `.rmi` or `.rpi`.
    integral: Option<Rounding>,
}

/// `cvt d, a{, b}`.
pub fn cvt(i: &mut Parsed<'_>) -> Decoded {
    let [to, from] = i.types()[..] else {
        return Err(DecodeError::invalid("expected two types"));
    };
    let mut rounder = Rounder::new(if i.has("rna") { Rounding::NearestAway } else { rounding(i) });
    if i.has("satfinite") {
        rounder = rounder.satfinite();
    }
    if i.has("relu") {
        rounder = rounder.relu();
    }
    let integral = i.one_of(&["rzi", "rmi", "rpi", "rni"]).map(|mode| match mode {
        "rzi" => Rounding::TowardZero,
        "rmi" => Rounding::Down,
        "rpi" => Rounding::Up,
        _ => Rounding::NearestEven,
    });
    let conversion = Conversion { to, from, ftz: i.has("ftz"), sat: i.has("sat"), rounder, integral };
    let (d, a) = (i.dst(0)?, i.src(1, from)?);
    let b = if i.operands().len() > 2 { Some(i.src(2, from)?) } else { None };
    if to == Type::UE8M0x2 || from == Type::UE8M0x2 {
        return conversion.of_scales(d, a, b);
    }
    if let Some((format, field)) = packed(to) {
        return conversion.to_packed(d, a, b, format, field);
    }
    if to == Type::TF32 {
        return Ok(map1(d, a, move |x: f32| number::tf32_to_register(rounder.round(&TF32, x.into()))));
    }
    if int_type(to).is_some() && int_type(from).is_some() && !conversion.sat {
        let ones = u64::MAX >> (64 - to.bits());
        i.carries(move |w, lane| {
            // An undefined sign bit extends as the sign does.
            let bits = extend(from, undefined::of(w, a, from.bits(), lane)) as u64 & ones;
            let bits = if to.is_signed() { extend(to, bits) as u64 } else { bits };
            d.register.map(|register| (register, bits)).into_iter().collect()
        });
    }
    match int_type(to) {
        Some(int) => conversion.to_integer(d, a, int),
        None => conversion.to_float(d, a),
    }
}

impl Conversion {
    /// Converts two f32 or one bf16x2 to ue8m0x2, or ue8m0x2 to bf16x2.
    fn of_scales(&self, d: Dst, a: Src, b: Option<Src>) -> Decoded {
        let rounder = self.rounder;
        match (self.from, b) {
            (Type::UE8M0x2, _) => Ok(map1(d, a, move |x: u16| {
                let one = |c: u8| rounder.round(&number::BF16, number::decode_ue8m0(c)) as u32;
                one(x as u8) | one((x >> 8) as u8) << 16
            })),
            (Type::BF16x2, _) => Ok(map1(d, a, move |x: u32| {
                let one = |x: u32| u32::from(rounder.round_ue8m0(f32::from_bits(x << 16).into()));
                one(x & 0xffff) | one(x >> 16) << 8
            })),
            (_, Some(b)) => Ok(map2(d, [a, b], move |a: f32, b: f32| {
                u16::from(rounder.round_ue8m0(a.into())) << 8 | u16::from(rounder.round_ue8m0(b.into()))
            })),
            (_, None) => Err(DecodeError::invalid("operand 3 is missing")),
        }
    }

    /// Converts to packed elements of `format`, in fields of `field` bits.
    fn to_packed(&self, d: Dst, a: Src, b: Option<Src>, format: &'static Format, field: u32) -> Decoded {
        let (rounder, ftz) = (self.rounder, self.ftz);
        let field_mask = (1u64 << field) - 1;
        match (packed(self.from), self.from, b) {
            // From a packed type: element by element.
            (Some((source, width)), ..) => {
                let ones = (1u64 << width) - 1;
                Ok(map1(d, a, move |x: u64| {
                    let one = |n: u32| {
                        let element = x >> (n * width) & ones & ((1 << source.width()) - 1);
                        (rounder.round(format, number::decode(source, element)) & field_mask) << (n * field)
                    };
                    one(0) | one(1)
                }))
            }
            // From two f32: the first operand goes to the upper half.
            (None, Type::F32, Some(b)) => {
                let narrow = move |x: f32| {
                    let x = if ftz { flush_f32(x) } else { x };
                    rounder.round(format, x.into()) & field_mask
                };
                Ok(map2(d, [a, b], move |a: f32, b: f32| narrow(a) << field | narrow(b)))
            }
            _ => Err(DecodeError::unsupported(format!("cvt from {:?} to {:?}", self.from, self.to))),
        }
    }

    fn to_integer(&self, d: Dst, a: Src, int: IntType) -> Decoded {
        let (to, from) = (self.to, self.from);
        let ones = u64::MAX >> (64 - to.bits());
        if int_type(from).is_none() {
            let read = self.reader()?;
            let source = if from == Type::F64 { &F64 } else { format(from).map_or(&F64, |f| f.0) };
            let mode = self.integral.unwrap_or(Rounding::TowardZero);
            return Ok(map1(d, a, move |x: u64| number::float_to_int(read(x), source, mode, int) as u64 & ones));
        }
        if self.sat {
            return Ok(map1(d, a, move |x: u64| int.saturate(extend(from, x)) as u64 & ones));
        }
        // The source's sign extends the result to the destination type's width. The type's sign extends it to the
        // register's.
        let sign_extends = to.is_signed() && d.bits > to.bits();
        Ok(map1(d, a, move |x: u64| {
            let value = extend(from, x) as u64 & ones;
            if sign_extends { extend(to, value) as u64 } else { value }
        }))
    }

    fn to_float(&self, d: Dst, a: Src) -> Decoded {
        let &Conversion { to, from, ftz, sat, rounder, integral } = self;
        let target = if to == Type::F64 { &F64 } else { single(to)? };
        if int_type(from).is_some() {
            return Ok(map1(d, a, move |x: u64| {
                let y = rounder.round_integer(target, extend(from, x));
                if sat { rounder.round(target, number::saturate(number::decode(target, y))) } else { y }
            }));
        }
        let read = self.reader()?;
        Ok(map1(d, a, move |x: u64| {
            let y = read(x);
            let y = integral.map_or(y, |mode| number::round_to_integral(y, mode));
            let y = rounder.round(target, if sat { number::saturate(y) } else { y });
            if ftz { target.flush(y) } else { y }
        }))
    }

    /// Function that converts the bits of the source register to f64.
    fn reader(&self) -> Result<fn(u64) -> f64, DecodeError> {
        reader(self.from, self.ftz).ok_or_else(|| DecodeError::unsupported(format!("cvt from {:?}", self.from)))
    }
}

fn single(ty: Type) -> Result<&'static Format, DecodeError> {
    match format(ty) {
        Some((format, 1)) => Ok(format),
        _ => Err(DecodeError::unsupported(format!("cvt to {ty:?}"))),
    }
}

pub fn pack(i: &mut Parsed<'_>) -> Decoded {
    let to = if i.has("u2") || i.has("s2") {
        IntType { bits: 2, signed: i.has("s2") }
    } else if i.has("u4") || i.has("s4") {
        IntType { bits: 4, signed: i.has("s4") }
    } else {
        let first = i.types().first().copied().and_then(int_type);
        first.ok_or_else(|| DecodeError::invalid("the conversion type is missing"))?
    };
    let d = i.dst(0)?;
    let (a, b) = (i.src(1, Type::S32)?, i.src(2, Type::S32)?);
    let c = if i.operands().len() > 3 { i.src(3, Type::B32)? } else { Src::Constant(0) };
    Ok(map3(d, [a, b, c], move |a: i32, b: i32, c: u32| number::cvt_pack(to, a, b, c)))
}

/// Converts between generic addresses and addresses of a state space's window. Global and const addresses are generic.
pub fn cvta(i: &mut Parsed<'_>) -> Decoded {
    let space = i.space().ok_or_else(|| DecodeError::invalid("the state space is missing"))?;
    let (d, a) = (i.dst(0)?, i.address_value(1)?);
    let Some(base) = window(space) else {
        return Ok(mov::copy(d, a));
    };
    if i.has("to") {
        Ok(map1(d, a, move |x: u64| x.wrapping_sub(base)))
    } else {
        Ok(map1(d, a, move |x: u64| x.wrapping_add(base)))
    }
}

pub fn isspacep(i: &mut Parsed<'_>) -> Decoded {
    let space = i.space().ok_or_else(|| DecodeError::invalid("the state space is missing"))?;
    let p = i.predicate_dst(0)?;
    let a = i.address_value(1)?;
    Ok(Box::new(move |w, m, mask| {
        let mut value = 0;
        for (n, address) in w.get(a).into_iter().enumerate() {
            let found = space_of(address);
            let yes = match space {
                Space::Shared => found == Space::Shared && m.rank_of(address) == w.cta,
                Space::SharedCluster => found == Space::Shared,
                Space::Const => m.global.nearest(address).is_some_and(|(a, at)| a.constant && at < a.len()),
                other => found == other,
            };
            value |= u32::from(yes) << n;
        }
        p.write(w, mask, value);
        Ok(Flow::Next)
    }))
}
