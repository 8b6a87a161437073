//! Clusters: their barrier, launch control, dependent launches (PTX ISA, "barrier.cluster", "clusterlaunchcontrol",
//! "griddepcontrol", "setmaxnreg").

use super::mbarrier::lane_at;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::machine::address::Spot;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::Mode;
use crate::machine::wait::WaitFor;
use crate::operand::{Src, lanes};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};
use std::sync::atomic::Ordering;

pub fn arrive(i: &mut Parsed<'_>) -> Decoded {
    let relaxed = i.has("relaxed");
    Ok(Box::new(move |w, m, mask| {
        if w.cluster_arrived & mask != 0 {
            let text = "an arrival at the cluster barrier while the wait for the last one is missing";
            return Err(Stop::new(FaultKind::BarrierDivergence, text));
        }
        w.cluster_arrived |= mask;
        let barrier = &mut m.cluster_barrier;
        w.cluster_generation = barrier.generation;
        if let (Some(race), false) = (&mut m.race, relaxed) {
            race.release(w.index, mask, &mut barrier.arriving);
        }
        barrier.arrived += mask.count_ones();
        barrier.advance();
        m.progress += 1;
        Ok(Flow::Next)
    }))
}

pub fn wait(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, m, mask| {
        if w.cluster_arrived & mask != mask {
            let text = "a wait at the cluster barrier without an arrival";
            return Err(Stop::new(FaultKind::BarrierDivergence, text));
        }
        let barrier = &m.cluster_barrier;
        if barrier.generation == w.cluster_generation {
            m.roles[w.role as usize].barrier_waits += 1;
            return Ok(Flow::Wait(WaitFor::Cluster { generation: w.cluster_generation }));
        }
        w.cluster_arrived &= !mask;
        if let Some(race) = &mut m.race {
            race.acquire(w.index, mask, &barrier.published);
        }
        Ok(Flow::Next)
    }))
}

/// Register counts that `setmaxnreg` takes.
const REGISTERS: std::ops::RangeInclusive<u64> = 24..=256;

/// `setmaxnreg`: `.dec` gives registers to the CTA's pool, `.inc` waits until the pool has them. What a thread has besides is
/// not looked at: `ptxas` keeps within it.
pub fn setmaxnreg(i: &mut Parsed<'_>) -> Decoded {
    let count = match i.src(0, Type::U32)? {
        Src::Constant(n) if REGISTERS.contains(&n) && n % 8 == 0 => n as u32,
        _ => return Err(DecodeError::invalid("the count is a constant multiple of 8 from 24 to 256")),
    };
    let Some(at_launch) = i.registers_at_launch() else { return Ok(Box::new(|_, _, _| Ok(Flow::Next))) };
    let more = i.has("inc");
    Ok(Box::new(move |w, m, _| {
        let now = w.register_limit.unwrap_or(at_launch);
        let free = &mut m.ctas[w.cta as usize].free_registers;
        match (more, count.checked_sub(now), now.checked_sub(count)) {
            (true, Some(missing), _) if missing > *free => {
                return Ok(Flow::Wait(WaitFor::Registers { cta: w.cta, count: missing }));
            }
            (true, Some(missing), _) => *free -= missing,
            (false, _, Some(released)) => {
                *free += released;
                m.progress += 1;
            }
            _ => {
                let text = format!("{count} registers a thread, and its warp has {now} already");
                return Err(Stop::new(FaultKind::InvalidOperand, text));
            }
        }
        w.register_limit = Some(count);
        Ok(Flow::Next)
    }))
}

/// `griddepcontrol`: the grids before this one are complete when it starts, but nobody knows it before `.wait`.
pub fn griddepcontrol(i: &mut Parsed<'_>) -> Decoded {
    let waits = i.has("wait");
    Ok(Box::new(move |w, m, mask| {
        let cta = &mut m.ctas[w.cta as usize];
        if waits {
            cta.awaited_grids = true;
            if let Some(race) = &mut m.race {
                race.acquire_end_of_grids(w.index, mask);
            }
        } else {
            let knows = |lane| m.race.as_ref().is_some_and(|race| race.knows_end_of_grids(w.index, lane as u32));
            cta.let_dependents_start |= !lanes(mask).all(knows);
        }
        Ok(Flow::Next)
    }))
}

/// Bytes of the response of `clusterlaunchcontrol.try_cancel`.
const RESPONSE: u32 = 16;

/// `clusterlaunchcontrol.try_cancel`: takes over a cluster that has not been launched. The response is opaque: here the
/// first CTA's index plus one in x, y, z, and zeros where none was left.
pub fn try_cancel(i: &mut Parsed<'_>) -> Decoded {
    i.communicates();
    let (to, barrier) = (i.address(0)?, i.address(1)?);
    let multicast = i.has("multicast::cluster::all");
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let agent = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, true));
            let space = to.space(Space::Shared);
            let Spot::Shared { offset, .. } = m.resolve(w, lane_at(w, &to, space, lane), RESPONSE)? else { continue };
            let at = m.mbarrier(w, lane_at(w, &barrier, barrier.space(Space::Shared), lane), true)?;
            let targets: Vec<u32> = if multicast { (0..m.ctas.len() as u32).collect() } else { vec![w.cta] };
            for &cta in &targets {
                if let (Some(race), Some(agent)) = (&mut m.race, &agent)
                    && let Err(conflict) = race.agent_access(agent, cta, offset, RESPONSE, Mode::Write, w.pc())
                {
                    return Err(m.conflict(Mode::Write, conflict, offset, RESPONSE).lane(lane as u32));
                }
            }
            m.start(w, move |m| {
                let next = m.launch.next_cluster.fetch_add(1, Ordering::Relaxed);
                let mut response = [0; RESPONSE as usize];
                if next < m.launch.clusters {
                    let origin = m.launch.cluster_origin(next);
                    for (d, index) in origin.iter().enumerate() {
                        response[4 * d..4 * d + 4].copy_from_slice(&(index + 1).to_le_bytes());
                    }
                }
                for &cta in &targets {
                    m.write_shared(cta, offset, &response);
                    let at = MbarrierAt { cta: if multicast { cta } else { at.cta }, ..at };
                    m.mbarrier_complete(at, RESPONSE, agent.as_ref())?;
                }
                Ok(())
            });
        }
        Ok(Flow::Next)
    }))
}

/// `clusterlaunchcontrol.query_cancel`.
pub fn query_cancel(i: &mut Parsed<'_>) -> Decoded {
    if i.has("is_canceled") {
        let p = i.predicate_dst(0)?;
        let words = i.words(i.operand(1)?, Type::B128)?;
        return Ok(Box::new(move |w, _, mask| {
            let low = w.get(words[0]);
            let found = (0..32).fold(0u32, |m, n| m | u32::from(low[n] != 0) << n);
            p.write(w, mask, found);
            Ok(Flow::Next)
        }));
    }
    let one = i.one_of(&["get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"]);
    let outs = match (i.operand(0)?, one) {
        (Operand::Vector(parts), None) => parts.iter().map(|p| i.dst_operand(p)).collect::<Result<Vec<_>, _>>()?,
        (single, Some(_)) => vec![i.dst_operand(single)?],
        _ => return Err(DecodeError::invalid("a vector of four registers expected")),
    };
    let first = match one {
        Some(name) if name.ends_with('y') => 1,
        Some(name) if name.ends_with('z') => 2,
        _ => 0,
    };
    let words = i.words(i.operand(1)?, Type::B128)?;
    Ok(Box::new(move |w, _, mask| {
        let words = [w.get(words[0]), w.get(words[1])];
        for (n, d) in outs.iter().enumerate() {
            let index = |lane: usize| (words[(first + n) / 2][lane] >> (32 * ((first + n) % 2))) as u32;
            // The fourth element of the vector is not defined.
            let row = std::array::from_fn(|lane| u64::from(index(lane).wrapping_sub(1)));
            d.write(w, mask, &row);
        }
        Ok(Flow::Next)
    }))
}
