//! NVFP4 grouped GEMM kernels, with one folder per mechanism that computes products.
//!
//! A kernel is a module in one of these folders, with a cargo feature of the same name. `[package.metadata.kernels]` in
//! `Cargo.toml` lists the architectures that it is compiled for. A kernel's `abi` has the definitions that the host
//! needs (descriptors, tiles, sizes) and compiles everywhere. The rest of the module requires the feature. Code that
//! several kernels share lies in their folder, or beside the folders. There is no `asm!` here: instructions are
//! functions of `cuda_std`.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

// Kernels, by mechanism of their products.
pub mod layer;
pub mod mma_sync;
pub mod simt;
pub mod tcgen05;
pub mod wgmma;

// Common parts: first of host and device, then of the device alone.
pub mod curve;
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
#[cfg(feature = "device")]
mod unroll;
