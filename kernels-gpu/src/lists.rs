//! Lists of an MoE layer on the device: the rows of each expert.
//!
//! A layer has T tokens of H elements, and E local experts. Each token names k experts; experts that are not local
//! contribute nothing. A *row* is one (token, local expert) pair. Rows are sorted by expert. Only the device knows
//! their number.

use crate::sorted::most_rows;

/// Maximum number of experts per layer.
pub const MAX_EXPERTS: u32 = 1024;

/// Maximum number of experts of a layer that takes the entries for small layers. A layer with more experts takes the
/// entries for large layers.
pub const SMALL_EXPERTS: u32 = 512;

/// Maximum number of experts that a token names.
pub const MAX_TOP_K: u32 = 32;

/// Value in [`Lists::places`] for a choice without a row.
pub const NO_ROW: u32 = u32::MAX;

/// Offsets of a layer's lists, in bytes from the start of the lists. Each offset is a multiple of 16, and each list is
/// an array of `u32`.
///
/// ```
/// # use kernels_gpu::lists::Lists;
/// let lists = Lists::new(8, 128);
/// assert_eq!((lists.firsts, lists.tile_firsts, lists.rows), (16, 544, 1072));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    /// [`Lists::TICKETS`] counters, 0 when the lists have been written. CTAs of a product take their tiles by
    /// incrementing a counter.
    pub tickets: u64,
    /// `[E + 1]`: first row of each expert, then the number of rows.
    pub firsts: u64,
    /// `[E + 1]`: number of tiles of tokens of all preceding experts ([`token_tiles`]), then of all experts.
    pub tile_firsts: u64,
    /// `[T·k]`: token of each row. The rows of one expert are in the order of their choices, so the lists are
    /// deterministic. If each expert's rows are padded to a multiple, there may be more rows ([`most_rows`]), and
    /// padding rows are [`NO_ROW`].
    pub rows: u64,
    /// `[T·k]`: row of token t's j-th expert at t·k + j, or [`NO_ROW`].
    pub places: u64,
    /// Bytes of all lists.
    pub bytes: u64,
}

impl Lists {
    /// Number of tickets. Two products take their tiles by ticket: gate and up, and down.
    pub const TICKETS: u32 = 4;

    /// Returns the layout for `choices` = T·k choices of `experts` experts.
    pub const fn new(choices: u64, experts: u32) -> Self {
        Self::filled(choices, experts, 1)
    }

    /// Same as [`Self::new`], with each expert's rows padded to a multiple of `row_multiple`
    /// ([`Route::row_multiple`](crate::layer::moe_route::abi::Route::row_multiple)).
    pub const fn filled(choices: u64, experts: u32, row_multiple: u32) -> Self {
        const fn after(offset: u64, numbers: u64) -> u64 {
            (offset + 4 * numbers).next_multiple_of(16)
        }
        let firsts = after(0, Self::TICKETS as u64);
        let tile_firsts = after(firsts, experts as u64 + 1);
        let rows = after(tile_firsts, experts as u64 + 1);
        let places = after(rows, most_rows(choices, experts, row_multiple));
        Self { tickets: 0, firsts, tile_firsts, rows, places, bytes: after(places, choices) }
    }
}

/// Number of tiles that `rows` rows are split into, with up to `tile_tokens` tokens per tile.
#[inline(always)]
pub const fn token_tiles(rows: u32, tile_tokens: u32) -> u32 {
    rows.div_ceil(tile_tokens)
}

/// Number of tokens per tile, except the last tile, which has the rest. Tiles are as even as core matrices of 8 rows
/// allow.
#[inline(always)]
pub const fn tile_size(rows: u32, tiles: u32) -> u32 {
    rows.div_ceil(tiles).next_multiple_of(8)
}
