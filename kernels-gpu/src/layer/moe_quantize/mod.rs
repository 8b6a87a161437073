//! Tokens of 16 bits to e4m3 with a scale for each, sorted by expert: what `moe_fp8_sm90` multiplies.
//!
//! # Contract
//!
//! * A launch has [`abi::Quantize::blocks`] blocks of [`abi::Quantize::THREADS`] threads.
//! * The grid may begin while the one before it still runs. It reads and writes global memory only when that one has ended, and lets
//!   the next one begin after that: the next one may read at once what grids before this one have written.
//! * Addresses are aligned as [`abi::Quantize`] says, or to what lies there. Nobody writes what it reads meanwhile, or accesses what
//!   it writes.
//! * It writes the lines and the scale of each row, once, whatever was there. The same input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_quantize")]
mod kernel;
