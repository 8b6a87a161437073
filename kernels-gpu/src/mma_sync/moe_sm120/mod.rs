//! The products of an MoE layer on GeForce RTX 50, RTX PRO and DGX Spark: `moe_sm90`'s source with instances of its own.
//!
//! In these each warp multiplies by itself (`mma.sync`), since sm_120 and sm_121 have no `wgmma`, and a block has 99 KB of shared
//! memory.
//!
//! # Contract
//!
//! That of [`moe_sm90`](crate::wgmma::moe_sm90), with the threads and the shared memory of these instances. A row has the same bits as on
//! Hopper if the tensor core adds up as Hopper's does, which no card has shown yet.

pub mod abi;
#[cfg(feature = "moe_sm120")]
mod entries;
