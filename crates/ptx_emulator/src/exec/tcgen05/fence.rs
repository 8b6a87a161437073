//! `tcgen05.fence`.

use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

/// `tcgen05.fence::before_thread_sync`, `::after_thread_sync`.
pub struct Fence {
    before: bool,
}

impl Instruction for Fence {
    fn decode(i: &mut Parsed<'_>) -> Result<Fence> {
        Ok(Fence { before: i.has("fence::before_thread_sync") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        match &mut m.race {
            Some(race) if self.before => race.acquire(w.index, mask, &w.tmem_known),
            Some(race) => race.release(w.index, mask, &mut w.tmem_view),
            None => {}
        }
        Ok(Flow::Next)
    }
}
