//! `mbarrier.try_wait` instructions that have found their phase incomplete. The warp continues up to the first
//! instruction that uses the predicate, and waits there. The predicate can therefore reflect an arrival that the thread
//! made in between, as on an H200.

use crate::code::Inst;
use crate::config::fault::Stopped;
use crate::machine::footprint::Kind;
use crate::machine::in_flight::Poll;
use crate::machine::mbarrier::BYTES;
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;

/// Answers the polls whose predicates an instruction of the lanes `mask` uses. Returns the condition that the
/// instruction must wait for, if any.
pub fn settle(w: &mut Warp, m: &mut Machine<'_>, inst: &Inst, mask: u32) -> Stopped<Option<WaitFor>> {
    let uses = |p: u32| {
        let guard = inst.guard.is_some_and(|(guard, _)| guard == p);
        guard || inst.uses.predicate_reads.contains(&p) || inst.uses.predicate_writes.contains(&p)
    };
    w.polls.retain(|poll| poll.lanes.iter().any(|(lane, ..)| w.fragments.iter().any(|f| f.mask >> lane & 1 == 1)));
    let used = |poll: &Poll| uses(poll.predicate) && poll.lanes.iter().any(|(lane, ..)| mask >> lane & 1 == 1);
    let Some(n) = w.polls.iter().position(used) else { return Ok(None) };
    let waited = matches!(w.resumed, Some(WaitFor::TimedOut | WaitFor::Mbarrier { .. }));
    if waited {
        m.clock.now += 1;
        w.issued += 1;
    }
    let mut poll = w.polls.swap_remove(n);
    let (mine, others): (Vec<_>, Vec<_>) = poll.lanes.drain(..).partition(|(lane, ..)| mask >> lane & 1 == 1);
    let complete = m.mbarrier_test(w, &mine, true)?;
    let missing = mine.iter().rev().find(|(lane, ..)| complete >> lane & 1 == 0).map(|&(_, at, phase)| (at, phase));
    let lanes = mine.iter().fold(0, |lanes, (lane, ..)| lanes | 1 << lane);
    let timed_out = matches!(w.resumed, Some(WaitFor::TimedOut));
    let wait = match missing {
        Some((at, phase)) if !timed_out && !m.clock.out_of_patience() => {
            m.mbarrier_blocks(at)?;
            m.roles[w.role as usize].barrier_waits += 1;
            poll.lanes = mine;
            Some(WaitFor::Mbarrier { at, phase, pc: poll.pc })
        }
        Some((at, _)) => {
            m.roles[w.role as usize].failed_polls += 1;
            m.record_shared(at.cta, at.offset, BYTES, Kind::Read);
            w.set_predicate(poll.predicate, lanes, complete);
            Some(WaitFor::Progress { since: m.progress, at, pc: poll.pc })
        }
        None => {
            w.set_predicate(poll.predicate, lanes, complete);
            None
        }
    };
    poll.lanes.extend(others);
    if !poll.lanes.is_empty() {
        w.polls.push(poll);
    }
    if wait.is_none() && !w.polls.is_empty() { settle(w, m, inst, mask) } else { Ok(wait) }
}
