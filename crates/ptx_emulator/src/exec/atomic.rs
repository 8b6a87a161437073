//! Read-modify-write and fences (PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red,
//! membar, fence").

use crate::code::{Flow, Step};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::number::{self, Rounder, Rounding};
use crate::machine::address::Lane;
use crate::machine::race::Mode;
use crate::operand::{Src, lanes};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};

/// New value from the old one and the operands, on the bits of one element.
pub type Update = fn(Type, u64, u64, u64) -> u64;

fn signed(ty: Type, x: u64) -> i64 {
    let shift = 64 - ty.bits();
    (x << shift) as i64 >> shift
}

fn minmax(ty: Type, a: u64, b: u64, min: bool) -> u64 {
    if let Some((format, count)) = super::float::format(ty) {
        let (width, which) = (format.width(), if min { number::Extremum::Min } else { number::Extremum::Max });
        let ones = (1u64 << width) - 1;
        return (0..count).fold(0, |r, n| {
            let at = n * width;
            r | number::extremum(format, which, a >> at & ones, b >> at & ones, false) << at
        });
    }
    let less = if ty.is_signed() { signed(ty, a) < signed(ty, b) } else { a < b };
    if less == min { a } else { b }
}

fn add(ty: Type, a: u64, b: u64) -> u64 {
    if ty == Type::F64 {
        return (f64::from_bits(a) + f64::from_bits(b)).to_bits();
    }
    let Some((format, count)) = super::float::format(ty) else {
        return a.wrapping_add(b);
    };
    let (width, rounder) = (format.width(), Rounder::new(Rounding::NearestEven));
    let ones = (1u64 << width) - 1;
    (0..count).fold(0, |r, n| {
        let at = n * width;
        let (x, y) = (number::decode(format, a >> at & ones), number::decode(format, b >> at & ones));
        r | rounder.round(format, number::add(x, y, Rounding::NearestEven)) << at
    })
}

pub fn update(op: &str) -> Option<Update> {
    Some(match op {
        "and" => |_, old, b, _| old & b,
        "or" => |_, old, b, _| old | b,
        "xor" => |_, old, b, _| old ^ b,
        "exch" => |_, _, b, _| b,
        "cas" => |_, old, b, c| if old == b { c } else { old },
        "add" => |ty, old, b, _| add(ty, old, b),
        "inc" => |_, old, b, _| if old >= b { 0 } else { old + 1 },
        "dec" => |_, old, b, _| if old == 0 || old > b { b } else { old - 1 },
        "min" => |ty, old, b, _| minmax(ty, old, b, true),
        "max" => |ty, old, b, _| minmax(ty, old, b, false),
        _ => return None,
    })
}

/// The operations of `red`, and of copies that reduce.
pub const REDUCTIONS: [&str; 8] = ["and", "or", "xor", "add", "inc", "dec", "min", "max"];

pub fn atom(i: &mut Parsed<'_>) -> Decoded {
    let op = i.one_of(&["exch", "cas"]).or_else(|| i.one_of(&REDUCTIONS));
    let order = (i.one_of(&["acquire", "acq_rel"]).is_some(), i.one_of(&["release", "acq_rel"]).is_some());
    read_modify_write(i, op, order)
}

pub fn red(i: &mut Parsed<'_>) -> Decoded {
    let (op, release) = (i.one_of(&REDUCTIONS), i.has("release"));
    read_modify_write(i, op, (false, release))
}

/// `atom` and `red`, scalar or vector; `order` says whether it acquires and whether it releases.
fn read_modify_write(i: &mut Parsed<'_>, op: Option<&'static str>, order: (bool, bool)) -> Decoded {
    let ty = i.ty()?;
    let update = op.and_then(update).ok_or_else(|| DecodeError::invalid("the operation is missing"))?;
    let returns = i.opcode() == "atom";
    let first = usize::from(returns);
    let address = i.address(first)?;
    let space = i.space_at(&address);
    if matches!(space, Space::Generic | Space::Global) {
        i.communicates();
    }
    let words = |i: &mut Parsed<'_>, operand: &Operand| match operand {
        Operand::Vector(parts) => Ok(parts.iter().map(|p| i.words(p, ty)).collect::<Result<Vec<_>, _>>()?.concat()),
        single => i.words(single, ty),
    };
    let missing = || DecodeError::invalid("an operand is missing");
    let b: Vec<Src> = words(i, i.operands().get(first + 1).ok_or_else(missing)?)?;
    let c: Vec<Src> = if op == Some("cas") {
        words(i, i.operands().get(first + 2).ok_or_else(missing)?)?
    } else {
        vec![Src::Constant(0); b.len()]
    };
    let out = match (returns, i.operand(0)?) {
        (false, _) => Vec::new(),
        (true, Operand::Vector(parts)) => {
            parts.iter().map(|p| i.dst_words(p, ty)).collect::<Result<Vec<_>, _>>()?.concat()
        }
        (true, single) => i.dst_words(single, ty)?,
    };
    let wide = ty == Type::B128;
    let piece = ty.bytes().min(8) as usize;
    let ones = u64::MAX >> (64 - piece * 8);
    let total = piece * b.len();
    let (acquire, release) = order;
    let compare = op == Some("cas");
    Ok(Box::new(move |w, m, mask| {
        let base = w.get(address.base);
        let addresses = base.map(|a| a.wrapping_add(address.offset as u64));
        for lane in lanes(mask) {
            let only = 1 << lane;
            m.observe(w, only, &addresses, space, acquire);
            m.publish(w, only, &addresses, space, release);
            let at = Lane { lane: lane as u32, address: addresses[lane], space };
            let mut buffer = [0u8; 64];
            m.load(w, at, Mode::StrongRead, &mut buffer[..total])?;
            let mut old = [0u64; 8];
            for (n, old) in old.iter_mut().enumerate().take(b.len()) {
                let mut word = [0; 8];
                word[..piece].copy_from_slice(&buffer[n * piece..(n + 1) * piece]);
                *old = u64::from_le_bytes(word);
            }
            // 128 bits compare as one.
            let equal = !wide || !compare || (0..2).all(|n| old[n] == w.lane(b[n], lane));
            for n in 0..b.len() {
                let (x, y) = (w.lane(b[n], lane) & ones, w.lane(c[n], lane) & ones);
                let new = if equal { update(ty, old[n], x, y) & ones } else { old[n] };
                buffer[n * piece..(n + 1) * piece].copy_from_slice(&new.to_le_bytes()[..piece]);
            }
            m.store(w, at, Mode::Atomic, &buffer[..total])?;
            for (d, old) in out.iter().zip(old) {
                d.write_lane(w, lane, old);
            }
        }
        Ok(Flow::Next)
    }))
}

pub fn membar(i: &mut Parsed<'_>) -> Decoded {
    Ok(order(i.one_of(&["gl", "sys"]).is_some()))
}

/// `fence.{sc,acq_rel,acquire,release}`, `fence.mbarrier_init`.
pub fn fence(i: &mut Parsed<'_>) -> Decoded {
    Ok(order(i.one_of(&["mbarrier_init", "cluster", "gpu", "sys"]).is_some()))
}

/// Orders this thread's accesses, for threads beyond its CTA too.
fn order(beyond_cta: bool) -> Step {
    Box::new(move |w, m, mask| {
        m.fence(w, mask);
        if beyond_cta {
            m.fence_mbarriers(w);
        }
        Ok(Flow::Next)
    })
}

/// `fence.proxy.async` and its kind: what was written through the generic proxy becomes visible to the async proxy.
pub fn proxy_fence(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, m, mask| {
        if let Some(race) = &mut m.race {
            race.proxy_fence(w.index, mask);
        }
        m.fence_mbarriers(w);
        Ok(Flow::Next)
    }))
}
