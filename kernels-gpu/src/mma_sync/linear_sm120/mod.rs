//! A linear layer on GeForce RTX 50, RTX PRO and DGX Spark: `linear_sm90`'s source with instances of its own.
//!
//! Each warp multiplies by itself (`mma.sync`), whatever M is, since sm_120 and sm_121 have no `wgmma`, and a block has 99 KB of shared
//! memory.
//!
//! # Contract
//!
//! That of [`linear_sm90`](crate::wgmma::linear_sm90), with the threads and the shared memory of these instances, and a block for each tile. A
//! row has the same bits as on Hopper if the tensor core adds up as Hopper's does, which no card has shown yet.

pub mod abi;
#[cfg(feature = "linear_sm120")]
mod entries;
