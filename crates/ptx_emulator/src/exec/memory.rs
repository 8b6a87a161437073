//! Loads and stores (PTX ISA, "Data Movement and Conversion Instructions: ld, ld.global.nc, ldu, st, prefetch,
//! mapa, getctarank").

use super::{Flow, Lowered, map2};
use crate::lower::{Lower, LowerError};
use crate::machine::memory::{Lane, RANK_SHIFT, space_of};
use crate::parser::ast::{Instruction, Operand};
use crate::race::{Mode, lanes};
use crate::types::{Space, Type};

/// Elements of a vector access.
fn elements(i: &Instruction) -> usize {
    match i.one_of(&["v2", "v4", "v8"]) {
        Some("v2") => 2,
        Some("v4") => 4,
        Some("v8") => 8,
        _ => 1,
    }
}

/// Strong accesses do not race with each other (PTX ISA, "Memory Consistency Model: Operation Types").
fn is_strong(i: &Instruction) -> bool {
    i.one_of(&["volatile", "relaxed", "acquire", "release", "mmio"]).is_some()
}

/// Whether an access goes to shared memory.
fn in_shared(space: Space, address: u64) -> bool {
    match space {
        Space::Generic => space_of(address) == Space::Shared,
        other => other == Space::Shared,
    }
}

pub fn ld(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let ty = i.ty().ok_or_else(|| LowerError::invalid("the type is missing"))?;
    let count = elements(i);
    let out = match i.operand(0)? {
        Operand::Vector(parts) if parts.len() == count => {
            let parts = parts.iter().map(|p| l.dst_words(p, ty)).collect::<Result<Vec<_>, _>>()?;
            parts.concat()
        }
        single if count == 1 => l.dst_words(single, ty)?,
        _ => {
            return Err(LowerError::invalid(format!("a vector of {count} registers expected")));
        }
    };
    let address = l.address(i, 1)?;
    let space = address.space(i.space().unwrap_or(Space::Generic));
    let bytes = ty.bytes() as usize;
    let (piece, total) = (bytes.min(8), bytes * count);
    // A narrow signed value fills a wider register with its sign.
    let sign_bits = if ty.is_signed() && out.iter().any(|d| d.bits > ty.bits()) { ty.bits() } else { 64 };
    let mode = if is_strong(i) { Mode::StrongRead } else { Mode::Read };
    let acquire = i.has("acquire");
    if mode == Mode::StrongRead && matches!(space, Space::Generic | Space::Global) {
        l.communicates();
    }
    Ok(Box::new(move |w, m, mask| {
        let base = w.get(address.base);
        let mut buffer = [0u8; 64];
        let mut addresses = [0; 32];
        for lane in lanes(mask) {
            addresses[lane] = base[lane].wrapping_add(address.offset as u64);
            let at = Lane { lane: lane as u32, address: addresses[lane], space };
            m.load(w, at, mode, &mut buffer[..total])?;
            for (n, d) in out.iter().enumerate() {
                let mut word = [0; 8];
                word[..piece].copy_from_slice(&buffer[n * piece..(n + 1) * piece]);
                let value = u64::from_le_bytes(word);
                let shift = 64 - sign_bits;
                d.write_lane(w, lane, ((value << shift) as i64 >> shift) as u64);
            }
        }
        if m.sanitize && in_shared(space, addresses[mask.trailing_zeros() as usize]) {
            m.count_bank_conflicts(w, mask, &addresses, total as u32);
        }
        if mode == Mode::StrongRead {
            m.observe(w, mask, &addresses, space, acquire);
        }
        Ok(Flow::Next)
    }))
}

pub fn st(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let ty = i.ty().ok_or_else(|| LowerError::invalid("the type is missing"))?;
    let count = elements(i);
    let address = l.address(i, 0)?;
    let source = match i.operand(1)? {
        Operand::Vector(parts) if parts.len() == count => {
            let parts = parts.iter().map(|p| l.words(p, ty)).collect::<Result<Vec<_>, _>>()?;
            parts.concat()
        }
        single if count == 1 => l.words(single, ty)?,
        _ => {
            return Err(LowerError::invalid(format!("a vector of {count} registers expected")));
        }
    };
    let space = address.space(i.space().unwrap_or(Space::Generic));
    let bytes = ty.bytes() as usize;
    let (piece, total) = (bytes.min(8), bytes * count);
    let mode = if is_strong(i) { Mode::Atomic } else { Mode::Write };
    let release = i.has("release");
    if mode == Mode::Atomic && matches!(space, Space::Generic | Space::Global) {
        l.communicates();
    }
    Ok(Box::new(move |w, m, mask| {
        let base = w.get(address.base);
        let mut buffer = [0u8; 64];
        let mut addresses = [0; 32];
        for lane in lanes(mask) {
            addresses[lane] = base[lane].wrapping_add(address.offset as u64);
        }
        if mode == Mode::Atomic {
            m.publish(w, mask, &addresses, space, release);
        }
        for lane in lanes(mask) {
            for (n, s) in source.iter().enumerate() {
                let word = w.lane(*s, lane).to_le_bytes();
                buffer[n * piece..(n + 1) * piece].copy_from_slice(&word[..piece]);
            }
            let at = Lane { lane: lane as u32, address: addresses[lane], space };
            m.store(w, at, mode, &buffer[..total])?;
        }
        if m.sanitize && in_shared(space, addresses[mask.trailing_zeros() as usize]) {
            m.count_bank_conflicts(w, mask, &addresses, total as u32);
        }
        Ok(Flow::Next)
    }))
}

/// Hints: nothing to do.
pub fn hint(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    if !i.operands.is_empty() && !i.has("tensormap") {
        l.address(i, 0)?;
    }
    Ok(Box::new(|_, _, _| Ok(Flow::Next)))
}

/// `createpolicy`: a cache policy is opaque and has no effect.
pub fn createpolicy(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let d = l.dst(i, 0)?;
    Ok(Box::new(move |w, _, mask| {
        d.write(w, mask, &[0; 32]);
        Ok(Flow::Next)
    }))
}

/// `mapa`: the address in the shared memory of another CTA of the cluster.
pub fn mapa(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let (d, a) = (l.dst(i, 0)?, l.address_value(i, 1)?);
    let rank = l.src(i, 2, Type::U32)?;
    Ok(map2(d, [a, rank], |a: u64, rank: u32| {
        let low = (1 << RANK_SHIFT) - 1;
        a & !0xffff_ffff | a & low | u64::from(rank & 0xff) << RANK_SHIFT
    }))
}

pub fn getctarank(l: &mut Lower<'_>, i: &Instruction) -> Lowered {
    let (d, a) = (l.dst(i, 0)?, l.address_value(i, 1)?);
    Ok(super::map1(d, a, |a: u64| (a as u32) >> RANK_SHIFT))
}
