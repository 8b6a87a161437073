//! Quantizes 16-bit tokens to e4m3 with one scale per token, sorted by expert, for `moe_fp8_sm90`.
//!
//! # Contract
//!
//! * Grid: [`abi::Quantize::blocks`] CTAs of [`abi::Quantize::THREADS`] threads.
//! * The grid may start while the previous grid still runs. It accesses global memory only after the previous grid has
//!   ended, and then lets the next grid start. So the next grid may read at once what earlier grids have written.
//! * Addresses are aligned as [`abi::Quantize`] says, or to the element. During the launch nothing else writes the
//!   inputs or accesses the outputs.
//! * The kernel writes the lines and the scale of each row once, whatever the memory held before. The same input gives
//!   the same bits.

pub mod abi;
#[cfg(feature = "moe_quantize")]
mod kernel;
