//! The parameter of an MoE layer's products with 16-bit tokens, on all GPUs.

use bytemuck::{Pod, Zeroable};

use crate::epilogue::Activation;

/// The one parameter of a product: for every expert e with its rows, `C = silu(α·A·gateᵀ + bias) ∘ (α·A·upᵀ + bias)` or another
/// activation of the two, or `C = α·A·downᵀ + bias`.
///
/// Which rows an expert has, [`Lists`](crate::lists::Lists) say, which the grid before may still be writing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the tokens, a multiple of 16: `[tokens, k]` without gaps, 16-bit numbers in the order of K
    /// ([`units`](crate::units)). On an instance with [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted), the rows as [`sorted`](crate::sorted) says.
    pub tokens: u64,
    /// Address of [`Lists::rows`](crate::lists::Lists::rows), the token that each row is; 0 if rows are tokens. Not looked at
    /// on an instance with [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted).
    pub rows: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for the instance's
    /// [`Instance::tile_tokens`](crate::wgmma::moe_sm90::abi::Instance::tile_tokens).
    pub tile_firsts: u64,
    /// Address of this product's ticket, 0 when the lists have been made.
    pub ticket: u64,
    /// Addresses of the units of the first expert's gate and up, or of its down (the second is not looked at); multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's to the next one's.
    pub expert_bytes: u64,
    /// Addresses of a factor for each expert, f32: the global scales of gate and up, or of down.
    pub alpha: [u64; 2],
    /// Addresses of what is added to products times their factor: `[experts, n]`, f32, in the order of the rows of each B; 0 for
    /// nothing.
    pub bias: [u64; 2],
    /// Address of C `[rows, n]`, 16-bit numbers of the tokens' type, rows without gaps; a multiple of 16. Or see
    /// [`c_is_sorted`](Self::c_is_sorted).
    pub c: u64,
    /// Rows of each B, columns of C; a multiple of 16.
    pub n: u32,
    /// Elements summed over; a multiple of 16, not 0.
    pub k: u32,
    /// Experts, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// 1 if the grid before may still be writing the lists. 0 if it has waited for the one that wrote them, before it let this
    /// one begin: then weights are loaded before it ends.
    pub lists_pending: u32,
    /// On an instance with [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted), where each expert's first row is a multiple of
    /// [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE): rows that tokens have room for, and C if it is sorted.
    pub row_capacity: u32,
    /// 1 if C lies as [`sorted`](crate::sorted) says, for the next product to take: columns are positions in the order of K. Not looked
    /// at on other instances.
    pub c_is_sorted: u32,
    /// What becomes of that.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}
