//! Loads that race, and whose value is dropped. Compilers give the same work to several warps where there is less of it
//! than threads: each loads the data, and only one stores what it makes of them, to the same place perhaps. The loads of
//! the others race with that store, and nothing comes of what they load.
//!
//! Such a race is a warning as long as nothing comes of the value, and a fault as soon as something does. Which
//! instructions the value can leave a warp's registers by follows from the code ([`Launch::outlets`]); which of them the
//! warp has executed before, its course says ([`super::course`]); here is found what it executes after.

use std::collections::HashMap;
use std::sync::Arc;

use super::grid_races::{Meeting, Order};
use super::race::Mode;
use super::state::{Launch, Machine};
use crate::config::fault::Stopped;

/// The loads of one cluster.
#[derive(Default)]
pub struct DroppedReads {
    /// Races with loads whose value has been dropped so far.
    open: Vec<Open>,
    /// The outlets of loads, by instruction.
    outlets: HashMap<u32, Option<Arc<[u32]>>>,
}

struct Open {
    warp: u32,
    outlets: Arc<[u32]>,
    meeting: Meeting,
}

impl DroppedReads {
    /// The instructions by which the value of a load can leave registers, unless it decides what is executed.
    fn outlets(&mut self, launch: &Launch<'_>, pc: u32) -> Option<Arc<[u32]>> {
        self.outlets.entry(pc).or_insert_with(|| (launch.outlets)(pc).map(Arc::from)).clone()
    }
}

/// A race of a plain load with a write of another warp, the load as the later side.
fn load_last(meeting: &Meeting) -> Option<Meeting> {
    let Meeting { earlier, later, order, .. } = *meeting;
    let (load, write) = if later.mode == Mode::Read { (later, earlier) } else { (earlier, later) };
    let apart = (load.base, load.issuer) != (write.base, write.issuer);
    let plain = load.mode == Mode::Read && load.issuer.is_none() && order == Order::Unknown;
    (plain && apart).then_some(Meeting { earlier: write, later: load, ..*meeting })
}

impl Machine<'_> {
    /// Whether nothing has come of the load in a race within the cluster. If something does from here on,
    /// [`Machine::execute_outlet`] finds it.
    pub fn is_dropped(&mut self, meeting: &Meeting) -> bool {
        let Some(meeting) = load_last(meeting) else { return false };
        let (warp, pc) = (meeting.later.base / 32, meeting.later.pc);
        let Some(outlets) = self.dropped_reads.outlets(&self.launch, pc) else { return false };
        if self.race.as_mut().is_none_or(|race| outlets.iter().any(|&pc| race.course(warp).has_executed(pc))) {
            return false;
        }
        let place = |m: &Meeting| (m.later.base, m.earlier.pc, m.later.pc);
        if self.dropped_reads.open.iter().all(|open| place(&open.meeting) != place(&meeting)) {
            self.dropped_reads.open.push(Open { warp, outlets, meeting });
        }
        true
    }

    /// The current instruction does more than write registers. If it lets out a value that raced, that race matters.
    pub fn execute_outlet(&mut self) -> Stopped<()> {
        let (warp, pc) = self.current;
        let lets_out = |open: &Open| open.warp == warp && open.outlets.contains(&pc);
        let Some(at) = self.dropped_reads.open.iter().position(lets_out) else { return Ok(()) };
        let open = self.dropped_reads.open.swap_remove(at);
        self.hazard(self.launch.race(&open.meeting).other("what comes of the value", Some(pc)))
    }
}
