//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * Computes what [`Group`](abi::Group) says for every tile of the list, in one launch of as many blocks as the list is dealt out to,
//!   [`Instance::threads`](abi::Instance::threads) each, [`Instance::shared_bytes`](abi::Instance::shared_bytes) of dynamic shared memory. Tiles cover each group's C once. M, N
//!   and K may end anywhere in a tile.
//! * Unless [`Instance::decodes_tokens`](abi::Instance::decodes_tokens), the grid before on the stream, or one before that, is `tokens_sm90`, which
//!   decodes the groups' tokens.
//! * Addresses are as [`Group`](abi::Group) says. Scales are finite (never 0x7f) and have no sign, in the
//!   padding of the scale layout too: it meets values that are zeros.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Products are exact; the tensor core adds them up in f32. α·sum and α·2²⁸ must be finite in f32. Overflow of the output
//!   format gives ±inf.

pub mod abi;
#[cfg(feature = "gated_sm90")]
mod kernel;
