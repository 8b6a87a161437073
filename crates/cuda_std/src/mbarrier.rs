//! Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
//!
//! A barrier is 8 bytes of shared memory at a multiple of 8; an [`Mbarrier`] is its address. A *phase* of the barrier
//! completes after the number of arrivals given at the initialization and after all expected bytes. A wait names a
//! phase by its parity: 0 for the first phase, 1 for the second, and so on alternately. The phase before the first
//! counts as complete, so a wait for parity 1 of a fresh barrier returns at once. PTX ISA, "Parallel Synchronization
//! and Communication Instructions: mbarrier"; sm_90 and up.

use crate::{
    cluster::{ClusterAddress, mapa},
    ptx,
    shared::SharedAddress,
};

/// Size of a barrier in bytes.
pub const MBARRIER_BYTES: u32 = 8;

/// The address of a barrier in the shared memory of this CTA.
///
/// ```no_run
/// # use cuda_std::{mbarrier::{Mbarrier, mbarrier_arrive}, shared::dynamic_shared_address};
/// # unsafe {
/// mbarrier_arrive(Mbarrier::at(dynamic_shared_address()));
/// # }
/// ```
///
/// A shared address is not a barrier, and a barrier is not a shared address:
///
/// ```compile_fail,E0308
/// # use cuda_std::{mbarrier::mbarrier_arrive, shared::dynamic_shared_address};
/// # unsafe {
/// mbarrier_arrive(dynamic_shared_address());
/// # }
/// ```
/// ```compile_fail,E0308
/// # use cuda_std::{mbarrier::Mbarrier, shared::{dynamic_shared_address, st_shared_f32}};
/// # unsafe {
/// st_shared_f32(Mbarrier::at(dynamic_shared_address()), 1.0);
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mbarrier(pub(crate) u32);

impl Mbarrier {
    /// Returns the barrier at `address`, a multiple of 8.
    #[inline(always)]
    pub const fn at(address: SharedAddress) -> Self {
        Self(address.0)
    }

    /// Returns barrier number `index` of an array of barriers that starts with this one.
    #[inline(always)]
    pub const fn nth(self, index: u32) -> Self {
        Self(self.0 + index * MBARRIER_BYTES)
    }

    /// Returns the barrier at the same place in the CTA of rank `rank`.
    #[inline(always)]
    pub fn in_block(self, rank: u32) -> ClusterMbarrier {
        ClusterMbarrier(mapa(SharedAddress(self.0), rank))
    }
}

/// The address of a barrier of any CTA of the cluster: see [`Mbarrier::in_block`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterMbarrier(ClusterAddress);

/// Initializes a barrier whose phases each take `arrivals` arrivals (`mbarrier.init`).
///
/// Other threads may use it after a barrier of the CTA. Asynchronous copies also need a
/// [`fence_mbarrier_init`](crate::fence::fence_mbarrier_init) before they use it.
///
/// # Safety
/// `barrier` is a multiple of 8 and points to 8 bytes of the CTA's shared memory that nobody else uses.
#[inline(always)]
pub unsafe fn mbarrier_init(barrier: Mbarrier, arrivals: u32) {
    // SAFETY: the caller guarantees 8 aligned bytes of shared memory that nobody else uses.
    unsafe {
        ptx!(
            "mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) barrier.0, in(reg32) arrivals,
            options(nostack, preserves_flags)
        )
    };
}

/// Arrives once. Threads that wait for the phase see what this thread did before (`mbarrier.arrive`).
///
/// # Safety
/// `barrier` is initialized, and its current phase still expects an arrival.
#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: Mbarrier) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival.
    unsafe { ptx!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) barrier.0, options(nostack, preserves_flags)) };
}

/// Like [`mbarrier_arrive`], at a barrier of any CTA of the cluster. Waiting threads use
/// [`mbarrier_wait_parity_cluster`] (`mbarrier.arrive.release.cluster`).
///
/// # Safety
/// `barrier` is initialized, and its current phase still expects an arrival. Its CTA has not ended.
#[inline(always)]
pub unsafe fn mbarrier_arrive_cluster(barrier: ClusterMbarrier) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival, in a CTA that has not ended.
    unsafe {
        ptx!(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(reg32) barrier.0.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Like [`mbarrier_arrive_cluster`], but orders no memory accesses of this thread. Waiting threads use
/// [`mbarrier_wait_parity`] (`mbarrier.arrive.relaxed.cluster`).
///
/// # Safety
/// `barrier` is initialized, and its current phase still expects an arrival. Its CTA has not ended.
#[inline(always)]
pub unsafe fn mbarrier_arrive_cluster_relaxed(barrier: ClusterMbarrier) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival, in a CTA that has not ended.
    unsafe {
        ptx!(
            "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [{}];", in(reg32) barrier.0.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Adds `bytes` of asynchronous copies to what the current phase expects, and arrives once
/// (`mbarrier.arrive.expect_tx`).
///
/// # Safety
/// `barrier` is initialized, and its current phase still expects an arrival. The phase never expects 2²⁰ bytes or more.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: Mbarrier, bytes: u32) {
    // SAFETY: the caller guarantees an initialized barrier whose phase expects an arrival and stays below 2²⁰ bytes.
    unsafe {
        ptx!(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) barrier.0, in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
}

/// Stores four words in the shared memory of any CTA of the cluster and reports their 16 bytes to a barrier of that
/// CTA. The barrier's phase expects the bytes (`st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32`). Waiting
/// threads use [`mbarrier_wait_parity_cluster`].
///
/// # Safety
/// `address` is a multiple of 16 in the shared memory of the barrier's CTA, which has started and does not end before
/// the phase completes. Nobody else accesses the 16 bytes until then. The barrier is initialized.
#[inline(always)]
pub unsafe fn st_async_shared_cluster_v4_b32(
    address: ClusterAddress,
    [a, b, c, d]: [u32; 4],
    mbarrier: ClusterMbarrier,
) {
    // SAFETY: the caller guarantees 16 aligned bytes in a running CTA, untouched until the phase of its barrier
    // completes.
    unsafe {
        ptx!(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{}], {{{}, {}, {}, {}}}, [{}];",
            in(reg32) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in(reg32) mbarrier.0.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Like [`st_async_shared_cluster_v4_b32`], for one word at a multiple of 4.
///
/// # Safety
/// `address` is a multiple of 4 in the shared memory of the barrier's CTA, which has started and does not end before
/// the phase completes. Nobody else accesses the 4 bytes until then. The barrier is initialized.
#[inline(always)]
pub unsafe fn st_async_shared_cluster_b32(address: ClusterAddress, value: u32, mbarrier: ClusterMbarrier) {
    // SAFETY: the caller guarantees 4 aligned bytes in a running CTA, untouched until the phase of its barrier
    // completes.
    unsafe {
        ptx!(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{}], {}, [{}];",
            in(reg32) address.0, in(reg32) value, in(reg32) mbarrier.0.0, options(nostack, preserves_flags)
        )
    };
}

macro_rules! waits {
    ($($(#[$doc:meta])* $try_wait:ident, $wait:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `barrier` is initialized. `parity` names its current phase or the phase before.
        #[inline(always)]
        pub unsafe fn $try_wait(barrier: Mbarrier, parity: u32) -> bool {
            let complete: u32;
            // SAFETY: the caller guarantees an initialized barrier, and the parity of its current or previous phase.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .pred p;",
                    concat!($instruction, ".shared::cta.b64 p, [{barrier}], {parity};"),
                    "selp.u32 {complete}, 1, 0, p;",
                    "}}",
                    complete = out(reg32) complete, barrier = in(reg32) barrier.0, parity = in(reg32) parity,
                    options(nostack, preserves_flags)
                )
            };
            complete != 0
        }

        #[doc = concat!("Waits until the phase of this parity is complete: repeats [`", stringify!($try_wait), "`] until it returns `true`.")]
        ///
        /// # Safety
        /// `barrier` is initialized. `parity` names its current phase or the phase before.
        #[inline(always)]
        pub unsafe fn $wait(barrier: Mbarrier, parity: u32) {
            // SAFETY: the caller guarantees an initialized barrier, and the parity of its current or previous phase.
            while !unsafe { $try_wait(barrier, parity) } {}
        }
    )*};
}

waits! {
    /// Returns whether the phase of this parity is complete. It may wait for a while before it returns `false`
    /// (`mbarrier.try_wait.parity`).
    mbarrier_try_wait_parity, mbarrier_wait_parity = "mbarrier.try_wait.parity";
    /// Like [`mbarrier_try_wait_parity`], for a barrier where threads of other CTAs of the cluster arrive too
    /// (`mbarrier.try_wait.parity.acquire.cluster`).
    mbarrier_try_wait_parity_cluster, mbarrier_wait_parity_cluster = "mbarrier.try_wait.parity.acquire.cluster";
}
