//! What the products of an MoE layer with tokens in NVFP4 share on all GPUs: the kernels' parameter, and tiles that the device finds.

use bytemuck::{Pod, Zeroable};

use crate::epilogue;

#[cfg(feature = "routed")]
pub(crate) mod tiles;

/// A tensor map, which the driver has encoded: bytes, the 128-byte swizzle, zeros outside.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorMap(pub [u64; 16]);

/// Where a product leaves its C as the next one multiplies it: the 16-bit numbers in NVFP4, as
/// [`Quantize`](crate::layer::moe_quantize_nvfp4::abi::Quantize) says, with the product's own rows and tiles of tokens. What fills tiles up has
/// scales of 0, as there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantizedC {
    /// Address of the global scale of each expert's rows, f32, none of them 0. Itself 0 if C is not quantized.
    pub input_scales: u64,
    /// Address of the values, as [`nvfp4_rows`](crate::nvfp4_rows) says; 0 likewise.
    pub values: u64,
    /// Address of the scales, likewise.
    pub scales: u64,
    /// Address of each row's global scale, f32.
    pub globals: u64,
}

/// The one parameter of a product: `C = f(A·B[0]ᵀ, A·B[1]ᵀ)` for each expert's rows of tokens, gate first, or of one matrix alone.
///
/// A product is the sum times `global scale of the token · alpha of the expert`, rounded to f32, plus the bias, in one rounding; then
/// comes the activation.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// What the values of tokens are copied by: u8, rows of `k / 2` bytes, [`row_bytes`](crate::nvfp4_rows::row_bytes) apart, a box of
    /// [`K_BLOCK_BYTES`](crate::tcgen05::gated_sm100::abi::K_BLOCK_BYTES) × the instance's tokens. Maps come first: the kernel passes on their
    /// addresses, not their bytes.
    pub token_map: TensorMap,
    /// What those of weights are copied by, likewise, a box of [`TILE_ROWS`](crate::tcgen05::gated_sm100::abi::TILE_ROWS) rows: for each expert
    /// its matrices, `n` rows each.
    pub weight_map: TensorMap,
    /// Address of the tokens' scales, a multiple of 16, as [`nvfp4_rows`](crate::nvfp4_rows) says.
    pub token_scales: u64,
    /// Address of each token's global scale, f32.
    pub globals: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts); not looked at where the host knows the [`rows`](Self::rows).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts); likewise.
    pub tile_firsts: u64,
    /// Address of the weights' scales, a multiple of 16: for each expert those of its matrices,
    /// [`weight_scale_bytes`](crate::nvfp4_rows::weight_scale_bytes) each.
    pub weight_scales: u64,
    /// Addresses of a factor for each expert, f32, of each matrix. Where the host knows the rows, the address of one for each column.
    pub alpha: [u64; 2],
    /// Addresses of `n` numbers for each expert, f32, that are added to the products of each matrix; 0 where there are none.
    pub bias: [u64; 2],
    /// Address of C, a multiple of 16: rows of `n` 16-bit numbers without gaps. May be 0 where C is quantized: then it is so alone.
    pub c: u64,
    /// Where the C of a gated product goes in NVFP4; a plain one does not look at it.
    pub quantized: QuantizedC,
    /// Columns of C, a multiple of 16.
    pub n: u32,
    /// Elements summed over, a multiple of 16.
    pub k: u32,
    /// E.
    pub experts: u32,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// What becomes of the products.
    pub activation: epilogue::Activation,
    /// Rows of C if there is one expert, whose rows are all of these, and the product is plain: a linear layer's. 0 if lists say which
    /// rows an expert has.
    pub rows: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: [u32; 2],
}
