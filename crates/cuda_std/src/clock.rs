//! Clocks for measurements.
//!
//! PTX ISA, "Special Registers": `%clock64`, `%smid`.

use crate::ptx;

/// Cycle counter of the SM (`%clock64`).
///
/// The compiler does not move the read across memory accesses, barriers and other volatile calls. The read does not
/// wait for loads that are in flight.
#[inline(always)]
pub fn clock64() -> u64 {
    let cycles: u64;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u64 {}, %clock64;", out(reg64) cycles, options(nostack, preserves_flags)) };
    cycles
}

/// Index of the SM that the thread runs on (`%smid`).
#[inline(always)]
pub fn multiprocessor() -> u32 {
    let number: u32;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u32 {}, %smid;", out(reg32) number, options(nostack, preserves_flags)) };
    number
}
