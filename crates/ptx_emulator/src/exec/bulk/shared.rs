//! Ranges of shared memory that copies read and write.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::address::Spot;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};

/// Unit and alignment of bulk copies, in bytes.
pub const BULK_ALIGN: u32 = 16;

/// Bytes of a CTA's shared memory.
#[derive(Clone, Copy)]
pub struct SharedRange {
    pub cta: u32,
    pub offset: u32,
    pub bytes: u32,
}

impl SharedRange {
    /// The bytes that an operand names. The address may be generic, `shared::cta` or `shared::cluster`: each carries
    /// the CTA's rank.
    pub fn at(m: &Machine<'_>, w: &Warp, a: &Address, lane: usize, bytes: u32, align: u32) -> Stopped<SharedRange> {
        match m.resolve_aligned(w, w.shared_at(a, lane), bytes, align)? {
            Spot::Shared { cta, offset } => Ok(SharedRange { cta, offset, bytes }),
            _ => Err(Stop::new(FaultKind::OutOfBounds, "an address in shared memory expected").lane(lane as u32)),
        }
    }

    /// Checks an asynchronous access against all others.
    pub fn track(self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, mode: Mode) -> Stopped<()> {
        let SharedRange { cta, offset, bytes } = self;
        if mode == Mode::Write {
            m.check_no_mbarrier(cta, offset, bytes)?;
        } else if m.sanitize {
            let defined = &m.ctas[cta as usize].shared.defined[offset as usize..(offset + bytes) as usize];
            // If a copy that writes them is still in flight, the race detector reports it.
            if !defined.iter().any(|d| *d) {
                let text = format!("a copy of {bytes} bytes of shared memory that nothing has written");
                m.hazard(Stop::new(FaultKind::UninitializedShared, text))?;
            }
            m.check_undefined(cta, offset, bytes)?;
        }
        if let (Some(race), Some(agent)) = (&mut m.race, agent)
            && let Err(conflict) = race.agent_access(agent, cta, offset, bytes, mode, w.pc())
        {
            let stop = m.conflict(mode, conflict, offset, bytes);
            if conflict.observed { m.warn(stop)? } else { m.hazard(stop)? }
        }
        Ok(())
    }

    /// The bytes as they are.
    pub fn read<'m>(self, m: &'m Machine<'_>) -> &'m [u8] {
        &m.ctas[self.cta as usize].shared.data[self.offset as usize..(self.offset + self.bytes) as usize]
    }
}

/// The copy of some lanes as the race detector knows it.
pub fn spawn(m: &mut Machine<'_>, w: &Warp, lanes: u32) -> Option<Agent> {
    m.race.as_mut().map(|race| race.spawn(w.index, lanes, true))
}

/// The copies that the lanes of `mask` make, each with its lanes: one copy if all have the same operands, else one a lane.
///
/// The manual has a copy for each thread. A card's copies have operands of the whole warp: `ptxas` makes one instruction (`UTMASTG`)
/// where it sees that all lanes have the same, and else a loop over the lanes (`UBLKCP`; on an H200 sixteen lanes with one
/// destination add to it sixteen times). Shipped kernels store tiles by whole warps. Under `strict` each lane makes its own.
pub fn together(m: &Machine<'_>, w: &Warp, mask: u32, operands: &[Src]) -> Vec<u32> {
    let first = mask.trailing_zeros() as usize;
    let same = |lane: usize| operands.iter().all(|&operand| w.lane(operand, first) == w.lane(operand, lane));
    if !m.launch.config.strict && lanes(mask).all(same) {
        return vec![mask];
    }
    lanes(mask).map(|lane| 1 << lane).collect()
}
