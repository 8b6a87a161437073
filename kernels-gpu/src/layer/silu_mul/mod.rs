//! Activation of what two plain GEMMs have left in memory: C = silu(gate) ∘ up. The third kernel of the unfused baseline.
//!
//! # Contract
//!
//! * One launch computes every [`abi::Segment`] of an array. Its grid is the sum of [`abi::Segment::blocks`]; a block has
//!   [`abi::THREADS`] threads.
//! * Addresses are aligned as [`abi::Segment`] says. Nobody writes gate or up meanwhile.
//! * It writes C's own elements and nothing else, each once. It computes in f32 and rounds once. The same input gives the
//!   same bits.

pub mod abi;
#[cfg(feature = "silu_mul")]
mod kernel;
