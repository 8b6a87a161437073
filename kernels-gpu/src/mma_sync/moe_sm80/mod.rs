//! The products of an MoE layer on any card from sm_80 on: tokens of 16 bits, experts' rows known on the device alone.
//!
//! # Contract
//!
//! * One launch computes what [`Launch`](crate::moe::Launch) says for every row of every expert. A grid may have any number
//!   of blocks; each has [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Lists are as [`Lists`](crate::lists::Lists) says, their ticket 0. Weights are [`units`](crate::units), packed for
//!   the instance's type of tokens. Scales are finite and have no sign.
//! * The grid before has ended when this one begins.
//! * It writes the rows of C and nothing else, each element once. Products are exact; the tensor core adds them up in f32,
//!   always along K in the same order, in every instance: a row's bits do not depend on other rows. The order is that of
//!   [`moe_sm90`](crate::wgmma::moe_sm90) and [`moe_sm120`](crate::wgmma::moe_sm120). What is too large for the output format becomes ±inf. A row
//!   has NaN only if its token or its sums have.

pub mod abi;
#[cfg(feature = "moe_sm80")]
mod kernel;
