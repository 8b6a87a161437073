//! `tcgen05.shift`: each of 32 lanes except the last gets the 32 bytes of the next lane.

use super::cells::{CtaGroup, cell};
use super::turn::Turn;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::tmem::{Address as Cell, LANES_PER_WARP, SHIFT_COLUMNS};
use crate::machine::race::Mode;
use crate::machine::state::{Effect, Machine};
use crate::machine::tensor_core::Kind;
use crate::machine::warp::Warp;
use crate::operand::{Address, lanes};

/// `tcgen05.shift [address]`.
pub struct Shift {
    group: CtaGroup,
    address: Address,
}

impl Instruction for Shift {
    fn decode(i: &mut Parsed<'_>) -> Result<Shift> {
        Ok(Shift { group: CtaGroup::decode(i)?, address: i.address(0)? })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let base = cell(w, &self.address, lane);
            if !base.lane.is_multiple_of(LANES_PER_WARP) {
                let text =
                    format!("a shift starts at lane {}; the lane must be a multiple of {LANES_PER_WARP}", base.lane);
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            let ctas = self.group.ctas(w, m)?;
            let turn = Turn::take(m, w, lane, Kind::Shift, &[Kind::Mma]);
            for &cta in &ctas {
                for row in 0..LANES_PER_WARP {
                    let at = Cell { lane: base.lane + row, ..base };
                    for (touched, mode) in [(row > 0, Mode::Read), (row + 1 < LANES_PER_WARP, Mode::Write)] {
                        if touched {
                            m.tmem_access(cta, at, SHIFT_COLUMNS, turn.agent(), mode, w.pc())?;
                        }
                    }
                }
            }
            turn.start(m, w, Move { ctas, base });
        }
        Ok(Flow::Next)
    }
}

/// Copies the contents of each lane after `base` to the lane before it.
struct Move {
    ctas: Vec<u32>,
    base: Cell,
}

impl Effect for Move {
    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let Move { ctas, base } = self;
        for cta in ctas {
            for row in base.lane..base.lane + LANES_PER_WARP - 1 {
                let next = m.tmem_read_row(cta, Cell { lane: row + 1, ..base }, SHIFT_COLUMNS)?.to_vec();
                m.tmem_write_row(cta, Cell { lane: row, ..base }, &next);
            }
        }
        m.progress += 1;
        Ok(())
    }
}
