//! Parameter of an MoE layer's products with 16-bit tokens, on all GPUs.

use bytemuck::{Pod, Zeroable};

use crate::epilogue::Activation;

/// The only parameter of a product. For every expert e and its rows it computes `C = silu(α·A·gateᵀ + bias) ∘ (α·A·upᵀ
/// + bias)`, or another activation of the two, or `C = α·A·downᵀ + bias`.
///
/// [`Lists`](crate::lists::Lists) define each expert's rows. The previous grid may still be writing the lists.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the tokens, a multiple of 16: `[tokens, k]` without gaps, 16-bit numbers in the order of K
    /// ([`units`](crate::units)). For an instance with
    /// [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted): address of the rows in the layout of
    /// [`sorted`](crate::sorted).
    pub tokens: u64,
    /// Address of [`Lists::rows`](crate::lists::Lists::rows), the token of each row; 0 if rows are tokens. Ignored by
    /// an instance with [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted).
    pub rows: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for the instance's
    /// [`Instance::tile_tokens`](crate::wgmma::moe_sm90::abi::Instance::tile_tokens).
    pub tile_firsts: u64,
    /// Address of this product's ticket, which is 0 when the lists have been written.
    pub ticket: u64,
    /// Addresses of the units of the first expert's gate and up, or of its down (the second address is ignored);
    /// multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's weights to the next one's.
    pub expert_bytes: u64,
    /// Addresses of one f32 factor per expert: the global scales of gate and up, or of down.
    pub alpha: [u64; 2],
    /// Addresses of the biases, which are added to products times their factor: `[experts, n]`, f32, in the order of
    /// each B's rows; 0 for no bias.
    pub bias: [u64; 2],
    /// Address of C `[rows, n]`, 16-bit numbers of the token type, rows without gaps; a multiple of 16.
    /// [`c_is_sorted`](Self::c_is_sorted) selects another layout.
    pub c: u64,
    /// Number of rows of each B, and of columns of C; a multiple of 16.
    pub n: u32,
    /// Number of elements that are summed; a multiple of 16, not 0.
    pub k: u32,
    /// Number of experts, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// 1: wait for the previous grid before reading the lists. 0: the lists are complete, because the previous grid
    /// waited for the grid that wrote them before it let this grid start; weights are then loaded before the previous
    /// grid ends.
    pub lists_pending: u32,
    /// Only for an instance with [`Instance::sorted`](crate::wgmma::moe_sm90::abi::Instance::sorted), where each
    /// expert's first row is a multiple of [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE): capacity in rows of the
    /// sorted tokens, and of C if C is sorted.
    pub row_capacity: u32,
    /// 1: C has the layout of [`sorted`](crate::sorted), as input of the next product; its columns are positions in the
    /// order of K. Ignored by other instances.
    pub c_is_sorted: u32,
    /// Activation of the sums.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}
