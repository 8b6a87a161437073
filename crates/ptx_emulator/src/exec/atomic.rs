//! Read-modify-write and fences (PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red,
//! membar, fence").

use super::instruction::Instruction;
use super::memory::in_shared;
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::number::{self, Rounder, Rounding};
use crate::machine::address::{Lane, space_at, width};
use crate::machine::race::Mode;
use crate::machine::scope::Scope;
use crate::machine::state::Machine;
use crate::machine::warp::{Source, Warp};
use crate::operand::{Address, Dst, Src, lanes};
use crate::timing::core as timing;
use crate::types::{Space, Type};

/// Computes the new value from the old value and the operands, on the bits of one element.
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

/// The update that modifier `op` names.
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

/// Operations of `red` and of reducing copies.
pub const REDUCTIONS: [&str; 8] = ["and", "or", "xor", "add", "inc", "dec", "min", "max"];

/// `atom` and `red`, scalar or vector.
struct ReadModifyWrite {
    address: Address,
    space: Space,
    acquire: bool,
    release: bool,
    scope: Scope,
    ty: Type,
    update: Update,
    /// `true` if the stored value does not depend on the old value.
    exchanges: bool,
    /// `true` if the registers of an operand are compared as one 128-bit value.
    compare_whole: bool,
    /// Destinations of the old values.
    out: Vec<Dst>,
    /// Operands of the update for each register.
    operands: Vec<(Src, Src)>,
}

/// `atom d, [address], b{, c}`.
pub struct Atom(ReadModifyWrite);

impl Instruction for Atom {
    fn decode(i: &mut Parsed<'_>) -> Result<Atom> {
        let operation = i.one_of(&["exch", "cas"]).or_else(|| i.one_of(&REDUCTIONS));
        let mut atom = ReadModifyWrite::decode(i, operation, 1)?;
        atom.acquire = i.one_of(&["acquire", "acq_rel"]).is_some();
        atom.release = i.one_of(&["release", "acq_rel"]).is_some();
        let ty = atom.ty;
        atom.out = i.parts(0)?.iter().map(|p| i.dst_words(p, ty)).collect::<Result<Vec<_>>>()?.concat();
        Ok(Atom(atom))
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        self.0.issue(w, m, mask)
    }
}

/// `red [address], b`.
pub struct Red(ReadModifyWrite);

impl Instruction for Red {
    fn decode(i: &mut Parsed<'_>) -> Result<Red> {
        let operation = i.one_of(&REDUCTIONS);
        let mut red = ReadModifyWrite::decode(i, operation, 0)?;
        red.release = i.has("release");
        Ok(Red(red))
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        self.0.issue(w, m, mask)
    }
}

impl ReadModifyWrite {
    /// Decodes the operands that `atom` and `red` share. The address is operand `first`.
    fn decode(i: &mut Parsed<'_>, operation: Option<&str>, first: usize) -> Result<ReadModifyWrite> {
        let ty = i.ty()?;
        let update =
            operation.and_then(update).ok_or_else(|| DecodeError::invalid("the atomic operation is missing"))?;
        let address = i.address(first)?;
        let space = i.space_at(&address);
        if matches!(space, Space::Generic | Space::Global) {
            i.communicates();
        }
        let mut words = |n| -> Result<Vec<Src>> {
            Ok(i.parts(n)?.iter().map(|p| i.words(p, ty)).collect::<Result<Vec<_>>>()?.concat())
        };
        let b = words(first + 1)?;
        let compares = operation == Some("cas");
        let c = if compares { words(first + 2)? } else { vec![Src::Constant(0); b.len()] };
        let operands = b.into_iter().zip(c).collect();
        let compare_whole = compares && ty == Type::B128;
        let exchanges = operation == Some("exch");
        let (acquire, release, out) = (false, false, Vec::new());
        let scope = i.one_of(&Scope::NAMES).map(Scope::named).unwrap_or_default();
        Ok(ReadModifyWrite {
            address,
            space,
            acquire,
            release,
            scope,
            ty,
            update,
            exchanges,
            compare_whole,
            out,
            operands,
        })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let width = width(self.space);
        let addresses = w.get(self.address.base).map(|base| base.wrapping_add(self.address.offset as u64) & width);
        m.touches.scope = self.scope;
        let piece = self.ty.bytes().min(8) as usize;
        let total = piece * self.operands.len();
        if let Some(timed) = &mut m.timed {
            let space = space_at(self.space, addresses[mask.trailing_zeros() as usize]);
            timed.access = timing::access(mask, &addresses, total as u32, space, !self.out.is_empty(), true);
        }
        for lane in lanes(mask) {
            // `red` returns nothing, so the thread observes nothing.
            if !self.out.is_empty() {
                m.observe(w, 1 << lane, &addresses, self.space, self.acquire, true);
            }
            m.publish(w, 1 << lane, &addresses, self.space, self.release, true);
            let at = Lane { lane: lane as u32, address: addresses[lane], space: self.space };
            let mut buffer = [0u8; 64];
            let unwritten = if self.exchanges {
                m.load_value(w, at, Mode::StrongRead, &mut buffer[..total], false)?
            } else {
                m.load(w, at, Mode::StrongRead, &mut buffer[..total])?;
                0
            };
            let mut old = [0u64; 8];
            for (old, bytes) in old.iter_mut().zip(buffer[..total].chunks_exact(piece)) {
                let mut word = [0; 8];
                word[..piece].copy_from_slice(bytes);
                *old = u64::from_le_bytes(word);
            }
            let new = self.finish(w, lane, &old);
            for (new, bytes) in new.iter().zip(buffer[..total].chunks_exact_mut(piece)) {
                bytes.copy_from_slice(&new.to_le_bytes()[..piece]);
            }
            m.store(w, at, Mode::Atomic, &buffer[..total])?;
            for (d, old) in self.out.iter().zip(old) {
                d.write_lane(w, lane, old);
            }
            if unwritten != 0 {
                let source = Source::unwritten(in_shared(self.space, at.address));
                w.undefine_results(&self.out, piece, lane, unwritten, w.begins(source));
            }
        }
        Ok(Flow::Next)
    }

    /// The new values for one lane.
    fn finish(&self, w: &Warp, lane: usize, old: &[u64; 8]) -> [u64; 8] {
        let ones = u64::MAX >> (64 - self.ty.bits().min(64));
        let equal = !self.compare_whole || self.operands.iter().zip(old).all(|((b, _), old)| *old == w.lane(*b, lane));
        let mut new = *old;
        for (new, (b, c)) in new.iter_mut().zip(&self.operands).filter(|_| equal) {
            *new = (self.update)(self.ty, *new, w.lane(*b, lane) & ones, w.lane(*c, lane) & ones) & ones;
        }
        new
    }
}

/// `membar`, `fence.{sc,acq_rel,acquire,release}`, `fence.mbarrier_init`: orders the accesses of this thread.
pub struct Fence {
    scope: Scope,
    /// `true` if the fence also orders accesses for threads outside the CTA.
    beyond_cta: bool,
    /// `fence.mbarrier_init`.
    initializations: bool,
}

impl Instruction for Fence {
    fn decode(i: &mut Parsed<'_>) -> Result<Fence> {
        i.awaits_loads();
        let initializations = i.opcode() == "fence" && i.has("mbarrier_init");
        let scope = match i.opcode() {
            "membar" => i.one_of(&["cta", "gl", "sys"]),
            _ => i.one_of(&Scope::NAMES),
        };
        let scope = scope.map(Scope::named).unwrap_or_default();
        Ok(Fence { scope, beyond_cta: initializations || scope > Scope::Cta, initializations })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        m.fence(w, mask, self.scope);
        if let (Some(race), true, false) = (&mut m.race, self.scope > Scope::Cta, self.initializations) {
            race.release(w.index, mask, m.sync.fenced_cluster.entry(w.index).or_default());
        }
        if let (Some(race), true) = (&mut m.race, self.beyond_cta) {
            let now = race.fence_initializations(w.index, mask);
            if self.initializations {
                lanes(mask).for_each(|lane| w.initializations_fenced[lane] = Some(now));
            }
        }
        Ok(Flow::Next)
    }
}

/// `fence.proxy.async` and related fences: make writes of the generic proxy visible to the async proxy.
pub struct ProxyFence;

impl Instruction for ProxyFence {
    fn decode(i: &mut Parsed<'_>) -> Result<ProxyFence> {
        i.awaits_loads();
        Ok(ProxyFence)
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        if let Some(race) = &mut m.race {
            race.proxy_fence(w.index, mask);
            race.fence_initializations(w.index, mask);
        }
        Ok(Flow::Next)
    }
}
