//! Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
//!
//! A barrier is 8 bytes at a shared address, a multiple of 8. Its *phase* completes when as many arrivals have
//! come as it was made for and all bytes that were expected. Waits name a phase by its parity: 0 for the first,
//! 1 for the second, and so on in turn; the phase before the first counts as complete, so that waiting for
//! parity 1 of a fresh barrier returns at once. PTX ISA, "Parallel Synchronization and Communication
//! Instructions: mbarrier"; sm_90 and up.

use crate::ptx;

/// Bytes of a barrier.
pub const MBARRIER_BYTES: u32 = 8;

/// Makes a barrier whose phases take `arrivals` arrivals (`mbarrier.init`).
///
/// Other threads may use it behind a barrier of the block, other proxies behind
/// [`fence_mbarrier_init`](crate::fence::fence_mbarrier_init) too.
///
/// # Safety
/// `address` is a multiple of 8; 8 bytes of the block's shared memory lie there that nobody else uses.
#[inline(always)]
pub unsafe fn mbarrier_init(address: u32, arrivals: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        ptx!(
            "mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) address, in(reg32) arrivals,
            options(nostack, preserves_flags)
        )
    };
}

/// Arrives once; what this thread did before is visible to those who wait for the phase (`mbarrier.arrive`).
///
/// # Safety
/// `address` is a barrier of this block.
#[inline(always)]
pub unsafe fn mbarrier_arrive(address: u32) {
    // SAFETY: the caller's promise.
    unsafe { ptx!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) address, options(nostack, preserves_flags)) };
}

/// As [`mbarrier_arrive`], at a barrier of any block of the cluster, for those who wait with
/// [`mbarrier_wait_parity_cluster`] (`mbarrier.arrive.release.cluster`).
///
/// # Safety
/// `address` is of a barrier of a block that has not ended, as [`mapa`](crate::cluster::mapa) gives it.
#[inline(always)]
pub unsafe fn mbarrier_arrive_cluster(address: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        ptx!(
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(reg32) address,
            options(nostack, preserves_flags)
        )
    };
}

/// Makes the phase at hand expect `bytes` more of asynchronous copies, and arrives once
/// (`mbarrier.arrive.expect_tx`).
///
/// # Safety
/// As [`mbarrier_arrive`]; the phase expects fewer than 2²⁰ bytes at any time.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(address: u32, bytes: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        ptx!(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) address, in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
}

macro_rules! waits {
    ($($(#[$doc:meta])* $try_wait:ident, $wait:ident = $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As [`mbarrier_arrive`]; the phase is the one at hand or the one before.
        #[inline(always)]
        pub unsafe fn $try_wait(address: u32, parity: u32) -> bool {
            let complete: u32;
            // SAFETY: the caller's promise.
            unsafe {
                ptx!(
                    "{{",
                    ".reg .pred p;",
                    concat!($instruction, ".shared::cta.b64 p, [{address}], {parity};"),
                    "selp.u32 {complete}, 1, 0, p;",
                    "}}",
                    complete = out(reg32) complete, address = in(reg32) address, parity = in(reg32) parity,
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
        pub unsafe fn $wait(address: u32, parity: u32) {
            // SAFETY: the caller's promise.
            while !unsafe { $try_wait(address, parity) } {}
        }
    )*};
}

waits! {
    /// Whether the phase of this parity is complete; may wait for a while to find out (`mbarrier.try_wait.parity`).
    mbarrier_try_wait_parity, mbarrier_wait_parity = "mbarrier.try_wait.parity";
    /// As [`mbarrier_try_wait_parity`], where threads of other blocks of the cluster arrive too
    /// (`mbarrier.try_wait.parity.acquire.cluster`).
    mbarrier_try_wait_parity_cluster, mbarrier_wait_parity_cluster = "mbarrier.try_wait.parity.acquire.cluster";
}
