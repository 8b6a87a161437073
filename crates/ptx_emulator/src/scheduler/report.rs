//! The scheduler's part of a fault: the thread and place, and the waiting parties of a deadlock.

use std::collections::BTreeSet;

use super::cluster::Cluster;
use crate::config::fault::{Fault, FaultKind, Party, Stop, Warning};
use crate::config::report::Class;
use crate::machine::address::{RANK_SHIFT, SHARED_BASE, space_of};
use crate::machine::state::Noted;
use crate::machine::wait::WaitFor;
use crate::machine::warp::{Fragment, Warp};
use crate::operand::Src;
use crate::types::Space;

/// Maximum number of parties of a fault that are listed, and of instructions that could end their waits.
const MOST_PARTIES: usize = 8;
const MOST_WRITERS: usize = 3;

impl<'k> Cluster<'k> {
    /// Adds the thread and place to a handler's fault.
    pub(super) fn fault(&self, warp: usize, mut stop: Stop) -> Fault {
        let w = &self.warps[warp];
        stop.pc = stop.pc.or_else(|| w.fragments.get(w.current).map(|f| f.pc));
        stop.into_fault(self.kernel, Some((self.machine.ctas[w.cta as usize].index, w.role)))
    }

    /// Output that the cluster has printed.
    pub fn output(&self) -> &str {
        &self.machine.output
    }

    /// Warnings and hazards so far, one per place.
    pub fn noted(&mut self) -> (Vec<Warning>, Vec<Warning>) {
        let (mut warnings, mut hazards) = (Vec::new(), Vec::new());
        for Noted { warp, stop, grave, times } in self.machine.noted.take() {
            let found = Warning { fault: self.fault(warp as usize, stop), times };
            if grave { Warning::add(&mut hazards, found) } else { Warning::count(&mut warnings, found) }
        }
        (warnings, hazards)
    }

    /// Fault to report if this cluster and `others`, all clusters that have begun, are stuck forever. `not_begun` clusters
    /// have not begun, because no other ends.
    pub fn no_progress(&self, others: &[Cluster<'k>], not_begun: u64) -> Fault {
        let kernel = self.kernel;
        let text = "threads repeat the same instructions, and nothing is left that could change what they read";
        let mut fault = Fault::bare(FaultKind::NoProgress, &kernel.name, text.to_owned());
        if let Some((w, f)) = self.repeating().next() {
            (fault.cta, fault.warp) = (Some(self.machine.ctas[w.cta as usize].index), Some(w.role));
            fault.lane = Some(f.mask.trailing_zeros());
        }
        let mut read = Vec::new();
        fault.others = self.parties(&mut read);
        fault.place = fault.others.first().and_then(|party| party.place.clone().map(Box::new));
        for other in others.iter().filter(|other| other.machine.index != self.machine.index) {
            for party in other.parties(&mut read) {
                if !fault.others.iter().any(|known| known.place == party.place && known.what.ends_with(&party.what)) {
                    let [x, y, z] = other.machine.ctas[0].index;
                    let what = format!("CTA ({x}, {y}, {z}), {}", party.what);
                    fault.others.push(Party { what, ..party });
                }
            }
        }
        let more = fault.others.len().saturating_sub(MOST_PARTIES);
        fault.others.truncate(MOST_PARTIES);
        if more > 0 {
            fault.others.push(Party { what: format!("and {more} more"), place: None });
        }
        fault.others.extend(self.writers(&read, others));
        if not_begun > 0 {
            let what = format!(
                "{not_begun} of {} clusters have not begun: a GPU of {} SMs holds {} at a time, and none ends",
                self.machine.launch.clusters,
                self.machine.launch.sms,
                others.len().max(1)
            );
            fault.others.push(Party { what, place: None });
        }
        fault
    }

    /// Threads that repeat the same steps.
    fn repeating(&self) -> impl Iterator<Item = (&Warp, &Fragment)> {
        let warps = self.warps.iter().filter(|w| self.stall.repeats(w.index as usize));
        warps.flat_map(|w| w.fragments.iter().map(move |f| (w, f)))
    }

    /// Describes the loops and waits of the cluster's threads. Adds the spaces that they read to `read`.
    fn parties(&self, read: &mut Vec<Space>) -> Vec<Party> {
        let mut parties: Vec<Party> = self.repeating().map(|(w, f)| self.repeated(w, f, read)).collect();
        let waiting = self.waiting().into_iter().filter(|(w, ..)| !self.stall.repeats(w.index as usize));
        parties.extend(waiting.map(|(.., party)| party));
        parties
    }

    /// Adds what the cluster's threads repeat or wait for to the fault of a limit, if nothing has changed for long.
    pub(super) fn explain_limit(&self, fault: &mut Fault) {
        if self.stall.is_quiet(self.machine.changes(), self.machine.clock.now) {
            let mut read = Vec::new();
            let looping = |w: &&Warp| !self.stall.cycle(w.index as usize).is_empty();
            let running = self.warps.iter().filter(looping).flat_map(|w| w.fragments.iter().map(move |f| (w, f)));
            let mut parties: Vec<Party> = running.map(|(w, f)| self.repeated(w, f, &mut read)).collect();
            let waiting = self.waiting().into_iter().filter(|(w, ..)| !looping(w));
            parties.extend(waiting.map(|(.., party)| party));
            parties.truncate(MOST_PARTIES);
            fault.others.extend(parties);
            fault.others.extend(self.writers(&read, &[]));
        }
    }

    /// Describes the loop of a fragment of a warp. Adds the spaces that it reads to `read`.
    fn repeated(&self, w: &Warp, f: &Fragment, read: &mut Vec<Space>) -> Party {
        let kernel = self.kernel;
        let who = self.name(w, f);
        let around = |pc: u32| pc == f.pc || kernel.leads(f.pc, pc) && kernel.leads(pc, f.pc);
        let cycle: Vec<u32> = self.stall.cycle(w.index as usize).iter().copied().filter(|&pc| around(pc)).collect();
        let load = |pc: &u32| Some((*pc, self.read_by(w, *pc, f.mask.trailing_zeros() as usize)?));
        if let Some(wait) = &f.wait {
            let what = format!("{who} waits for {}", wait.describe(&self.machine));
            return Party { what, place: Some(kernel.place(f.pc)) };
        }
        let Some((pc, (space, what))) = cycle.iter().find_map(load) else {
            let what = format!("{who} repeats {} instructions that read no memory", cycle.len());
            return Party { what, place: Some(kernel.place(f.pc)) };
        };
        if !read.contains(&space) {
            read.push(space);
        }
        Party { what: format!("{who} reads {what} again and again"), place: Some(kernel.place(pc)) }
    }

    /// Memory that an instruction reads for a lane, and the value that it last read. `None`: the instruction reads no
    /// memory that other threads write.
    fn read_by(&self, w: &Warp, pc: u32, lane: usize) -> Option<(Space, String)> {
        let inst = &self.kernel.code[pc as usize];
        let (base, offset) = inst.uses.address?;
        let value = w.lane(Src::Register(*inst.uses.writes.first()?), lane);
        if inst.class != Class::Memory || [".local", ".param", ".const"].iter().any(|s| inst.name.contains(s)) {
            return None;
        }
        let address = base.map_or(0, |base| w.lane(Src::Register(base), lane)).wrapping_add(offset as u64);
        let shared = inst.name.contains(".shared") || space_of(address) == Space::Shared;
        let (space, place) = if shared {
            let byte = i64::from(address as u32 & ((1 << RANK_SHIFT) - 1)) - i64::from(SHARED_BASE);
            (Space::Shared, format!("byte {byte} of shared memory"))
        } else {
            (Space::Global, self.machine.global.describe(address))
        };
        Some((space, format!("{place}, where it found {value:#x},")))
    }

    /// Instructions outside the repeated ones that could write the memory that warps read again and again.
    fn writers(&self, read: &[Space], others: &[Cluster<'k>]) -> Vec<Party> {
        let repeated = |pc: &u32| (0..self.warps.len()).any(|n| self.stall.cycle(n).contains(pc));
        let writes = |pc: &u32| {
            let name = &self.kernel.code[*pc as usize].name;
            let opcode = name.split('.').next().unwrap_or_default();
            let named = |space: &Space| name.contains(&format!(".{}", space.name()));
            let generic = ![".shared", ".global", ".local", ".param"].iter().any(|space| name.contains(space));
            matches!(opcode, "st" | "atom" | "red" | "cp") && read.iter().any(|space| named(space) || generic)
        };
        let found: Vec<u32> = (0..self.kernel.code.len() as u32).filter(|pc| writes(pc) && !repeated(pc)).collect();
        if found.is_empty() && !read.is_empty() {
            let what = "no other instruction of the kernel writes such memory".to_owned();
            return vec![Party { what, place: None }];
        }
        self.able(found, "write it", others)
    }

    /// At most [`MOST_WRITERS`] of some instructions that could do something, those that threads can still reach first.
    fn able(&self, mut instructions: Vec<u32>, what: &str, others: &[Cluster<'k>]) -> Vec<Party> {
        let clusters = others.iter().chain(std::iter::once(self));
        let at: BTreeSet<u32> =
            clusters.flat_map(|c| c.warps.iter().flat_map(|w| &w.fragments)).map(|f| f.pc).collect();
        let reachable = |pc: u32| at.iter().any(|&from| from == pc || self.kernel.leads(from, pc));
        instructions.sort_by_cached_key(|&pc| !reachable(pc));
        let party = |pc: u32| {
            let why =
                if reachable(pc) { "the threads that would execute it wait" } else { "no thread is on its way to it" };
            Party { what: format!("this instruction could {what}, but {why}"), place: Some(self.kernel.place(pc)) }
        };
        instructions.into_iter().take(MOST_WRITERS).map(party).collect()
    }

    /// Instructions that could arrive at an mbarrier, or deliver bytes to it.
    fn arrivals(&self) -> Vec<Party> {
        let arrives = |pc: &u32| {
            let name = self.kernel.code[*pc as usize].name.as_str();
            let starts = ["mbarrier.arrive", "mbarrier.complete_tx", "cp.async.mbarrier.arrive", "tcgen05.commit"];
            starts.iter().any(|start| name.starts_with(start)) || name.contains(".mbarrier::complete_tx")
        };
        let found = (0..self.kernel.code.len() as u32).filter(arrives).collect();
        self.able(found, "complete the phase of an mbarrier", &[])
    }

    /// CTA rank, warp and lanes of a fragment.
    fn name(&self, w: &Warp, f: &Fragment) -> String {
        let rank = if self.machine.ctas.len() > 1 { format!("CTA rank {}, ", w.cta) } else { String::new() };
        let lanes = if f.mask == w.all { String::new() } else { format!(", lanes {:#010x}", f.mask) };
        format!("{rank}warp {}{lanes}", w.role)
    }

    /// Each waiting fragment: its warp, its instruction and what it waits for.
    fn waiting(&self) -> Vec<(&Warp, u32, Party)> {
        let mut waiting = Vec::new();
        for w in &self.warps {
            for f in &w.fragments {
                let Some(wait) = &f.wait else { continue };
                let what = format!("{} waits for {}", self.name(w, f), wait.describe(&self.machine));
                // The waiting instruction comes after the poll.
                let pc = match wait {
                    WaitFor::Mbarrier { pc, .. } | WaitFor::Progress { pc, .. } => *pc,
                    _ => f.pc,
                };
                waiting.push((w, pc, Party { what, place: Some(self.kernel.place(pc)) }));
            }
        }
        waiting
    }

    /// Fault to report if the cluster is idle forever.
    pub fn deadlock(&self) -> Fault {
        let kernel = self.kernel;
        let waiting = self.waiting();
        let mut only_barriers = true;
        let (mut undelivered, mut at_mbarriers) = (false, false);
        for w in &self.warps {
            for f in &w.fragments {
                let Some(wait) = &f.wait else { continue };
                only_barriers &= matches!(wait, WaitFor::Barrier { .. });
                if let WaitFor::Mbarrier { at, .. } | WaitFor::Progress { at, .. } = wait {
                    at_mbarriers = true;
                    let barrier = self.machine.ctas[at.cta as usize].mbarriers.get(&at.offset);
                    undelivered |= barrier.is_some_and(|b| b.pending == 0 && b.tx != 0);
                }
            }
        }
        let exited = self.warps.iter().filter(|w| w.fragments.is_empty()).count();
        let (kind, message) = if only_barriers {
            let mut text = "threads wait at a barrier that the other threads will not reach".to_string();
            if exited > 0 {
                text += &format!("; {exited} warps have exited");
            }
            (FaultKind::BarrierDivergence, text)
        } else if undelivered {
            let text = "an mbarrier has all its arrivals, but nothing will deliver the bytes that it expects";
            (FaultKind::BytesNotDelivered, text.to_string())
        } else {
            (FaultKind::Deadlock, "no thread can continue".to_string())
        };
        let mut fault = Fault::bare(kind, &kernel.name, message);
        if let Some((w, pc, _)) = waiting.first() {
            fault.cta = Some(self.machine.ctas[w.cta as usize].index);
            fault.warp = Some(w.role);
            fault.place = Some(Box::new(kernel.place(*pc)));
        }
        fault.others = waiting.into_iter().map(|(_, _, party)| party).collect();
        if at_mbarriers {
            fault.others.extend(self.arrivals());
        }
        fault
    }
}
