//! Weights from a checkpoint's layout to what an MoE layer's kernels read, on the device.
//!
//! # Contract
//!
//! * A launch has [`abi::Pack::blocks`] blocks of [`abi::Pack::THREADS`] threads. It packs all matrices.
//! * Addresses are aligned as [`abi::Pack`] says. Nobody writes values and scales meanwhile, or accesses units and the place of an
//!   invalid scale.
//! * It writes every byte of the units. The same input gives the same bytes. What it makes of a scale that is NaN or has a sign
//!   means nothing.

pub mod abi;
#[cfg(feature = "moe_pack")]
mod kernel;
