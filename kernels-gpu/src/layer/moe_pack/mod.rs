//! Packs weights on the device: from a checkpoint's layout to the layout that an MoE layer's kernels read.
//!
//! # Contract
//!
//! * Grid: [`abi::Pack::blocks`] CTAs of [`abi::Pack::THREADS`] threads; for NVFP4 tokens [`abi::PackNvfp4::blocks`]
//!   CTAs of [`abi::PackNvfp4::THREADS`] threads. One launch packs all matrices.
//! * Addresses are aligned as [`abi::Pack`] or [`abi::PackNvfp4`] says. During the launch nothing else writes values or
//!   scales, and nothing else accesses the packed weights or the place of an invalid scale.
//! * The kernel writes every byte of the units; of rows for NVFP4 tokens, every byte except padding. The same input
//!   gives the same bytes. The bytes that it makes of a NaN or negative scale are unspecified.

pub mod abi;
#[cfg(feature = "moe_pack")]
mod kernel;
#[cfg(feature = "moe_pack")]
mod nvfp4;
