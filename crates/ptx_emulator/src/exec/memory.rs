//! Loads and stores (PTX ISA, "Data Movement and Conversion Instructions: ld, ld.global.nc, ldu, st, prefetch,
//! mapa, getctarank").

use std::sync::Arc;

use super::instruction::Instruction;
use super::lane::{map1, map2};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::access::row::{Place, same_address};
use crate::machine::address::{Lane, RANK_SHIFT, space_at, space_of, width};
use crate::machine::race::Mode;
use crate::machine::scope::Scope;
use crate::machine::state::Machine;
use crate::machine::warp::{Source, Warp};
use crate::operand::{Address, Dst, Row, Src, lanes, lanes_down};
use crate::parser::ast::Operand;
use crate::timing::core as timing;
use crate::types::{Space, Type};

/// Whether an access goes to shared memory.
pub fn in_shared(space: Space, address: u64) -> bool {
    match space {
        Space::Generic => space_of(address) == Space::Shared,
        other => other == Space::Shared,
    }
}

/// Fields that loads and stores share.
struct Access {
    address: Address,
    space: Space,
    /// Whether the access is strong. Strong accesses do not race with each other (PTX ISA, "Memory Consistency Model: Operation Types").
    strong: bool,
    scope: Scope,
    /// Number of elements in the vector.
    elements: usize,
    /// Bytes of an element per register, and bytes of all elements.
    piece: usize,
    total: usize,
}

impl Access {
    /// Decodes the access through operand `n`. `strong` lists the modifiers of strong accesses, `vectors` the modifiers
    /// of vector accesses. A strong access may carry information between clusters.
    fn decode(i: &mut Parsed<'_>, n: usize, strong: &[&'static str], vectors: &[&'static str]) -> Result<Access> {
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
        let scope = if strong { i.one_of(&Scope::NAMES) } else { None };
        let scope = scope.map(Scope::named).unwrap_or_default();
        Ok(Access { address, space, strong, scope, elements, piece: bytes.min(8), total: bytes * elements })
    }

    /// The registers of operand `n`: one for each element, in braces if there are several.
    fn registers<'a>(&self, i: &Parsed<'a>, n: usize) -> Result<&'a [Operand]> {
        let parts = i.parts(n)?;
        if parts.len() != self.elements {
            return Err(DecodeError::invalid(format!("expected a vector of {} registers", self.elements)));
        }
        Ok(parts)
    }

    fn addresses(&self, w: &Warp) -> Row {
        let width = width(self.space);
        w.get(self.address.base).map(|base| base.wrapping_add(self.address.offset as u64) & width)
    }

    fn at(&self, addresses: &Row, lane: usize) -> Lane {
        Lane { lane: lane as u32, address: addresses[lane], space: self.space }
    }

    fn count_conflicts(&self, w: &Warp, m: &mut Machine<'_>, mask: u32, addresses: &Row, loads: bool) {
        if let Some(timed) = &mut m.timed {
            timed.access = {
                let space = space_at(self.space, addresses[mask.trailing_zeros() as usize]);
                timing::access(mask, addresses, self.total as u32, space, loads, self.strong)
            };
        }
        if m.sanitize && in_shared(self.space, addresses[mask.trailing_zeros() as usize]) {
            m.count_bank_conflicts(w, mask, addresses, self.total as u32);
        }
    }
}

/// `ld`, `ldu d, [address]`.
pub struct Ld {
    access: Access,
    acquire: bool,
    out: Vec<Dst>,
    registers: Arc<[u32]>,
    /// Bits of the value if its sign extends to a wider register; 64 if there is nothing to extend.
    sign_bits: u32,
}

impl Instruction for Ld {
    fn decode(i: &mut Parsed<'_>) -> Result<Ld> {
        let (strong, vectors): (&[&str], &[&str]) = match i.opcode() {
            "ldu" => (&[], &["v2", "v4"]),
            _ => (&["volatile", "relaxed", "acquire", "mmio"], &["v2", "v4", "v8"]),
        };
        let access = Access::decode(i, 1, strong, vectors)?;
        let ty = i.ty()?;
        let out = access.registers(i, 0)?.iter().map(|p| i.dst_words(p, ty)).collect::<Result<Vec<_>>>()?.concat();
        let sign_bits = if ty.is_signed() && out.iter().any(|d| d.bits > ty.bits()) { ty.bits() } else { 64 };
        let registers = out.iter().filter_map(|d| d.register).collect();
        Ok(Ld { acquire: access.strong && i.has("acquire"), access, out, registers, sign_bits })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let access = &self.access;
        let addresses = access.addresses(w);
        m.touches.scope = access.scope;
        if !self.at_once(w, m, mask, &addresses) {
            self.by_lanes(w, m, mask, &addresses)?;
        }
        access.count_conflicts(w, m, mask, &addresses, true);
        if m.sanitize && in_shared(access.space, addresses[mask.trailing_zeros() as usize]) {
            m.begin_load(w, &self.registers);
        }
        if access.strong {
            m.observe(w, mask, &addresses, access.space, self.acquire, false);
        }
        Ok(Flow::Next)
    }
}

impl Ld {
    /// Loads for all lanes at once. Returns `false`, without a load, if the accesses need checks lane by lane.
    fn at_once(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32, addresses: &Row) -> bool {
        let Access { space, strong, piece, total, .. } = self.access;
        // If all lanes load the same bytes of global memory, only one lane loads.
        let loading = if same_address(mask, addresses) { mask & mask.wrapping_neg() } else { mask };
        let place = m.place_of_row(w, loading, addresses, space, total as u64).filter(|_| !strong);
        let shift = 64 - self.sign_bits;
        let extended = |value: u64| ((value << shift) as i64 >> shift) as u64;
        match place {
            None => return false,
            Some(Place::Global(allocation)) if allocation.may_be_undefined() => return false,
            Some(Place::Global(allocation)) => {
                let base = allocation.base();
                for (n, d) in self.out.iter().enumerate() {
                    let mut row = [0; 32];
                    for lane in lanes(loading) {
                        row[lane] = extended(allocation.value(addresses[lane] - base + (n * piece) as u64, piece));
                    }
                    if loading != mask {
                        row = [row[loading.trailing_zeros() as usize % 32]; 32];
                    }
                    d.write(w, mask, &row);
                }
            }
            Some(Place::Local(base)) => {
                if !m.row_is_defined(w, mask, addresses, base, total) {
                    return false;
                }
                for (n, d) in self.out.iter().enumerate() {
                    let mut row = [0; 32];
                    for lane in lanes(mask) {
                        let at = w.local_at(lane, addresses[lane] - base) + n * piece;
                        let mut word = [0; 8];
                        word[..piece].copy_from_slice(&w.local[at..at + piece]);
                        row[lane] = extended(u64::from_le_bytes(word));
                    }
                    d.write(w, mask, &row);
                }
            }
        }
        if let Some(place) = place {
            m.row_loaded(w, mask, loading, addresses, total as u32, place);
        }
        true
    }

    fn by_lanes(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32, addresses: &Row) -> Stopped<()> {
        let access = &self.access;
        let mode = if access.strong { Mode::StrongRead } else { Mode::Read };
        let mut buffer = [0u8; 64];
        let undefined = m.sanitize && m.has_undefined(w);
        let tracked = match mode {
            Mode::Read => m.track_shared_loads(w, mask, addresses, access.space, access.total as u32),
            _ => 0,
        };
        for lane in lanes(mask) {
            let buffered = &mut buffer[..access.total];
            let unwritten = m.load_value(w, access.at(addresses, lane), mode, buffered, tracked >> lane & 1 == 1)?;
            self.finish(w, lane, &buffer);
            if unwritten != 0 {
                let source = Source::unwritten(in_shared(access.space, addresses[lane]));
                w.undefine_results(&self.out, access.piece, lane, unwritten, w.begins(source));
            }
            if undefined
                && let Some((undefined, origin)) =
                    m.undefined_bytes(w, access.at(addresses, lane), access.total as u32)?
            {
                w.undefine_results(&self.out, access.piece, lane, undefined, origin);
            }
        }
        Ok(())
    }

    /// Writes one lane's registers.
    #[inline(always)]
    fn finish(&self, w: &mut Warp, lane: usize, bytes: &[u8; 64]) {
        let shift = 64 - self.sign_bits;
        for (piece, d) in bytes.chunks_exact(self.access.piece).zip(&self.out) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            d.write_lane(w, lane, ((u64::from_le_bytes(word) << shift) as i64 >> shift) as u64);
        }
    }
}

/// `st [address], values`.
pub struct St {
    access: Access,
    release: bool,
    values: Vec<Src>,
}

impl Instruction for St {
    fn decode(i: &mut Parsed<'_>) -> Result<St> {
        let access = Access::decode(i, 0, &["volatile", "relaxed", "release", "mmio"], &["v2", "v4", "v8"])?;
        let ty = i.ty()?;
        i.stores_from_here();
        let values = access.registers(i, 1)?.iter().map(|p| i.words(p, ty)).collect::<Result<Vec<_>>>()?.concat();
        Ok(St { access, release: i.has("release"), values })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let access = &self.access;
        let addresses = access.addresses(w);
        if access.strong {
            m.touches.scope = access.scope;
            m.publish(w, mask, &addresses, access.space, self.release, false);
        }
        let place = m.place_of_row(w, mask, &addresses, access.space, access.total as u64);
        let undefined = m.sanitize && lanes(mask).any(|lane| self.undefined(w, lane) != 0);
        let plain = !access.strong && !undefined;
        match place.filter(|place| plain && !matches!(place, Place::Global(allocation) if allocation.constant)) {
            Some(place) => {
                m.store_row(w, mask, &addresses, place, access.total, |w, lane, data| self.value(w, lane, data));
            }
            None => self.by_lanes(w, m, mask, &addresses)?,
        }
        access.count_conflicts(w, m, mask, &addresses, false);
        Ok(Flow::Next)
    }
}

impl St {
    /// Stores in descending order of lanes. If several lanes store to one address, the lowest lane's value stays, as on
    /// an H200. If several lanes fault, the lowest lane's fault is reported.
    fn by_lanes(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32, addresses: &Row) -> Stopped<()> {
        let mut outcome = Ok(());
        for lane in lanes_down(mask) {
            if let Err(stop) = self.one_lane(w, m, lane, addresses) {
                outcome = Err(stop);
            }
        }
        outcome
    }

    fn one_lane(&self, w: &mut Warp, m: &mut Machine<'_>, lane: usize, addresses: &Row) -> Stopped<()> {
        let access = &self.access;
        let mode = if access.strong { Mode::Atomic } else { Mode::Write };
        let mut buffer = [0u8; 64];
        self.value(w, lane, &mut buffer[..access.total]);
        m.store_value(w, access.at(addresses, lane), mode, &buffer[..access.total])?;
        let undefined = if m.sanitize { self.undefined(w, lane) } else { 0 };
        if undefined != 0 {
            let source = self.values.iter().find(|s| w.undefined_bytes(**s, lane) != 0).copied();
            let origin = w.origin(source.unwrap_or(Src::Constant(0)), lane);
            m.store_undefined(w, access.at(addresses, lane), access.total as u32, undefined, origin)?;
        }
        Ok(())
    }

    /// Writes the bytes of one lane's values to `bytes`.
    fn value(&self, w: &Warp, lane: usize, bytes: &mut [u8]) {
        for (piece, s) in bytes.chunks_exact_mut(self.access.piece).zip(&self.values) {
            piece.copy_from_slice(&w.lane(*s, lane).to_le_bytes()[..self.access.piece]);
        }
    }

    /// Mask of the undefined bytes in one lane's values.
    fn undefined(&self, w: &Warp, lane: usize) -> u64 {
        let piece = self.access.piece;
        let bytes = |s: &Src| u64::from(w.undefined_bytes(*s, lane)) & ((1 << piece) - 1);
        self.values.iter().enumerate().fold(0, |all, (n, s)| all | bytes(s) << (n * piece))
    }
}

/// `st.bulk [address], size, 0`: stores zeros in shared memory.
pub struct StBulk {
    address: Address,
    space: Space,
    size: Src,
}

impl Instruction for StBulk {
    fn decode(i: &mut Parsed<'_>) -> Result<StBulk> {
        let (address, size) = (i.address(0)?, i.src(1, Type::U64)?);
        if i.constant(2, "the initial value")? != 0 {
            return Err(DecodeError::invalid("the initial value must be 0"));
        }
        Ok(StBulk { address, space: i.space_at(&address), size })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        /// Unit and alignment, in bytes.
        const UNIT: u64 = 8;
        for lane in lanes(mask) {
            let (at, size) = (w.lane_at(&self.address, self.space, lane), w.lane(self.size, lane));
            if !size.is_multiple_of(UNIT) {
                let text = format!("the size of {size} bytes is not a multiple of {UNIT}");
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            for offset in (0..size).step_by(UNIT as usize) {
                m.store(w, Lane { address: at.address + offset, ..at }, Mode::Write, &[0; UNIT as usize])?;
            }
        }
        Ok(Flow::Next)
    }
}

/// `prefetch`, `prefetchu`, `applypriority`, `discard`: hints without effect.
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

/// `mapa`: the corresponding address in the shared memory of another CTA of the cluster.
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
