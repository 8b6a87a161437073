//! `st.async`, `red.async`: a store or reduction in another CTA's shared memory that signals an mbarrier of that CTA.

use super::reduction::Reduction;
use super::shared::SharedRange;
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::Agent;
use crate::machine::state::{Effect, Machine};
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::timing::work::Work;
use crate::types::Type;

/// `st.async [to], values, [mbarrier]`, `red.async [to], value, [mbarrier]`.
pub struct StAsync {
    to: Address,
    values: Vec<Src>,
    ty: Type,
    barrier: Address,
    reduction: Option<Reduction>,
}

impl Instruction for StAsync {
    fn decode(i: &mut Parsed<'_>) -> Result<StAsync> {
        let ty = i.ty()?;
        let reduction = if i.opcode() == "red" { Some(Reduction::named(i, ty)?) } else { None };
        Ok(StAsync { to: i.address(0)?, values: i.src_vector(1, ty)?, ty, barrier: i.address(2)?, reduction })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let piece = self.ty.bytes() as usize;
        let size = (piece * self.values.len()) as u32;
        for lane in lanes(mask) {
            let agent = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, false));
            let to = SharedRange::at(m, w, &self.to, lane, size, size)?;
            let barrier = m.mbarrier(w, w.shared_at(&self.barrier, lane), true)?;
            to.track(m, w, agent.as_ref(), Reduction::mode(self.reduction))?;
            let bytes = |s: &Src| w.lane(*s, lane).to_le_bytes()[..piece].to_vec();
            let data = self.values.iter().flat_map(bytes).collect();
            m.start(w, Deliver { to, data, reduction: self.reduction, barrier, agent });
        }
        Ok(Flow::Next)
    }
}

struct Deliver {
    to: SharedRange,
    data: Vec<u8>,
    reduction: Option<Reduction>,
    barrier: MbarrierAt,
    agent: Option<Agent>,
}

impl Effect for Deliver {
    fn work(&self) -> Work {
        Work::Transfer { bytes: self.to.bytes.into(), cta: self.to.cta }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let data = match self.reduction {
            Some(reduction) => reduction.apply(self.to.read(m), &self.data),
            None => self.data,
        };
        m.write_shared(self.to.cta, self.to.offset, &data);
        m.mbarrier_complete(self.barrier, self.to.bytes, self.agent.as_ref())
    }
}
