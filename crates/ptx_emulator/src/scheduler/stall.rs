//! Search for clusters that never end although their threads run: each warp waits, or repeats the same instructions
//! while no value in memory changes, with the same values in all registers that decide what it does. Its next steps are
//! then the same again. A register decides if a branch, an address or an operand of an instruction that does more than
//! write registers depends on it. A loop that also counts its rounds, or reads a clock and drops the time, is found too.
//! An instruction counts whether its guard is true or not: the branch that ends a loop is not taken before the last
//! round.
//!
//! The states of a warp are compared as in Brent's search for cycles: with one kept state, which is renewed each time
//! the number of steps has doubled. Because this takes time, it begins after [`QUIET`] instructions without a change,
//! and takes place in windows: an eighth of the time since the last change.

use std::collections::BTreeSet;

use crate::code::{Inst, Kernel};
use crate::machine::state::Machine;
use crate::machine::warp::{Fragment, State, Warp};

/// Instructions of a cluster without a change before its warps are watched.
const QUIET: u64 = 1 << 14;
/// Length of the first window.
const WINDOW: u64 = 1 << 12;

/// Watch over the warps of a cluster.
pub struct Stall {
    /// [`Machine::changes`](crate::machine::state::Machine::changes) and the cluster's clock at the last change.
    changes: u64,
    since: u64,
    /// Current or next window.
    window: std::ops::Range<u64>,
    warps: Vec<Watch>,
}

/// Watch over a warp.
#[derive(Default)]
struct Watch {
    state: Option<Box<State>>,
    steps: u64,
    /// Number of steps at which the state is renewed.
    renewal: u64,
    /// Instructions that the warp has come to since the state was taken.
    instructions: BTreeSet<u32>,
    /// Registers that decide the course of these instructions, and the number of instructions that they were found for.
    decisive: Decisive,
    decisive_for: usize,
    /// Whether the state has come again.
    repeats: bool,
}

/// Registers and predicates that decide the course of a loop, in ascending order.
#[derive(Default)]
pub(super) struct Decisive {
    registers: BTreeSet<u32>,
    predicates: BTreeSet<u32>,
}

impl Decisive {
    /// Returns the registers and predicates that decide the course of a loop of these instructions. A call passes values
    /// that its [`Uses`](crate::code::Uses) do not list, so with a call all registers decide.
    pub(super) fn of(kernel: &Kernel, loop_body: &BTreeSet<u32>) -> Decisive {
        if loop_body.iter().any(|&pc| kernel.code[pc as usize].name.starts_with("call")) {
            return Decisive {
                registers: (0..kernel.registers).collect(),
                predicates: (0..kernel.predicates).collect(),
            };
        }
        let mut found = Decisive::default();
        let mut left: Vec<&Inst> = loop_body.iter().map(|&pc| &kernel.code[pc as usize]).collect();
        loop {
            let before = left.len();
            left.retain(|inst| !found.take(inst));
            if left.len() == before {
                return found;
            }
        }
    }

    /// Whether a warp has the values of a state in all of them.
    pub(super) fn agrees(&self, w: &Warp, state: &State) -> bool {
        w.has_values_of(state, &self.registers, &self.predicates)
    }

    /// Adds what an instruction depends on, if it acts or if its result decides. Returns whether it does.
    fn take(&mut self, inst: &Inst) -> bool {
        let uses = &inst.uses;
        let decides = uses.acts
            || uses.jump.is_some()
            || uses.writes.iter().any(|r| self.registers.contains(r))
            || uses.predicate_writes.iter().any(|p| self.predicates.contains(p));
        if decides {
            self.registers.extend(&uses.reads);
            self.predicates.extend(&uses.predicate_reads);
            self.predicates.extend(inst.guard.map(|(predicate, _)| predicate));
        }
        decides
    }
}

impl Watch {
    /// Compares the warp with the kept state, which has come again if all lanes that can run have run since.
    fn executed(&mut self, kernel: &Kernel, w: &mut Warp, machine: &Machine<'_>) {
        self.steps += 1;
        let rests = |f: &Fragment| match &f.wait {
            None => f.mask & !w.ran == 0,
            Some(wait) => !wait.ready(machine, f.mask),
        };
        let at_rest = |state: &State| w.is_at(state) && w.fragments.iter().all(rests);
        if let Some(state) = self.state.as_deref().filter(|state| at_rest(state)) {
            if self.decisive_for != self.instructions.len() {
                self.decisive = Decisive::of(kernel, &self.instructions);
                self.decisive_for = self.instructions.len();
            }
            self.repeats = self.decisive.agrees(w, state);
        }
        if self.repeats {
            return;
        }
        if self.steps >= self.renewal && w.polls.is_empty() {
            self.state = Some(Box::new(w.state()));
            self.renewal = 2 * self.steps;
            self.instructions.clear();
            self.decisive_for = 0;
            w.ran = 0;
        }
    }
}

impl Stall {
    /// Watch over `warps` warps.
    pub fn new(warps: usize) -> Stall {
        let mut stall = Stall { changes: 0, since: 0, window: 0..0, warps: Vec::new() };
        stall.warps.resize_with(warps, Watch::default);
        stall.changed(0, 0);
        stall
    }

    /// Begins anew, because something has changed that a warp may have waited for.
    pub fn changed(&mut self, changes: u64, now: u64) {
        (self.changes, self.since) = (changes, now);
        self.window = now + QUIET..now + QUIET + WINDOW;
        self.warps.iter_mut().for_each(|watch| *watch = Watch::default());
    }

    /// Watches all warps again at once, because waits have ended without a change.
    pub fn watch_again(&mut self, now: u64) {
        self.window = now..now + WINDOW;
        self.warps.iter_mut().for_each(|watch| *watch = Watch::default());
    }

    /// Whether nothing has changed for so long that the warps have been watched.
    pub fn is_quiet(&self, changes: u64, now: u64) -> bool {
        changes == self.changes && now - self.since > QUIET + WINDOW
    }

    /// Whether the warps are watched at this time.
    pub fn watches(&mut self, changes: u64, now: u64) -> bool {
        if changes != self.changes {
            self.changed(changes, now);
        }
        self.window.contains(&now)
    }

    /// Whether a window has just ended. The next one begins when the time since the last change has doubled.
    pub fn window_ended(&mut self, changes: u64, now: u64) -> bool {
        if changes != self.changes || now < self.window.end {
            return false;
        }
        // Instructions between windows are not recorded, so no cycle reaches from one window to the next.
        for watch in self.warps.iter_mut().filter(|watch| !watch.repeats) {
            (watch.state, watch.steps, watch.renewal) = (None, 0, 0);
        }
        let begin = now + (now - self.since);
        self.window = begin..begin + WINDOW.max((begin - self.since) / 8);
        true
    }

    /// Records that a warp has come to an instruction. It is `executed` if its guard is true in some lane.
    pub fn step(&mut self, kernel: &Kernel, w: &mut Warp, machine: &Machine<'_>, executed: bool) {
        let watch = &mut self.warps[w.index as usize];
        if watch.repeats || w.fragments.is_empty() {
            return;
        }
        watch.instructions.insert(machine.current.1);
        if executed {
            watch.executed(kernel, w, machine);
        }
    }

    /// Whether a warp repeats its steps.
    pub fn repeats(&self, warp: usize) -> bool {
        self.warps[warp].repeats
    }

    /// Instructions that a warp repeats.
    pub fn cycle(&self, warp: usize) -> &BTreeSet<u32> {
        &self.warps[warp].instructions
    }
}
