//! `tcgen05.ld` and `tcgen05.st`, which move data between registers and tensor memory, and their waits.

use super::cells::offset;
use super::turn::after_fence;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::tmem::{AccessShape, Address as Cell, LANES_PER_WARP, first_lane_of_warp};
use crate::machine::in_flight::TmemLoad;
use crate::machine::race::{Agent, Mode, merge};
use crate::machine::state::{Effect, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, Src, lanes};
use crate::timing::core as timing;
use crate::timing::work::Work;
use crate::types::Type;

/// Fields that loads and stores share.
struct Access {
    address: Address,
    shape: AccessShape,
    /// `true` if a register holds the halves of two columns.
    packed: bool,
}

impl Access {
    /// Decodes the access through operand `address` with `registers` registers. For shape `.16x32bx2`, operand `split`
    /// gives the position of the second half.
    fn decode(i: &mut Parsed<'_>, address: usize, split: usize, registers: usize) -> Result<Access> {
        let address = i.address(address)?;
        let shape = match i.one_of(&["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]) {
            Some("32x32b") => AccessShape::L32x32b,
            Some("16x64b") => AccessShape::L16x64b,
            Some("16x128b") => AccessShape::L16x128b,
            Some("16x256b") => AccessShape::L16x256b,
            _ => match i.src(split, Type::U32)? {
                Src::Constant(split) => AccessShape::L16x32bx2 { split: split as u32 },
                Src::Register(_) => return Err(DecodeError::invalid("the split column must be a constant")),
            },
        };
        let num = i.modifiers().iter().find_map(|m| m.strip_prefix('x').and_then(|n| n.parse::<u32>().ok()));
        let num = num.ok_or_else(|| DecodeError::invalid("`.num` is missing (`.x1` to `.x128`)"))?;
        if !shape.allows(num) {
            return Err(DecodeError::invalid(format!("`.x{num}` does not exist for this shape")));
        }
        let count = num * shape.registers();
        if registers != count as usize {
            return Err(DecodeError::invalid(format!("expected {count} registers")));
        }
        Ok(Access { address, shape, packed: i.one_of(&["pack::16b", "unpack::16b"]).is_some() })
    }

    /// Columns per register.
    fn columns(&self) -> u32 {
        1 + u32::from(self.packed)
    }

    /// Cells of each register, by lane. All lanes must name the same address. A warp always accesses its own quarter of
    /// the lanes: of the lane in the address, only the position within a quarter counts. The manual requires the
    /// address to name that quarter (PTX ISA, "Tensor Memory: Access restrictions"), but shipped kernels pass lane 0.
    fn cells(&self, w: &Warp, m: &mut Machine<'_>, mask: u32, registers: usize) -> Stopped<Vec<[Cell; 32]>> {
        let named = self.base(w, mask)?;
        let first = first_lane_of_warp(w.role);
        let mine = first..first + LANES_PER_WARP;
        if !mine.contains(&named.lane) {
            let text = format!(
                "lane {} is outside the quarter of warp {}, lanes {first} to {}",
                named.lane,
                w.role,
                mine.end - 1
            );
            m.warn(Stop::new(FaultKind::TmemWrongWarp, text))?;
        }
        let base = Cell { lane: first + named.lane % LANES_PER_WARP, ..named };
        let cell = |lane, register| offset(base, self.shape.cell(lane, register, self.packed));
        let cells: Vec<[Cell; 32]> =
            (0..registers as u32).map(|r| std::array::from_fn(|lane| cell(lane as u32, r))).collect();
        match cells.iter().flatten().find(|c| !mine.contains(&c.lane)) {
            None => Ok(cells),
            Some(cell) => {
                let text = format!(
                    "lane {} is outside the quarter of warp {}, lanes {first} to {}",
                    cell.lane,
                    w.role,
                    mine.end - 1
                );
                Err(Stop::new(FaultKind::TmemWrongWarp, text))
            }
        }
    }

    /// Checks that halves of registers are stored to pairs of columns. On a B200, `.16x32bx2.unpack::16b` whose second
    /// half begins one column behind the first is a misaligned address; two columns are right (triton-lang/triton#10321).
    fn check_even(&self, cells: &[[Cell; 32]]) -> Stopped<()> {
        match cells.iter().flatten().find(|cell| self.packed && cell.column % 2 != 0) {
            None => Ok(()),
            Some(cell) => {
                let text = format!("the halves of a register are stored to columns from {}, which is odd", cell.column);
                Err(Stop::new(FaultKind::Misaligned, text))
            }
        }
    }

    fn base(&self, w: &Warp, mask: u32) -> Stopped<Cell> {
        let lane = mask.trailing_zeros() as usize;
        let base = w.address(&self.address, lane);
        if let Some(other) = lanes(mask).find(|&n| w.address(&self.address, n) != base) {
            let text = format!("lanes {lane} and {other} name different addresses");
            return Err(Stop::new(FaultKind::InvalidOperand, text).lane(other as u32));
        }
        Ok(Cell::decode(base as u32))
    }
}

/// Creates the agent of a warp's access. The agent is ordered after the warp's earlier accesses.
fn spawn(m: &mut Machine<'_>, w: &Warp, mask: u32, store: bool) -> Option<Agent> {
    let strict = m.launch.config.strict;
    let thread = w.index * 32 + mask.trailing_zeros();
    let quarter = w.cta * 4 + w.role % 4;
    m.race.as_mut().map(|race| {
        let mut known = None;
        race.release(w.index, mask, &mut known);
        if let Some(own) = &w.tmem_known {
            merge(&mut known, own);
        }
        let agent = race.spawn_from(w.index, &known, false);
        let agent = if strict {
            // A warp's stores to the same cells stay in order. The manual does not order a load after a store.
            let mut stores = None;
            let earlier = w.tmem_stores.iter().filter(|_| store).filter_map(|s| s.1.as_ref());
            earlier.for_each(|earlier| race.finish_apart(earlier, &mut stores));
            after_fence(race, w, agent, stores.iter())
        } else {
            agent.in_quarter(quarter)
        };
        if store {
            race.begin_store(&agent, thread, quarter);
        }
        agent
    })
}

/// `tcgen05.ld registers, [address]`. By the manual, the registers get their values at `tcgen05.wait::ld`. On a GPU,
/// the first use of a register waits for its load (a scoreboard guards the register in SASS), so the emulator writes
/// the values at once. The load counts as a reader of tensor memory until a register is used or the load is waited for.
pub struct Ld {
    out: Vec<Dst>,
    access: Access,
}

impl Instruction for Ld {
    fn decode(i: &mut Parsed<'_>) -> Result<Ld> {
        let out = i.dst_vector(0)?;
        // The registers stay in flight after the instruction.
        i.writes_later();
        let access = Access::decode(i, 1, 2, out.len())?;
        Ok(Ld { out, access })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let cells = self.access.cells(w, m, mask, self.out.len())?;
        let agent = spawn(m, w, mask, false);
        for (d, row) in self.out.iter().zip(&cells) {
            let mut bits = [0; 32];
            for (lane, &cell) in row.iter().enumerate() {
                m.tmem_access(w.cta, cell, self.access.columns(), agent.as_ref(), Mode::Read, w.pc())?;
                let low = m.tmem_read(w.cta, cell)?;
                bits[lane] = match self.access.packed {
                    false => low.into(),
                    true => {
                        let high = m.tmem_read(w.cta, Cell { column: cell.column + 1, ..cell })?;
                        u64::from(low & 0xffff | high << 16)
                    }
                };
            }
            d.write(w, mask, &bits);
            if let Some(r) = d.register {
                w.define(r, mask, mask);
            }
        }
        if let Some(timed) = &mut m.timed {
            timed.access = timing::Access::Tmem { bytes: self.out.len() as u64 * 128 };
        }
        if m.sanitize {
            let registers = self.out.iter().filter_map(|d| d.register).collect();
            w.tmem_loads.push(TmemLoad { registers, agent, pc: w.pc() });
        }
        Ok(Flow::Next)
    }
}

/// `tcgen05.st [address], registers`. By the manual, the cells get their values at `tcgen05.wait::st`. On a GPU, later
/// loads and stores of the same quarter see the values without the wait, and shipped kernels rely on that. The tensor
/// core does not see them.
pub struct St {
    access: Access,
    from: Vec<Src>,
}

impl Instruction for St {
    fn decode(i: &mut Parsed<'_>) -> Result<St> {
        let from = i.src_vector(i.operands().len() - 1, Type::B32)?;
        Ok(St { access: Access::decode(i, 0, 1, from.len())?, from })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let cells = self.access.cells(w, m, mask, self.from.len())?;
        self.access.check_even(&cells)?;
        let agent = spawn(m, w, mask, true);
        for (s, row) in self.from.iter().zip(&cells) {
            for (lane, &cell) in row.iter().enumerate() {
                m.tmem_access(w.cta, cell, self.access.columns(), agent.as_ref(), Mode::Write, w.pc())?;
                let value = w.lane(*s, lane) as u32;
                if self.access.packed {
                    m.tmem_write(w.cta, cell, value & 0xffff);
                    m.tmem_write(w.cta, Cell { column: cell.column + 1, ..cell }, value >> 16);
                } else {
                    m.tmem_write(w.cta, cell, value);
                }
            }
        }
        // A warp's stores to the same cells stay in order.
        let after = m.predecessors(w.tmem_stores.iter().map(|s| s.0));
        let id = m.start_after(w, after, Completion { bytes: self.from.len() as u64 * 128 });
        w.tmem_stores.push((id, agent));
        Ok(Flow::Next)
    }
}

/// Moment from which the tensor core also sees a store.
struct Completion {
    bytes: u64,
}

impl Effect for Completion {
    fn work(&self) -> Work {
        Work::Tmem { bytes: self.bytes }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        m.progress += 1;
        Ok(())
    }
}

/// `tcgen05.wait::ld`, `tcgen05.wait::st`.
pub struct Wait {
    stores: bool,
}

impl Instruction for Wait {
    fn decode(i: &mut Parsed<'_>) -> Result<Wait> {
        i.awaits_loads();
        Ok(Wait { stores: i.has("wait::st") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let agents: Vec<Agent> = if self.stores {
            let mut waiting: Vec<u64> = w.tmem_stores.iter().map(|s| s.0).collect();
            m.await_operations(&mut waiting);
            if !waiting.is_empty() {
                return Ok(Flow::Wait(WaitFor::Operations(waiting)));
            }
            w.tmem_stores.drain(..).filter_map(|s| s.1).collect()
        } else {
            let loads = std::mem::take(&mut w.tmem_loads);
            loads.into_iter().filter_map(|load| load.agent).collect()
        };
        m.tmem_learn(w, mask, &agents);
        Ok(Flow::Next)
    }
}
