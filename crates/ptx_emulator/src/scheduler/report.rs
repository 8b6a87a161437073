//! The scheduler's part of a fault: the thread and place, and the waiting parties of a deadlock.

use super::cluster::Cluster;
use crate::config::fault::{Fault, FaultKind, Party, Stop, Warning};
use crate::machine::state::Noted;
use crate::machine::wait::WaitFor;

impl Cluster<'_> {
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
            let list = if grave { &mut hazards } else { &mut warnings };
            Warning::add(list, Warning { fault: self.fault(warp as usize, stop), times });
        }
        (warnings, hazards)
    }

    /// Fault to report if the cluster is idle forever.
    pub fn deadlock(&self) -> Fault {
        let kernel = self.kernel;
        let mut waiting = Vec::new();
        let mut only_barriers = true;
        let mut undelivered = false;
        for w in &self.warps {
            for f in &w.fragments {
                let Some(wait) = &f.wait else { continue };
                only_barriers &= matches!(wait, WaitFor::Barrier { .. });
                if let WaitFor::Mbarrier { at, .. } | WaitFor::Progress { at, .. } = wait {
                    let barrier = self.machine.ctas[at.cta as usize].mbarriers.get(&at.offset);
                    undelivered |= barrier.is_some_and(|b| b.pending == 0 && b.tx != 0);
                }
                let rank = if self.machine.ctas.len() > 1 { format!("CTA rank {}, ", w.cta) } else { String::new() };
                let lanes = if f.mask == w.all { String::new() } else { format!(", lanes {:#010x}", f.mask) };
                let what = format!("{rank}warp {}{lanes} waits for {}", w.role, wait.describe(&self.machine));
                // The waiting instruction comes after the poll.
                let pc = match wait {
                    WaitFor::Mbarrier { pc, .. } | WaitFor::Progress { pc, .. } => *pc,
                    _ => f.pc,
                };
                waiting.push((w, pc, Party { what, place: Some(kernel.place(pc)) }));
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
        fault
    }
}
