//! The Blackwell kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of B200 and B300.
//!
//! # Contract
//!
//! * Computes what [`Group`](abi::Group) says for every tile of the list, in one launch: a grid of at most as many blocks as there
//!   are tiles, twice as many where a pair computes a tile; [`Instance::threads`](abi::Instance::threads) threads each and
//!   [`Instance::shared_bytes`](abi::Instance::shared_bytes) of dynamic shared memory. Tiles cover each group's C once, and [`Instance::allows`](abi::Instance::allows) its
//!   M. M, N and K may end anywhere in a tile.
//! * Addresses and tensor maps are as [`Group`](abi::Group) says: K is a multiple of [`K_ALIGNMENT`](abi::K_ALIGNMENT), so that the rows of a map
//!   are of 16 bytes. Scales are finite (never 0x7f) and have no sign, in the padding of K too: it meets values that
//!   the maps fill with zeros.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Sums are f32, as the tensor core adds them. α·sum must be finite in f32. Overflow of the output format gives
//!   ±inf.

pub mod abi;
#[cfg(feature = "gated_sm100")]
mod kernel;
