//! A linear layer on any card from sm_80 on: `linear_sm90`'s products of a warp, with tokens and weights copied 16 bytes a thread.
//!
//! # Contract
//!
//! That of [`linear_sm90`](crate::wgmma::linear_sm90), with the threads and the shared memory of these instances, and a block for each tile.
//! But the grid before has ended when this one begins, and tokens are read by their address and pitch, not by their map. A row has the same
//! bits as on Hopper if the tensor core adds up as Hopper's does, which no card has shown yet.

pub mod abi;
#[cfg(feature = "linear_sm80")]
mod kernel;
