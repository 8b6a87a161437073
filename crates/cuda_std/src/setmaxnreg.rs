//! How many registers the threads of a warpgroup have.
//!
//! All 128 threads of a warpgroup execute the same call. It has no effect in a kernel without launch bounds. PTX ISA,
//! "Miscellaneous Instructions: setmaxnreg"; sm_90a and up.

use crate::ptx;

/// Refuses counts that the instruction does not take.
const fn check(count: u32) {
    assert!(24 <= count && count <= 256 && count.is_multiple_of(8), "a multiple of 8 from 24 to 256");
}

/// Waits until the pool has enough, and raises a thread's registers to `COUNT` (`setmaxnreg.inc`).
///
/// # Safety
/// See the module: the same call by the warpgroup. `COUNT` is not below what a thread has.
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const COUNT: u32>() {
    const { check(COUNT) };
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("setmaxnreg.inc.sync.aligned.u32 {};", const COUNT, options(nostack, preserves_flags)) };
}

/// Lowers a thread's registers to `COUNT`, and gives the rest to the pool (`setmaxnreg.dec`).
///
/// # Safety
/// See the module: the same call by the warpgroup. `COUNT` is not above what a thread has.
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const COUNT: u32>() {
    const { check(COUNT) };
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("setmaxnreg.dec.sync.aligned.u32 {};", const COUNT, options(nostack, preserves_flags)) };
}
