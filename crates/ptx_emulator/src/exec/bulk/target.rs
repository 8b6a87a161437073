//! Destination of a copy into shared memory, and the mbarriers that it signals.

use super::shared::SharedRange;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::Agent;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};

/// Operands that determine which mbarriers a copy signals.
pub struct Signals {
    pub barrier: Address,
    /// Mask of CTAs that receive the data, each at the same offset.
    pub multicast: Option<Src>,
    /// `true` if the mbarrier may belong to either CTA of the pair.
    pub pair: bool,
}

impl Signals {
    /// The operands as sources.
    pub fn operands(&self) -> impl Iterator<Item = Src> {
        self.multicast.into_iter().chain([self.barrier.base])
    }
}

/// Destinations of one copy, and the mbarriers that it signals.
pub struct Target {
    /// CTAs that receive the data.
    pub ctas: Vec<u32>,
    /// The mbarrier for each CTA.
    barriers: Vec<MbarrierAt>,
}

impl Target {
    /// Resolves the target of one lane's copy to `to`.
    pub fn resolve(m: &mut Machine<'_>, w: &Warp, lane: usize, to: SharedRange, signals: &Signals) -> Stopped<Target> {
        let at = m.mbarrier(w, w.shared_at(&signals.barrier, lane), true)?;
        let reachable = at.cta == to.cta || signals.pair && at.cta / 2 == to.cta / 2;
        if signals.multicast.is_none() && !reachable {
            let text = "the mbarrier is not in the CTA that receives the data; use an mbarrier of that CTA";
            return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
        }
        let ctas = match signals.multicast {
            Some(mask) => ctas_of(m, w.lane(mask, lane) as u32, lane)?,
            None => vec![to.cta],
        };
        // PTX ISA, "cp.async.bulk.tensor", `.multicast::cluster`, `.cta_group`.
        let cta = |to: u32| match (signals.multicast, signals.pair) {
            (None, _) => at.cta,
            (Some(_), false) => to,
            // In the destination's pair, the CTA with the same parity as the CTA of the mbarrier.
            (Some(_), true) => to & !1 | at.cta & 1,
        };
        let barriers = ctas.iter().map(|&to| MbarrierAt { cta: cta(to), ..at }).collect();
        Ok(Target { ctas, barriers })
    }

    /// Writes bytes at the same offset of each CTA.
    pub fn write(&self, m: &mut Machine<'_>, offset: u32, data: &[u8]) {
        for &cta in &self.ctas {
            m.write_shared(cta, offset, data);
        }
    }

    /// Records that a copy from global memory was requested.
    pub fn request(&self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>) {
        for &at in &self.barriers {
            m.reach_async(w, at.cta, agent);
            m.load_requested(at);
        }
    }

    /// Publishes the accesses of an agent to the threads that wait at each CTA's mbarrier.
    pub fn learn(&self, m: &mut Machine<'_>, agent: Option<&Agent>) -> Stopped<()> {
        let Some(agent) = agent else { return Ok(()) };
        self.barriers.iter().try_for_each(|&at| m.mbarrier_learn(at, agent))
    }

    /// Reports to each CTA's mbarrier that `bytes` bytes arrived.
    pub fn complete(&self, m: &mut Machine<'_>, bytes: u32, agent: Option<&Agent>) -> Stopped<()> {
        self.barriers.iter().try_for_each(|&at| m.mbarrier_complete(at, bytes, agent))
    }
}

fn ctas_of(m: &Machine<'_>, mask: u32, lane: usize) -> Stopped<Vec<u32>> {
    let ctas: Vec<u32> = lanes(mask & 0xffff).map(|n| n as u32).collect();
    match ctas.iter().find(|&&c| m.ctas.get(c as usize).is_none_or(|c| c.running == 0)) {
        None if !ctas.is_empty() => Ok(ctas),
        _ => {
            let text = format!(
                "the CTA mask {mask:#06x} is empty or names a missing CTA; the cluster has {} CTAs",
                m.ctas.len()
            );
            Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32))
        }
    }
}
