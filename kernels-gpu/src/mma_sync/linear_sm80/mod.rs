//! A linear layer on any GPU from sm_80 on: each warp multiplies by itself, as in `linear_sm120`. Threads copy tokens
//! and weights 16 bytes at a time.
//!
//! # Contract
//!
//! The contract of [`linear_sm90`](crate::wgmma::linear_sm90), with the threads and the shared memory of these
//! instances, and with these differences:
//!
//! * The grid has one CTA per tile.
//! * The previous grid has ended when this grid starts.
//! * The kernel reads tokens by address and pitch, not by a tensor map.
//!
//! A row has the same bits as on Hopper if the GPU's tensor core adds like Hopper's, which was not verified on any GPU.

pub mod abi;
#[cfg(feature = "linear_sm80")]
mod kernel;
