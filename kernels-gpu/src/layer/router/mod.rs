//! Selects the experts of each token and their weights from a router's logits, with one warp per token.
//!
//! # Contract
//!
//! * Grid: [`abi::blocks`] CTAs of [`abi::THREADS`] threads, with [`abi::shared_bytes`] of dynamic shared memory. The
//!   entry for any rule ([`abi::RULE_ENTRY`]) has [`abi::rule_shared_bytes`].
//! * Addresses are aligned to the element. During the launch nothing else writes the inputs or accesses the outputs.
//! * The kernel writes every id and weight once and nothing else. Experts are compared by f32 scores ([`score`]); of
//!   two equal experts the lower number comes first. The same logits of a token give the same bits, on the host too.

pub mod abi;
#[cfg(feature = "router")]
mod kernel;
#[cfg(feature = "router")]
mod lane;
#[cfg(feature = "router")]
mod rule;
pub mod score;
