//! Clusters: CTAs that run together and access each other's shared memory.
//!
//! `#[kernel(cluster = …)]` sets the cluster size of a kernel; the grid is a multiple of it. PTX ISA, "Special
//! Registers", "Data Movement and Conversion Instructions": `mapa`, `st`, and "Parallel Synchronization and
//! Communication Instructions: barrier.cluster"; sm_90 and up. In code for an older architecture, each CTA counts as a
//! cluster of one CTA.

use core::ops::Add;

use crate::{BEFORE_SM_90, ptx, shared::SharedAddress};

/// An address in the shared memory of any CTA of the cluster (`.shared::cluster`).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterAddress(pub(crate) u32);

impl Add<u32> for ClusterAddress {
    type Output = Self;

    /// Returns the address `bytes` further on, in the shared memory of the same CTA.
    #[inline(always)]
    fn add(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

/// Rank of the CTA in its cluster, from 0 (`%cluster_ctarank`).
#[inline(always)]
pub fn cluster_rank() -> u32 {
    if BEFORE_SM_90 {
        return 0;
    }
    let rank: u32;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u32 {}, %cluster_ctarank;", out(reg32) rank, options(pure, nomem, nostack, preserves_flags)) };
    rank
}

/// Number of CTAs in the cluster (`%cluster_nctarank`); 1 for a launch without clusters.
#[inline(always)]
pub fn cluster_size() -> u32 {
    if BEFORE_SM_90 {
        return 1;
    }
    let size: u32;
    // SAFETY: reads a register that every thread has.
    unsafe { ptx!("mov.u32 {}, %cluster_nctarank;", out(reg32) size, options(pure, nomem, nostack, preserves_flags)) };
    size
}

/// Returns the address of the same place in the shared memory of the CTA with rank `rank` (`mapa.shared::cluster`).
#[inline(always)]
pub fn mapa(address: SharedAddress, rank: u32) -> ClusterAddress {
    let mapped: u32;
    // SAFETY: computes an address and accesses no memory.
    unsafe {
        ptx!(
            "mapa.shared::cluster.u32 {}, {}, {};", out(reg32) mapped, in(reg32) address.0, in(reg32) rank,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    ClusterAddress(mapped)
}

/// Arrives at the cluster barrier without waiting. Threads that wait at the barrier see what this thread wrote to
/// memory before (`barrier.cluster.arrive.release.aligned`).
///
/// # Safety
/// All lanes of a warp call it together. Each thread calls [`wait_cluster`] before it calls this function again.
#[inline(always)]
pub unsafe fn arrive_cluster() {
    // SAFETY: the caller guarantees that all lanes of the warp execute this, and that each arrival has its wait.
    unsafe { ptx!("barrier.cluster.arrive.release.aligned;", options(nostack, preserves_flags)) };
}

/// Like [`arrive_cluster`], but orders no memory accesses (`barrier.cluster.arrive.relaxed.aligned`).
///
/// # Safety
/// All lanes of a warp call it together. Each thread calls [`wait_cluster`] before it arrives again.
#[inline(always)]
pub unsafe fn arrive_cluster_relaxed() {
    // SAFETY: the caller guarantees that all lanes of the warp execute this, and that each arrival has its wait.
    unsafe { ptx!("barrier.cluster.arrive.relaxed.aligned;", options(nostack, preserves_flags)) };
}

/// Waits until every thread of the cluster has called [`arrive_cluster`] or ended, and makes visible what those threads
/// wrote to memory before they arrived (`barrier.cluster.wait.acquire.aligned`).
///
/// # Safety
/// All lanes of a warp call it together, once after each [`arrive_cluster`].
#[inline(always)]
pub unsafe fn wait_cluster() {
    // SAFETY: the caller guarantees that all lanes of the warp execute this, once after each arrival.
    unsafe { ptx!("barrier.cluster.wait.acquire.aligned;", options(nostack, preserves_flags)) };
}

/// Waits for every thread of the cluster and makes their writes to memory visible to each other: calls
/// [`arrive_cluster`], then [`wait_cluster`].
///
/// # Safety
/// Every thread of the cluster that has not ended calls it, all lanes of a warp together.
#[inline(always)]
pub unsafe fn sync_cluster() {
    // SAFETY: the caller guarantees that all lanes of the warp execute this; the wait follows the arrival.
    unsafe {
        arrive_cluster();
        wait_cluster();
    }
}
