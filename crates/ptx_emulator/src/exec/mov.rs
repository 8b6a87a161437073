//! Moves between registers (PTX ISA, "Data Movement: mov, prmt").

use super::lane::{Lane, map1, map3};
use super::undefined;
use crate::code::{Flow, Step};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::warp::Warp;
use crate::operand::{Dst, Src};
use crate::parser::ast::Operand;
use crate::types::Type;

/// `mov d, a`: registers, constants, addresses; packs and unpacks vectors.
pub fn mov(i: &mut Parsed<'_>) -> Decoded {
    i.moves();
    let ty = i.ty()?;
    if ty == Type::Pred {
        let (d, a) = (i.predicate_dst(0)?, i.predicate(1)?);
        undefined::predicates(i, d.0, [a], |[a]| a);
        return Ok(Box::new(move |w, _, mask| {
            let value = a.mask(w);
            d.write(w, mask, value);
            Ok(Flow::Next)
        }));
    }
    let [to, from] = i.operands() else {
        return Err(DecodeError::invalid("expected two operands"));
    };
    match (to, from) {
        (Operand::Vector(_), Operand::Vector(_)) => elements(i, ty),
        (Operand::Vector(_), _) => unpack(i, ty),
        (_, Operand::Vector(_)) => pack(i, ty),
        _ if ty == Type::B128 => {
            let (words, out) = (i.words(from, ty)?, i.dst_words(to, ty)?);
            let moves: Vec<_> = out.into_iter().zip(words).collect();
            i.carries(carry(moves.clone()));
            Ok(copies(moves))
        }
        _ => {
            let (d, a) = (i.dst(0)?, i.src(1, ty)?);
            i.carries(carry(vec![(d, a)]));
            Ok(copy(d, a))
        }
    }
}

/// `d = a`.
pub fn copy(d: Dst, a: Src) -> Step {
    map1(d, a, <u64 as Lane>::of)
}

/// Propagates the undefined bits of each source to its destination.
fn carry(moves: Vec<(Dst, Src)>) -> impl Fn(&Warp, usize) -> Vec<(u32, u64)> + Send + Sync {
    move |w, lane| {
        let bits = |s: &Src| w.undefined_bits(*s, lane);
        moves.iter().filter_map(|(d, s)| Some((d.register?, bits(s)))).collect()
    }
}

/// Performs several moves at once.
fn copies(moves: Vec<(Dst, Src)>) -> Step {
    Box::new(move |w, _, mask| {
        let rows: Vec<_> = moves.iter().map(|(_, s)| w.get(*s)).collect();
        for ((d, _), row) in moves.iter().zip(&rows) {
            d.write(w, mask, row);
        }
        Ok(Flow::Next)
    })
}

/// Moves a vector to a vector, element by element.
fn elements(i: &mut Parsed<'_>, ty: Type) -> Decoded {
    let (out, sources) = (i.dst_vector(0)?, i.parts(1)?);
    if out.len() != sources.len() {
        return Err(DecodeError::invalid("the two vectors have different lengths"));
    }
    let each = Type::parse(&format!("b{}", ty.bits() / out.len().max(1) as u32)).unwrap_or(ty);
    let moves: Vec<_> = out.into_iter().zip(i.src_vector(1, each)?).collect();
    i.carries(carry(moves.clone()));
    Ok(copies(moves))
}

/// Splits a value into parts, lowest first.
fn unpack(i: &mut Parsed<'_>, ty: Type) -> Decoded {
    let words = i.words(i.operand(1)?, ty)?;
    let out = i.dst_vector(0)?;
    let bits = ty.bits() / out.len().max(1) as u32;
    let (from, to) = (words.clone(), out.clone());
    i.carries(move |w, lane| {
        let all =
            from.iter().enumerate().fold(0, |all, (n, s)| all | u128::from(w.undefined_bits(*s, lane)) << (64 * n));
        let part = |n: usize| (all >> (n as u32 * bits)) as u64 & (u64::MAX >> (64 - bits));
        to.iter().enumerate().filter_map(|(n, d)| Some((d.register?, part(n)))).collect()
    });
    Ok(Box::new(move |w, _, mask| {
        let rows: Vec<_> = words.iter().map(|s| w.get(*s)).collect();
        for (n, d) in out.iter().enumerate() {
            let at = n as u32 * bits;
            let row = rows[(at / 64) as usize].map(|v| v >> (at % 64) & (u64::MAX >> (64 - bits)));
            d.write(w, mask, &row);
        }
        Ok(Flow::Next)
    }))
}

/// Joins parts into a value, lowest first.
fn pack(i: &mut Parsed<'_>, ty: Type) -> Decoded {
    let bits = ty.bits() / i.parts(1)?.len().max(1) as u32;
    let element = match bits {
        8 => Type::B8,
        16 => Type::B16,
        32 => Type::B32,
        64 => Type::B64,
        _ => return Err(DecodeError::invalid("the parts do not fit the width of the destination")),
    };
    let sources = i.src_vector(1, element)?;
    let out = i.dst_words(i.operand(0)?, ty)?;
    let (from, to) = (sources.clone(), out.clone());
    i.carries(move |w, lane| {
        let part = |s: &Src| u128::from(undefined::of(w, *s, bits, lane));
        let all = from.iter().enumerate().fold(0, |all, (n, s)| all | part(s) << (n as u32 * bits));
        to.iter().enumerate().filter_map(|(n, d)| Some((d.register?, (all >> (64 * n)) as u64))).collect()
    });
    Ok(Box::new(move |w, _, mask| {
        let mut rows = [[0u64; 32]; 2];
        for (n, s) in sources.iter().enumerate() {
            let (at, row) = (n as u32 * bits, w.get(*s));
            for lane in 0..32 {
                let part = row[lane] & (u64::MAX >> (64 - bits));
                rows[(at / 64) as usize][lane] |= part << (at % 64);
            }
        }
        for (d, row) in out.iter().zip(&rows) {
            d.write(w, mask, row);
        }
        Ok(Flow::Next)
    }))
}

/// Byte permutation: the default mode and the six named modes.
pub fn prmt(i: &mut Parsed<'_>) -> Decoded {
    let d = i.dst(0)?;
    let s = [i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?];
    let byte = |a: u32, b: u32, n: u32| (u64::from(b) << 32 | u64::from(a)) >> (8 * (n & 7)) & 0xff;
    if i.modifiers().len() == 1 {
        // A result byte is undefined if its source byte is undefined. If the selector is undefined, all result bytes
        // are.
        i.carries(move |w, lane| {
            let both = undefined::of(w, s[1], 32, lane) << 32 | undefined::of(w, s[0], 32, lane);
            let selector = w.lane(s[2], lane);
            let byte = |n: u64| both >> (8 * (selector >> (4 * n) & 7)) & 0xff;
            // A replicated sign is undefined if any bit of its byte is.
            let spread = |n: u64, bits: u64| if selector >> (4 * n + 3) & 1 == 1 && bits != 0 { 0xff } else { bits };
            let taken = (0..4).fold(0, |bits, n| bits | spread(n, byte(n)) << (8 * n));
            let bits = if undefined::of(w, s[2], 16, lane) != 0 { u64::MAX } else { taken };
            d.register.map(|register| (register, bits)).into_iter().collect()
        });
    }
    let pack = |f: &dyn Fn(u32) -> u64| (0..4).fold(0, |r, n| r | f(n) << (8 * n)) as u32;
    // Index of the source byte for result byte `n` if the selector is `c` (PTX ISA, "prmt", table of modes).
    let mode: fn(u32, u32) -> u32 = match i.one_of(&["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]) {
        Some("f4e") => |c, n| c + n,
        Some("b4e") => |c, n| c.wrapping_sub(n) & 7,
        Some("rc8") => |c, _| c,
        Some("ecl") => |c, n| c.max(n),
        Some("ecr") => |c, n| c.min(n),
        Some("rc16") => |c, n| (c & 1) * 2 + (n & 1),
        _ => {
            return Ok(map3(d, s, move |a: u32, b: u32, c: u32| {
                pack(&|n| {
                    let select = c >> (4 * n) & 0xf;
                    let value = byte(a, b, select);
                    match (select & 8 != 0, value & 0x80 != 0) {
                        (false, _) => value,
                        (true, true) => 0xff,
                        (true, false) => 0,
                    }
                })
            }));
        }
    };
    Ok(map3(d, s, move |a: u32, b: u32, c: u32| pack(&|n| byte(a, b, mode(c & 3, n)))))
}
