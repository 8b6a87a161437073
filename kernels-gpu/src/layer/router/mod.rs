//! Which experts a token has, and with which weights, from the logits of a router: a warp a token.
//!
//! # Contract
//!
//! * A launch has [`abi::blocks`] blocks of [`abi::THREADS`] threads, with [`abi::shared_bytes`] of dynamic shared memory.
//! * Addresses are aligned to what lies there. Nobody writes what it reads meanwhile, or accesses what it writes.
//! * It writes every id and weight once and nothing else. Experts are compared by f32 scores ([`score`]); the lower of two equal
//!   ones comes first. The same logits of a token give the same bits, on the host too.

pub mod abi;
#[cfg(feature = "router")]
mod kernel;
pub mod score;
