//! What host and `moe_quantize` agree on: the kernel's parameter, and what it computes.

use bytemuck::{Pod, Zeroable};

/// The entries, for f16 and for bf16.
pub const ENTRIES: [&str; 2] = ["moe_quantize_f16", "moe_quantize_bf16"];

/// The largest e4m3.
pub const LARGEST: f32 = 448.0;

/// What stands for the largest magnitude of a token whose numbers are all smaller: its scale is the smallest normal f32, so that the
/// scale's inverse is finite.
pub const LEAST_AMAX: f32 = LARGEST * f32::MIN_POSITIVE;

/// The one parameter of [`ENTRIES`]: rows of 16-bit numbers to e4m3 with a scale.
///
/// The scale of a row is `max(amax, LEAST_AMAX) / 448`, rounded to f32, where amax is its largest magnitude: by the bits, so that a
/// NaN is larger than an infinity, and that than a number. A number's code is `x · (1 / scale)`, the inverse and the product each
/// rounded to f32 and then to e4m3, to nearest even; what is above 448 becomes 448, and a NaN 0x7f. So a row with a NaN has that scale and
/// those codes, and one with an infinity has that scale and NaN where the infinity was.
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
    /// Address of [`Lists::rows`](crate::lists::Lists::rows): where it is
    /// [`NO_ROW`](crate::lists::NO_ROW), among the rows that fill up an expert's, the row becomes zeros; 0 if every row
    /// is a token.
    pub rows: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts). 0 if every row is a token and the host knows how many there
    /// are: then all rows behind them become zeros.
    pub firsts: u64,
    /// Address of the codes, a multiple of 16, as [`sorted`](crate::sorted) says, the columns of each line in the order of
    /// [`e4m3_position`](crate::units::e4m3_position).
    pub codes: u64,
    /// Address of each row's scale, f32.
    pub scales: u64,
    /// Tokens, if they are known: not where `rows` is 0 and `firsts` is not, which says how many there are.
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E.
    pub experts: u32,
    /// Rows that codes have room for in each k-block.
    pub row_capacity: u32,
    /// Columns, a multiple of 16.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Quantize {
    /// Threads of a block.
    pub const THREADS: u32 = 256;

    /// Warps of a block: a token has one, and so has an expert whose rows are filled up.
    pub const WARPS: u32 = Self::THREADS / 32;

    /// Blocks of a grid.
    pub const fn blocks(&self) -> u64 {
        let warps =
            if self.rows != 0 { self.token_count as u64 + self.experts as u64 } else { self.row_capacity as u64 };
        warps.div_ceil(Self::WARPS as u64)
    }
}
