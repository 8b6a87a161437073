//! What an MoE layer does before and after its products: lists of each expert's tokens, tokens in the order of K or in their experts'
//! rows, and the weighted sum of a token's rows (from sm_90 on with clusters and overlapping grids).
//!
//! # Contract
//!
//! * A launch of `moe_route` has [`abi::Route::blocks`] blocks of [`abi::Route::THREADS`] threads, in clusters of
//!   [`abi::Route::cluster`], with [`abi::Route::shared_bytes`] of dynamic shared memory. A launch of a `moe_combine` has
//!   [`abi::Combine::blocks`] blocks of [`abi::Combine::THREADS`] threads, and one of `moe_expand` [`abi::Expand::blocks`] of
//!   [`abi::Expand::THREADS`].
//! * Before sm_90 a cluster is one block, and the grid before has ended.
//! * From sm_90 on a grid may begin while the one before it still runs. It reads and writes global memory only when that one has
//!   ended, and lets the next one begin at once; `moe_expand` when it has waited itself, so that the next one may read the lists.
//! * Addresses are aligned as [`abi::Route`] and [`abi::Combine`] say, or to what lies there. Nobody writes what it reads
//!   meanwhile, or accesses what it writes.
//! * It writes every list, token and output once, whatever was there, and nothing else. The same input gives the same bits.

pub mod abi;
#[cfg(feature = "moe_route")]
mod kernel;
