//! What host and `moe_quantize_nvfp4` agree on: the kernel's parameter, and what it computes.

use bytemuck::{Pod, Zeroable};

pub use crate::format::{LARGEST_VALUE, LEAST_SCALE, NAN_SCALE};

/// The entries, for f16 and for bf16.
pub const ENTRIES: [&str; 2] = ["moe_quantize_nvfp4_f16", "moe_quantize_nvfp4_bf16"];

/// The largest number over its global scale: the largest e2m1 times the largest e4m3.
pub const LARGEST: f32 = LARGEST_VALUE * 448.0;

/// The least global scale of a token, 2⁻¹⁰⁰: so small that only zeros are left of smaller numbers, and so large that all quotients
/// are normal f32.
pub const LEAST_GLOBAL: f32 = f32::from_bits((127 - 100) << 23);

/// The one parameter of [`ENTRIES`]: rows of 16-bit numbers to NVFP4.
///
/// A row's *global scale* is its expert's input scale, or else `max(amax, LARGEST · LEAST_GLOBAL) / LARGEST`, rounded to f32, where amax
/// is the token's largest magnitude: by the bits, so that a NaN is larger than an infinity, and that than a number.
///
/// A block of 16 has the scale `amax / (6 · global)`, product and quotient each rounded to f32 and then to e4m3, to nearest even, at
/// most 448 and at least [`LEAST_SCALE`]. A value is `x · (1 / (scale · global))`, each of the three operations rounded to f32 and then
/// to e2m1, to nearest even, at most ±6; zeros keep their sign. If the block's amax or the global scale is not finite, the scale is
/// [`NAN_SCALE`] and all values are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Quantize {
    /// Address of the tokens, a multiple of 16: rows of `k` 16-bit numbers, `input_pitch` bytes apart.
    pub input: u64,
    /// A multiple of 16.
    pub input_pitch: u64,
    /// Address of a factor for each token, f32, by which it is multiplied and then rounded to its type before all else; or 0.
    pub input_weights: u64,
    /// Address of [`Lists::places`](crate::lists::Lists::places), by which a token goes to `top_k` rows; 0 if tokens are
    /// rows.
    pub places: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts), each expert's rows behind the other's without a gap. 0 if
    /// tokens are the rows of the only expert, all that there are: then there are no lists.
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for tiles of up to
    /// [`TILE_TOKENS`](crate::nvfp4_rows::TILE_TOKENS); not looked at without lists.
    pub tile_firsts: u64,
    /// Address of each expert's input scale, f32: at least [`LEAST_GLOBAL`] and at most its inverse, or 0 where each token is to have a
    /// global scale of its own.
    pub input_scales: u64,
    /// Address of the values, a multiple of 16, as [`nvfp4_rows`](crate::nvfp4_rows) says.
    pub values: u64,
    /// Address of the scales, as [`nvfp4_rows`](crate::nvfp4_rows) says.
    pub scales: u64,
    /// Address of each row's global scale, f32.
    pub globals: u64,
    /// Tokens; where tokens are rows by lists, the most that there can be.
    pub token_count: u32,
    /// Tiles that the tokens are in, if there are no lists.
    pub token_tiles: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E.
    pub experts: u32,
    /// Columns, a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Quantize {
    /// Threads of a block.
    pub const THREADS: u32 = 256;

    /// Warps of a block: a token has one.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// Blocks of a grid.
    pub const fn blocks(&self) -> u64 {
        self.token_count.div_ceil(Self::WARPS) as u64
    }
}
