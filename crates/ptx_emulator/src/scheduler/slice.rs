//! Instructions that compute only values: none of their results reaches an address, a branch, a predicate or a barrier.
//! A timed launch may skip them.

use rustc_hash::FxHashSet;

use crate::code::{Inst, Kernel};
use crate::config::report::Class;

/// Whether each instruction of a kernel computes only values.
pub fn values_only(kernel: &Kernel) -> Vec<bool> {
    let mut needed: FxHashSet<u32> = FxHashSet::default();
    let mut kept = vec![false; kernel.code.len()];
    loop {
        let mut changed = false;
        for (inst, kept) in kernel.code.iter().zip(&mut kept) {
            if *kept || is_arithmetic(inst) && !inst.uses.writes.iter().any(|r| needed.contains(r)) {
                continue;
            }
            (*kept, changed) = (true, true);
            // The registers of A are only values, like the accumulators. The remaining source comes last in `reads`.
            if inst.name.starts_with("wgmma.mma_async") && inst.uses.reads.len() > 2 {
                needed.extend(inst.uses.reads.last());
            } else {
                needed.extend(&inst.uses.reads);
            }
        }
        if !changed {
            return kept.into_iter().map(|kept| !kept).collect();
        }
    }
}

/// Whether an instruction is arithmetic on registers without other effects.
fn is_arithmetic(inst: &Inst) -> bool {
    let computes = matches!(inst.class, Class::Integer | Class::Float | Class::Convert | Class::Move);
    computes && !inst.uses.writes.is_empty() && inst.uses.predicate_writes.is_empty() && !inst.uses.aligned
}
