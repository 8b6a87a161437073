//! Asynchronous copies of a few bytes by each thread, from global to shared memory (sm_80 and up).
//!
//! PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy", and "mbarrier: cp.async.mbarrier.arrive".

use crate::{global::GlobalAddress, mbarrier::Mbarrier, ptx, shared::SharedAddress};

/// Starts to copy 16 bytes, bypassing the first-level cache, or to write 16 zeros where `predicate` does not hold
/// (`cp.async.cg.shared.global` with a source size).
///
/// # Safety
/// `destination` is a multiple of 16 in the block's shared memory, which nobody reads or writes until the copy is seen to
/// be complete. `source` is a multiple of 16; where `predicate` holds, 16 bytes of global memory lie there that nobody
/// writes meanwhile.
#[inline(always)]
pub unsafe fn cp_async_16_or_zero(predicate: bool, destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.cg.shared.global [{}], [{}], 16, {};",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) if predicate { 16 } else { 0 },
            options(nostack, preserves_flags)
        )
    };
}

/// Starts to copy sixteen bytes that other warps of the multiprocessor ask for too: through its cache (`cp.async.ca.shared.global`).
///
/// # Safety
/// As [`cp_async_16_or_zero`].
#[inline(always)]
pub unsafe fn cp_async_16_cached(destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.ca.shared.global [{}], [{}], 16;",
            in(reg32) destination.0, in(reg64) source.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Starts to copy four bytes, or to write zeros where `predicate` does not hold (`cp.async.ca.shared.global` with a source size).
///
/// # Safety
/// As [`cp_async_16_or_zero`], of four bytes at multiples of four.
#[inline(always)]
pub unsafe fn cp_async_4_or_zero(predicate: bool, destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.ca.shared.global [{}], [{}], 4, {};",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) if predicate { 4 } else { 0 },
            options(nostack, preserves_flags)
        )
    };
}

/// Makes a group of the thread's copies since its last group (`cp.async.commit_group`).
#[inline(always)]
pub fn cp_async_commit_group() {
    // SAFETY: it counts copies, and may be executed anywhere.
    unsafe { ptx!("cp.async.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until all but the newest `PENDING` groups of the thread are complete (`cp.async.wait_group`).
#[inline(always)]
pub fn cp_async_wait_group<const PENDING: u32>() {
    // SAFETY: it waits for copies, and may be executed anywhere.
    unsafe { ptx!("cp.async.wait_group {};", const PENDING, options(nostack, preserves_flags)) };
}

/// Arrives at the barrier as soon as all earlier copies of this thread are complete. This is one of the arrivals that the
/// barrier was initialized for (`cp.async.mbarrier.arrive.noinc`).
///
/// # Safety
/// `barrier` has been initialized, and its phase still lacks an arrival.
#[inline(always)]
pub unsafe fn cp_async_mbarrier_arrive_noinc(barrier: Mbarrier) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{}];", in(reg32) barrier.0, options(nostack, preserves_flags))
    };
}
