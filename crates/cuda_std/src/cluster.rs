//! Blocks that run together and reach each other's shared memory: the cluster.
//!
//! A kernel asks for a cluster with `#[kernel(cluster = …)]`; the grid is a multiple of it. PTX ISA, "Special Registers",
//! "Data Movement and Conversion Instructions": `mapa`, `st`, and "Parallel Synchronization and Communication Instructions:
//! barrier.cluster"; sm_90 and up. In code for an older architecture each block is a cluster of its own.

use core::ops::Add;

use crate::{BEFORE_SM_90, ptx, shared::SharedAddress};

/// An address in the shared memory of any block of the cluster (`.shared::cluster`).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterAddress(pub(crate) u32);

impl Add<u32> for ClusterAddress {
    type Output = Self;

    /// The address so many bytes further on, in the same block's.
    #[inline(always)]
    fn add(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

/// The block's place in its cluster, from 0 (`%cluster_ctarank`).
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

/// Blocks of the cluster (`%cluster_nctarank`); 1 where the launch asked for none.
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

/// The same place in the shared memory of the block that has this rank (`mapa.shared::cluster`).
#[inline(always)]
pub fn mapa(address: SharedAddress, rank: u32) -> ClusterAddress {
    let mapped: u32;
    // SAFETY: computes an address, touches no memory.
    unsafe {
        ptx!(
            "mapa.shared::cluster.u32 {}, {}, {};", out(reg32) mapped, in(reg32) address.0, in(reg32) rank,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    ClusterAddress(mapped)
}

/// Says that this thread has come so far, and goes on; what it has written to memory is visible to who waits for it
/// (`barrier.cluster.arrive.release.aligned`).
///
/// # Safety
/// All lanes of a warp call it together, and each thread calls [`wait_cluster`] before it calls this again.
#[inline(always)]
pub unsafe fn arrive_cluster() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("barrier.cluster.arrive.release.aligned;", options(nostack, preserves_flags)) };
}

/// As [`arrive_cluster`], but says nothing of memory (`barrier.cluster.arrive.relaxed.aligned`).
///
/// # Safety
/// As [`arrive_cluster`].
#[inline(always)]
pub unsafe fn arrive_cluster_relaxed() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("barrier.cluster.arrive.relaxed.aligned;", options(nostack, preserves_flags)) };
}

/// Waits until every thread of the cluster that has not ended has called [`arrive_cluster`], and sees what they wrote before
/// (`barrier.cluster.wait.acquire.aligned`).
///
/// # Safety
/// All lanes of a warp call it together, each once after [`arrive_cluster`].
#[inline(always)]
pub unsafe fn wait_cluster() {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("barrier.cluster.wait.acquire.aligned;", options(nostack, preserves_flags)) };
}

/// Waits for every thread of the cluster, and makes what they wrote to memory visible to each other: [`arrive_cluster`], then
/// [`wait_cluster`].
///
/// # Safety
/// All lanes of a warp call it together, and every thread of the cluster that has not ended.
#[inline(always)]
pub unsafe fn sync_cluster() {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        arrive_cluster();
        wait_cluster();
    }
}
