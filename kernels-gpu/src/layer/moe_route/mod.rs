//! The steps of an MoE layer around its products: lists of each expert's tokens, tokens with permuted columns or in the
//! rows of their experts, and the weighted sum of a token's rows. From sm_90 on with clusters and overlapping grids.
//!
//! # Contract
//!
//! * Grids:
//!   * `moe_route`, and `moe_route_large` for more than 512 experts: [`abi::Route::blocks`] CTAs of [`abi::Route::THREADS`] threads, in clusters of
//!     [`abi::Route::cluster`], with [`abi::Route::shared_bytes`] of dynamic shared memory.
//!   * `moe_combine`: [`abi::Combine::blocks`] CTAs of [`abi::Combine::THREADS`] threads.
//!   * `moe_expand`: [`abi::Expand::blocks`] CTAs of [`abi::Expand::THREADS`] threads.
//! * Before sm_90 a cluster is one CTA, and the previous grid has ended.
//! * From sm_90 on a grid may start while the previous grid still runs. It accesses global memory only after the
//!   previous grid has ended. It lets the next grid start at once; `moe_expand` does so after its own wait, so that the
//!   next grid may read the lists.
//! * Addresses are aligned as [`abi::Route`] and [`abi::Combine`] say, or to the element. During the launch nothing
//!   else writes the inputs or accesses the outputs.
//! * The kernels write every list, token and output once, whatever the memory held before, and nothing else. The same
//!   input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_route")]
mod kernel;
