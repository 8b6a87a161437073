//! Bulk copies between global and shared memory by the asynchronous proxy: linear copies, and boxes of a tensor.
//!
//! One thread starts a copy. A load reports its bytes to an mbarrier
//! ([`mbarrier_arrive_expect_tx`](crate::mbarrier::mbarrier_arrive_expect_tx)). Stores belong to bulk groups; the
//! thread that started the stores commits and waits for its groups. PTX ISA, "Data Movement and Conversion
//! Instructions: Asynchronous copy"; sm_90 and up.

use crate::{global::GlobalAddress, mbarrier::Mbarrier, ptx, shared::SharedAddress};

/// The generic address of a tensor map: 128 bytes, encoded by the driver, at a multiple of 64.
///
/// ```no_run
/// # use cuda_std::tma::{TensorMapAddress, prefetch_tensormap};
/// # unsafe {
/// prefetch_tensormap(TensorMapAddress::new(0x1000));
/// # }
/// ```
///
/// The address of the tensor itself does not compile:
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
    /// Wraps an address that the host passed as a number.
    #[inline(always)]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// Returns the address as a number.
    #[inline(always)]
    pub const fn address(self) -> u64 {
        self.0
    }
}

/// Returns the [`TensorMapAddress`] of the tensor map at the start of a kernel's only parameter. Use it inside of that
/// kernel. It corresponds to `__grid_constant__` in CUDA C++. The parameter is aligned to 64 bytes.
///
/// # Safety
/// The parameter of this kernel starts with a tensor map.
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

/// Prefetches a tensor map (`prefetch.tensormap`).
///
/// # Safety
/// `map` is the address of a tensor map.
#[inline(always)]
pub unsafe fn prefetch_tensormap(map: TensorMapAddress) {
    // SAFETY: the caller guarantees that `map` is the address of a tensor map.
    unsafe { ptx!("prefetch.tensormap [{}];", in(reg64) map.0, options(nostack, preserves_flags)) };
}

/// Copies `bytes` from global to shared memory (`cp.async.bulk.shared::cluster.global`).
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16; `bytes` bytes at each address are valid. `mbarrier` is a barrier of
/// this CTA. Nobody accesses the destination or writes the source until `mbarrier` has completed the phase that expects
/// the bytes.
#[inline(always)]
pub unsafe fn cp_async_bulk_shared_global(
    destination: SharedAddress,
    source: GlobalAddress,
    bytes: u32,
    mbarrier: Mbarrier,
) {
    // SAFETY: the caller guarantees `bytes` aligned bytes at both addresses, untouched until the phase of `mbarrier`
    // completes.
    unsafe {
        ptx!(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) destination.0, in(reg64) source.0, in(reg32) bytes, in(reg32) mbarrier.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Like [`cp_async_bulk_shared_global`], to the same place in several CTAs of the cluster: bit r of `blocks` selects
/// the CTA of rank r. The barrier at the same place in each of those CTAs counts the bytes
/// (`cp.async.bulk.shared::cluster.global.multicast::cluster`).
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16; `bytes` bytes at `source`, and at `destination` in each selected
/// CTA, are valid. In each selected CTA, which has started and has not ended, `mbarrier` is a barrier. Nobody accesses
/// a destination until its CTA's barrier has completed the phase that expects the bytes; nobody writes the source until
/// all have.
#[inline(always)]
pub unsafe fn cp_async_bulk_shared_global_multicast(
    destination: SharedAddress,
    source: GlobalAddress,
    bytes: u32,
    mbarrier: Mbarrier,
    blocks: u16,
) {
    // SAFETY: the caller guarantees `bytes` aligned bytes at both addresses in every selected CTA, untouched until the
    // phase completes.
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
/// Both addresses and `bytes` are multiples of 16; `bytes` bytes at each address are valid. A
/// [`fence_proxy_async_shared`](crate::fence::fence_proxy_async_shared) follows the last ordinary write of the source.
/// Nobody writes the source until this thread has waited for the group's reads. Nobody accesses the destination until
/// the group is complete.
#[inline(always)]
pub unsafe fn cp_async_bulk_global_shared(destination: GlobalAddress, source: SharedAddress, bytes: u32) {
    // SAFETY: the caller guarantees `bytes` aligned bytes at both addresses, untouched until the group completes.
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
        /// Copies the box at these coordinates (innermost first) from global to shared memory. Elements outside of the
        /// tensor arrive as the map's fill value and count as bytes
        #[doc = concat!("(`cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.tile`).")]
        ///
        /// # Safety
        #[doc = concat!("A tensor map of rank ", $rank, " is at `map` and visible to the proxy")]
        /// ([`fence_proxy_tensormap_acquire`](crate::fence::fence_proxy_tensormap_acquire)). `destination` is a
        /// multiple of 128, and of the size of the swizzle pattern if the map has one; it has room for the box. Nobody
        /// accesses the box until `mbarrier`, a barrier of this CTA, has completed the phase that expects its bytes.
        #[inline(always)]
        pub unsafe fn $load(
            destination: SharedAddress,
            map: TensorMapAddress,
            [$($axis),*]: [i32; $rank],
            mbarrier: Mbarrier,
        ) {
            // SAFETY: the caller guarantees a visible tensor map, and an aligned box that nobody accesses until the
            // phase completes.
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

        /// Copies the box at these coordinates (innermost first) from shared to global memory, without the elements
        /// outside of the tensor
        #[doc = concat!("(`cp.async.bulk.tensor.", $rank, "d.global.shared::cta.tile`).")]
        ///
        /// # Safety
        #[doc = concat!("A tensor map of rank ", $rank, " is at `map` and visible to the proxy")]
        /// ([`fence_proxy_tensormap_acquire`](crate::fence::fence_proxy_tensormap_acquire)). `source` holds the box at
        /// a multiple of 128, and of the size of the swizzle pattern if the map has one. Fences and waits are the same
        /// as for [`cp_async_bulk_global_shared`].
        #[inline(always)]
        pub unsafe fn $store(map: TensorMapAddress, [$($axis),*]: [i32; $rank], source: SharedAddress) {
            // SAFETY: the caller guarantees a visible tensor map, and an aligned source that nobody writes until the
            // group has read it.
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

/// Like [`cp_async_bulk_tensor_2d_shared_global`], but names this CTA's shared memory as the destination
/// (`cp.async.bulk.tensor.2d.shared::cta.global.tile`; PTX 8.6). For sm_120, ptxas 13.5 allocates a stack for the other
/// form and no stack for this form.
///
/// # Safety
/// `map` is the address of a tensor map of 2 dimensions that is visible to copies
/// ([`fence_proxy_tensormap_acquire`](crate::fence::fence_proxy_tensormap_acquire)). `destination` is a multiple of
/// 128, and of the size of the swizzle pattern if the map has one; it has room for the box. Nobody accesses the box
/// until `mbarrier`, a barrier of this CTA, has completed the phase that expects its bytes.
#[inline(always)]
pub unsafe fn cp_async_bulk_tensor_2d_shared_cta_global(
    destination: SharedAddress,
    map: TensorMapAddress,
    [x, y]: [i32; 2],
    mbarrier: Mbarrier,
) {
    // SAFETY: the caller guarantees a visible tensor map, and an aligned box that nobody accesses until the phase
    // completes.
    unsafe {
        ptx!(
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}], [{}];",
            in(reg32) destination.0, in(reg64) map.0, in(reg32) x, in(reg32) y, in(reg32) mbarrier.0,
            options(nostack, preserves_flags)
        )
    };
}

/// Puts the bulk stores of this thread since its last commit into a new group (`cp.async.bulk.commit_group`).
#[inline(always)]
pub fn cp_async_bulk_commit_group() {
    // SAFETY: accesses no memory itself.
    unsafe { ptx!("cp.async.bulk.commit_group;", options(nostack, preserves_flags)) };
}

/// Waits until all groups of this thread but the newest `PENDING` are complete (`cp.async.bulk.wait_group`).
#[inline(always)]
pub fn cp_async_bulk_wait_group<const PENDING: u32>() {
    // SAFETY: accesses no memory itself.
    unsafe { ptx!("cp.async.bulk.wait_group {};", const PENDING, options(nostack, preserves_flags)) };
}

/// Waits until all groups of this thread but the newest `PENDING` have read their sources
/// (`cp.async.bulk.wait_group.read`).
#[inline(always)]
pub fn cp_async_bulk_wait_group_read<const PENDING: u32>() {
    // SAFETY: accesses no memory itself.
    unsafe { ptx!("cp.async.bulk.wait_group.read {};", const PENDING, options(nostack, preserves_flags)) };
}
