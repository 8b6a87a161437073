//! Ranges of shared memory that copies read and write.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::address::Spot;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};

/// Unit and alignment of bulk copies, in bytes.
pub const BULK_ALIGN: u32 = 16;

/// A byte range in a CTA's shared memory.
#[derive(Clone, Copy)]
pub struct SharedRange {
    pub cta: u32,
    pub offset: u32,
    pub bytes: u32,
}

impl SharedRange {
    /// The bytes that an operand names. The address may be generic, `shared::cta` or `shared::cluster`: each contains
    /// the rank of its CTA.
    pub fn at(m: &Machine<'_>, w: &Warp, a: &Address, lane: usize, bytes: u32, align: u32) -> Stopped<SharedRange> {
        match m.resolve_aligned(w, w.shared_at(a, lane), bytes, align)? {
            Spot::Shared { cta, offset } => Ok(SharedRange { cta, offset, bytes }),
            _ => Err(Stop::new(FaultKind::OutOfBounds, "expected an address in shared memory").lane(lane as u32)),
        }
    }

    /// Checks an asynchronous access against all other accesses.
    pub fn track(self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, mode: Mode) -> Stopped<()> {
        let SharedRange { cta, offset, bytes } = self;
        m.reach_async(w, cta, agent);
        if mode == Mode::Write {
            m.check_no_mbarrier(cta, offset, bytes)?;
        } else if m.sanitize {
            let defined = &m.ctas[cta as usize].shared.defined[offset as usize..(offset + bytes) as usize];
            // If a copy in flight writes these bytes, the race detector reports it instead.
            if !defined.iter().any(|d| *d) {
                let text = format!("a copy reads {bytes} bytes of shared memory that were never written");
                m.hazard(Stop::new(FaultKind::UninitializedShared, text))?;
            }
            m.check_undefined(cta, offset, bytes)?;
        }
        if let (Some(race), Some(agent)) = (&mut m.race, agent)
            && let Err(conflict) = race.agent_access(agent, cta, offset, bytes, mode, w.pc())
        {
            let stop = m.conflict(mode, conflict, offset, bytes);
            if conflict.observed || conflict.met { m.warn(stop)? } else { m.hazard(stop)? }
        }
        Ok(())
    }

    /// The current bytes.
    pub fn read<'m>(self, m: &'m Machine<'_>) -> &'m [u8] {
        &m.ctas[self.cta as usize].shared.data[self.offset as usize..(self.offset + self.bytes) as usize]
    }
}

/// Registers the copy of some lanes with the race detector.
pub fn spawn(m: &mut Machine<'_>, w: &Warp, lanes: u32) -> Option<Agent> {
    m.race.as_mut().map(|race| race.spawn(w.index, lanes, true))
}

/// Groups the lanes of `mask` into copies: one copy if all lanes have the same operands, else one copy per lane.
///
/// The manual defines one copy per thread. On a GPU, the operands of a copy are uniform across the warp: `ptxas` emits
/// one instruction (`UTMASTG`) if it sees that all lanes have the same operands, and else a loop over the lanes
/// (`UBLKCP`; on an H200, sixteen lanes with one destination add to it sixteen times). Shipped kernels store tiles with
/// whole warps. Under `strict` each lane makes a copy.
pub fn together(m: &Machine<'_>, w: &Warp, mask: u32, operands: &[Src]) -> Vec<u32> {
    let first = mask.trailing_zeros() as usize;
    let same = |lane: usize| operands.iter().all(|&operand| w.lane(operand, first) == w.lane(operand, lane));
    if !m.launch.config.strict && lanes(mask).all(same) {
        return vec![mask];
    }
    lanes(mask).map(|lane| 1 << lane).collect()
}
