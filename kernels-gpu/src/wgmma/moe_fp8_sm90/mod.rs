//! The products of an MoE layer, or of a linear layer, on Hopper with tokens in e4m3: weights are decoded to e4m3 too, and multiplied at
//! twice the rate of 16-bit numbers.
//!
//! # Contract
//!
//! * One launch computes what [`abi::Launch`] says for every row of every expert. A grid may have any number of blocks; each has
//!   [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Lists, if there are any, are as [`Lists::filled`](crate::lists::Lists::filled) says for
//!   [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE), their ticket 0, and a grid has written them that the one before this one has waited
//!   for. Tokens are as [`moe_quantize`](crate::layer::moe_quantize) leaves them. Weights are [`units`](crate::units), packed for e4m3. Scales are finite and
//!   have no sign.
//! * The grid may begin while the one before it still runs. It reads tokens after that one has ended. It lets the next one begin when
//!   it has waited itself.
//! * It writes the rows of C and nothing else, each element once. A weight is its value times its block's scale over 8, rounded once to
//!   e4m3. The tensor core adds products up in steps of 32 columns, always in the order of K, in every instance, and keeps of each sum
//!   what Hopper keeps (some 14 bits): a row's bits do not depend on other rows. What is too large for the output format becomes ±inf. A
//!   row has NaN only if its token or its sums have.

pub mod abi;
#[cfg(feature = "moe_fp8_sm90")]
mod kernel;
