//! The products of an MoE layer or a linear layer with e4m3 tokens on Hopper. Weights are decoded to e4m3 too, and
//! multiplied at twice the rate of 16-bit numbers.
//!
//! # Contract
//!
//! * One launch computes [`abi::Launch`]'s operation for every row of every expert. Grid: any number of CTAs of
//!   [`abi::Instance::threads`] threads with [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Lists, if any, are as [`Lists::filled`](crate::lists::Lists::filled) says for
//!   [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE), with ticket 0. The previous grid has waited for the grid that wrote
//!   them.
//! * Tokens are as [`moe_quantize`](crate::layer::moe_quantize) leaves them. Weights are [`units`](crate::units),
//!   packed for e4m3. Scales are finite and not negative.
//! * The grid may start while the previous grid still runs. It reads tokens after the previous grid has ended. It lets
//!   the next grid start after its own wait.
//! * The kernel writes the rows of C, each element once, and nothing else. A weight is the product of its value and its
//!   block scale, divided by 8, rounded once to e4m3. The tensor core adds products in steps of 32 columns, in the
//!   order of K in every instance, and keeps some 14 bits of each sum, as Hopper does. So a row's bits do not depend on
//!   other rows. Values beyond the output format's range become ±inf. A row contains NaN only if its token or its sums
//!   do.

pub mod abi;
#[cfg(feature = "moe_fp8_sm90")]
mod kernel;
