//! Activation of the outputs of two plain GEMMs: C = silu(gate) ∘ up. The third kernel of the unfused baseline.
//!
//! # Contract
//!
//! * One launch computes every [`abi::Segment`] of an array. Grid: the sum of [`abi::Segment::blocks`] CTAs of
//!   [`abi::THREADS`] threads.
//! * Addresses are aligned as [`abi::Segment`] says. During the launch nothing else writes gate or up.
//! * The kernel writes C's own elements once each, and nothing else. It computes in f32 and rounds once. The same input
//!   gives the same bits.

pub mod abi;
#[cfg(feature = "silu_mul")]
mod kernel;
