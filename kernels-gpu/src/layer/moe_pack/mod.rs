//! Weights from a checkpoint's layout to what an MoE layer's kernels read, on the device.
//!
//! # Contract
//!
//! * A launch has [`abi::Pack::blocks`] blocks of [`abi::Pack::THREADS`] threads, or for tokens in NVFP4 [`abi::PackNvfp4::blocks`] of
//!   [`abi::PackNvfp4::THREADS`]. It packs all matrices.
//! * Addresses are aligned as [`abi::Pack`] or [`abi::PackNvfp4`] says. Nobody writes values and scales meanwhile, or accesses what is
//!   packed and the place of an invalid scale.
//! * It writes every byte of the units; of rows in NVFP4 all but what pads them. The same input gives the same bytes. What it makes of a
//!   scale that is NaN or has a sign means nothing.

pub mod abi;
#[cfg(feature = "moe_pack")]
mod kernel;
#[cfg(feature = "moe_pack")]
mod nvfp4;
