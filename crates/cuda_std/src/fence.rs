//! Fences between memory proxies: ordinary accesses on one side, asynchronous copies and tensor cores on the other.
//!
//! PTX ISA, "Memory Consistency Model: Proxies" and "Parallel Synchronization and Communication Instructions:
//! membar, fence"; sm_90 and up.

use crate::{ptx, tma::TensorMapAddress};

/// Makes barriers that this thread has initialized visible to asynchronous copies
/// (`fence.mbarrier_init.release.cluster`).
#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: orders memory accesses and makes none.
    unsafe { ptx!("fence.mbarrier_init.release.cluster;", options(nostack, preserves_flags)) };
}

/// Orders this thread's ordinary accesses of shared memory before the fence with later accesses of the same memory by
/// asynchronous copies and tensor cores, and vice versa (`fence.proxy.async.shared::cta`).
#[inline(always)]
pub fn fence_proxy_async_shared() {
    // SAFETY: orders memory accesses and makes none.
    unsafe { ptx!("fence.proxy.async.shared::cta;", options(nostack, preserves_flags)) };
}

/// Makes ordinary writes of a tensor map, by the host too, visible to later copies of this thread. A map in global
/// memory needs one such fence before its first use (`fence.proxy.tensormap::generic.acquire.sys`; CUDA programming
/// guide, "Passing a tensor map to a kernel").
///
/// # Safety
/// `map` is the address of a tensor map.
#[inline(always)]
pub unsafe fn fence_proxy_tensormap_acquire(map: TensorMapAddress) {
    // SAFETY: the caller guarantees that `map` is the address of a 128-byte tensor map.
    unsafe {
        ptx!("fence.proxy.tensormap::generic.acquire.sys [{}], 128;", in(reg64) map.0, options(nostack, preserves_flags))
    };
}
