//! Clocks, to measure with.
//!
//! PTX ISA, "Special Registers": `%clock64`, `%smid`.

use crate::ptx;

/// Cycles that this multiprocessor has counted (`%clock64`).
///
/// It stays where it is among the accesses of memory, barriers and other such calls around it. What it waits for is what its instruction
/// needs: a load that is still under way is none of that.
#[inline(always)]
pub fn clock64() -> u64 {
    let cycles: u64;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u64 {}, %clock64;", out(reg64) cycles, options(nostack, preserves_flags)) };
    cycles
}

/// The multiprocessor that the thread runs on (`%smid`).
#[inline(always)]
pub fn multiprocessor() -> u32 {
    let number: u32;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u32 {}, %smid;", out(reg32) number, options(nostack, preserves_flags)) };
    number
}
