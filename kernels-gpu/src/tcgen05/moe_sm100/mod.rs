//! The products of an MoE layer with NVFP4 tokens on B200 and B300: `gated_sm100`'s source, with tiles found on the
//! device.
//!
//! # Contract
//!
//! * A launch computes [`Launch`](crate::routed::Launch) on an instance of its operation. Grid: any number of CTAs of
//!   [`Instance::threads`](crate::tcgen05::gated_sm100::abi::Instance::threads) threads with
//!   [`Instance::shared_bytes`](crate::tcgen05::gated_sm100::abi::Instance::shared_bytes) of dynamic shared memory.
//! * Lists are those that [`moe_route`](crate::layer::moe_route) makes for tiles of the instance's tokens. Addresses
//!   and tensor maps are as [`Launch`](crate::routed::Launch) says. Scales are not negative. Scales of weights are
//!   finite; a token with a NaN scale becomes NaN throughout.
//! * The grid may start while the previous grid still runs. It accesses global memory only after the previous grid has
//!   ended, and then lets the next grid start. An instance with
//!   [`Instance::early`](crate::tcgen05::gated_sm100::abi::Instance::early) reads lists and weights before that: they
//!   were complete before the previous grid let this grid start.
//! * The kernel writes the rows of C, each element once, and nothing else: as 16-bit numbers, in NVFP4 with the scales
//!   and the global scale of each row, or both. Products are exact. The tensor core adds them in f32 along K, in the
//!   same order in every instance, so a row's bits do not depend on other rows. Values beyond the output format's range
//!   become ±inf.

pub mod abi;
#[cfg(feature = "moe_sm100")]
mod kernel;
