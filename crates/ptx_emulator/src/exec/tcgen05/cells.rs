//! CTAs and tensor-memory cells that an instruction uses.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::parsed::Parsed;
use crate::hw::tmem::Address as Cell;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::Address;

/// Number of CTAs that an instruction works on: one, or the two CTAs of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtaGroup(pub u32);

impl CtaGroup {
    pub fn decode(i: &Parsed<'_>) -> CtaGroup {
        CtaGroup(if i.has("cta_group::2") { 2 } else { 1 })
    }

    /// CTAs of the group, in order of rank.
    pub fn ctas(self, w: &Warp, m: &Machine<'_>) -> Stopped<Vec<u32>> {
        if self.0 == 1 {
            return Ok(vec![w.cta]);
        }
        let first = w.cta & !1;
        if first as usize + 1 >= m.ctas.len() {
            let text = ".cta_group::2 needs a peer CTA, but the cluster has none";
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        Ok(vec![first, first + 1])
    }
}

/// Cell at the address that a lane names.
pub fn cell(w: &Warp, address: &Address, lane: usize) -> Cell {
    Cell::decode(w.address(address, lane) as u32)
}

/// Cell at an offset from `base`.
pub fn offset(base: Cell, cell: Cell) -> Cell {
    Cell { lane: base.lane + cell.lane, column: base.column + cell.column }
}
