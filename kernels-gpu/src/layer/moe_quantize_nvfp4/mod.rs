//! Tokens of 16 bits to NVFP4, sorted by expert: what `moe_sm100` and `moe_nvfp4_sm120` multiply.
//!
//! # Contract
//!
//! * A launch has [`abi::Quantize::blocks`] blocks of [`abi::Quantize::THREADS`] threads.
//! * The grid may begin while the one before it still runs. It reads and writes global memory only when that one has ended, and lets
//!   the next one begin after that: the next one may read at once what grids before this one have written.
//! * Addresses are aligned as [`abi::Quantize`] says, or to what lies there. Nobody writes what it reads meanwhile, or accesses what
//!   it writes.
//! * It writes the values, the scales and the global scale of each row, once, and zeros as the scales of what fills a tile of tokens up
//!   to a multiple of eight. The same input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_quantize_nvfp4")]
mod kernel;
