//! Fragments of a warp: choice of the next fragment to run, and merging. Lanes that diverge run as separate fragments,
//! one after the other. Fragments that reach the same position merge.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::state::Machine;
use crate::machine::wait::{Place, WaitFor};
use crate::machine::warp::{Fragment, Warp};

/// Backward jumps that a fragment may take before the rest of its warp gets a turn.
const SPIN_QUOTA: u32 = 64;

impl Warp {
    /// Merges fragments at the same position, and picks the next fragment to run: among the fragments that can run, the
    /// one with the fewest spins, then the lowest `pc`. Returns `false` if no fragment can run.
    pub fn schedule(&mut self, machine: &mut Machine) -> Stopped<bool> {
        if self.fragments.len() == 1 {
            self.current = 0;
            let ready = match &self.fragments[0].wait {
                None => true,
                Some(wait) => wait.ready(machine, self.fragments[0].mask),
            };
            if ready {
                self.resume(0, machine);
            }
            return if ready { Ok(true) } else { self.go_on_alone(machine) };
        }
        self.merge();
        let mut best: Option<(u32, u32, usize)> = None;
        for (i, f) in self.fragments.iter().enumerate() {
            let ready = match &f.wait {
                None => true,
                Some(WaitFor::Lanes { need, place: Place::Aligned | Place::Here }) => need & !f.mask == 0,
                Some(WaitFor::Lanes { need, place: Place::Anywhere }) => {
                    let waiting = self.fragments.iter().filter_map(|o| match &o.wait {
                        Some(WaitFor::Lanes { need: n, place: Place::Anywhere }) if n == need => Some(o.mask),
                        _ => None,
                    });
                    need & !waiting.fold(0, |m, n| m | n) == 0
                }
                Some(wait) => wait.ready(machine, f.mask),
            };
            let key = (f.spins / SPIN_QUOTA, f.pc, i);
            if ready && best.is_none_or(|b| key < b) {
                best = Some(key);
            }
        }
        let Some((_, _, i)) = best else { return self.go_on_alone(machine) };
        if let Some(WaitFor::Lanes { need, place: Place::Anywhere }) = self.fragments[i].wait {
            // All members have arrived, at whatever instructions: release all of them.
            for f in &mut self.fragments {
                if matches!(&f.wait, Some(WaitFor::Lanes { need: n, place: Place::Anywhere }) if *n == need) {
                    f.wait = Some(WaitFor::Released);
                }
            }
        }
        self.current = i;
        self.resume(i, machine);
        Ok(true)
    }

    /// Ends a fragment's wait.
    fn resume(&mut self, fragment: usize, machine: &mut Machine) {
        let fragment = &mut self.fragments[fragment];
        self.resumed = fragment.wait.take();
        if !matches!(self.resumed, None | Some(WaitFor::Lanes { .. } | WaitFor::Released | WaitFor::Alone)) {
            machine.roles[self.role as usize].waited_steps += machine.clock.now - fragment.since;
        }
    }

    /// Merges fragments at the same position in the same call.
    fn merge(&mut self) {
        let mut i = 0;
        while i < self.fragments.len() {
            let mut j = i + 1;
            while j < self.fragments.len() {
                let (a, b) = (&self.fragments[i], &self.fragments[j]);
                let converging = |f: &Fragment| match &f.wait {
                    None => true,
                    Some(WaitFor::Lanes { place, .. }) => *place != Place::Anywhere,
                    Some(_) => false,
                };
                if a.pc == b.pc && a.calls == b.calls && (a.wait == b.wait || converging(a) && converging(b)) {
                    let b = self.fragments.swap_remove(j);
                    let a = &mut self.fragments[i];
                    a.mask |= b.mask;
                    a.spins = a.spins.min(b.spins);
                    if a.wait != b.wait {
                        a.wait = None;
                    }
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
        if self.fragments.len() == 1 {
            self.fragments[0].spins = 0;
        }
    }

    /// Called if no fragment can run. Lanes continue without the members they wait for if those members have exited or
    /// wait at a later instruction. An H200 does the same for `shfl`, `vote`, `redux` and `bar.warp.sync` (on the GPU,
    /// the other lanes wait where the code converges). Lanes that wait for each other at any other two positions wait
    /// forever.
    fn go_on_alone(&mut self, machine: &mut Machine) -> Stopped<bool> {
        let waiting = |f: &Fragment| match f.wait {
            Some(WaitFor::Lanes { need, place }) => Some((need, place)),
            _ => None,
        };
        let by_members = |f: &&Fragment| waiting(f).is_some_and(|(_, place)| place != Place::Aligned);
        let Some(first) = self.fragments.iter().filter(by_members).map(|f| f.pc).min() else {
            return self.check_convergence().map(|()| false);
        };
        let i = self.fragments.iter().position(|f| f.pc == first && by_members(&f)).unwrap_or(0);
        let need = waiting(&self.fragments[i]).map_or(0, |(need, _)| need);
        let further_on = |o: &Fragment| {
            let leads = machine.launch.leads;
            waiting(o).is_some() && leads(first, o.pc) && (o.pc > first || !leads(o.pc, first))
        };
        let members = |(n, o): &(usize, &Fragment)| *n != i && o.mask & need != 0;
        if !self.fragments.iter().enumerate().filter(members).all(|(_, o)| further_on(o)) {
            return self.check_convergence().map(|()| false);
        }
        let here = self.fragments[i].mask;
        let text = format!("lanes {need:#010x} must execute it together; {here:#010x} do, the others never arrive");
        machine.warn(Stop { pc: Some(first), ..*Stop::new(FaultKind::WarpDivergence, text) }.into())?;
        self.fragments[i].wait = Some(WaitFor::Alone);
        self.current = i;
        self.resume(i, machine);
        Ok(true)
    }

    /// Reports lanes that wait for each other at different positions, because they wait forever.
    fn check_convergence(&self) -> Stopped<()> {
        let live = self.live();
        for f in &self.fragments {
            let Some(WaitFor::Lanes { need, place }) = &f.wait else {
                continue;
            };
            // A lane that waits for something else may still arrive.
            let stuck = |o: &&Fragment| {
                o.mask & need != 0 && o.mask & f.mask == 0 && matches!(o.wait, Some(WaitFor::Lanes { .. }))
            };
            let gone = need & !live;
            let elsewhere = self.fragments.iter().find(stuck);
            if gone == 0 && elsewhere.is_none() {
                continue;
            }
            let mut stop = Stop::new(
                FaultKind::WarpDivergence,
                if gone != 0 && elsewhere.is_none() {
                    format!(
                        "lanes {need:#010x} must execute it together; {:#010x} do, {gone:#010x} have exited",
                        f.mask
                    )
                } else if *place == Place::Anywhere {
                    format!("lanes {need:#010x} must all arrive; {:#010x} wait here", f.mask)
                } else {
                    format!("lanes {need:#010x} must execute it together; {:#010x} do", f.mask)
                },
            );
            stop.pc = Some(f.pc);
            if let Some(o) = elsewhere {
                stop = stop.other(format!("lanes {:#010x} are at another instruction", o.mask), Some(o.pc));
            }
            return Err(stop);
        }
        Ok(())
    }
}
