//! Warp-wide instructions (PTX ISA, "Data Movement: shfl.sync", "Parallel Synchronization: vote.sync, match.sync,
//! activemask, redux.sync, elect.sync, bar.warp.sync").

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::number::{self, F32};
use crate::machine::state::Machine;
use crate::machine::wait::{Place, WaitFor};
use crate::machine::warp::{Source, Undefined, Warp};
use crate::operand::{Dst, PredicateDst, PredicateSrc, Row, Src, lanes};
use crate::parser::ast::Operand;
use crate::types::Type;

/// The member mask of an instruction.
struct Members(Src);

impl Members {
    fn decode(i: &mut Parsed<'_>, n: usize) -> Result<Members> {
        Ok(Members(i.src(n, Type::B32)?))
    }

    /// Groups the lanes of `mask` by the members that they name: pairs of the named members and the lanes that name
    /// them. Tiles of a warp execute one instruction together, and each tile names its own members.
    fn groups(&self, w: &Warp, mask: u32) -> Stopped<Groups> {
        let named = |lane: usize| w.lane(self.0, lane) as u32;
        let mut groups = Groups { count: 0, all: [(0, 0); 32] };
        let mut rest = mask;
        while rest != 0 {
            let first = named(rest.trailing_zeros() as usize);
            let here = lanes(rest).filter(|&lane| named(lane) == first).fold(0, |here, lane| here | 1 << lane);
            let stop = |text: String, of: u32| Stop::new(FaultKind::WarpDivergence, text).lane(of.trailing_zeros());
            if here & !first != 0 {
                let lane = (here & !first).trailing_zeros();
                let text = format!("lane {lane} is not in its own member mask {first:#010x}");
                return Err(stop(text, here & !first));
            }
            let others = first & mask & !here;
            if others != 0 {
                let other = named(others.trailing_zeros() as usize);
                let text = format!("lanes of one group name different member masks: {first:#010x} and {other:#010x}");
                return Err(stop(text, others));
            }
            // Lanes without a thread in this launch are not members.
            groups.all[groups.count] = (first & w.all, here);
            groups.count += 1;
            rest &= !here;
        }
        Ok(groups)
    }

    /// Returns [`Members::groups`] if all members have arrived, otherwise the lanes that are waited for.
    fn gather(&self, w: &Warp, mask: u32) -> Stopped<std::result::Result<Groups, WaitFor>> {
        let mut groups = self.groups(w, mask)?;
        if w.resumed == Some(WaitFor::Alone) {
            groups.all.iter_mut().for_each(|(members, _)| *members &= mask);
        }
        let need = groups.iter().fold(0, |need, (members, _)| need | members);
        Ok(if need & !mask == 0 { Ok(groups) } else { Err(WaitFor::Lanes { need, place: Place::Here }) })
    }
}

/// Lanes grouped by the members that they name.
struct Groups {
    count: usize,
    all: [(u32, u32); 32],
}

impl Groups {
    fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.all[..self.count].iter().copied()
    }
}

/// Evaluates to the groups once all members are present; until then, the warp waits.
macro_rules! gather {
    ($members:expr, $w:expr, $mask:expr) => {
        match $members.gather($w, $mask)? {
            Ok(groups) => groups,
            Err(wait) => return Ok(Flow::Wait(wait)),
        }
    };
}

/// A destination `d` or `d|p`.
fn pair(i: &mut Parsed<'_>) -> Result<(Dst, Option<PredicateDst>)> {
    match i.operand(0)? {
        Operand::Pair(d, p) => Ok((i.dst_operand(d)?, Some(i.predicate_dst_operand(p)?))),
        d => Ok((i.dst_operand(d)?, None)),
    }
}

/// A predicate with the same value in all lanes.
fn uniform(holds: bool) -> u32 {
    if holds { u32::MAX } else { 0 }
}

/// `shfl.sync d{|p}, a, b, c, members`.
pub struct Shfl {
    mode: Shuffle,
    d: Dst,
    valid: Option<PredicateDst>,
    sources: [Src; 3],
    members: Members,
}

#[derive(Clone, Copy)]
enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

impl Instruction for Shfl {
    fn decode(i: &mut Parsed<'_>) -> Result<Shfl> {
        let mode = match i.one_of(&["up", "down", "bfly", "idx"]) {
            Some("up") => Shuffle::Up,
            Some("down") => Shuffle::Down,
            Some("bfly") => Shuffle::Butterfly,
            _ => Shuffle::Index,
        };
        let (d, valid) = pair(i)?;
        let sources = [i.src(1, Type::B32)?, i.src(2, Type::B32)?, i.src(3, Type::B32)?];
        // `issue` marks the undefined bytes in the lanes that read them.
        i.carries(|_, _| Vec::new());
        Ok(Shfl { mode, d, valid, sources, members: Members::decode(i, 4)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        gather!(self.members, w, mask);
        let [a, b, c] = self.sources.map(|s| w.get(s));
        let (mut out, mut valid) = (a, 0);
        for lane in 0..32usize {
            let (from, inside) = self.mode.source(lane as i32, b[lane] as i32, c[lane] as i32);
            let from = if inside { from } else { lane as i32 };
            if mask >> lane & 1 == 1 && mask >> from & 1 == 0 {
                if m.launch.config.strict {
                    let text = format!("lane {lane} reads from lane {from}, which does not execute the shuffle");
                    return Err(Stop::new(FaultKind::WarpDivergence, text).lane(lane as u32));
                }
                if let (true, Some(register)) = (m.sanitize, self.d.register) {
                    let origin = w.begins(Source::AbsentLane);
                    w.undefined_results.push(Undefined { register, lane, bits: u64::MAX, origin });
                }
            }
            let from_lane = from as usize & 31;
            let both = mask >> lane & mask >> from_lane & 1 == 1;
            let bits = if m.sanitize && both { w.undefined_bits(self.sources[0], from_lane) } else { 0 };
            if let (true, Some(register)) = (bits != 0, self.d.register) {
                let origin = w.origin(self.sources[0], from_lane);
                w.undefined_results.push(Undefined { register, lane, bits, origin });
            }
            out[lane] = a[from as usize & 31];
            valid |= u32::from(inside) << lane;
        }
        self.d.write(w, mask, &out);
        if let Some(p) = self.valid {
            p.write(w, mask, valid);
        }
        Ok(Flow::Next)
    }
}

impl Shuffle {
    /// The lane that `n` reads from, and whether that lane is inside the segment (PTX ISA, "shfl.sync", pseudo code).
    fn source(self, n: i32, b: i32, c: i32) -> (i32, bool) {
        let (bval, cval, segment) = (b & 31, c & 31, c >> 8 & 31);
        let max_lane = n & segment | cval & !segment;
        let min_lane = n & segment;
        match self {
            Shuffle::Up => (n - bval, n - bval >= max_lane),
            Shuffle::Down => (n + bval, n + bval <= max_lane),
            Shuffle::Butterfly => (n ^ bval, n ^ bval <= max_lane),
            Shuffle::Index => (min_lane | bval & !segment, (min_lane | bval & !segment) <= max_lane),
        }
    }
}

/// `vote.sync d, a, members`.
pub struct Vote {
    out: Poll,
    a: PredicateSrc,
    members: Members,
}

enum Poll {
    Ballot(Dst),
    All(PredicateDst),
    Any(PredicateDst),
    /// True if the votes of all members are equal.
    Uniform(PredicateDst),
}

impl Instruction for Vote {
    fn decode(i: &mut Parsed<'_>) -> Result<Vote> {
        let (a, members) = (i.predicate(1)?, Members::decode(i, 2)?);
        let out = match i.one_of(&["ballot", "all", "any", "uni"]) {
            Some("ballot") => Poll::Ballot(i.dst(0)?),
            Some("all") => Poll::All(i.predicate_dst(0)?),
            Some("any") => Poll::Any(i.predicate_dst(0)?),
            _ => Poll::Uniform(i.predicate_dst(0)?),
        };
        Ok(Vote { out, a, members })
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let all = self.a.mask(w);
        for (members, here) in gather!(self.members, w, mask).iter() {
            let votes = all & members;
            match &self.out {
                Poll::Ballot(d) => d.write(w, here, &[votes.into(); 32]),
                Poll::All(p) => p.write(w, here, uniform(votes == members)),
                Poll::Any(p) => p.write(w, here, uniform(votes != 0)),
                Poll::Uniform(p) => p.write(w, here, uniform(votes == 0 || votes == members)),
            }
        }
        Ok(Flow::Next)
    }
}

/// `match.sync d{|p}, a, members`.
pub struct Match {
    all: bool,
    d: Dst,
    equal: Option<PredicateDst>,
    a: Src,
    members: Members,
}

impl Instruction for Match {
    fn decode(i: &mut Parsed<'_>) -> Result<Match> {
        let (d, equal) = pair(i)?;
        let ty = i.ty()?;
        Ok(Match { all: i.has("all"), d, equal, a: i.src(1, ty)?, members: Members::decode(i, 2)? })
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let a = w.get(self.a);
        for (members, here) in gather!(self.members, w, mask).iter() {
            let same = |x: u64| lanes(members).fold(0u32, |m, n| m | u32::from(a[n] == x) << n);
            let mut out: Row = [0; 32];
            for lane in lanes(here) {
                out[lane] = same(a[lane]).into();
            }
            if !self.all {
                self.d.write(w, here, &out);
                continue;
            }
            let equal = lanes(here).all(|n| out[n] == u64::from(members));
            self.d.write(w, here, &[if equal { members.into() } else { 0 }; 32]);
            if let Some(p) = self.equal {
                p.write(w, here, uniform(equal));
            }
        }
        Ok(Flow::Next)
    }
}

/// `redux.sync d, a, members`.
pub struct Redux {
    d: Dst,
    a: Src,
    members: Members,
    /// `true` if the signs of the sources are dropped.
    abs: bool,
    combine: Box<dyn Fn(u32, u32) -> u32 + Send + Sync>,
}

impl Instruction for Redux {
    fn decode(i: &mut Parsed<'_>) -> Result<Redux> {
        let ty = i.ty()?;
        let (d, a, members) = (i.dst(0)?, i.src(1, ty)?, Members::decode(i, 2)?);
        let nan = i.has("NaN");
        let extremum = move |which| move |x: u32, y: u32| number::extremum(&F32, which, x.into(), y.into(), nan) as u32;
        let op = i.one_of(&["add", "min", "max", "and", "or", "xor"]);
        let combine: Box<dyn Fn(u32, u32) -> u32 + Send + Sync> = match (op, ty) {
            (Some("min"), Type::F32) => Box::new(extremum(number::Extremum::Min)),
            (Some("max"), Type::F32) => Box::new(extremum(number::Extremum::Max)),
            (Some("min"), Type::S32) => Box::new(|x, y| (x as i32).min(y as i32) as u32),
            (Some("max"), Type::S32) => Box::new(|x, y| (x as i32).max(y as i32) as u32),
            (Some("min"), _) => Box::new(u32::min),
            (Some("max"), _) => Box::new(u32::max),
            (Some("add"), _) => Box::new(u32::wrapping_add),
            (Some("and"), _) => Box::new(|x, y| x & y),
            (Some("or"), _) => Box::new(|x, y| x | y),
            _ => Box::new(|x, y| x ^ y),
        };
        // One undefined source makes the group's result undefined; `issue` marks it.
        i.carries(|_, _| Vec::new());
        Ok(Redux { d, a, members, abs: i.has("abs"), combine })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let a = w.get(self.a);
        let value = |n: usize| if self.abs { a[n] as u32 & 0x7fff_ffff } else { a[n] as u32 };
        for (members, here) in gather!(self.members, w, mask).iter() {
            let result = lanes(members).map(value).reduce(&self.combine).unwrap_or(0);
            if let (true, Some(register)) = (m.sanitize, self.d.register) {
                let undefined = lanes(members).find(|&lane| w.undefined_bytes(self.a, lane) != 0);
                for (from, lane) in undefined.into_iter().flat_map(|from| lanes(here).map(move |lane| (from, lane))) {
                    let origin = w.origin(self.a, from);
                    w.undefined_results.push(Undefined { register, lane, bits: u64::MAX, origin });
                }
            }
            self.d.write(w, here, &[result.into(); 32]);
        }
        Ok(Flow::Next)
    }
}

/// `elect.sync d|p, members`: elects the lowest member.
pub struct Elect {
    d: Dst,
    elected: PredicateDst,
    members: Members,
}

impl Instruction for Elect {
    fn decode(i: &mut Parsed<'_>) -> Result<Elect> {
        let (d, Some(elected)) = pair(i)? else {
            return Err(DecodeError::invalid("expected a destination `d|p`"));
        };
        Ok(Elect { d, elected, members: Members::decode(i, 1)? })
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for (members, here) in gather!(self.members, w, mask).iter() {
            let leader = members.trailing_zeros();
            self.d.write(w, here, &[leader.into(); 32]);
            self.elected.write(w, here, 1 << leader);
        }
        Ok(Flow::Next)
    }
}

/// `activemask d`.
pub fn activemask(i: &mut Parsed<'_>) -> Decoded {
    let d = i.dst(0)?;
    Ok(Box::new(move |w, _, mask| {
        d.write(w, mask, &[mask.into(); 32]);
        Ok(Flow::Next)
    }))
}

/// `bar.warp.sync members`: the members wait for each other, even at different instructions. Then they see each other's
/// writes.
pub struct SyncMembers(Members);

impl Instruction for SyncMembers {
    fn decode(i: &mut Parsed<'_>) -> Result<SyncMembers> {
        Ok(SyncMembers(Members::decode(i, 0)?))
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let released = matches!(w.resumed, Some(WaitFor::Released | WaitFor::Lanes { place: Place::Anywhere, .. }));
        let alone = w.resumed == Some(WaitFor::Alone);
        for (need, here) in self.0.groups(w, mask)?.iter() {
            let together = alone || need & !here == 0;
            if alone {
                m.warp_barriers.remove(&(w.index, need));
            }
            if together && let Some(race) = &mut m.race {
                let mut shared = None;
                race.release(w.index, here, &mut shared);
                race.acquire(w.index, here, &shared);
            }
            if together {
                continue;
            }
            if released {
                let shared = m.warp_barriers.get(&(w.index, need)).cloned().flatten();
                if let Some(race) = &mut m.race {
                    race.acquire(w.index, here, &shared);
                }
                continue;
            }
            if let Some(race) = &mut m.race {
                race.release(w.index, here, m.warp_barriers.entry((w.index, need)).or_default());
            }
            let wait = WaitFor::Lanes { need, place: Place::Anywhere };
            return Ok(if here == mask { Flow::Wait(wait) } else { Flow::WaitApart(here, wait) });
        }
        Ok(Flow::Next)
    }
}
