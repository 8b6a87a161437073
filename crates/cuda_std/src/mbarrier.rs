//! Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
//!
//! A barrier is 8 bytes of shared memory at a multiple of 8: an [`Mbarrier`] is its address. Its *phase* completes when it
//! has seen as many arrivals as it was initialized for and all bytes that were expected. Waits name a phase by its parity: 0 for the first,
//! 1 for the second, and so on in turn; the phase before the first counts as complete, so that waiting for
//! parity 1 of a fresh barrier returns at once. PTX ISA, "Parallel Synchronization and Communication
//! Instructions: mbarrier"; sm_90 and up.

use crate::{
    cluster::{ClusterAddress, mapa},
    ptx,
    shared::SharedAddress,
};

/// Bytes of a barrier.
pub const MBARRIER_BYTES: u32 = 8;

/// The address of a barrier in the shared memory of this block.
///
/// ```no_run
/// # use cuda_std::{mbarrier::{Mbarrier, mbarrier_arrive}, shared::dynamic_shared_address};
/// # unsafe {
/// mbarrier_arrive(Mbarrier::at(dynamic_shared_address()));
/// # }
/// ```
///
/// A shared address cannot stand for a barrier, and a barrier cannot stand for a shared address:
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
    /// The barrier at this address, a multiple of 8.
    #[inline(always)]
    pub const fn at(address: SharedAddress) -> Self {
        Self(address.0)
    }

    /// The barrier of this index, of those that lie side by side from this one on.
    #[inline(always)]
    pub const fn nth(self, index: u32) -> Self {
        Self(self.0 + index * MBARRIER_BYTES)
    }

    /// The barrier at the same place in the block of the cluster that has this rank.
    #[inline(always)]
    pub fn in_block(self, rank: u32) -> ClusterMbarrier {
        ClusterMbarrier(mapa(SharedAddress(self.0), rank))
    }
}

/// The address of a barrier of any block of the cluster: see [`Mbarrier::in_block`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterMbarrier(ClusterAddress);

/// Initializes a barrier whose phases take `arrivals` arrivals (`mbarrier.init`).
///
/// Other threads may use it after a barrier of the block. Asynchronous copies may use it after
/// [`fence_mbarrier_init`](crate::fence::fence_mbarrier_init) besides.
///
/// # Safety
/// `barrier` is a multiple of 8; 8 bytes of the block's shared memory lie there that nobody else uses.
#[inline(always)]
pub unsafe fn mbarrier_init(barrier: Mbarrier, arrivals: u32) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) barrier.0, in(reg32) arrivals,
            options(nostack, preserves_flags)
        )
    };
}

/// Arrives once. What this thread did before is visible to those who wait for the phase (`mbarrier.arrive`).
///
/// # Safety
/// `barrier` has been initialized, and its phase still lacks an arrival.
#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: Mbarrier) {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) barrier.0, options(nostack, preserves_flags)) };
}

/// As [`mbarrier_arrive`], at a barrier of any block of the cluster. Those who wait use
/// [`mbarrier_wait_parity_cluster`] (`mbarrier.arrive.release.cluster`).
///
/// # Safety
/// As [`mbarrier_arrive`]; the barrier's block has not ended.
#[inline(always)]
pub unsafe fn mbarrier_arrive_cluster(barrier: ClusterMbarrier) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(reg32) barrier.0.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Makes the current phase expect `bytes` more of asynchronous copies, and arrives once
/// (`mbarrier.arrive.expect_tx`).
///
/// # Safety
/// As [`mbarrier_arrive`]; the phase expects fewer than 2²⁰ bytes at any time.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: Mbarrier, bytes: u32) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) barrier.0, in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
}

/// Stores four words in the shared memory of any block of the cluster, and reports their 16 bytes to a barrier of that block, whose
/// phase expects them (`st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32`). Those who wait use
/// [`mbarrier_wait_parity_cluster`].
///
/// # Safety
/// `address` is a multiple of 16 in the shared memory of the barrier's block, which has begun and does not end meanwhile; nobody else
/// accesses the words until the phase is complete. The barrier has been initialized.
#[inline(always)]
pub unsafe fn st_async_shared_cluster_v4_b32(
    address: ClusterAddress,
    [a, b, c, d]: [u32; 4],
    mbarrier: ClusterMbarrier,
) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{}], {{{}, {}, {}, {}}}, [{}];",
            in(reg32) address.0, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in(reg32) mbarrier.0.0,
            options(nostack, preserves_flags)
        )
    };
}

/// As [`st_async_shared_cluster_v4_b32`], of one word at a multiple of 4.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn st_async_shared_cluster_b32(address: ClusterAddress, value: u32, mbarrier: ClusterMbarrier) {
    // SAFETY: what `# Safety` above asks.
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
        /// `barrier` has been initialized; the phase is the current one or the one before.
        #[inline(always)]
        pub unsafe fn $try_wait(barrier: Mbarrier, parity: u32) -> bool {
            let complete: u32;
            // SAFETY: what `# Safety` above asks.
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

        #[doc = concat!("Waits until the phase of this parity is complete: [`", stringify!($try_wait), "`] until it holds.")]
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($try_wait), "`].")]
        #[inline(always)]
        pub unsafe fn $wait(barrier: Mbarrier, parity: u32) {
            // SAFETY: what `# Safety` above asks.
            while !unsafe { $try_wait(barrier, parity) } {}
        }
    )*};
}

waits! {
    /// Whether the phase of this parity is complete. It may wait for a while before it says no (`mbarrier.try_wait.parity`).
    mbarrier_try_wait_parity, mbarrier_wait_parity = "mbarrier.try_wait.parity";
    /// As [`mbarrier_try_wait_parity`], where threads of other blocks of the cluster arrive too
    /// (`mbarrier.try_wait.parity.acquire.cluster`).
    mbarrier_try_wait_parity_cluster, mbarrier_wait_parity_cluster = "mbarrier.try_wait.parity.acquire.cluster";
}
