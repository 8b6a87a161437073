//! End of a wait, and its description in a deadlock report.

use crate::machine::address::SHARED_BASE;
use crate::machine::mbarrier::Phase;
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;

impl WaitFor {
    /// Whether the wait is over.
    pub fn ready(&self, machine: &Machine<'_>, mask: u32) -> bool {
        match self {
            WaitFor::Lanes { need, .. } => need & !mask == 0,
            WaitFor::Released | WaitFor::Alone => true,
            WaitFor::Barrier { cta, id, generation } => {
                machine.ctas[*cta as usize].barriers[*id as usize].generation != *generation
            }
            WaitFor::Operations(ids) => ids.iter().all(|id| !machine.pending.contains(*id)),
            WaitFor::Mbarrier { at, phase, .. } => {
                let barrier = machine.ctas[at.cta as usize].mbarriers.get(&at.offset);
                barrier.is_none_or(|b| b.is_complete(*phase))
            }
            WaitFor::Progress { since, .. } => machine.progress != *since,
            WaitFor::TimedOut => true,
            WaitFor::Columns { cta, columns } => machine.ctas[*cta as usize].tmem.room(*columns).is_some(),
            WaitFor::PeerAllocation { peer, count } => {
                machine.ctas[*peer as usize].tmem.pair_allocations.len() >= *count
            }
            WaitFor::Warpgroup { cta, group, count } => machine.warpgroups[&(*cta, *group)].have_issued(*count),
            WaitFor::Registers { cta, count } => machine.ctas[*cta as usize].free_registers >= *count,
            WaitFor::Cluster { generation } => machine.cluster_barrier.generation != *generation,
        }
    }

    /// Description for a deadlock report.
    pub fn describe(&self, machine: &Machine<'_>) -> String {
        match self {
            WaitFor::Lanes { need, .. } => format!("lanes {need:#010x} of its warp"),
            WaitFor::Released | WaitFor::Alone => "nothing".into(),
            WaitFor::Barrier { cta, id, .. } => {
                let barrier = &machine.ctas[*cta as usize].barriers[*id as usize];
                format!("barrier {id}: {} of {} threads have arrived", barrier.arrived, barrier.expected)
            }
            WaitFor::Operations(ids) => format!("{} asynchronous operations", ids.len()),
            WaitFor::Mbarrier { at, .. } | WaitFor::Progress { at, .. } => {
                let state = machine.ctas[at.cta as usize].mbarriers.get(&at.offset).map(|b| b.describe());
                let byte = at.offset - SHARED_BASE;
                let phase = match self {
                    WaitFor::Mbarrier { phase: Phase::Parity(odd), .. } => format!("parity {} of ", u32::from(*odd)),
                    WaitFor::Mbarrier { phase: Phase::Token(n), .. } => format!("phase {n} of "),
                    _ => String::new(),
                };
                format!("{phase}the mbarrier at byte {byte} of shared memory: {}", state.unwrap_or_default())
            }
            WaitFor::TimedOut => "nothing".into(),
            WaitFor::Columns { columns, .. } => format!("{columns} free columns of tensor memory"),
            WaitFor::PeerAllocation { peer, .. } => format!("tcgen05.alloc.cta_group::2 of the peer, CTA rank {peer}"),
            WaitFor::Warpgroup { .. } => "the wgmma of the other warps of its warpgroup".into(),
            WaitFor::Registers { cta, count } => {
                let free = machine.ctas[*cta as usize].free_registers;
                format!("{count} more registers per thread; warps of its CTA have released {free}")
            }
            WaitFor::Cluster { .. } => machine.cluster_barrier.describe(),
        }
    }
}
