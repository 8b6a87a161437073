//! Asynchronous copies of a few bytes per thread, from global to shared memory (sm_80 and up).
//!
//! PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy", and "mbarrier: cp.async.mbarrier.arrive".

use crate::{global::GlobalAddress, mbarrier::Mbarrier, ptx, shared::SharedAddress};

/// Starts to copy 16 bytes past the L1 cache, or to write 16 zeros if `predicate` is false
/// (`cp.async.cg.shared.global` with a source size).
///
/// # Safety
/// `destination` is a multiple of 16 in the CTA's shared memory; nobody accesses its 16 bytes until a wait has covered
/// the copy. `source` is a multiple of 16. If `predicate` is true, `source` points to 16 bytes of global memory that
/// nobody writes during the copy.
#[inline(always)]
pub unsafe fn cp_async_16_or_zero(predicate: bool, destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: the caller guarantees 16 aligned shared bytes, and 16 aligned global bytes if `predicate`, untouched
    // until complete.
    unsafe {
        ptx!(
            "cp.async.cg.shared.global [{}], [{}], 16, {};",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) if predicate { 16 } else { 0 },
            options(nostack, preserves_flags)
        )
    };
}

/// Starts to copy 16 bytes through the L1 cache, for bytes that other warps of the SM load too
/// (`cp.async.ca.shared.global`).
///
/// # Safety
/// `destination` is a multiple of 16 in the CTA's shared memory; nobody accesses its 16 bytes until a wait has covered
/// the copy. `source` is a multiple of 16 and points to 16 bytes of global memory that nobody writes during the copy.
#[inline(always)]
pub unsafe fn cp_async_16_cached(destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: the caller guarantees 16 aligned bytes at both addresses, untouched until the copy is complete.
    unsafe {
        ptx!(
            "cp.async.ca.shared.global [{}], [{}], 16;",
            in(reg32) destination.0, in(reg64) source.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Starts to copy four bytes, or to write zeros if `predicate` is false (`cp.async.ca.shared.global` with a source
/// size).
///
/// # Safety
/// `destination` is a multiple of 4 in the CTA's shared memory; nobody accesses its 4 bytes until a wait has covered
/// the copy. `source` is a multiple of 4. If `predicate` is true, `source` points to 4 bytes of global memory that
/// nobody writes during the copy.
#[inline(always)]
pub unsafe fn cp_async_4_or_zero(predicate: bool, destination: SharedAddress, source: GlobalAddress) {
    // SAFETY: the caller guarantees 4 aligned shared bytes, and 4 aligned global bytes if `predicate`, untouched until
    // complete.
    unsafe {
        ptx!(
            "cp.async.ca.shared.global [{}], [{}], 4, {};",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) if predicate { 4 } else { 0 },
            options(nostack, preserves_flags)
        )
    };
}

/// Puts the thread's copies since its last group into a new group (`cp.async.commit_group`).
#[inline(always)]
pub fn cp_async_commit_group() {
    // SAFETY: groups copies; it may be executed anywhere.
    unsafe { ptx!("cp.async.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until all groups of the thread but the newest `PENDING` are complete (`cp.async.wait_group`).
#[inline(always)]
pub fn cp_async_wait_group<const PENDING: u32>() {
    // SAFETY: waits for copies; it may be executed anywhere.
    unsafe { ptx!("cp.async.wait_group {};", const PENDING, options(nostack, preserves_flags)) };
}

/// Arrives at the barrier once all earlier copies of this thread are complete. The arrival counts toward the number
/// that the barrier was initialized with (`cp.async.mbarrier.arrive.noinc`).
///
/// # Safety
/// `barrier` is initialized, and its current phase still expects an arrival.
#[inline(always)]
pub unsafe fn cp_async_mbarrier_arrive_noinc(barrier: Mbarrier) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival.
    unsafe {
        ptx!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{}];", in(reg32) barrier.0, options(nostack, preserves_flags))
    };
}
