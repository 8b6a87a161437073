//! What host and `moe_sm90` agree on: the parameter of a product, budgets, and the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N. A tile of C takes two *panels* of weights. A
//! block goes through K in k-blocks; a stage holds one k-block of a tile's weights.

use bytemuck::{Pod, Zeroable};

/// The one parameter of a product: for every expert e with its rows, `C = silu(α·A·gateᵀ) ∘ (α·A·upᵀ)`, or `C = α·A·downᵀ`.
///
/// Which rows an expert has, [`Lists`](crate::moe_route::abi::Lists) say, which the grid before may still be writing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the tokens, a multiple of 16: `[tokens, k]` without gaps, 16-bit numbers in the order of K
    /// ([`units`](crate::units)).
    pub tokens: u64,
    /// Address of [`Lists::rows`](crate::moe_route::abi::Lists::rows), the token that each row is; 0 if rows are tokens.
    pub rows: u64,
    /// Address of [`Lists::firsts`](crate::moe_route::abi::Lists::firsts).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::moe_route::abi::Lists::tile_firsts), for the instance's
    /// [`Instance::tile_tokens`].
    pub tile_firsts: u64,
    /// Address of this product's ticket, 0 when the lists have been made.
    pub ticket: u64,
    /// Addresses of the units of the first expert's gate and up, or of its down (the second is not looked at); multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's to the next one's.
    pub expert_bytes: u64,
    /// Addresses of a factor for each expert, f32: the global scales of gate and up, or of down.
    pub alpha: [u64; 2],
    /// Address of C `[rows, n]`, 16-bit numbers of the tokens' type, rows without gaps; a multiple of 16.
    pub c: u64,
    /// Rows of each B, columns of C; a multiple of 16.
    pub n: u32,
    /// Elements summed over; a multiple of 16, not 0.
    pub k: u32,
    /// Experts, from 1 to [`MAX_EXPERTS`](crate::moe_route::abi::MAX_EXPERTS).
    pub experts: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}
