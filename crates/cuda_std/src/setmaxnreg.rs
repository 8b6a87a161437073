//! Changes the number of registers of the threads of a warpgroup.
//!
//! All 128 threads of a warpgroup execute the same call. The call has no effect in a kernel without launch bounds. PTX
//! ISA, "Miscellaneous Instructions: setmaxnreg"; sm_90a and up.

use crate::ptx;

/// Refuses register counts that the instruction does not encode.
const fn check(count: u32) {
    assert!(24 <= count && count <= 256 && count.is_multiple_of(8), "COUNT must be a multiple of 8 from 24 to 256");
}

/// Raises the registers per thread to `COUNT`; waits until the pool has enough (`setmaxnreg.inc`).
///
/// # Safety
/// All threads of the warpgroup make the same call. `COUNT` is at least the current number of registers per thread.
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const COUNT: u32>() {
    const { check(COUNT) };
    // SAFETY: the caller guarantees that the whole warpgroup executes this, and that `COUNT` is not below the current
    // count.
    unsafe { ptx!("setmaxnreg.inc.sync.aligned.u32 {};", const COUNT, options(nostack, preserves_flags)) };
}

/// Lowers the registers per thread to `COUNT` and returns the rest to the pool (`setmaxnreg.dec`).
///
/// # Safety
/// All threads of the warpgroup make the same call. `COUNT` is at most the current number of registers per thread.
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const COUNT: u32>() {
    const { check(COUNT) };
    // SAFETY: the caller guarantees that the whole warpgroup executes this, and that `COUNT` is not above the current
    // count.
    unsafe { ptx!("setmaxnreg.dec.sync.aligned.u32 {};", const COUNT, options(nostack, preserves_flags)) };
}
