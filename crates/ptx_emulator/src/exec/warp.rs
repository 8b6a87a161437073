//! Warp-wide instructions (PTX ISA, "Data Movement: shfl.sync", "Parallel Synchronization: vote.sync, match.sync,
//! activemask, redux.sync, elect.sync, bar.warp.sync").

use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::number::{self, F32};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Src, lanes};
use crate::parser::ast::Operand;
use crate::types::Type;

/// Whether every member named in the mask operand is here: `Ok(None)` if so, else what to wait for. All lanes must
/// name the same members, and be among them.
fn members(w: &Warp, operand: Src, mask: u32) -> Stopped<Result<u32, WaitFor>> {
    let first = w.lane(operand, mask.trailing_zeros() as usize) as u32;
    for lane in lanes(mask) {
        let named = w.lane(operand, lane) as u32;
        if named != first || named >> lane & 1 == 0 {
            let text = if named != first {
                format!("lanes that execute it together name members {first:#010x} and {named:#010x}")
            } else {
                format!("lane {lane} executes it with a member mask {named:#010x} that leaves it out")
            };
            return Err(Stop::new(FaultKind::WarpDivergence, text).lane(lane as u32));
        }
    }
    // Threads that the launch did not create count as absent, not as missing.
    let need = first & w.all;
    Ok(if need & !mask == 0 { Ok(first) } else { Err(WaitFor::Lanes { need, anywhere: false }) })
}

/// Waits until all members are here, then goes on.
macro_rules! gather {
    ($w:expr, $operand:expr, $mask:expr) => {
        match members($w, $operand, $mask)? {
            Ok(members) => members,
            Err(wait) => return Ok(Flow::Wait(wait)),
        }
    };
}

pub fn shfl(i: &mut Parsed<'_>) -> Decoded {
    let (d, p) = match i.operand(0)? {
        Operand::Pair(d, p) => (i.dst_operand(d)?, Some(i.predicate_dst_operand(p)?)),
        d => (i.dst_operand(d)?, None),
    };
    let (a, b, c) = (i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?);
    let member = i.src(4, Type::B32)?;
    let mode = i.one_of(&["up", "down", "bfly", "idx"]).ok_or_else(|| DecodeError::invalid("the mode is missing"))?;
    Ok(Box::new(move |w, _, mask| {
        let _members = gather!(w, member, mask);
        let (source, b, c) = (w.get(a), w.get(b), w.get(c));
        let (mut out, mut valid) = (source, 0);
        for lane in 0..32usize {
            // PTX ISA, "shfl.sync", the pseudo code.
            let (bval, cval, segment) = (b[lane] as i32 & 31, c[lane] as i32 & 31, (c[lane] >> 8) as i32 & 31);
            let n = lane as i32;
            let max_lane = n & segment | cval & !segment;
            let min_lane = n & segment;
            let (from, inside) = match mode {
                "up" => (n - bval, n - bval >= max_lane),
                "down" => (n + bval, n + bval <= max_lane),
                "bfly" => (n ^ bval, n ^ bval <= max_lane),
                _ => (min_lane | bval & !segment, (min_lane | bval & !segment) <= max_lane),
            };
            let from = if inside { from } else { n };
            if mask >> lane & 1 == 1 && mask >> from & 1 == 0 {
                let text = format!("lane {lane} reads from lane {from}, which does not take part");
                return Err(Stop::new(FaultKind::WarpDivergence, text).lane(lane as u32));
            }
            out[lane] = source[from as usize & 31];
            valid |= u32::from(inside) << lane;
        }
        d.write(w, mask, &out);
        if let Some(p) = p {
            p.write(w, mask, valid);
        }
        Ok(Flow::Next)
    }))
}

pub fn vote(i: &mut Parsed<'_>) -> Decoded {
    let a = i.predicate(1)?;
    let member = i.src(2, Type::B32)?;
    if i.has("ballot") {
        let d = i.dst(0)?;
        return Ok(Box::new(move |w, _, mask| {
            let members = gather!(w, member, mask);
            let ballot = a.mask(w) & members & w.all;
            d.write(w, mask, &[ballot.into(); 32]);
            Ok(Flow::Next)
        }));
    }
    let p = i.predicate_dst(0)?;
    let mode = i.one_of(&["all", "any", "uni"]).ok_or_else(|| DecodeError::invalid("the mode is missing"))?;
    Ok(Box::new(move |w, _, mask| {
        let members = gather!(w, member, mask) & w.all;
        let votes = a.mask(w) & members;
        let yes = match mode {
            "all" => votes == members,
            "any" => votes != 0,
            _ => votes == 0 || votes == members,
        };
        p.write(w, mask, if yes { u32::MAX } else { 0 });
        Ok(Flow::Next)
    }))
}

pub fn matching(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty().unwrap_or(Type::B32);
    let (d, p) = match i.operand(0)? {
        Operand::Pair(d, p) => (i.dst_operand(d)?, Some(i.predicate_dst_operand(p)?)),
        d => (i.dst_operand(d)?, None),
    };
    let (a, member) = (i.src(1, ty)?, i.src(2, Type::B32)?);
    let all = i.has("all");
    Ok(Box::new(move |w, _, mask| {
        let members = gather!(w, member, mask) & w.all;
        let a = w.get(a);
        let same = |x: u64| lanes(members).fold(0u32, |m, n| m | u32::from(a[n] == x) << n);
        let mut out = [0u64; 32];
        for lane in lanes(mask) {
            out[lane] = same(a[lane]).into();
        }
        if all {
            let equal = lanes(mask).all(|n| out[n] == u64::from(members));
            d.write(w, mask, &[if equal { members.into() } else { 0 }; 32]);
            if let Some(p) = p {
                p.write(w, mask, if equal { u32::MAX } else { 0 });
            }
        } else {
            d.write(w, mask, &out);
        }
        Ok(Flow::Next)
    }))
}

pub fn redux(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let d = i.dst(0)?;
    let (a, member) = (i.src(1, ty)?, i.src(2, Type::B32)?);
    let op = i.one_of(&["add", "min", "max", "and", "or", "xor"]);
    let op = op.ok_or_else(|| DecodeError::invalid("the operation is missing"))?;
    let (abs, nan) = (i.has("abs"), i.has("NaN"));
    let fold: Box<dyn Fn(u32, u32) -> u32 + Send + Sync> = match (op, ty) {
        ("min" | "max", Type::F32) => {
            let which = if op == "min" { number::Extremum::Min } else { number::Extremum::Max };
            Box::new(move |x, y| number::extremum(&F32, which, x.into(), y.into(), nan) as u32)
        }
        ("add", _) => Box::new(u32::wrapping_add),
        ("min", Type::S32) => Box::new(|x, y| (x as i32).min(y as i32) as u32),
        ("max", Type::S32) => Box::new(|x, y| (x as i32).max(y as i32) as u32),
        ("min", _) => Box::new(u32::min),
        ("max", _) => Box::new(u32::max),
        ("and", _) => Box::new(|x, y| x & y),
        ("or", _) => Box::new(|x, y| x | y),
        _ => Box::new(|x, y| x ^ y),
    };
    Ok(Box::new(move |w, _, mask| {
        let members = gather!(w, member, mask) & w.all;
        let a = w.get(a);
        let value = |n: usize| {
            if abs { a[n] as u32 & 0x7fff_ffff } else { a[n] as u32 }
        };
        let result = lanes(members).map(value).reduce(&fold).unwrap_or(0);
        d.write(w, mask, &[result.into(); 32]);
        Ok(Flow::Next)
    }))
}

/// `elect.sync d|p, membermask`: the lowest member.
pub fn elect(i: &mut Parsed<'_>) -> Decoded {
    let Operand::Pair(d, p) = i.operand(0)? else {
        return Err(DecodeError::invalid("a destination `d|p` expected"));
    };
    let (d, p) = (i.dst_operand(d)?, i.predicate_dst_operand(p)?);
    let member = i.src(1, Type::B32)?;
    Ok(Box::new(move |w, _, mask| {
        let members = gather!(w, member, mask) & w.all;
        let leader = members.trailing_zeros();
        d.write(w, mask, &[leader.into(); 32]);
        p.write(w, mask, 1 << leader);
        Ok(Flow::Next)
    }))
}

pub fn activemask(i: &mut Parsed<'_>) -> Decoded {
    let d = i.dst(0)?;
    Ok(Box::new(move |w, _, mask| {
        d.write(w, mask, &[mask.into(); 32]);
        Ok(Flow::Next)
    }))
}

/// `bar.warp.sync`: the members wait for each other, wherever in the code they are, and see each other's writes.
pub fn sync(i: &mut Parsed<'_>) -> Decoded {
    let member = i.src(0, Type::B32)?;
    Ok(Box::new(move |w, m, mask| {
        let first = mask.trailing_zeros() as usize;
        let named = w.lane(member, first) as u32;
        let released = matches!(w.resumed, Some(WaitFor::Released | WaitFor::Lanes { anywhere: true, .. }));
        if let Some(lane) = lanes(mask).find(|n| w.lane(member, *n) as u32 >> n & 1 == 0) {
            let text = format!("lane {lane} executes it with a member mask that leaves it out");
            return Err(Stop::new(FaultKind::WarpDivergence, text).lane(lane as u32));
        }
        let need = named & w.all;
        if need & !mask == 0 {
            // All members are here together.
            if let Some(race) = &mut m.race {
                let mut shared = None;
                race.release(w.index, need, &mut shared);
                race.acquire(w.index, need, &shared);
            }
            return Ok(Flow::Next);
        }
        if released {
            let shared = m.warp_barriers.get(&(w.index, need)).cloned().flatten();
            if let Some(race) = &mut m.race {
                race.acquire(w.index, mask, &shared);
            }
            return Ok(Flow::Next);
        }
        if let Some(race) = &mut m.race {
            race.release(w.index, mask, m.warp_barriers.entry((w.index, need)).or_default());
        }
        Ok(Flow::Wait(WaitFor::Lanes { need, anywhere: true }))
    }))
}
