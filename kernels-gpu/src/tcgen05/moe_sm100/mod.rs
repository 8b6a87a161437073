//! The products of an MoE layer on B200 and B300 with tokens in NVFP4: `gated_sm100`'s source, whose tiles the device finds itself.
//!
//! # Contract
//!
//! * A launch computes [`Launch`](crate::routed::Launch) on an instance of its operation, with any number of blocks of
//!   [`Instance::threads`](crate::tcgen05::gated_sm100::abi::Instance::threads) threads and
//!   [`Instance::shared_bytes`](crate::tcgen05::gated_sm100::abi::Instance::shared_bytes) of dynamic shared memory.
//! * Lists are as [`moe_route`](crate::layer::moe_route) makes them, for tiles of the instance's tokens. Addresses and tensor maps are as
//!   [`Launch`](crate::routed::Launch) says. Scales have no sign. Those of weights are finite; a token with a NaN as a scale becomes NaN throughout.
//! * The grid may begin while the one before it still runs. It reads and writes global memory only when that one has ended, and lets
//!   the next one begin after that.
//! * It writes the rows of C, as 16-bit numbers, in NVFP4 with the scales and the global scale of each row, or both, and nothing else, each
//!   element once. Products are exact; the tensor core adds them up in f32, always along K
//!   in the same order, in every instance: a row's bits do not depend on other rows. What is too large for the output format becomes ±inf.

pub mod abi;
#[cfg(feature = "moe_sm100")]
mod kernel;
