//! `tcgen05.alloc`, `tcgen05.dealloc` and `tcgen05.relinquish_alloc_permit`.

use super::cells::CtaGroup;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::tmem::{Address as Cell, is_allocation_size};
use crate::machine::address::Spot;
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src};
use crate::types::{Space, Type};

/// `tcgen05.alloc [to], columns`. With `.cta_group::2`, a warp of each CTA of a pair executes it. Both continue when
/// both have allocated (PTX ISA, "tcgen05.alloc": it "may block", and needs a warp of each of the peer CTAs).
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
        Ok(Alloc { group: CtaGroup::decode(i), to, space: i.space_at(&to), columns })
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
        if self.group.ctas(w, m)?.len() == 1 {
            return Ok(Flow::Next);
        }
        let own = &mut m.ctas[w.cta as usize].tmem;
        own.pair_allocations += 1;
        let count = own.pair_allocations;
        m.progress += 1;
        Ok(Flow::Pause(WaitFor::PeerAllocation { peer: w.cta ^ 1, count }))
    }
}

/// `tcgen05.dealloc at, columns`.
pub struct Dealloc {
    at: Src,
    columns: Src,
}

impl Instruction for Dealloc {
    fn decode(i: &mut Parsed<'_>) -> Result<Dealloc> {
        Ok(Dealloc { at: i.src(0, Type::U32)?, columns: i.src(1, Type::U32)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let lane = mask.trailing_zeros() as usize;
        let (at, columns) = (w.lane(self.at, lane) as u32, w.lane(self.columns, lane) as u32);
        m.ctas[w.cta as usize].tmem.free(Cell::decode(at).column, columns)?;
        m.progress += 1;
        Ok(Flow::Next)
    }
}

/// `tcgen05.relinquish_alloc_permit`.
pub struct Relinquish;

impl Instruction for Relinquish {
    fn decode(_: &mut Parsed<'_>) -> Result<Relinquish> {
        Ok(Relinquish)
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, _: u32) -> Stopped<Flow> {
        m.ctas[w.cta as usize].tmem.relinquished = true;
        Ok(Flow::Next)
    }
}
