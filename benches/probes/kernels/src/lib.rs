//! Kernels that measure constants of the time model (benches/lab/time-model.md).
//!
//! A module is a cargo feature of the same name; `[package.metadata.kernels]` in `Cargo.toml` lists its architectures.
//! Kernels write measured and computed numbers of 64 bits to `out`, in the order that each kernel documents. Cycles are
//! the total of all requested work; the host divides.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

#[cfg(feature = "block_scale")]
pub mod block_scale;
#[cfg(any(feature = "portable", feature = "block_scale"))]
mod chains;
#[cfg(feature = "copies")]
pub mod copies;
#[cfg(feature = "portable")]
pub mod portable;
#[cfg(feature = "tcgen05")]
pub mod tcgen05;
#[cfg(feature = "wgmma")]
pub mod wgmma;

use cuda_std::{
    fence::fence_proxy_async_shared,
    global::{GlobalAddress, st_global_b64},
    shared::{SharedAddress, st_shared_b32},
    thread,
};

/// Writes result `number`.
///
/// # Safety
/// `out` has room for it, and no other thread writes it.
#[inline(always)]
pub(crate) unsafe fn write(out: u64, number: u32, value: u64) {
    // SAFETY: the caller guarantees that `out` has room for this number and that no other thread writes it.
    unsafe { st_global_b64(GlobalAddress::new(out) + u64::from(number) * 8, value) }
}

/// Fills shared memory with a word, for tensor cores to read. All threads of the CTA take part. The words are visible
/// after the next barrier of the CTA.
///
/// # Safety
/// The CTA has `bytes` bytes at `from`, a multiple of 4, and nothing else accesses them.
#[inline(always)]
#[allow(dead_code, reason = "not every module has a tensor core that reads shared memory")]
pub(crate) unsafe fn fill(from: SharedAddress, bytes: u32, word: u32) {
    let mut at = thread::thread_idx_x() * 4;
    while at < bytes {
        // SAFETY: the caller guarantees the bytes, and each word is written by one thread.
        unsafe { st_shared_b32(from + at, word) };
        at += thread::block_dim_x() * 4;
    }
    fence_proxy_async_shared();
}
