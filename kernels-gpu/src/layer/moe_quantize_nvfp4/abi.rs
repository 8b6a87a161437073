//! Definitions that host and `moe_quantize_nvfp4` share: the kernel's parameter and its computation.

use bytemuck::{Pod, Zeroable};

pub use crate::format::{LARGEST_VALUE, LEAST_SCALE, NAN_SCALE};
use crate::{format::SCALE_TILE_COLUMNS, lists::MAX_EXPERTS, nvfp4_rows::scale_tiles};

/// Names of the entries for f16 and for bf16.
pub const ENTRIES: [&str; 2] = ["moe_quantize_nvfp4_f16", "moe_quantize_nvfp4_bf16"];

/// Names of the entries for few tokens, for f16 and for bf16. They give the same bits as [`ENTRIES`], and spread each
/// token over several warps.
pub const FEW_ENTRIES: [&str; 2] = ["moe_quantize_nvfp4_few_f16", "moe_quantize_nvfp4_few_bf16"];

/// Names of the entries for few tokens that also make the lists, for f16 and for bf16.
pub const ROUTE_ENTRIES: [&str; 2] = ["moe_quantize_nvfp4_route_f16", "moe_quantize_nvfp4_route_bf16"];

/// Maximum number of choices, T·k, of [`ROUTE_ENTRIES`].
pub const ROUTE_CHOICES: u32 = 1024;

/// Largest number divided by its global scale: the largest e2m1 times the largest e4m3.
pub const LARGEST: f32 = LARGEST_VALUE * 448.0;

/// Least global scale of a token, 2⁻¹⁰⁰: small enough that smaller numbers become zeros, and large enough that all
/// quotients are normal f32.
pub const LEAST_GLOBAL: f32 = f32::from_bits((127 - 100) << 23);

/// The only parameter of [`ENTRIES`] and [`FEW_ENTRIES`]: rows of 16-bit numbers, to convert to NVFP4.
///
/// A row's *global scale* is its expert's input scale, or otherwise `max(amax, LARGEST · LEAST_GLOBAL) / LARGEST`,
/// rounded to f32, where amax is the token's largest magnitude. Magnitudes are compared by their bits: a NaN is larger
/// than an infinity, and an infinity is larger than a number.
///
/// A block of 16 has the scale `amax / (6 · global)`, where the product and the quotient are rounded to f32 and the
/// result to e4m3, to nearest even, at most 448 and at least [`LEAST_SCALE`]. A value is `x · (1 / (scale · global))`,
/// where each of the three operations is rounded to f32 and the result to e2m1, to nearest even, at most ±6; zeros keep
/// their sign. If the block's amax or the global scale is not finite, the scale is [`NAN_SCALE`] and all values are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Quantize {
    /// Address of the tokens, a multiple of 16: rows of `k` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// Bytes from one token to the next; a multiple of 16.
    pub input_pitch: u64,
    /// Address of one f32 factor per token; a token is first multiplied by its factor and rounded to its type. 0 for no
    /// factors.
    pub input_weights: u64,
    /// Address of [`Lists::places`](crate::lists::Lists::places), the `top_k` rows of each token; 0 if tokens are rows.
    pub places: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts), with the experts' rows in sequence without gaps. 0 if
    /// tokens are all rows of the only expert: then there are no lists.
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for tiles of up to
    /// [`TILE_TOKENS`](crate::nvfp4_rows::TILE_TOKENS); ignored without lists.
    pub tile_firsts: u64,
    /// Address of one f32 input scale per expert, from [`LEAST_GLOBAL`] to its inverse, or 0 if each token has its own
    /// global scale.
    pub input_scales: u64,
    /// Address of the values, a multiple of 16, in the layout of [`nvfp4_rows`](crate::nvfp4_rows).
    pub values: u64,
    /// Address of the scales, in the layout of [`nvfp4_rows`](crate::nvfp4_rows).
    pub scales: u64,
    /// Address of one f32 global scale per row.
    pub globals: u64,
    /// Number of tokens. If tokens are rows by lists, their maximum number.
    pub token_count: u32,
    /// Number of tiles of tokens, if there are no lists.
    pub token_tiles: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E.
    pub experts: u32,
    /// Number of columns; a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The only parameter of [`ROUTE_ENTRIES`]: the tokens and the choices, from which each CTA makes the lists for itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RouteQuantize {
    /// The tokens, with `places`, `firsts` and `tile_firsts` as outputs, none of them 0. T·k is at most
    /// [`ROUTE_CHOICES`].
    pub quantize: Quantize,
    /// Addresses and numbers as in [`Route`](crate::layer::moe_route::abi::Route).
    pub ids: u64,
    /// Same as [`Route::map`](crate::layer::moe_route::abi::Route::map).
    pub map: u64,
    /// Same as [`Route::named_experts`](crate::layer::moe_route::abi::Route::named_experts).
    pub named_experts: u32,
    /// Same as [`Route::tile_tokens`](crate::layer::moe_route::abi::Route::tile_tokens).
    pub tile_tokens: u32,
}

/// Shared memory of a CTA of [`ROUTE_ENTRIES`]: the warps' largest magnitudes; per choice its expert; per expert, and
/// behind the last one, its first row and its first tile; per warp the sums of its experts. These are offsets in bytes.
pub const ROUTE_EXPERTS_AT: u32 = Quantize::FEW_SHARED_BYTES;
/// Offset of the first rows and tiles.
pub const ROUTE_FIRSTS_AT: u32 = ROUTE_EXPERTS_AT + 4 * ROUTE_CHOICES;
/// Offset of the warps' sums.
pub const ROUTE_SUMS_AT: u32 = ROUTE_FIRSTS_AT + 4 * (MAX_EXPERTS + 1);

impl RouteQuantize {
    /// Dynamic shared memory per CTA, in bytes.
    pub const SHARED_BYTES: u32 = ROUTE_SUMS_AT + 4 * (Quantize::FEW_THREADS / 32);
}

impl Quantize {
    /// Threads per CTA.
    pub const THREADS: u32 = 256;

    /// Warps per CTA. There is one warp per token.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// CTAs per grid of [`ENTRIES`].
    pub const fn blocks(&self) -> u64 {
        self.token_count.div_ceil(Self::WARPS) as u64
    }

    /// Threads per CTA of [`FEW_ENTRIES`]. Each thread has one block of a token.
    pub const FEW_THREADS: u32 = 128;

    /// Dynamic shared memory per CTA of [`FEW_ENTRIES`], in bytes: the largest magnitude of each warp.
    pub const FEW_SHARED_BYTES: u32 = Self::FEW_THREADS / 32 * 4;

    /// Number of pieces that a token is cut into for [`FEW_ENTRIES`]: one per CTA.
    pub const fn few_pieces(&self) -> u32 {
        (scale_tiles(self.k) * SCALE_TILE_COLUMNS).div_ceil(Self::FEW_THREADS)
    }

    /// CTAs per grid of [`FEW_ENTRIES`]: one per row and piece.
    pub const fn few_blocks(&self) -> u64 {
        let rows = if self.places == 0 { 1 } else { self.top_k as u64 };
        self.token_count as u64 * rows * self.few_pieces() as u64
    }
}
