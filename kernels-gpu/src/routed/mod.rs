//! Common parts of the products of an MoE layer with NVFP4 tokens on all GPUs: the kernels' parameter, and tiles that
//! the device finds.

use bytemuck::{Pod, Zeroable};

use crate::epilogue;

#[cfg(feature = "routed")]
pub(crate) mod tiles;

/// A tensor map, encoded by the driver: bytes, 128-byte swizzle, zeros outside.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorMap(pub [u64; 16]);

/// Destination of a product's C in the format that the next product multiplies: the 16-bit numbers in NVFP4, quantized
/// as in [`Quantize`](crate::layer::moe_quantize_nvfp4::abi::Quantize), with the product's own rows and tiles of
/// tokens. The tiles' padding has scales of 0, too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantizedC {
    /// Address of the global scale of each expert's rows, f32, none of them 0. The address is 0 if C is not quantized.
    pub input_scales: u64,
    /// Address of the values, as documented in [`nvfp4_rows`](crate::nvfp4_rows); 0 if C is not quantized.
    pub values: u64,
    /// Address of the scales, as documented in [`nvfp4_rows`](crate::nvfp4_rows); 0 if C is not quantized.
    pub scales: u64,
    /// Address of each row's global scale, f32; 0 if C is not quantized.
    pub globals: u64,
}

/// The parameter of a product: `C = f(A·B[0]ᵀ, A·B[1]ᵀ)` for each expert's rows of tokens, gate first, or `f` of one
/// matrix.
///
/// A product is the sum times `global scale of the token · alpha of the expert`, rounded to f32, plus the bias, with
/// one rounding. The activation follows.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Tensor map of the tokens' values: u8, rows of `k / 2` bytes, [`row_bytes`](crate::nvfp4_rows::row_bytes) apart,
    /// a box of [`K_BLOCK_BYTES`](crate::tcgen05::gated_sm100::abi::K_BLOCK_BYTES) × the instance's tokens. Maps come
    /// first, because the kernel passes on their addresses, not their bytes.
    pub token_map: TensorMap,
    /// Tensor map of the weights' values: each expert's matrices, `n` rows each. It differs from `token_map` in its box
    /// of [`TILE_ROWS`](crate::tcgen05::gated_sm100::abi::TILE_ROWS) rows.
    pub weight_map: TensorMap,
    /// Address of the tokens' scales, a multiple of 16, as documented in [`nvfp4_rows`](crate::nvfp4_rows).
    pub token_scales: u64,
    /// Address of each token's global scale, f32.
    pub globals: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts); unused if the host knows the [`rows`](Self::rows).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts); unused if the host knows the rows.
    pub tile_firsts: u64,
    /// Address of the weights' scales, a multiple of 16: the scales of each expert's matrices,
    /// [`weight_scale_bytes`](crate::nvfp4_rows::weight_scale_bytes) per matrix.
    pub weight_scales: u64,
    /// Per matrix, the address of one factor per expert, f32; or of one factor per column if the host knows the rows.
    pub alpha: [u64; 2],
    /// Per matrix, the address of `n` biases per expert, f32, which are added to the products; 0 if there are no
    /// biases.
    pub bias: [u64; 2],
    /// Address of C, a multiple of 16: rows of `n` 16-bit numbers without gaps. It may be 0 if C is quantized: then
    /// only the quantized C is written.
    pub c: u64,
    /// Destination of a gated product's C in NVFP4; unused by a plain product.
    pub quantized: QuantizedC,
    /// Columns of C, a multiple of 16.
    pub n: u32,
    /// Number of elements that are summed, a multiple of 16.
    pub k: u32,
    /// Number of experts E.
    pub experts: u32,
    /// Output format: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Activation of the products.
    pub activation: epilogue::Activation,
    /// Number of rows of C in a linear layer, whose only expert has all rows. 0 if lists define each expert's rows.
    pub rows: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: [u32; 2],
}
