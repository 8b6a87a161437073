//! Named barriers of a CTA (PTX ISA, "Parallel Synchronization: bar, barrier").

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::machine::barrier::{self, Barrier};
use crate::machine::footprint::{Arriving, Kind, Object};
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Dst, PredicateDst, PredicateSrc, Src};
use crate::types::Type;

/// `bar.sync`, `bar.arrive`, `bar.red` and `barrier.*`. Both opcodes count threads. Whole warps execute `bar`, and
/// `barrier` with `.aligned`.
pub struct Bar {
    id: Src,
    /// Threads that complete a generation. `None`: all threads of the CTA that have not exited.
    count: Option<Src>,
    /// `true` if the thread does not wait.
    arrive: bool,
    /// Each thread's predicate for `.red`.
    vote: Option<PredicateSrc>,
    out: Out,
}

/// Destination of the result of `.red`.
enum Out {
    None,
    /// Number of true predicates.
    Count(Dst),
    /// `true` if all predicates are true.
    All(PredicateDst),
    /// `true` if any predicate is true.
    Any(PredicateDst),
}

impl Instruction for Bar {
    fn decode(i: &mut Parsed<'_>) -> Result<Bar> {
        let reduce = i.one_of(&["popc", "and", "or"]).filter(|_| i.has("red"));
        let arrive = i.has("arrive");
        i.awaits_loads();
        if i.opcode() == "bar" {
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
        let out = match reduce {
            None => Out::None,
            Some("popc") => Out::Count(i.dst(0)?),
            Some("and") => Out::All(i.predicate_dst(0)?),
            Some(_) => Out::Any(i.predicate_dst(0)?),
        };
        Ok(Bar { id, count, arrive, vote, out })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        if let Some(WaitFor::Barrier { cta, id, .. }) = w.resumed {
            let barrier = &m.ctas[cta as usize].barriers[id as usize];
            if let Some(race) = &mut m.race {
                race.acquire(w.index, mask, &barrier.published);
            }
            self.finish(w, mask, barrier);
            return Ok(Flow::Next);
        }
        let (id, expected) = self.operands(w, m, mask)?;
        // A warp counts as 32 threads, even if the launch gave it fewer or some have exited.
        let arriving = if mask == w.live() { 32 } else { mask.count_ones() };
        let yes = self.vote.map_or(0, |p| (p.mask(w) & mask).count_ones());
        let barrier = &mut m.ctas[w.cta as usize].barriers[id as usize];
        let room = expected.saturating_sub(barrier.arrived);
        arrive(barrier, id, expected, arriving, w.pc())?;
        barrier.of_all = self.count.is_none();
        barrier.votes = (barrier.votes.0 + yes, barrier.votes.1 + mask.count_ones());
        if let Some(race) = &mut m.race {
            race.release(w.index, mask, &mut barrier.arriving);
        }
        let generation = barrier.generation;
        barrier.advance();
        let ends = barrier.generation != generation;
        let object = Object::Barrier { cluster: m.index, cta: w.cta, id };
        let arriving = Arriving { phase: generation, ends, count: arriving, room, named: Some(expected) };
        m.record(object, 0..1, Kind::Arrive(arriving));
        m.progress += 1;
        m.repeats += u64::from(self.vote.is_none());
        if self.arrive {
            return Ok(Flow::Next);
        }
        m.roles[w.role as usize].barrier_waits += 1;
        Ok(Flow::Wait(WaitFor::Barrier { cta: w.cta, id, generation }))
    }
}

impl Bar {
    /// The barrier's number, and the number of threads that complete a generation.
    fn operands(&self, w: &Warp, m: &Machine<'_>, mask: u32) -> Stopped<(u32, u32)> {
        let lane = mask.trailing_zeros() as usize;
        let invalid = |text: String| Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
        let id = w.lane(self.id, lane) as u32;
        if id >= barrier::COUNT {
            return invalid(format!("barrier {id} does not exist; a CTA has barriers 0 to {}", barrier::COUNT - 1));
        }
        let Some(count) = self.count else { return Ok((id, m.ctas[w.cta as usize].running * 32)) };
        let count = w.lane(count, lane) as u32;
        if count == 0 || !count.is_multiple_of(32) {
            return invalid(format!("{count} threads at barrier {id}; the count must be a positive multiple of 32"));
        }
        Ok((id, count))
    }

    /// Writes the result of `.red` once all threads have voted.
    fn finish(&self, w: &mut Warp, mask: u32, barrier: &Barrier) {
        let (yes, all) = barrier.result;
        let truth = |holds| if holds { u32::MAX } else { 0 };
        match &self.out {
            Out::None => {}
            Out::Count(d) => d.write(w, mask, &[yes.into(); 32]),
            Out::All(p) => p.write(w, mask, truth(yes == all)),
            Out::Any(p) => p.write(w, mask, truth(yes > 0)),
        }
    }
}

/// Counts arriving threads. All of them must name the same count for the generation.
fn arrive(barrier: &mut Barrier, id: u32, expected: u32, arriving: u32, pc: u32) -> Stopped<()> {
    if barrier.arrived == 0 {
        barrier.expected = expected;
        barrier.first_pc = pc;
    } else if barrier.expected != expected {
        let by_first = barrier.expected;
        let text = format!("barrier {id}: the first arrival expects {by_first} threads, this one {expected}");
        return Err(Stop::new(FaultKind::BarrierDivergence, text).other("the first arrival", Some(barrier.first_pc)));
    }
    barrier.arrived += arriving;
    if barrier.arrived > barrier.expected {
        let text = format!("{} threads arrive at barrier {id}, which expects {expected}", barrier.arrived);
        return Err(Stop::new(FaultKind::BarrierDivergence, text));
    }
    Ok(())
}
