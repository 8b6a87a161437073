//! CTAs and tensor-memory cells that an instruction uses.

use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::tmem::Address as Cell;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::Address;

/// Number of CTAs that an instruction works on: one, or the two CTAs of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtaGroup(pub u32);

impl CtaGroup {
    /// Decodes the modifier. All instructions of a kernel name the same group: `ptxas` 13.5 refuses others, and on a B200
    /// a commit of the other group was an illegal instruction (tile-ai/tilelang#2287).
    pub fn decode(i: &mut Parsed<'_>) -> Result<CtaGroup> {
        let group = if i.has("cta_group::2") { 2 } else { 1 };
        if i.set_cta_group(group) != group {
            let text =
                "`.cta_group::1` and `.cta_group::2` in one kernel; all its tcgen05 instructions must name the same";
            return Err(DecodeError::faults(text));
        }
        Ok(CtaGroup(group))
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
