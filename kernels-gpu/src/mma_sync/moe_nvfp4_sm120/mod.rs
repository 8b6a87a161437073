//! The products of an MoE layer on GeForce RTX 50, RTX PRO and DGX Spark with tokens in NVFP4: `gated_sm120`'s source, whose tiles the
//! device finds itself.
//!
//! # Contract
//!
//! That of [`moe_sm100`](crate::tcgen05::moe_sm100) and its parameter, with the threads and the shared memory of these instances
//! ([`gated_sm120`](crate::mma_sync::gated_sm120)), and a map of weights whose boxes have [`SLAB_ROWS`](crate::mma_sync::gated_sm120::abi::SLAB_ROWS) rows.

pub mod abi;
#[cfg(feature = "moe_nvfp4_sm120")]
mod kernel;
