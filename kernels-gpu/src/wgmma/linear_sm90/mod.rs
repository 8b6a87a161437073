//! A linear layer on Hopper: one NVFP4 matrix, 16-bit tokens in their natural order.
//!
//! [`linear_sm120`](crate::mma_sync::linear_sm120) has [`by_warp`]'s source with other instances.
//! [`linear_sm80`](crate::mma_sync::linear_sm80) has the products of [`by_warp`].
//!
//! # Contract
//!
//! * One launch of a product computes [`Launch`](crate::linear::Launch). Grid: any number of CTAs of
//!   [`abi::Instance::threads`] threads with [`abi::Instance::shared_bytes`] of dynamic shared memory. An instance whose
//!   parts of K belong to a cluster of two CTAs has two CTAs per tile.
//! * Weights are [`panels`](abi), packed for the instance's token type. Scales are finite and not negative.
//! * The grid may start while the previous grid still runs. It loads weights at once, and reads tokens and writes C
//!   after the previous grid has ended. It lets the next grid start after its own wait.
//! * The kernel writes C, each element once, and nothing else. Products are exact. The tensor core adds them in f32
//!   along K, in the same order in every instance with the same number of parts of K, so a row's bits do not depend on
//!   other rows. Values beyond the
//!   output format's range become ±inf. A row contains NaN only if its token or its sums do.
//! * [`Pack`](crate::linear::Pack) packs a matrix. Grid: [`Pack::blocks`](crate::linear::Pack::blocks) CTAs of
//!   [`Pack::THREADS`](crate::linear::Pack::THREADS) threads.

pub mod abi;
pub mod by_warp;
#[cfg(feature = "linear_sm90")]
mod kernel;
