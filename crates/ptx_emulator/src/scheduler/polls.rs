//! `mbarrier.try_wait` instructions that have found their phase incomplete. The warp continues up to the first
//! instruction that uses the predicate, and waits there. The predicate can therefore reflect an arrival that the thread
//! made in between, as on an H200.

use crate::code::Inst;
use crate::config::fault::Stopped;
use crate::machine::footprint::Kind;
use crate::machine::in_flight::{Poll, Test};
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
    let present = w.fragments.iter().fold(0, |all, f| all | f.mask);
    w.polls.retain(|poll| poll.tests.iter().any(|test| test.lanes & present != 0));
    let used = |poll: &Poll| uses(poll.predicate) && poll.tests.iter().any(|test| test.lanes & mask != 0);
    let Some(n) = w.polls.iter().position(used) else { return Ok(None) };
    let waited = matches!(w.resumed, Some(WaitFor::TimedOut | WaitFor::Mbarrier { .. }));
    if waited {
        m.clock.now += 1;
        w.issued += 1;
    }
    let mut poll = w.polls.swap_remove(n);
    let of = |lanes: u32| -> Vec<Test> {
        let tests = poll.tests.iter().map(|test| Test { lanes: test.lanes & lanes, ..*test });
        tests.filter(|test| test.lanes != 0).collect()
    };
    let mine = of(mask);
    poll.tests = of(!mask);
    let complete = m.mbarrier_test(w, &mine, true)?;
    let missing = mine.iter().filter(|test| test.lanes & complete == 0).max_by_key(|test| test.lanes).copied();
    let lanes = mine.iter().fold(0, |all, test| all | test.lanes);
    let timed_out = matches!(w.resumed, Some(WaitFor::TimedOut));
    let wait = match missing {
        Some(Test { at, phase, .. }) if !timed_out && !m.clock.out_of_patience() => {
            m.mbarrier_blocks(at)?;
            m.roles[w.role as usize].barrier_waits += 1;
            poll.tests.extend(mine);
            Some(WaitFor::Mbarrier { at, phase, pc: poll.pc })
        }
        Some(Test { at, .. }) => {
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
    if !poll.tests.is_empty() {
        w.polls.push(poll);
    }
    if wait.is_none() && !w.polls.is_empty() { settle(w, m, inst, mask) } else { Ok(wait) }
}
