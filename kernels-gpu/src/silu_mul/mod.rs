//! silu and product of what two plain GEMMs have left in memory: the third kernel of the unfused baseline.
//!
//! # Contract
//!
//! * Computes every [`Segment`](abi::Segment) of the array, in one launch: a grid of as many blocks as the segments have
//!   ([`Segment::blocks`](abi::Segment::blocks)), [`THREADS`](abi::THREADS) threads each.
//! * Addresses are aligned as [`Segment`](abi::Segment) says. Nobody writes gate or up meanwhile.
//! * Writes C's own elements and nothing else, each once; computes in f32, rounds once. The same input gives the same
//!   bits.

pub mod abi;
#[cfg(feature = "silu_mul")]
mod kernel;
