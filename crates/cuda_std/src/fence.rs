//! Fences between memory proxies: ordinary accesses on one side, asynchronous copies and tensor cores on the other.
//!
//! PTX ISA, "Memory Consistency Model: Proxies" and "Parallel Synchronization and Communication Instructions:
//! membar, fence"; sm_90 and up.

use crate::{ptx, tma::TensorMapAddress};

/// Makes the barriers that this thread has initialized known to asynchronous copies
/// (`fence.mbarrier_init.release.cluster`).
#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: orders memory accesses, makes none.
    unsafe { ptx!("fence.mbarrier_init.release.cluster;", options(nostack, preserves_flags)) };
}

/// Orders this thread's accesses of shared memory with asynchronous copies and tensor-core operations on it: those before
/// the fence come before those after it (`fence.proxy.async.shared::cta`).
#[inline(always)]
pub fn fence_proxy_async_shared() {
    // SAFETY: orders memory accesses, makes none.
    unsafe { ptx!("fence.proxy.async.shared::cta;", options(nostack, preserves_flags)) };
}

/// Lets this thread's later copies see a tensor map as ordinary writes, the host's among them, have left it. A map in
/// global memory needs it once before its first use (`fence.proxy.tensormap::generic.acquire.sys`; CUDA programming
/// guide, "Passing a tensor map to a kernel").
///
/// # Safety
/// A tensor map lies at `map`.
#[inline(always)]
pub unsafe fn fence_proxy_tensormap_acquire(map: TensorMapAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!("fence.proxy.tensormap::generic.acquire.sys [{}], 128;", in(reg64) map.0, options(nostack, preserves_flags))
    };
}
