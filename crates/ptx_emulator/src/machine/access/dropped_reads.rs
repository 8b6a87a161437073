//! Racing loads whose value is dropped. When there is less work than threads, compilers give the same work to several
//! warps. Each warp loads the data, and only one warp stores its result, possibly to the same address. The loads of the
//! other warps race with that store, but their values are unused.
//!
//! A race of this kind is a warning while the value is unused, and a fault once the value is used. The code determines
//! the instructions by which the value can leave a warp's registers (`outlets` of the launch). The warp's course
//! records which of these instructions were executed before the race ([`crate::machine::course`]). This file checks the
//! instructions executed after the race.

use crate::config::fault::Stopped;
use crate::machine::dropped_reads::Open;
use crate::machine::grid_races::{Meeting, Order};
use crate::machine::race::Mode;
use crate::machine::state::Machine;

/// If a meeting is a race of a plain load with a write of another warp, returns it with the load as the later access.
fn load_last(meeting: &Meeting) -> Option<Meeting> {
    let Meeting { earlier, later, order, .. } = *meeting;
    let (load, write) = if later.mode == Mode::Read { (later, earlier) } else { (earlier, later) };
    let apart = (load.base, load.issuer) != (write.base, write.issuer);
    let plain = load.mode == Mode::Read && load.issuer.is_none() && order == Order::Unknown;
    (plain && apart).then_some(Meeting { earlier: write, later: load, ..*meeting })
}

impl Machine<'_> {
    /// Whether the value of the load in a race within the cluster is unused so far. [`Machine::execute_outlet`] reports
    /// a later use.
    pub fn is_dropped(&mut self, meeting: &Meeting) -> bool {
        let Some(meeting) = load_last(meeting) else { return false };
        let (warp, pc) = (meeting.later.base / 32, meeting.later.pc);
        let Some(outlets) = self.dropped_reads.outlets(pc, self.launch.outlets) else { return false };
        if self.race.as_mut().is_none_or(|race| outlets.iter().any(|&pc| race.course(warp).has_executed(pc))) {
            return false;
        }
        let place = |m: &Meeting| (m.later.base, m.earlier.pc, m.later.pc);
        if self.dropped_reads.open.iter().all(|open| place(&open.meeting) != place(&meeting)) {
            self.dropped_reads.open.push(Open { warp, outlets, meeting });
        }
        true
    }

    /// Handles an instruction that does more than write registers. If it uses a value that raced, the race is reported.
    pub fn execute_outlet(&mut self) -> Stopped<()> {
        let (warp, pc) = self.current;
        let lets_out = |open: &Open| open.warp == warp && open.outlets.contains(&pc);
        let Some(at) = self.dropped_reads.open.iter().position(lets_out) else { return Ok(()) };
        let open = self.dropped_reads.open.swap_remove(at);
        self.hazard(self.launch.race(&open.meeting).other("the use of the value", Some(pc)))
    }
}
