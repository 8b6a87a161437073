//! Search for clusters that never end although their threads run: each warp waits, or repeats the same instructions
//! with the same registers while no value in memory changes. Its next steps are then the same again.
//!
//! The states of a warp are compared as in Brent's search for cycles: with one kept state, which is renewed each time
//! the number of steps has doubled. Because this takes time, it begins after [`QUIET`] instructions without a change,
//! and takes place in windows: an eighth of the time since the last change.

use crate::machine::state::Machine;
use crate::machine::warp::{Fragment, State, Warp};

/// Instructions of a cluster without a change before its warps are watched.
const QUIET: u64 = 1 << 14;
/// Length of the first window.
const WINDOW: u64 = 1 << 12;
/// Maximum number of instructions of a cycle that are kept for the report.
const KEPT: usize = 64;

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
    /// Instructions since the state was taken.
    instructions: Vec<u32>,
    /// Whether the state has come again.
    repeats: bool,
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
        let begin = now + (now - self.since);
        self.window = begin..begin + WINDOW.max((begin - self.since) / 8);
        true
    }

    /// Records that a warp has executed an instruction. A state has come again if all lanes that can run have run since.
    pub fn step(&mut self, w: &mut Warp, machine: &Machine<'_>) {
        let pc = machine.current.1;
        let watch = &mut self.warps[w.index as usize];
        if watch.repeats || w.fragments.is_empty() {
            return;
        }
        watch.steps += 1;
        if watch.instructions.len() < KEPT && !watch.instructions.contains(&pc) {
            watch.instructions.push(pc);
        }
        let rests = |f: &Fragment| match &f.wait {
            None => f.mask & !w.ran == 0,
            Some(wait) => !wait.ready(machine, f.mask),
        };
        if watch.state.as_mut().is_some_and(|state| w.is_in(state)) && w.fragments.iter().all(rests) {
            watch.repeats = true;
        } else if watch.steps >= watch.renewal && w.polls.is_empty() {
            watch.state = Some(Box::new(w.state()));
            watch.renewal = 2 * watch.steps;
            watch.instructions.clear();
            w.ran = 0;
        }
    }

    /// Whether a warp repeats its steps.
    pub fn repeats(&self, warp: usize) -> bool {
        self.warps[warp].repeats
    }

    /// Instructions that a warp repeats.
    pub fn cycle(&self, warp: usize) -> &[u32] {
        &self.warps[warp].instructions
    }
}
