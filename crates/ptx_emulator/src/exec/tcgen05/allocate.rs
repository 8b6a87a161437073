//! `tcgen05.alloc`, `tcgen05.dealloc` and `tcgen05.relinquish_alloc_permit`.

use super::cells::CtaGroup;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::tmem::{Address as Cell, is_allocation_size};
use crate::machine::address::Spot;
use crate::machine::race::{Detector, Mode};
use crate::machine::state::Machine;
use crate::machine::tensor_memory::PairAllocation;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src};
use crate::types::{Space, Type};

/// `tcgen05.alloc [to], columns`. With `.cta_group::2`, a warp of each CTA of a pair executes it (PTX ISA, "tcgen05.alloc":
/// it "may block", and needs a warp of each of the peer CTAs). Behind a cluster barrier, both continue when both have
/// allocated. Without one, neither waits for the other (see [`Dealloc`]), unless
/// [`LaunchConfig::alloc_rendezvous`](crate::LaunchConfig::alloc_rendezvous) says so.
pub struct Alloc {
    group: CtaGroup,
    to: Address,
    space: Space,
    columns: Src,
}

impl Instruction for Alloc {
    fn decode(i: &mut Parsed<'_>) -> Result<Alloc> {
        i.uses_tmem();
        let (to, columns) = (i.address(0)?, i.src(1, Type::U32)?);
        Ok(Alloc { group: CtaGroup::decode(i)?, to, space: i.space_at(&to), columns })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let lane = mask.trailing_zeros() as usize;
        let columns = w.lane(self.columns, lane) as u32;
        if !is_allocation_size(columns) {
            let text = format!("an allocation of {columns} columns; the number must be a power of two from 32 to 512");
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let tmem = &mut m.ctas[w.cta as usize].tmem;
        if tmem.relinquished {
            let text = "an allocation after tcgen05.relinquish_alloc_permit";
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let Some(first) = tmem.allocate(columns) else {
            return Ok(Flow::Wait(WaitFor::Columns { cta: w.cta, columns }));
        };
        // The hardware writes the address through the async proxy, but readers need no proxy fence.
        let to = w.lane_at(&self.to, self.space, lane);
        m.store(w, to, Mode::Write, &first.to_le_bytes())?;
        if let Spot::Shared { cta, offset } = m.resolve(w, to, 4)? {
            let generation = m.generation_of_next_arrival(w);
            m.ctas[cta as usize].allocation_words.insert(offset, (w.pc(), generation));
        }
        if self.group.ctas(w, m)?.len() == 2 {
            let time = m.race.as_mut().map_or(0, |race| race.tick(w.index));
            let met = w.cluster_waited;
            m.ctas[w.cta as usize].tmem.pair_allocations.push(PairAllocation { warp: w.index, time, met });
            m.progress += 1;
            if met > 0 || m.launch.config.alloc_rendezvous {
                let count = m.ctas[w.cta as usize].tmem.pair_allocations.len();
                return Ok(Flow::Pause(WaitFor::PeerAllocation { peer: w.cta ^ 1, count }));
            }
        }
        Ok(Flow::Next)
    }
}

/// `tcgen05.dealloc at, columns`. With `.cta_group::2`, it must be ordered after the peer's allocation: on a B300, 96 of
/// 96 launches failed whose first CTA freed its columns before the second one, 10 us late, had allocated, and none did
/// with a cluster barrier in between (NVIDIA/cutlass#3435).
pub struct Dealloc {
    group: CtaGroup,
    at: Src,
    columns: Src,
}

impl Instruction for Dealloc {
    fn decode(i: &mut Parsed<'_>) -> Result<Dealloc> {
        Ok(Dealloc { group: CtaGroup::decode(i)?, at: i.src(0, Type::U32)?, columns: i.src(1, Type::U32)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let lane = mask.trailing_zeros() as usize;
        let (at, columns) = (w.lane(self.at, lane) as u32, w.lane(self.columns, lane) as u32);
        if self.group.ctas(w, m)?.len() == 2 {
            check_peer(w, m, lane)?;
        }
        let first = Cell::decode(at).column;
        m.ctas[w.cta as usize].tmem.free(first, columns)?;
        m.tmem_retire(w, mask, first, columns)?;
        m.progress += 1;
        Ok(Flow::Next)
    }
}

/// Checks that a warp of a pair knows the peer's allocation that belongs to its CTA's first allocation. With a cluster
/// barrier before both allocations instead, no launch failed on a B300, which is a warning.
fn check_peer(w: &Warp, m: &Machine<'_>, lane: usize) -> Stopped<()> {
    let allocations = |cta: u32| &m.ctas[cta as usize].tmem.pair_allocations;
    let (own, peer) = (allocations(w.cta), allocations(w.cta ^ 1));
    let found = own.len().checked_sub(1).and_then(|last| peer.get(last));
    let known = |peer: &PairAllocation| {
        let reaches = |race: &Detector| race.clock(w.index, lane as u32).met_time(peer.warp * 32) >= peer.time;
        m.race.as_ref().is_none_or(reaches)
    };
    // The second CTA may free before the first CTA allocates: no launch failed on a B300 (NVIDIA/cutlass#3435). Only level
    // `machine` accepts this, because nothing orders the second CTA's allocation before the end of the first CTA.
    let second = m.race.is_none() && w.cta % 2 == 1;
    if m.launch.config.alloc_rendezvous || second || found.is_some_and(known) {
        return Ok(());
    }
    let other = w.cta ^ 1;
    let text = format!(
        "a pair's columns are freed, and the tcgen05.alloc of the peer, CTA rank {other}, is not ordered before"
    );
    let stop = Stop::new(FaultKind::TmemNotAllocated, text);
    if own.last().is_some_and(|own| own.met > 0) { m.warn(stop) } else { Err(stop) }
}

/// `tcgen05.relinquish_alloc_permit`.
pub struct Relinquish;

impl Instruction for Relinquish {
    fn decode(i: &mut Parsed<'_>) -> Result<Relinquish> {
        CtaGroup::decode(i)?;
        Ok(Relinquish)
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, _: u32) -> Stopped<Flow> {
        m.ctas[w.cta as usize].tmem.relinquished = true;
        Ok(Flow::Next)
    }
}
