//! `tcgen05.commit`: arrives at an mbarrier once all earlier `mma`, `cp` and `shift` of the thread are complete.

use super::cells::CtaGroup;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::machine::address::Spot;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::{Agent, merge};
use crate::machine::state::{Effect, Machine};
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::timing::work::Work;
use crate::types::Type;

/// `tcgen05.commit [mbarrier]{, ctaMask}`.
pub struct Commit {
    /// `true` if the commit covers the tensor cores of both CTAs of the pair.
    pair: bool,
    /// Address in shared memory; without a state space too, Triton's kernels name the window's address.
    barrier: Address,
    /// Mask of CTAs. The commit signals each CTA's mbarrier at the same offset.
    multicast: Option<Src>,
}

impl Instruction for Commit {
    fn decode(i: &mut Parsed<'_>) -> Result<Commit> {
        let barrier = i.address(0)?;
        let multicast = if i.has("multicast::cluster") { Some(i.src(1, Type::U16)?) } else { None };
        Ok(Commit { pair: CtaGroup::decode(i)? == CtaGroup(2), barrier, multicast })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let targets = self.targets(w, m, lane)?;
            let pipes = &m.pipes[(w.cta / 2) as usize];
            let after = m.predecessors(pipes.iter().filter_map(|pipe| pipe.last));
            let agent = m.race.as_mut().map(|race| {
                let mut known = None;
                for earlier in pipes.iter().filter_map(|pipe| pipe.known.as_ref()) {
                    merge(&mut known, earlier);
                }
                race.spawn_from(w.index, &known, false)
            });
            for &at in &targets {
                m.reach_async(w, at.cta, agent.as_ref());
                agent.iter().for_each(|agent| _ = m.commits.insert(at, (agent.clone(), w.pc())));
            }
            m.start_after(w, after, Arrivals { pair: self.pair, targets, agent });
        }
        Ok(Flow::Next)
    }
}

impl Commit {
    fn targets(&self, w: &Warp, m: &mut Machine<'_>, lane: usize) -> Stopped<Vec<MbarrierAt>> {
        let at = w.shared_at(&self.barrier, lane);
        let Some(multicast) = self.multicast else { return Ok(vec![m.mbarrier(w, at, true)?]) };
        let Spot::Shared { offset, .. } = m.resolve(w, at, 8)? else { return Ok(Vec::new()) };
        let ctas = w.lane(multicast, lane) as u32 & 0xffff;
        if let Some(cta) = lanes(ctas).find(|&cta| cta >= m.ctas.len()) {
            let text = format!("the CTA mask names rank {cta}, but the cluster has {} CTAs", m.ctas.len());
            return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
        }
        Ok(lanes(ctas).map(|cta| MbarrierAt { cta: cta as u32, offset }).collect())
    }
}

struct Arrivals {
    pair: bool,
    targets: Vec<MbarrierAt>,
    agent: Option<Agent>,
}

impl Effect for Arrivals {
    fn work(&self) -> Work {
        Work::Commit { pair: self.pair }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        for at in self.targets {
            let own = m.current.0 / m.warps_per_cta;
            if at.cta != own && m.ctas[at.cta as usize].running == 0 {
                let text = format!("tcgen05.commit signals an mbarrier of CTA rank {}, which has exited", at.cta);
                return Err(Stop::new(FaultKind::OutOfBounds, text));
            }
            // An mbarrier that was invalidated in the meantime gets no arrival.
            if m.ctas[at.cta as usize].mbarriers.contains_key(&at.offset) || !m.invalidated.contains(&at) {
                m.mbarrier_arrive_async(at, self.agent.as_ref())?;
            }
        }
        Ok(())
    }
}
