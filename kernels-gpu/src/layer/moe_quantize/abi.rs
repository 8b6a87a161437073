//! Definitions that host and `moe_quantize` share: the kernel's parameter and its computation.

use bytemuck::{Pod, Zeroable};

/// Names of the entries for f16 and for bf16.
pub const ENTRIES: [&str; 2] = ["moe_quantize_f16", "moe_quantize_bf16"];

/// Largest e4m3.
pub const LARGEST: f32 = 448.0;

/// Least value that is used for a token's largest magnitude. Its scale is the smallest normal f32, so the inverse of a
/// scale is finite.
pub const LEAST_AMAX: f32 = LARGEST * f32::MIN_POSITIVE;

/// The only parameter of [`ENTRIES`]: rows of 16-bit numbers, to convert to e4m3 with one scale per row.
///
/// The scale of a row is `max(amax, LEAST_AMAX) / 448`, rounded to f32, where amax is the row's largest magnitude.
/// Magnitudes are compared by their bits: a NaN is larger than an infinity, and an infinity is larger than a number. A
/// number's code is `x · (1 / scale)`, where the inverse and the product are rounded to f32 and the result to e4m3, to
/// nearest even. Magnitudes above 448 become 448, and a NaN becomes 0x7f. So a row with a NaN has a NaN scale and only
/// codes 0x7f. A row with an infinity has an infinite scale, NaN in place of the infinity, and zeros elsewhere.
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
    /// Address of [`Lists::rows`](crate::lists::Lists::rows), where padding rows of an expert are
    /// [`NO_ROW`](crate::lists::NO_ROW); padding rows become zeros. 0 if every row is a token.
    pub rows: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts). 0 if every row is a token and the host knows the
    /// number of tokens: then all further rows become zeros.
    pub firsts: u64,
    /// Address of the codes, a multiple of 16, in the layout of [`sorted`](crate::sorted), with the columns of each
    /// line in the order of [`e4m3_position`](crate::units::e4m3_position).
    pub codes: u64,
    /// Address of one f32 scale per row.
    pub scales: u64,
    /// Number of tokens, if it is known. If `rows` is 0 and `firsts` is not, `firsts` has the number of tokens instead.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E.
    pub experts: u32,
    /// Capacity in rows of the codes, per k-block.
    pub row_capacity: u32,
    /// Number of columns; a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Quantize {
    /// Threads per CTA.
    pub const THREADS: u32 = 256;

    /// Warps per CTA. There is one warp per token, and one per expert whose rows are padded.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// CTAs per grid.
    pub const fn blocks(&self) -> u64 {
        let warps =
            if self.rows != 0 { self.token_count as u64 + self.experts as u64 } else { self.row_capacity as u64 };
        warps.div_ceil(Self::WARPS as u64)
    }
}
