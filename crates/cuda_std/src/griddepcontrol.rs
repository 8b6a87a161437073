//! Overlapping grids: a grid may start while the previous grid of its stream still runs.
//!
//! The launch enables the overlap (programmatic stream serialization; CUDA programming guide, "Programmatic Dependent
//! Launch and Synchronization"). Otherwise, both instructions do nothing. PTX ISA, "Parallel Synchronization and
//! Communication Instructions: griddepcontrol"; sm_90 and up. In code for an older architecture, where grids never
//! overlap, both functions are empty.

use crate::{BEFORE_SM_90, ptx};

/// Waits until the grids that this grid depends on have ended and their writes to memory are visible
/// (`griddepcontrol.wait`).
#[inline(always)]
pub fn griddepcontrol_wait() {
    if BEFORE_SM_90 {
        return;
    }
    // SAFETY: waits and accesses no memory itself. The compiler moves no memory access across it.
    unsafe { ptx!("griddepcontrol.wait;", options(nostack, preserves_flags)) };
}

/// Lets the dependent grids start as soon as every CTA has called this function or ended
/// (`griddepcontrol.launch_dependents`). Dependent grids must still wait before they read what this grid writes.
#[inline(always)]
pub fn griddepcontrol_launch_dependents() {
    if BEFORE_SM_90 {
        return;
    }
    // SAFETY: gives the scheduler a hint and accesses no memory.
    unsafe { ptx!("griddepcontrol.launch_dependents;", options(nostack, preserves_flags)) };
}
