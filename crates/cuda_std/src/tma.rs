//! Bulk copies between global and shared memory by the asynchronous proxy: linear ones, and boxes of a tensor.
//!
//! One thread starts a copy. A load reports its bytes to an mbarrier
//! ([`mbarrier_arrive_expect_tx`](crate::mbarrier::mbarrier_arrive_expect_tx)); stores belong to the groups that
//! their thread commits and waits for. PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy"; sm_90 and up.

use crate::{global::GlobalAddress, mbarrier::Mbarrier, ptx, shared::SharedAddress};

/// The generic address of a tensor map: 128 bytes, at a multiple of 64, that the driver has encoded.
///
/// ```no_run
/// # use cuda_std::tma::{TensorMapAddress, prefetch_tensormap};
/// # unsafe {
/// prefetch_tensormap(TensorMapAddress::new(0x1000));
/// # }
/// ```
///
/// The address of the tensor itself cannot stand for it:
///
/// ```compile_fail,E0308
/// # use cuda_std::{global::GlobalAddress, tma::prefetch_tensormap};
/// # unsafe {
/// prefetch_tensormap(GlobalAddress::new(0x1000));
/// # }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapAddress(pub(crate) u64);

impl TensorMapAddress {
    /// The address that the host has passed as a number.
    #[inline(always)]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The address as a number.
    #[inline(always)]
    pub const fn address(self) -> u64 {
        self.0
    }
}

/// The [`TensorMapAddress`] of a tensor map with which the only parameter of a kernel begins, inside of that kernel: what
/// `__grid_constant__` is in CUDA C++. The parameter is aligned to 64.
///
/// # Safety
/// The parameter of this kernel begins with a tensor map.
#[macro_export]
macro_rules! tensor_map_of_parameter {
    ($kernel:ident) => {{
        let address: u64;
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::asm!(
            concat!("mov.b64 {0}, ", stringify!($kernel), "_param_0;"),
            "cvta.param.u64 {0}, {0};",
            out(reg64) address, options(pure, nomem, nostack, preserves_flags)
        );
        #[cfg(not(target_arch = "nvptx64"))]
        {
            address = 0;
        }
        $crate::tma::TensorMapAddress::new(address)
    }};
}

/// Fetches a tensor map ahead of its use (`prefetch.tensormap`).
///
/// # Safety
/// A tensor map lies at `map`.
#[inline(always)]
pub unsafe fn prefetch_tensormap(map: TensorMapAddress) {
    // SAFETY: what `# Safety` above asks.
    unsafe { ptx!("prefetch.tensormap [{}];", in(reg64) map.0, options(nostack, preserves_flags)) };
}

/// Copies `bytes` from global to shared memory (`cp.async.bulk.shared::cluster.global`).
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16, and the range lies inside of each memory; nobody accesses
/// the destination or writes the source until `mbarrier`, of this block, has completed the phase that expects them.
#[inline(always)]
pub unsafe fn cp_async_bulk_shared_global(
    destination: SharedAddress,
    source: GlobalAddress,
    bytes: u32,
    mbarrier: Mbarrier,
) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) bytes, in(reg32) mbarrier.0,
            options(nostack, preserves_flags)
        )
    };
}

/// As [`cp_async_bulk_shared_global`], to the same place in each block of the cluster whose rank is a bit of `blocks`; the barriers at the
/// same place there are told of the bytes (`cp.async.bulk.shared::cluster.global.multicast::cluster`).
///
/// # Safety
/// As there, for the destination and the barrier of each of the blocks, which have begun and have not ended.
#[inline(always)]
pub unsafe fn cp_async_bulk_shared_global_multicast(
    destination: SharedAddress,
    source: GlobalAddress,
    bytes: u32,
    mbarrier: Mbarrier,
    blocks: u16,
) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            concat!(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster ",
                "[{}], [{}], {}, [{}], {};"
            ),
            in(reg32) destination.0, in(reg64) source.0, in(reg32) bytes, in(reg32) mbarrier.0, in(reg16) blocks,
            options(nostack, preserves_flags)
        )
    };
}

/// Copies `bytes` from shared to global memory (`cp.async.bulk.global.shared::cta`).
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16, and the range lies inside of each memory. After ordinary writes
/// of the source there has been a [`fence_proxy_async_shared`](crate::fence::fence_proxy_async_shared). Nobody writes the
/// source until this thread has waited for the copy's group to be read, or accesses the destination until the group is
/// complete.
#[inline(always)]
pub unsafe fn cp_async_bulk_global_shared(destination: GlobalAddress, source: SharedAddress, bytes: u32) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};",
            in(reg64) destination.0, in(reg32) source.0, in(reg32) bytes,
            options(nostack, preserves_flags)
        )
    };
}

macro_rules! tensor_copies {
    ($($rank:literal: $load:ident, $store:ident, $coordinates:literal, [$($axis:ident),*];)*) => {$(
        /// Copies the box at these coordinates, innermost first, from global to shared memory. What lies outside of
        /// the tensor arrives as the map's fill, and counts as bytes
        #[doc = concat!("(`cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.tile`).")]
        ///
        /// # Safety
        #[doc = concat!("A tensor map of rank ", $rank, " lies at `map`, known to the proxy")]
        /// ([`fence_proxy_tensormap_acquire`](crate::fence::fence_proxy_tensormap_acquire)). `destination` is a
        /// multiple of 128, of the swizzle's pattern where the map has one, with room for the box. Nobody accesses
        /// it until `mbarrier`, of this block, has completed the phase that expects the box's bytes.
        #[inline(always)]
        pub unsafe fn $load(
            destination: SharedAddress,
            map: TensorMapAddress,
            [$($axis),*]: [i32; $rank],
            mbarrier: Mbarrier,
        ) {
            // SAFETY: what `# Safety` above asks.
            unsafe {
                ptx!(
                    concat!(
                        "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes ",
                        "[{destination}], [{map}, ", $coordinates, "], [{mbarrier}];"
                    ),
                    destination = in(reg32) destination.0, map = in(reg64) map.0, mbarrier = in(reg32) mbarrier.0,
                    $($axis = in(reg32) $axis,)*
                    options(nostack, preserves_flags)
                )
            };
        }

        /// Copies the box at these coordinates, innermost first, from shared to global memory, but for what lies
        /// outside of the tensor
        #[doc = concat!("(`cp.async.bulk.tensor.", $rank, "d.global.shared::cta.tile`).")]
        ///
        /// # Safety
        #[doc = concat!("A tensor map of rank ", $rank, " lies at `map`, known to the proxy")]
        /// ([`fence_proxy_tensormap_acquire`](crate::fence::fence_proxy_tensormap_acquire)). `source` is a multiple
        /// of 128, of the swizzle's pattern where the map has one, and holds the box; for the rest see
        /// [`cp_async_bulk_global_shared`].
        #[inline(always)]
        pub unsafe fn $store(map: TensorMapAddress, [$($axis),*]: [i32; $rank], source: SharedAddress) {
            // SAFETY: what `# Safety` above asks.
            unsafe {
                ptx!(
                    concat!(
                        "cp.async.bulk.tensor.", $rank, "d.global.shared::cta.tile.bulk_group ",
                        "[{map}, ", $coordinates, "], [{source}];"
                    ),
                    source = in(reg32) source.0, map = in(reg64) map.0,
                    $($axis = in(reg32) $axis,)*
                    options(nostack, preserves_flags)
                )
            };
        }
    )*};
}

tensor_copies! {
    2: cp_async_bulk_tensor_2d_shared_global, cp_async_bulk_tensor_2d_global_shared, "{{{x}, {y}}}", [x, y];
    3: cp_async_bulk_tensor_3d_shared_global, cp_async_bulk_tensor_3d_global_shared, "{{{x}, {y}, {z}}}", [x, y, z];
}

/// As [`cp_async_bulk_tensor_2d_shared_global`], to this block's own shared memory by name
/// (`cp.async.bulk.tensor.2d.shared::cta.global.tile`; PTX 8.6). For sm_120, ptxas 13.5 makes a stack for the other form and none
/// for this one.
///
/// # Safety
/// As [`cp_async_bulk_tensor_2d_shared_global`].
#[inline(always)]
pub unsafe fn cp_async_bulk_tensor_2d_shared_cta_global(
    destination: SharedAddress,
    map: TensorMapAddress,
    [x, y]: [i32; 2],
    mbarrier: Mbarrier,
) {
    // SAFETY: what `# Safety` above asks.
    unsafe {
        ptx!(
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}], [{}];",
            in(reg32) destination.0, in(reg64) map.0, in(reg32) x, in(reg32) y, in(reg32) mbarrier.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Makes a group of the stores that this thread has started since it last did so (`cp.async.bulk.commit_group`).
#[inline(always)]
pub fn cp_async_bulk_commit_group() {
    // SAFETY: touches no memory itself.
    unsafe { ptx!("cp.async.bulk.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until all but the `PENDING` newest groups of this thread are complete (`cp.async.bulk.wait_group`).
#[inline(always)]
pub fn cp_async_bulk_wait_group<const PENDING: u32>() {
    // SAFETY: touches no memory itself.
    unsafe { ptx!("cp.async.bulk.wait_group {};", const PENDING, options(nostack, preserves_flags)) };
}

/// Waits until all but the `PENDING` newest groups of this thread have read their sources
/// (`cp.async.bulk.wait_group.read`).
#[inline(always)]
pub fn cp_async_bulk_wait_group_read<const PENDING: u32>() {
    // SAFETY: touches no memory itself.
    unsafe { ptx!("cp.async.bulk.wait_group.read {};", const PENDING, options(nostack, preserves_flags)) };
}
