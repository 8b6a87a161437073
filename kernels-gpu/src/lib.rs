//! NVFP4 grouped GEMM kernels: one a file, each a cargo feature of the same name.
//!
//! `[package.metadata.kernels]` in `Cargo.toml` says what each is compiled for. Without a feature there is only
//! [`abi`], what host and kernels agree on. No `asm!` here: instructions are functions of `cuda_std`.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

pub mod abi;
#[cfg(any(feature = "gated_simt", feature = "gated_sm90", feature = "gated_sm100", feature = "silu_mul"))]
mod epilogue;
#[cfg(feature = "gated_simt")]
pub mod gated_simt;
#[cfg(feature = "gated_sm100")]
pub mod gated_sm100;
#[cfg(feature = "gated_sm90")]
pub mod gated_sm90;
#[cfg(any(feature = "gated_sm90", feature = "gated_sm100"))]
pub mod ring;
#[cfg(any(feature = "gated_simt", feature = "silu_mul"))]
mod schedule;
#[cfg(feature = "silu_mul")]
pub mod silu_mul;
