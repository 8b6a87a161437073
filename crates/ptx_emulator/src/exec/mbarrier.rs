//! mbarrier instructions (PTX ISA, "Parallel Synchronization: mbarrier").

use crate::code::Flow;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::address::Lane;
use crate::machine::mbarrier::{Arrival, Phase};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};

/// One lane's address as an access.
pub fn lane_at(w: &Warp, address: &Address, space: Space, lane: usize) -> Lane {
    let address = w.lane(address.base, lane).wrapping_add(address.offset as u64);
    Lane { lane: lane as u32, address, space }
}

pub fn init(i: &mut Parsed<'_>) -> Decoded {
    let (a, count) = (i.address(0)?, i.src(1, Type::U32)?);
    let space = i.space_at(&a);
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            m.mbarrier_init(w, lane_at(w, &a, space, lane), w.lane(count, lane) as u32)?;
        }
        Ok(Flow::Next)
    }))
}

pub fn inval(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let space = i.space_at(&a);
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            m.mbarrier_inval(w, lane_at(w, &a, space, lane))?;
        }
        Ok(Flow::Next)
    }))
}

/// `mbarrier.expect_tx`, `mbarrier.complete_tx`.
pub fn transaction(i: &mut Parsed<'_>) -> Decoded {
    let (a, bytes) = (i.address(0)?, i.src(1, Type::U32)?);
    let space = i.space_at(&a);
    let expect = i.has("expect_tx");
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let at = lane_at(w, &a, space, lane);
            let at = m.mbarrier(w, at, m.rank_of(at.address) != w.cta)?;
            let bytes = w.lane(bytes, lane) as u32;
            if expect {
                m.mbarrier_expect(at, lane as u32, bytes)?;
            } else {
                m.mbarrier_complete(at, bytes, None)?;
            }
        }
        Ok(Flow::Next)
    }))
}

/// `mbarrier.arrive`, `mbarrier.arrive_drop`, with `.expect_tx` or a count. The lanes of a warp arrive at once: together
/// they must not be more than the phase still waits for. The manual does not say so; on an H200 two lanes that arrive at
/// a barrier of one end in a launch failure, and one after the other complete two phases.
pub fn arrive(i: &mut Parsed<'_>) -> Decoded {
    // The state is missing where the barrier may be another CTA's.
    let state = match i.operand(0)? {
        Operand::Address { .. } => None,
        d => Some(i.dst_operand(d)?),
    };
    let first = usize::from(state.is_some());
    let a = i.address(first)?;
    let space = i.space_at(&a);
    let value = if i.operands().len() > first + 1 { i.src(first + 1, Type::U32)? } else { Src::Constant(1) };
    let expect = i.has("expect_tx");
    let how = Arrival { drop: i.has("arrive_drop"), no_complete: i.has("noComplete") };
    Ok(Box::new(move |w, m, mask| {
        let mut places = [None; 32];
        for lane in lanes(mask) {
            let at = lane_at(w, &a, space, lane);
            places[lane] = Some(m.mbarrier(w, at, m.rank_of(at.address) != w.cta)?);
        }
        let mut rest = mask;
        while let Some(at) = places.get(rest.trailing_zeros() as usize).copied().flatten() {
            let together = lanes(rest).filter(|&lane| places[lane] == Some(at)).fold(0, |mask, lane| mask | 1 << lane);
            rest &= !together;
            let mut count = 0u32;
            for lane in lanes(together) {
                let value = w.lane(value, lane) as u32;
                if expect {
                    m.mbarrier_expect(at, lane as u32, value)?;
                }
                count = count.saturating_add(if expect { 1 } else { value });
            }
            let phase = m.mbarrier_arrive(w, together, at, count, how)?;
            if let Some(state) = state {
                state.write(w, together, &[phase; 32]);
            }
        }
        Ok(Flow::Next)
    }))
}

/// `mbarrier.test_wait`, `mbarrier.try_wait`, by state or parity. A thread that tries waits until the phase is complete,
/// until nothing else can happen, or until the schedule says that its time is over.
pub fn wait(i: &mut Parsed<'_>) -> Decoded {
    let p = i.predicate_dst(0)?;
    let a = i.address(1)?;
    let space = i.space_at(&a);
    let parity = i.has("parity");
    let phase = i.src(2, if parity { Type::U32 } else { Type::B64 })?;
    if i.operands().len() > 3 {
        // A hint of how long to wait at most.
        i.src(3, Type::U32)?;
    }
    let blocking = i.has("try_wait");
    Ok(Box::new(move |w, m, mask| {
        let timed_out = matches!(w.resumed, Some(WaitFor::TimedOut));
        let mut complete = 0;
        let mut missing = None;
        for lane in lanes(mask) {
            let at = m.mbarrier(w, lane_at(w, &a, space, lane), false)?;
            let value = w.lane(phase, lane);
            let phase = if parity { Phase::Parity(value & 1 == 1) } else { Phase::Token(value) };
            if m.mbarrier_test(w, lane as u32, at, phase)? {
                complete |= 1 << lane;
                m.phase_awaited(w, at);
            } else {
                missing = Some((at, phase));
            }
        }
        p.write(w, mask, complete);
        let Some((at, phase)) = missing else { return Ok(Flow::Next) };
        let waits = blocking && !timed_out && !m.clock.out_of_patience();
        let role = &mut m.roles[w.role as usize];
        if waits {
            role.barrier_waits += 1;
            return Ok(Flow::Wait(WaitFor::Mbarrier { at, phase }));
        }
        role.failed_polls += 1;
        Ok(Flow::Pause(WaitFor::Progress { since: m.progress, at }))
    }))
}

/// `cp.async.mbarrier.arrive`: an arrival once all earlier `cp.async` of the thread are complete.
pub fn copy_arrive(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let space = i.space_at(&a);
    let no_increment = i.has("noinc");
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let at = m.mbarrier(w, lane_at(w, &a, space, lane), false)?;
            if !no_increment {
                m.mbarrier_more(at, lane as u32)?;
            }
            let copies = &w.copies[lane];
            let open: Vec<_> = copies.committed.iter().flatten().chain(&copies.open).cloned().collect();
            let last = open.iter().map(|c| c.0).filter(|id| m.pending.contains(*id)).collect::<Vec<_>>();
            let agents: Vec<_> = open.into_iter().filter_map(|c| c.1).collect();
            let issuer = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, false));
            m.load_requested(at);
            m.start_after(w, last, move |m| {
                for agent in agents.iter().chain(&issuer) {
                    m.mbarrier_learn(at, agent)?;
                }
                m.mbarrier_arrive_async(at, None)
            });
        }
        Ok(Flow::Next)
    }))
}
