//! mbarrier instructions (PTX ISA, "Parallel Synchronization: mbarrier"). `machine/access/mbarrier.rs` implements their
//! effects on an mbarrier object.

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::machine::address::Lane;
use crate::machine::footprint::Kind;
use crate::machine::in_flight::{Poll, Test};
use crate::machine::mbarrier::{Arrival, BYTES, MbarrierAt, Phase};
use crate::machine::race::Accessor;
use crate::machine::state::{Effect, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, PredicateDst, Src, lanes};
use crate::parser::ast::Operand;
use crate::timing::work::Work;
use crate::types::{Space, Type};

/// An operand that names an mbarrier.
struct Object {
    address: Address,
    space: Space,
}

impl Object {
    fn decode(i: &mut Parsed<'_>, n: usize) -> Result<Object> {
        let address = i.address(n)?;
        Ok(Object { address, space: i.space_at(&address) })
    }

    fn lane(&self, w: &Warp, lane: usize) -> Lane {
        w.lane_at(&self.address, self.space, lane)
    }

    /// The mbarrier that a lane names. An mbarrier of another CTA needs a fence after its initialization.
    fn find(&self, w: &Warp, m: &mut Machine<'_>, lane: usize) -> Stopped<MbarrierAt> {
        let at = self.lane(w, lane);
        m.mbarrier(w, at, m.rank_of(at.address) != w.cta)
    }
}

/// `mbarrier.init [mbarrier], count`.
pub struct Init {
    object: Object,
    count: Src,
}

impl Instruction for Init {
    fn decode(i: &mut Parsed<'_>) -> Result<Init> {
        Ok(Init { object: Object::decode(i, 0)?, count: i.src(1, Type::U32)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            m.mbarrier_init(w, self.object.lane(w, lane), w.lane(self.count, lane) as u32)?;
        }
        Ok(Flow::Next)
    }
}

/// `mbarrier.inval [mbarrier]`.
pub struct Inval {
    object: Object,
}

impl Instruction for Inval {
    fn decode(i: &mut Parsed<'_>) -> Result<Inval> {
        Ok(Inval { object: Object::decode(i, 0)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            m.mbarrier_inval(w, self.object.lane(w, lane))?;
        }
        Ok(Flow::Next)
    }
}

/// `mbarrier.expect_tx`, `mbarrier.complete_tx [mbarrier], bytes`.
pub struct Transaction {
    object: Object,
    bytes: Src,
    expect: bool,
}

impl Instruction for Transaction {
    fn decode(i: &mut Parsed<'_>) -> Result<Transaction> {
        Ok(Transaction { object: Object::decode(i, 0)?, bytes: i.src(1, Type::U32)?, expect: i.has("expect_tx") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let at = self.object.find(w, m, lane)?;
            let bytes = w.lane(self.bytes, lane) as u32;
            if self.expect {
                m.mbarrier_expect(at, lane as u32, bytes)?;
                m.record_shared(at.cta, at.offset, BYTES, Kind::Write);
            } else {
                m.mbarrier_complete(at, bytes, None)?;
            }
        }
        Ok(Flow::Next)
    }
}

/// `mbarrier.arrive`, `mbarrier.arrive_drop {state, }[mbarrier]{, count or bytes}`.
///
/// The lanes of a warp arrive at once, so the sum of their counts must not exceed the pending count of the phase. The
/// manual does not mention this. On an H200, two lanes of one instruction that arrive at an mbarrier with a count of
/// one cause a launch failure; the same two arrivals one after the other complete two phases.
pub struct Arrive {
    object: Object,
    /// Destination of the state. `None`: the mbarrier may be in another CTA.
    state: Option<Dst>,
    /// Bytes to expect with `expect_tx`, otherwise the arrival count.
    value: Src,
    expect: bool,
    how: Arrival,
    /// `true` if the arrival publishes nothing to other CTAs: it is relaxed, or its scope is the CTA, also by default.
    narrow: bool,
}

impl Instruction for Arrive {
    fn decode(i: &mut Parsed<'_>) -> Result<Arrive> {
        let state = match i.operand(0)? {
            Operand::Address { .. } => None,
            d => Some(i.dst_operand(d)?),
        };
        let first = usize::from(state.is_some());
        let object = Object::decode(i, first)?;
        let value = if i.operands().len() > first + 1 { i.src(first + 1, Type::U32)? } else { Src::Constant(1) };
        let how = Arrival { drop: i.has("arrive_drop"), no_complete: i.has("noComplete") };
        let narrow = i.has("relaxed") || !i.has("cluster");
        Ok(Arrive { object, state, value, expect: i.has("expect_tx"), how, narrow })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let mut places = [None; 32];
        for lane in lanes(mask) {
            places[lane] = Some(self.object.find(w, m, lane)?);
        }
        m.release_loads(w);
        let mut rest = mask;
        while let Some(at) = places.get(rest.trailing_zeros() as usize).copied().flatten() {
            let together = lanes(rest).filter(|&lane| places[lane] == Some(at)).fold(0, |mask, lane| mask | 1 << lane);
            rest &= !together;
            let mut count = 0u32;
            for lane in lanes(together) {
                let value = w.lane(self.value, lane) as u32;
                if self.expect {
                    m.mbarrier_expect(at, lane as u32, value)?;
                }
                count = count.saturating_add(if self.expect { 1 } else { value });
            }
            m.reach_by_threads(at.cta, Accessor { base: w.index * 32, mask: together }, w.pc());
            m.mbarrier_publish(w, together, at, self.narrow && at.cta != w.cta)?;
            let arrival = Arrivals { at, lanes: together, count, how: self.how };
            if m.timed.is_some() && at.cta != w.cta {
                m.start(w, arrival);
                continue;
            }
            let phase = arrival.arrive(m)?;
            if let Some(state) = self.state {
                state.write(w, together, &[phase; 32]);
            }
        }
        Ok(Flow::Next)
    }
}

/// Arrivals of several lanes at once. In timed mode, arrivals at another CTA take time.
struct Arrivals {
    at: MbarrierAt,
    lanes: u32,
    count: u32,
    how: Arrival,
}

impl Arrivals {
    /// Arrives and returns the phase before the arrivals.
    fn arrive(self, m: &mut Machine<'_>) -> Stopped<u64> {
        m.mbarrier_arrive(self.lanes, self.at, self.count, self.how)
    }
}

impl Effect for Arrivals {
    fn work(&self) -> Work {
        Work::Transfer { bytes: 0, cta: self.at.cta }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        self.arrive(m).map(drop)
    }
}

/// `mbarrier.test_wait`, `mbarrier.try_wait p, [mbarrier], state or parity{, time}`. The first use of a `try_wait`'s
/// predicate waits until the phase is complete, until nothing else can happen, or until the schedule decides that the
/// time limit has passed.
pub struct Wait {
    complete: PredicateDst,
    object: Object,
    phase: Src,
    parity: bool,
    blocking: bool,
}

impl Instruction for Wait {
    fn decode(i: &mut Parsed<'_>) -> Result<Wait> {
        let complete = i.predicate_dst(0)?;
        let object = Object::decode(i, 1)?;
        let parity = i.has("parity");
        let phase = i.src(2, if parity { Type::U32 } else { Type::B64 })?;
        if i.operands().len() > 3 {
            // The suspend-time hint has no effect.
            i.src(3, Type::U32)?;
        }
        Ok(Wait { complete, object, phase, parity, blocking: i.has("try_wait") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let mut tests: Vec<Test> = Vec::new();
        let mut rest = mask;
        while rest != 0 {
            // Lanes mostly wait together.
            let object = self.object.lane(w, rest.trailing_zeros() as usize);
            let same = |&lane: &usize| self.object.lane(w, lane).address == object.address;
            let together = lanes(rest).filter(same).fold(0, |all, lane| all | 1 << lane);
            rest &= !together;
            let at = m.mbarrier_of_lanes(w, object, together)?;
            for lane in lanes(together) {
                let value = w.lane(self.phase, lane);
                let phase = if self.parity { Phase::Parity(value & 1 == 1) } else { Phase::Token(value) };
                match tests.iter_mut().find(|test| (test.at, test.phase) == (at, phase)) {
                    Some(test) => test.lanes |= 1 << lane,
                    None => tests.push(Test { lanes: 1 << lane, at, phase }),
                }
            }
        }
        let complete = m.mbarrier_test(w, &tests, self.blocking && self.complete.0.is_some())?;
        self.complete.write(w, mask, complete);
        tests.retain(|test| test.lanes & complete == 0);
        let Some(&Test { at, .. }) = tests.iter().max_by_key(|test| test.lanes) else { return Ok(Flow::Next) };
        let pc = w.pc();
        match self.complete.0 {
            Some(predicate) if self.blocking => {
                w.polls.push(Poll { pc, predicate, tests });
                Ok(Flow::Next)
            }
            _ => {
                m.roles[w.role as usize].failed_polls += 1;
                m.record_shared(at.cta, at.offset, BYTES, Kind::Read);
                Ok(Flow::Pause(WaitFor::Progress { since: m.progress, at, pc }))
            }
        }
    }
}
