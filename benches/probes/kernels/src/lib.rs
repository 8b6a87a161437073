//! Kernels that measure constants of the time model (docs/time-model.md).
//!
//! A module is a cargo feature of the same name; `[package.metadata.kernels]` in `Cargo.toml` says what it is compiled for. Kernels write
//! what they measured, and what they computed, to `out`: numbers of 64 bits, in the order that each kernel says. Cycles are those of all
//! that was asked for; the host divides.

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

/// Writes the result of this number.
///
/// # Safety
/// There is room for it at `out`, and no other thread writes it.
#[inline(always)]
pub(crate) unsafe fn write(out: u64, number: u32, value: u64) {
    // SAFETY: what `# Safety` above asks.
    unsafe { st_global_b64(GlobalAddress::new(out) + u64::from(number) * 8, value) }
}

/// Fills shared memory with a word, all threads of the block together, for tensor cores to read. Others see it behind the block's barrier.
///
/// # Safety
/// The block has so many bytes there, a multiple of 4, that nobody else accesses.
#[inline(always)]
#[allow(dead_code, reason = "not every module has a tensor core that reads shared memory")]
pub(crate) unsafe fn fill(from: SharedAddress, bytes: u32, word: u32) {
    let mut at = thread::thread_idx_x() * 4;
    while at < bytes {
        // SAFETY: what `# Safety` above asks; each word is one thread's.
        unsafe { st_shared_b32(from + at, word) };
        at += thread::block_dim_x() * 4;
    }
    fence_proxy_async_shared();
}
