//! Grids that overlap: one that was launched to begin while the one before it on its stream still runs.
//!
//! The launch asks for it (programmatic stream serialization; CUDA programming guide, "Programmatic Dependent Launch and
//! Synchronization"). If it does not, both instructions do nothing. PTX ISA, "Parallel Synchronization and Communication
//! Instructions: griddepcontrol"; sm_90 and up. In code for an older architecture, where grids never overlap, both functions are empty.

use crate::{BEFORE_SM_90, ptx};

/// Waits until the grids that this one depends on have ended and what they wrote to memory is visible
/// (`griddepcontrol.wait`).
#[inline(always)]
pub fn griddepcontrol_wait() {
    if BEFORE_SM_90 {
        return;
    }
    // SAFETY: waits; memory accesses stay on their side of it.
    unsafe { ptx!("griddepcontrol.wait;", options(nostack, preserves_flags)) };
}

/// Lets the grids that depend on this one begin as soon as every block has called this or ended
/// (`griddepcontrol.launch_dependents`). They still have to wait for what this one writes.
#[inline(always)]
pub fn griddepcontrol_launch_dependents() {
    if BEFORE_SM_90 {
        return;
    }
    // SAFETY: a hint to the scheduler.
    unsafe { ptx!("griddepcontrol.launch_dependents;", options(nostack, preserves_flags)) };
}
