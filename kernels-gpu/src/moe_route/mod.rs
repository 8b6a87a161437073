//! What an MoE layer does before and after its products: lists of each expert's tokens, tokens in the order of K, and the
//! weighted sum of a token's rows (sm_90: clusters, overlapping grids).

pub mod abi;
