//! NVFP4 grouped GEMM kernels, a folder each.
//!
//! A kernel is a module and a cargo feature of the same name; `[package.metadata.kernels]` in `Cargo.toml` says what it is
//! compiled for. Its `abi` is what the host must know of it: descriptors, tiles, sizes. That much compiles everywhere; the
//! rest of the folder needs the feature. No `asm!` here: instructions are functions of `cuda_std`.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod gated_simt;
pub mod gated_sm100;
pub mod gated_sm120;
pub mod gated_sm90;
pub mod linear_sm120;
pub mod linear_sm80;
pub mod linear_sm90;
pub mod moe_few_sm90;
pub mod moe_fp8_sm90;
pub mod moe_nvfp4_sm120;
pub mod moe_pack;
pub mod moe_quantize;
pub mod moe_quantize_nvfp4;
pub mod moe_route;
pub mod moe_sm100;
pub mod moe_sm120;
pub mod moe_sm80;
pub mod moe_sm90;
pub mod router;
pub mod silu_mul;

// What kernels share: on both sides, then on the device.
pub mod epilogue;
pub mod exp;
pub mod format;
mod instances;
pub mod nvfp4_rows;
pub mod sm90;
pub mod sorted;
pub mod units;

#[cfg(feature = "device")]
pub mod nvfp4_blocks;
#[cfg(feature = "device")]
pub mod ring;
#[cfg(feature = "device")]
pub mod schedule;
