//! Quantizes 16-bit tokens to NVFP4, sorted by expert, for `moe_sm100` and `moe_nvfp4_sm120`.
//!
//! # Contract
//!
//! * Grid: [`abi::Quantize::blocks`] CTAs of [`abi::Quantize::THREADS`] threads.
//! * The grid may start while the previous grid still runs. It accesses global memory only after the previous grid has
//!   ended, and then lets the next grid start. So the next grid may read at once what earlier grids have written.
//! * Addresses are aligned as [`abi::Quantize`] says, or to the element. During the launch nothing else writes the
//!   inputs or accesses the outputs.
//! * The kernel writes the values, the scales and the global scale of each row once. It writes zeros as the scales of
//!   the rows that fill a tile of tokens up to a multiple of eight. The same input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_quantize_nvfp4")]
mod kernel;
