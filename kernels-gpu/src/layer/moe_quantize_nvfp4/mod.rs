//! Quantizes 16-bit tokens to NVFP4, sorted by expert, for `moe_sm100` and `moe_nvfp4_sm120`.
//!
//! # Contract
//!
//! * Grid: [`abi::Quantize::blocks`] CTAs of [`abi::Quantize::THREADS`] threads. For the entries for few tokens:
//!   [`abi::Quantize::few_blocks`] CTAs of [`abi::Quantize::FEW_THREADS`] threads with
//!   [`abi::Quantize::FEW_SHARED_BYTES`] of dynamic shared memory.
//! * The grid may start while the previous grid still runs. It accesses global memory only after the previous grid has
//!   ended, and then lets the next grid start. So the next grid may read at once what earlier grids have written. An
//!   entry for few tokens without places lets the next grid start at once: its tokens are rows of an earlier product,
//!   and the lists were complete before that product let this grid start.
//! * The entries that make the lists have the same grid, with [`abi::RouteQuantize::SHARED_BYTES`] of dynamic shared
//!   memory. They write the places, the first rows and the first tiles that [`moe_route`](crate::layer::moe_route) would
//!   write, and no other list.
//! * Addresses are aligned as [`abi::Quantize`] says, or to the element. During the launch nothing else writes the
//!   inputs or accesses the outputs.
//! * The kernel writes the values, the scales and the global scale of each row once. It writes zeros as the scales of
//!   the rows that fill a tile of tokens up to a multiple of eight. The same input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_quantize_nvfp4")]
mod few;
#[cfg(feature = "moe_quantize_nvfp4")]
mod kernel;
#[cfg(feature = "moe_quantize_nvfp4")]
mod route;
