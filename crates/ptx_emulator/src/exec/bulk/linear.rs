//! `cp.async.bulk` and `cp.reduce.async.bulk`: copies between linear ranges.

use super::groups::Copy;
use super::reduction::Reduction;
use super::shared::{BULK_ALIGN, SharedRange, spawn, together};
use super::target::{Signals, Target};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::{Effect, Machine};
use crate::machine::warp::Warp;
use crate::operand::{Address, Src};
use crate::timing::work::Work;
use crate::types::Type;

fn size_of(w: &Warp, size: Src, lane: usize) -> Stopped<u32> {
    let size = w.lane(size, lane) as u32;
    if size.is_multiple_of(BULK_ALIGN) && size > 0 {
        return Ok(size);
    }
    let text = format!("a bulk copy of {size} bytes; the size must be a positive multiple of {BULK_ALIGN}");
    Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32))
}

fn global_address(w: &Warp, address: &Address, lane: usize) -> Stopped<u64> {
    let address = w.address(address, lane);
    if address.is_multiple_of(BULK_ALIGN.into()) {
        return Ok(address);
    }
    let text = format!("global address {address:#x} is not a multiple of {BULK_ALIGN}");
    Err(Stop::new(FaultKind::Misaligned, text).lane(lane as u32))
}

/// From global to shared memory: `cp.async.bulk [to], [from], size, [mbarrier]{, ctaMask}`.
pub struct Load {
    to: Address,
    from: Address,
    size: Src,
    signals: Signals,
}

impl Instruction for Load {
    fn decode(i: &mut Parsed<'_>) -> Result<Load> {
        let (to, from, size, barrier) = (i.address(0)?, i.address(1)?, i.src(2, Type::U32)?, i.address(3)?);
        let multicast = if i.has("multicast::cluster") { Some(i.src(4, Type::U16)?) } else { None };
        Ok(Load { to, from, size, signals: Signals { barrier, multicast, pair: false } })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let operands = [self.to.base, self.from.base, self.size].into_iter().chain(self.signals.operands());
        let operands: Vec<Src> = operands.collect();
        for lanes in together(m, w, mask, &operands) {
            let lane = lanes.trailing_zeros() as usize;
            let size = size_of(w, self.size, lane)?;
            let agent = spawn(m, w, lanes);
            let to = SharedRange::at(m, w, &self.to, lane, size, BULK_ALIGN)?;
            let target = Target::resolve(m, w, lane, to, &self.signals)?;
            for &cta in &target.ctas {
                SharedRange { cta, ..to }.track(m, w, agent.as_ref(), Mode::Write)?;
            }
            let address = global_address(w, &self.from, lane)?;
            m.issue_global(w, lane, agent.as_ref(), (address, size.into()), Mode::Read)?;
            let bulk = &mut m.roles[w.role as usize].bulk;
            bulk.shared_store += u64::from(size) * target.ctas.len() as u64;
            bulk.global_load += u64::from(size);
            target.request(m, w, agent.as_ref());
            m.start(w, Deliver { address, to, target, agent });
        }
        Ok(Flow::Next)
    }
}

struct Deliver {
    address: u64,
    to: SharedRange,
    target: Target,
    agent: Option<Agent>,
}

impl Effect for Deliver {
    fn work(&self) -> Work {
        Work::Load { ranges: vec![(self.address, self.to.bytes)], ctas: self.target.ctas.clone(), bulk: true }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let mut data = vec![0; self.to.bytes as usize];
        load_global(m, self.address, &mut data)?;
        self.target.write(m, self.to.offset, &data);
        self.target.complete(m, self.to.bytes, self.agent.as_ref())
    }
}

/// Reads global memory on behalf of a copy.
pub fn load_global(m: &mut Machine<'_>, address: u64, out: &mut [u8]) -> Stopped<()> {
    let (allocation, at) = m.locate_global(address, out.len() as u64)?;
    allocation.read(at, out);
    m.buffers[allocation.index].bulk_loaded += out.len() as u64;
    Ok(())
}

/// From shared memory to the shared memory of a CTA of the cluster, with or without a reduction:
/// `cp.async.bulk [to], [from], size, [mbarrier]`.
pub struct SharedToShared {
    to: Address,
    from: Address,
    size: Src,
    signals: Signals,
    reduction: Option<Reduction>,
}

impl Instruction for SharedToShared {
    fn decode(i: &mut Parsed<'_>) -> Result<SharedToShared> {
        let (to, from, size, barrier) = (i.address(0)?, i.address(1)?, i.src(2, Type::U32)?, i.address(3)?);
        let reduction = Reduction::decode(i, i.ty().unwrap_or(Type::U32))?;
        Ok(SharedToShared { to, from, size, signals: Signals { barrier, multicast: None, pair: false }, reduction })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let operands = [self.to.base, self.from.base, self.size].into_iter().chain(self.signals.operands());
        let operands: Vec<Src> = operands.collect();
        for lanes in together(m, w, mask, &operands) {
            let lane = lanes.trailing_zeros() as usize;
            let size = size_of(w, self.size, lane)?;
            let agent = spawn(m, w, lanes);
            let to = SharedRange::at(m, w, &self.to, lane, size, BULK_ALIGN)?;
            let target = Target::resolve(m, w, lane, to, &self.signals)?;
            to.track(m, w, agent.as_ref(), Mode::Write)?;
            let from = SharedRange::at(m, w, &self.from, lane, size, BULK_ALIGN)?;
            from.track(m, w, agent.as_ref(), Mode::Read)?;
            let bulk = &mut m.roles[w.role as usize].bulk;
            bulk.shared_store += u64::from(size);
            bulk.shared_load += u64::from(size);
            m.start(w, Transfer { from, to, target, reduction: self.reduction, agent });
        }
        Ok(Flow::Next)
    }
}

struct Transfer {
    from: SharedRange,
    to: SharedRange,
    target: Target,
    reduction: Option<Reduction>,
    agent: Option<Agent>,
}

impl Effect for Transfer {
    fn work(&self) -> Work {
        Work::Transfer { bytes: self.to.bytes.into(), cta: self.to.cta }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let data = match self.reduction {
            Some(reduction) => reduction.apply(self.to.read(m), self.from.read(m)),
            None => self.from.read(m).to_vec(),
        };
        self.target.write(m, self.to.offset, &data);
        self.target.complete(m, self.to.bytes, self.agent.as_ref())
    }
}

/// From shared to global memory, with or without a reduction: `cp.async.bulk [to], [from], size`.
pub struct Store {
    to: Address,
    from: Address,
    size: Src,
    reduction: Option<Reduction>,
}

impl Instruction for Store {
    fn decode(i: &mut Parsed<'_>) -> Result<Store> {
        let (to, from, size) = (i.address(0)?, i.address(1)?, i.src(2, Type::U32)?);
        let reduction = Reduction::decode(i, i.ty().unwrap_or(Type::U32))?;
        if reduction.is_some() {
            i.communicates();
        }
        Ok(Store { to, from, size, reduction })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let operands = [self.to.base, self.from.base, self.size];
        for lanes in together(m, w, mask, &operands) {
            let lane = lanes.trailing_zeros() as usize;
            let size = size_of(w, self.size, lane)?;
            let agent = spawn(m, w, lanes);
            let from = SharedRange::at(m, w, &self.from, lane, size, BULK_ALIGN)?;
            let address = global_address(w, &self.to, lane)?;
            from.track(m, w, agent.as_ref(), Mode::Read)?;
            Copy { pieces: vec![(from, address)], reduction: self.reduction }.start(m, w, lanes, agent)?;
        }
        Ok(Flow::Next)
    }
}

/// `cp.async.bulk.prefetch`: a hint without effect.
pub fn prefetch(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|_, _, _| Ok(Flow::Next)))
}
