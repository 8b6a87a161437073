//! The barrier of a cluster (PTX ISA, "Parallel Synchronization: barrier.cluster").

use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::Result;
use crate::decode::parsed::Parsed;
use crate::machine::footprint::{Arriving, Kind, Object};
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::lanes;

/// `barrier.cluster.arrive`.
pub struct Arrive {
    /// `.relaxed` publishes only the mbarriers that the thread initialized before its last `fence.mbarrier_init` (PTX
    /// ISA, "membar, fence": that fence orders "the prior mbarrier.init operations"; `barrier.cluster.arrive.relaxed`
    /// follows it in the manual's example).
    relaxed: bool,
}

impl Instruction for Arrive {
    fn decode(i: &mut Parsed<'_>) -> Result<Arrive> {
        i.awaits_loads();
        Ok(Arrive { relaxed: i.has("relaxed") })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        if w.cluster_arrived & mask != 0 {
            let text = "a second arrival at the cluster barrier without a wait after the first";
            return Err(Stop::new(FaultKind::BarrierDivergence, text));
        }
        w.cluster_arrived |= mask;
        let barrier = &mut m.cluster_barrier;
        w.cluster_generation = barrier.generation;
        if let Some(race) = &mut m.race {
            if self.relaxed {
                let fenced = lanes(mask).filter_map(|lane| w.initializations_fenced[lane]).max();
                fenced.into_iter().for_each(|t| race.release_initializations(w.index, t, &mut barrier.arriving));
                race.release_weakly(w.index, mask, &mut barrier.arriving);
            } else {
                race.release(w.index, mask, &mut barrier.arriving);
            }
        }
        barrier.arrived += mask.count_ones();
        m.advance_cluster_barrier();
        let (phase, after) = (w.cluster_generation, m.cluster_barrier.generation);
        let arriving = Arriving::uncounted(phase, after != phase);
        m.record(Object::ClusterBarrier(m.index), 0..1, Kind::Arrive(arriving));
        m.progress += 1;
        m.repeats += 1;
        Ok(Flow::Next)
    }
}

/// `barrier.cluster.wait`.
pub struct Wait;

impl Instruction for Wait {
    fn decode(_: &mut Parsed<'_>) -> Result<Wait> {
        Ok(Wait)
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
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
        w.cluster_waited = barrier.generation;
        if let Some(race) = &mut m.race {
            race.acquire(w.index, mask, &barrier.published);
        }
        m.record(Object::ClusterBarrier(m.index), 0..1, Kind::Await { phase: w.cluster_generation });
        Ok(Flow::Next)
    }
}
