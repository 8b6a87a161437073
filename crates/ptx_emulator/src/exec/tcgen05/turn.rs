//! Position of a thread's asynchronous operation in the order of the tensor core.

use std::sync::Arc;

use crate::machine::race::{Agent, Clock, Detector, merge};
use crate::machine::state::{Effect, Machine};
use crate::machine::tensor_core::Kind;
use crate::machine::warp::Warp;

/// Position of an operation in the order of its CTA pair's tensor core.
pub struct Turn {
    kind: Kind,
    agent: Option<Agent>,
    /// Incomplete operations that this operation must follow.
    after: Vec<u64>,
}

impl Turn {
    /// Assigns a turn to an operation that one lane issues now. It follows all earlier operations. Under `strict` it
    /// follows only the operations whose kind is pipelined with it.
    pub fn take(m: &mut Machine<'_>, w: &Warp, lane: usize, kind: Kind, pipelined: &[Kind]) -> Turn {
        let strict = m.launch.config.strict;
        let pipes = &m.pipes[(w.cta / 2) as usize];
        let behind = if strict { pipelined } else { Kind::ALL };
        let behind = || behind.iter().map(|&kind| &pipes[kind as usize]);
        let after = m.predecessors(behind().filter_map(|pipe| pipe.last));
        let agent = m.race.as_mut().map(|race| {
            let mut known = None;
            race.release(w.index, 1 << lane, &mut known);
            for earlier in behind().filter_map(|pipe| pipe.known.as_ref()).chain(&w.tmem_known) {
                merge(&mut known, earlier);
            }
            let agent = race.spawn_from(w.index, &known, true);
            if strict { after_fence(race, w, agent, behind().filter_map(|pipe| pipe.known.as_ref())) } else { agent }
        });
        Turn { kind, agent, after }
    }

    /// The operation's agent for the race detector.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// Starts the operation.
    pub fn start(self, m: &mut Machine<'_>, w: &Warp, effect: impl Effect) {
        let id = m.start_after(w, self.after, effect);
        let pipe = &mut m.pipes[(w.cta / 2) as usize][self.kind as usize];
        pipe.last = Some(id);
        if let (Some(race), Some(agent)) = (&m.race, &self.agent) {
            race.finish(agent, &mut pipe.known);
        }
    }
}

/// Returns `agent` with the order of its accesses to tensor memory under `strict`: they follow what the warp knew at
/// its last `fence::after_thread_sync`, the warp's own operations, and earlier operations of the tensor core.
pub fn after_fence<'a>(
    race: &Detector,
    w: &'a Warp,
    agent: Agent,
    earlier: impl Iterator<Item = &'a Arc<Clock>>,
) -> Agent {
    let mut known = w.tmem_view.clone();
    for other in earlier.chain(&w.tmem_known) {
        merge(&mut known, other);
    }
    agent.with_tensor_knowledge(&known, race)
}
