//! A linear layer on Hopper: one NVFP4 matrix, tokens of 16 bits in their natural order.
//!
//! [`linear_sm120`](crate::mma_sync::linear_sm120) is [`by_warp`]'s source with instances of its own; [`linear_sm80`](crate::mma_sync::linear_sm80) has its
//! products.
//!
//! # Contract
//!
//! * One launch of a product computes what [`Launch`](crate::linear::Launch) says. A grid may have any number of blocks; each has
//!   [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Weights are [`panels`](abi), packed for the instance's type of tokens. Scales are finite and have no sign.
//! * The grid may begin while the one before it still runs. It reads tokens, and writes C, after that one has ended; it loads
//!   weights before. It lets the next one begin when it has waited itself.
//! * It writes C and nothing else, each element once. Products are exact; the tensor core adds them up in f32, always along K in
//!   the same order, in every instance: a row's bits do not depend on other rows. What is too large for the output format becomes
//!   ±inf. A row has NaN only if its token or its sums have.
//! * [`Pack`](crate::linear::Pack) packs a matrix, in a grid of [`Pack::blocks`](crate::linear::Pack::blocks) blocks of [`Pack::THREADS`](crate::linear::Pack::THREADS) threads.

pub mod abi;
pub mod by_warp;
#[cfg(feature = "linear_sm90")]
mod kernel;
