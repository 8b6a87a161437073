//! Loads and stores (PTX ISA, "Data Movement and Conversion Instructions: ld, ld.global.nc, ldu, st, prefetch,
//! mapa, getctarank").

use super::lane::{map1, map2};
use crate::code::Flow;
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::address::{Lane, RANK_SHIFT, space_of};
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Row, lanes};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};

/// Whether an access goes to shared memory.
fn in_shared(space: Space, address: u64) -> bool {
    match space {
        Space::Generic => space_of(address) == Space::Shared,
        other => other == Space::Shared,
    }
}

/// What a load and a store have in common.
struct Access {
    address: Address,
    space: Space,
    /// Strong accesses do not race with each other (PTX ISA, "Memory Consistency Model: Operation Types").
    strong: bool,
    /// Elements of a vector.
    elements: usize,
    /// Bytes of an element as far as one register holds them, and of all elements.
    piece: usize,
    total: usize,
}

impl Access {
    /// The access through operand `n`, in one of these orders or a weak one, of one element or a vector of as many as one
    /// of these modifiers says; a strong one may carry information between clusters.
    fn decode(
        i: &mut Parsed<'_>,
        n: usize,
        strong: &[&'static str],
        vectors: &[&'static str],
    ) -> Result<Access, DecodeError> {
        let address = i.address(n)?;
        let space = i.space_at(&address);
        let strong = i.one_of(strong).is_some();
        if strong && matches!(space, Space::Generic | Space::Global) {
            i.communicates();
        }
        let elements = match i.one_of(vectors) {
            Some("v2") => 2,
            Some("v4") => 4,
            Some(_) => 8,
            None => 1,
        };
        let bytes = i.ty()?.bytes() as usize;
        Ok(Access { address, space, strong, elements, piece: bytes.min(8), total: bytes * elements })
    }

    fn addresses(&self, w: &Warp) -> Row {
        w.get(self.address.base).map(|base| base.wrapping_add(self.address.offset as u64))
    }

    fn at(&self, addresses: &Row, lane: usize) -> Lane {
        Lane { lane: lane as u32, address: addresses[lane], space: self.space }
    }

    fn count_conflicts(&self, w: &Warp, m: &mut Machine<'_>, mask: u32, addresses: &Row) {
        if m.sanitize && in_shared(self.space, addresses[mask.trailing_zeros() as usize]) {
            m.count_bank_conflicts(w, mask, addresses, self.total as u32);
        }
    }
}

impl Access {
    /// The registers of operand `n`: as many as the access has elements, in braces if more than one.
    fn registers<'a>(&self, i: &Parsed<'a>, n: usize) -> Result<&'a [Operand], DecodeError> {
        let parts = i.parts(n)?;
        if parts.len() != self.elements {
            return Err(DecodeError::invalid(format!("a vector of {} registers expected", self.elements)));
        }
        Ok(parts)
    }
}

pub fn ld(i: &mut Parsed<'_>) -> Decoded {
    let access = Access::decode(i, 1, &["volatile", "relaxed", "acquire", "mmio"], &["v2", "v4", "v8"])?;
    let acquire = i.has("acquire");
    load(i, access, acquire)
}

pub fn ldu(i: &mut Parsed<'_>) -> Decoded {
    let access = Access::decode(i, 1, &[], &["v2", "v4"])?;
    load(i, access, false)
}

fn load(i: &mut Parsed<'_>, access: Access, acquire: bool) -> Decoded {
    let ty = i.ty()?;
    let registers = access.registers(i, 0)?;
    let out = registers.iter().map(|p| i.dst_words(p, ty)).collect::<Result<Vec<_>, _>>()?.concat();
    // A narrow signed value fills a wider register with its sign.
    let sign_bits = if ty.is_signed() && out.iter().any(|d| d.bits > ty.bits()) { ty.bits() } else { 64 };
    let mode = if access.strong { Mode::StrongRead } else { Mode::Read };
    Ok(Box::new(move |w, m, mask| {
        let mut buffer = [0u8; 64];
        let addresses = access.addresses(w);
        for lane in lanes(mask) {
            m.load(w, access.at(&addresses, lane), mode, &mut buffer[..access.total])?;
            for (piece, d) in buffer.chunks_exact(access.piece).zip(&out) {
                let mut word = [0; 8];
                word[..piece.len()].copy_from_slice(piece);
                let shift = 64 - sign_bits;
                d.write_lane(w, lane, ((u64::from_le_bytes(word) << shift) as i64 >> shift) as u64);
            }
        }
        access.count_conflicts(w, m, mask, &addresses);
        if mode == Mode::StrongRead {
            m.observe(w, mask, &addresses, access.space, acquire);
        }
        Ok(Flow::Next)
    }))
}

pub fn st(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let access = Access::decode(i, 0, &["volatile", "relaxed", "release", "mmio"], &["v2", "v4", "v8"])?;
    let registers = access.registers(i, 1)?;
    let source = registers.iter().map(|p| i.words(p, ty)).collect::<Result<Vec<_>, _>>()?.concat();
    let mode = if access.strong { Mode::Atomic } else { Mode::Write };
    let release = i.has("release");
    Ok(Box::new(move |w, m, mask| {
        let mut buffer = [0u8; 64];
        let addresses = access.addresses(w);
        if mode == Mode::Atomic {
            m.publish(w, mask, &addresses, access.space, release);
        }
        for lane in lanes(mask) {
            for (piece, s) in buffer.chunks_exact_mut(access.piece).zip(&source) {
                piece.copy_from_slice(&w.lane(*s, lane).to_le_bytes()[..access.piece]);
            }
            m.store(w, access.at(&addresses, lane), mode, &buffer[..access.total])?;
        }
        access.count_conflicts(w, m, mask, &addresses);
        Ok(Flow::Next)
    }))
}

/// `prefetch`, `prefetchu`, `applypriority`, `discard`: hints, nothing to do.
pub fn hint(i: &mut Parsed<'_>) -> Decoded {
    if !i.operands().is_empty() {
        i.address(0)?;
    }
    Ok(Box::new(|_, _, _| Ok(Flow::Next)))
}

/// `createpolicy`: a cache policy is opaque and has no effect.
pub fn createpolicy(i: &mut Parsed<'_>) -> Decoded {
    let d = i.dst(0)?;
    Ok(Box::new(move |w, _, mask| {
        d.write(w, mask, &[0; 32]);
        Ok(Flow::Next)
    }))
}

/// `mapa`: the address in the shared memory of another CTA of the cluster.
pub fn mapa(i: &mut Parsed<'_>) -> Decoded {
    let (d, a) = (i.dst(0)?, i.address_value(1)?);
    let rank = i.src(2, Type::U32)?;
    Ok(map2(d, [a, rank], |a: u64, rank: u32| {
        let low = (1 << RANK_SHIFT) - 1;
        a & !0xffff_ffff | a & low | u64::from(rank & 0xff) << RANK_SHIFT
    }))
}

pub fn getctarank(i: &mut Parsed<'_>) -> Decoded {
    let (d, a) = (i.dst(0)?, i.address_value(1)?);
    Ok(map1(d, a, |a: u64| (a as u32) >> RANK_SHIFT))
}
