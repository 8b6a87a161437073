//! NVFP4 grouped GEMM kernels, in a folder for each mechanism that computes products.
//!
//! A kernel is a module of such a folder and a cargo feature of the same name; `[package.metadata.kernels]` in `Cargo.toml`
//! says what it is compiled for. Its `abi` is what the host must know of it: descriptors, tiles, sizes. That much compiles
//! everywhere; the rest of the module needs the feature. What several kernels share lies in their folder, or beside the folders. No `asm!` here: instructions are functions of `cuda_std`.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

// Kernels, by what computes their products.
pub mod layer;
pub mod mma_sync;
pub mod simt;
pub mod tcgen05;
pub mod wgmma;

// What kernels share: on both sides, then on the device.
pub mod decoding;
pub mod epilogue;
pub mod exp;
pub mod format;
mod instances;
pub mod linear;
pub mod lists;
pub mod moe;
pub mod nvfp4_rows;
pub mod routed;
pub mod sorted;
pub mod units;

#[cfg(feature = "device")]
pub mod nvfp4_blocks;
#[cfg(feature = "device")]
pub mod ring;
#[cfg(feature = "device")]
pub mod schedule;
