//! The CTAs and the cells of tensor memory that an instruction works on.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::parsed::Parsed;
use crate::hw::tmem::Address as Cell;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::Address;

/// How many CTAs an instruction works in: one, or the two of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtaGroup(pub u32);

impl CtaGroup {
    pub fn decode(i: &Parsed<'_>) -> CtaGroup {
        CtaGroup(if i.has("cta_group::2") { 2 } else { 1 })
    }

    /// The CTAs, in order of rank.
    pub fn ctas(self, w: &Warp, m: &Machine<'_>) -> Stopped<Vec<u32>> {
        if self.0 == 1 {
            return Ok(vec![w.cta]);
        }
        let first = w.cta & !1;
        if first as usize + 1 >= m.ctas.len() {
            let text = ".cta_group::2 in a cluster without a peer CTA";
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        Ok(vec![first, first + 1])
    }
}

/// The cell that a lane's address names.
pub fn cell(w: &Warp, address: &Address, lane: usize) -> Cell {
    Cell::decode(w.address(address, lane) as u32)
}

/// A cell relative to another.
pub fn offset(base: Cell, cell: Cell) -> Cell {
    Cell { lane: base.lane + cell.lane, column: base.column + cell.column }
}
