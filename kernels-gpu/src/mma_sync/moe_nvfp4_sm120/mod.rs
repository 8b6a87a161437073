//! The products of an MoE layer with NVFP4 tokens on GeForce RTX 50, RTX PRO and DGX Spark: `gated_sm120`'s source,
//! with tiles found on the device.
//!
//! # Contract
//!
//! The contract and the parameter of [`moe_sm100`](crate::tcgen05::moe_sm100), with the threads and the shared memory
//! of these instances ([`gated_sm120`](crate::mma_sync::gated_sm120)), and with a tensor map of weights whose boxes
//! have [`SLAB_ROWS`](crate::mma_sync::gated_sm120::abi::SLAB_ROWS) rows.

pub mod abi;
#[cfg(feature = "moe_nvfp4_sm120")]
mod kernel;
