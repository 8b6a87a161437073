//! Named barriers of a CTA (PTX ISA, "Parallel Synchronization: bar, barrier").

use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::barrier;
use crate::machine::wait::WaitFor;
use crate::operand::{Dst, PredicateDst};
use crate::types::Type;

/// `bar.sync`, `bar.arrive`, `bar.red` and `barrier.*`. Both kinds count threads; `bar` and `.aligned` are executed by
/// whole warps.
pub fn bar(i: &mut Parsed<'_>) -> Decoded {
    let reduce = i.one_of(&["popc", "and", "or"]).filter(|_| i.has("red"));
    let arrive = i.has("arrive");
    if i.opcode() == "bar" || i.has("aligned") {
        i.aligned();
    }
    let first = usize::from(reduce.is_some());
    let id = i.src(first, Type::U32)?;
    let rest = i.operands().len() - first - 1;
    let (count, vote) = match (reduce, rest) {
        (Some(_), 1) => (None, Some(i.predicate(first + 1)?)),
        (Some(_), 2) => (Some(i.src(first + 1, Type::U32)?), Some(i.predicate(first + 2)?)),
        (None, 0) if !arrive => (None, None),
        (None, 1) => (Some(i.src(first + 1, Type::U32)?), None),
        _ => return Err(DecodeError::invalid("wrong number of operands")),
    };
    enum Out {
        None,
        Count(Dst),
        Predicate(PredicateDst, bool),
    }
    let out = match reduce {
        Some("popc") => Out::Count(i.dst(0)?),
        Some(op) => Out::Predicate(i.predicate_dst(0)?, op == "and"),
        None => Out::None,
    };
    Ok(Box::new(move |w, m, mask| {
        let lane = mask.trailing_zeros() as usize;
        if let Some(WaitFor::Barrier { cta, id, .. }) = w.resumed {
            let barrier = &m.ctas[cta as usize].barriers[id as usize];
            let (yes, all) = barrier.result;
            if let Some(race) = &mut m.race {
                race.acquire(w.index, mask, &barrier.published);
            }
            match &out {
                Out::None => {}
                Out::Count(d) => d.write(w, mask, &[yes.into(); 32]),
                Out::Predicate(p, true) => p.write(w, mask, if yes == all { u32::MAX } else { 0 }),
                Out::Predicate(p, false) => p.write(w, mask, if yes > 0 { u32::MAX } else { 0 }),
            }
            return Ok(Flow::Next);
        }
        let number = w.lane(id, lane) as u32;
        let invalid = |text: String| Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
        if number >= barrier::COUNT {
            return invalid(format!("barrier {number}: a CTA has barriers 0 to {}", barrier::COUNT - 1));
        }
        let expected = match count {
            Some(c) => {
                let n = w.lane(c, lane) as u32;
                if n == 0 || !n.is_multiple_of(32) {
                    return invalid(format!("{n} threads at barrier {number}: the count is a multiple of 32"));
                }
                n
            }
            None => m.threads_per_cta.next_multiple_of(32),
        };
        // A warp counts whole, its missing threads too.
        let arriving = if mask == w.all { 32 } else { mask.count_ones() };
        let votes = vote.map_or(0, |p| (p.mask(w) & mask).count_ones());
        let threads = mask.count_ones();
        let warp = w.index;
        let pc = w.pc();
        let barrier = &mut m.ctas[w.cta as usize].barriers[number as usize];
        if barrier.arrived == 0 {
            barrier.expected = expected;
            barrier.first_pc = pc;
        } else if barrier.expected != expected {
            let text = format!(
                "barrier {number} is for {} threads by its first arrival, for {expected} here",
                barrier.expected
            );
            let first = barrier.first_pc;
            return Err(Stop::new(FaultKind::BarrierDivergence, text).other("the first arrival", Some(first)));
        }
        barrier.arrived += arriving;
        if barrier.arrived > barrier.expected {
            let text = format!("{} threads arrive at barrier {number} for {expected}", barrier.arrived);
            return Err(Stop::new(FaultKind::BarrierDivergence, text));
        }
        barrier.votes = (barrier.votes.0 + votes, barrier.votes.1 + threads);
        if let Some(race) = &mut m.race {
            race.release(warp, mask, &mut barrier.arriving);
        }
        let generation = barrier.generation;
        if barrier.arrived == barrier.expected {
            barrier.generation += 1;
            barrier.published = barrier.arriving.take();
            barrier.result = std::mem::take(&mut barrier.votes);
            barrier.arrived = 0;
        }
        m.progress += 1;
        if arrive {
            return Ok(Flow::Next);
        }
        m.roles[w.role as usize].barrier_waits += 1;
        Ok(Flow::Wait(WaitFor::Barrier { cta: w.cta, id: number, generation }))
    }))
}
