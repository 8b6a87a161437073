//! Instructions that control the launch: registers per warp, dependent grids, clusters that are taken over
//! (PTX ISA, "setmaxnreg", "griddepcontrol", "clusterlaunchcontrol").

use std::sync::atomic::Ordering;

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::machine::address::Spot;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::{Effect, Machine};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, PredicateDst, Src, lanes};
use crate::types::{Space, Type};

/// Register counts that `setmaxnreg` takes.
const REGISTERS: std::ops::RangeInclusive<u64> = 24..=256;

/// `setmaxnreg count`: `.dec` gives registers to the CTA's pool, `.inc` waits until the pool has enough. `ptxas`, not
/// the emulator, checks how many registers a thread really needs. In the manual all lanes of the warp execute it; an H200
/// does the same for one lane.
pub struct SetMaxNReg {
    count: u32,
    more: bool,
    /// Registers per thread at launch. `None`: the directives do not give them, and the instruction does nothing.
    at_launch: Option<u32>,
}

impl Instruction for SetMaxNReg {
    fn decode(i: &mut Parsed<'_>) -> Result<SetMaxNReg> {
        let count = match i.src(0, Type::U32)? {
            Src::Constant(n) if REGISTERS.contains(&n) && n % 8 == 0 => n as u32,
            _ => {
                return Err(DecodeError::invalid("the register count must be a constant multiple of 8 from 24 to 256"));
            }
        };
        i.by_any_lanes();
        Ok(SetMaxNReg { count, more: i.has("inc"), at_launch: i.registers_at_launch() })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        if mask != w.live() {
            let text = format!("lanes {:#010x} must execute it together; {mask:#010x} do", w.live());
            m.warn(Stop::new(FaultKind::WarpDivergence, text))?;
        }
        let (count, Some(at_launch)) = (self.count, self.at_launch) else { return Ok(Flow::Next) };
        let now = w.register_limit.unwrap_or(at_launch);
        let free = &mut m.ctas[w.cta as usize].free_registers;
        match (self.more, count.checked_sub(now), now.checked_sub(count)) {
            (true, Some(missing), _) if missing > *free => {
                return Ok(Flow::Wait(WaitFor::Registers { cta: w.cta, count: missing }));
            }
            (true, Some(missing), _) => *free -= missing,
            // The directives limit the registers at launch; `ptxas` may assign fewer, so `.inc` to the limit is legal.
            (true, None, _) if w.register_limit.is_none() => {}
            (false, _, Some(released)) => {
                *free += released;
                m.progress += 1;
            }
            _ => {
                let text = format!("`setmaxnreg` to {count} registers per thread, but the warp has {now}");
                return Err(Stop::new(FaultKind::InvalidOperand, text));
            }
        }
        w.register_limit = Some(count);
        Ok(Flow::Next)
    }
}

/// `griddepcontrol`. The emulator runs the earlier grids to completion first, but a thread may rely on that only after
/// `.wait`.
pub struct GridDepControl {
    wait: bool,
}

impl Instruction for GridDepControl {
    fn decode(i: &mut Parsed<'_>) -> Result<GridDepControl> {
        Ok(GridDepControl { wait: i.has("wait") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let cta = &mut m.ctas[w.cta as usize];
        if self.wait {
            cta.awaited_grids = true;
            if let Some(race) = &mut m.race {
                race.acquire_end_of_grids(w.index, mask);
            }
        } else {
            let knows = |lane| m.race.as_ref().is_some_and(|race| race.knows_end_of_grids(w.index, lane as u32));
            cta.let_dependents_start |= !lanes(mask).all(knows);
        }
        Ok(Flow::Next)
    }
}

/// Bytes of the response of `clusterlaunchcontrol.try_cancel`.
const RESPONSE: u32 = 16;

/// `clusterlaunchcontrol.try_cancel [to], [mbarrier]`: takes over a cluster that has not been launched. The response
/// is opaque to programs. The emulator stores the index of the cluster's first CTA in x, y and z, each plus one; all
/// zeros if no cluster is left.
pub struct TryCancel {
    to: Address,
    barrier: Address,
    /// `true` if every CTA of the cluster gets the response.
    multicast: bool,
}

impl Instruction for TryCancel {
    fn decode(i: &mut Parsed<'_>) -> Result<TryCancel> {
        i.communicates();
        let (to, barrier) = (i.address(0)?, i.address(1)?);
        Ok(TryCancel { to, barrier, multicast: i.has("multicast::cluster::all") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let agent = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, true));
            let to = w.lane_at(&self.to, self.to.space(Space::Shared), lane);
            let Spot::Shared { offset, .. } = m.resolve(w, to, RESPONSE)? else { continue };
            let at = m.mbarrier(w, w.lane_at(&self.barrier, self.barrier.space(Space::Shared), lane), true)?;
            let targets: Vec<MbarrierAt> = if self.multicast {
                (0..m.ctas.len() as u32).map(|cta| MbarrierAt { cta, ..at }).collect()
            } else {
                vec![at]
            };
            for MbarrierAt { cta, .. } in &targets {
                if let (Some(race), Some(agent)) = (&mut m.race, &agent)
                    && let Err(conflict) = race.agent_access(agent, *cta, offset, RESPONSE, Mode::Write, w.pc())
                {
                    m.hazard(m.conflict(Mode::Write, conflict, offset, RESPONSE).lane(lane as u32))?;
                }
            }
            m.start(w, Respond { offset, targets, agent });
        }
        Ok(Flow::Next)
    }
}

/// Writes the response at `offset` of each CTA and signals the CTA's mbarrier.
struct Respond {
    offset: u32,
    targets: Vec<MbarrierAt>,
    agent: Option<Agent>,
}

impl Effect for Respond {
    fn communicates(&self) -> bool {
        true
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let next = m.launch.next_cluster.fetch_add(1, Ordering::Relaxed);
        let mut response = [0; RESPONSE as usize];
        if next < m.launch.clusters {
            let origin = m.launch.cluster_origin(next);
            for (word, index) in response.chunks_exact_mut(4).zip(origin) {
                word.copy_from_slice(&(index + 1).to_le_bytes());
            }
        }
        for &at in &self.targets {
            m.write_shared(at.cta, self.offset, &response);
            m.mbarrier_complete(at, RESPONSE, self.agent.as_ref())?;
        }
        Ok(())
    }
}

/// `clusterlaunchcontrol.query_cancel`: decodes a response.
pub struct QueryCancel {
    /// The low and the high 64 bits.
    response: [Src; 2],
    query: Query,
}

enum Query {
    IsCanceled(PredicateDst),
    /// Components of the first CTA's index, starting with component `n`.
    FirstCta(usize, Vec<Dst>),
}

impl Instruction for QueryCancel {
    fn decode(i: &mut Parsed<'_>) -> Result<QueryCancel> {
        let query = if i.has("is_canceled") {
            Query::IsCanceled(i.predicate_dst(0)?)
        } else {
            let one = i.one_of(&["get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"]);
            let first = match one {
                Some("get_first_ctaid::y") => 1,
                Some("get_first_ctaid::z") => 2,
                _ => 0,
            };
            let out = i.dst_vector(0)?;
            if out.len() != if one.is_some() { 1 } else { 4 } {
                return Err(DecodeError::invalid(
                    "expected one register for a single component, otherwise a vector of four",
                ));
            }
            Query::FirstCta(first, out)
        };
        let words = i.words(i.operand(1)?, Type::B128)?;
        Ok(QueryCancel { response: [words[0], words[1]], query })
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let words = self.response.map(|word| w.get(word));
        match &self.query {
            Query::IsCanceled(p) => {
                let found = (0..32).fold(0u32, |m, n| m | u32::from(words[0][n] != 0) << n);
                p.write(w, mask, found);
            }
            Query::FirstCta(first, out) => {
                for (d, n) in out.iter().zip(*first..) {
                    let index = |lane: usize| (words[n / 2][lane] >> (32 * (n % 2))) as u32;
                    // The fourth element of the vector is not defined.
                    d.write(w, mask, &std::array::from_fn(|lane| u64::from(index(lane).wrapping_sub(1))));
                }
            }
        }
        Ok(Flow::Next)
    }
}
