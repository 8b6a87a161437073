//! Lists of an MoE layer on the device, which say which rows an expert has.
//!
//! A layer has T tokens of H elements and E experts of its own. Each token names k experts; those that are not the layer's own
//! contribute nothing. A *row* is a token for one of its experts; rows are sorted by expert. How many there are is known on
//! the device alone.

use crate::sorted::most_rows;

/// The most experts of a layer.
pub const MAX_EXPERTS: u32 = 512;

/// The most experts that a token names.
pub const MAX_TOP_K: u32 = 32;

/// In [`Lists::places`], that a choice has no row.
pub const NO_ROW: u32 = u32::MAX;

/// Where the lists of a layer lie in memory, in bytes from their start, a multiple of 16. Each is an array of `u32`.
///
/// ```
/// # use kernels_gpu::lists::Lists;
/// let lists = Lists::new(8, 128);
/// assert_eq!((lists.firsts, lists.tile_firsts, lists.rows), (16, 544, 1072));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    /// [`Lists::TICKETS`] numbers, 0 when the lists have been made: a product's blocks take their tiles by one.
    pub tickets: u64,
    /// `[E + 1]`: the first row of each expert; at last the number of rows.
    pub firsts: u64,
    /// `[E + 1]`: how many tiles of tokens the experts before have ([`token_tiles`]); at last that of all.
    pub tile_firsts: u64,
    /// `[T·k]`: the token that a row is of. Rows of one expert are in the order of their choices, so that lists are always the
    /// same. Where each expert's rows are filled up to a multiple, there may be more ([`most_rows`]), and [`NO_ROW`] stands for
    /// what is no token.
    pub rows: u64,
    /// `[T·k]`: the row of token t's j-th expert at t·k + j, or [`NO_ROW`].
    pub places: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl Lists {
    /// How many products take their tiles by tickets: gate and up, and down.
    pub const TICKETS: u32 = 4;

    /// Of so many choices, T·k, and experts.
    pub const fn new(choices: u64, experts: u32) -> Self {
        Self::filled(choices, experts, 1)
    }

    /// As [`Self::new`], where each expert's rows are filled up to a multiple of [`Route::row_multiple`](crate::layer::moe_route::abi::Route::row_multiple).
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

/// Tiles of up to `tile_tokens` tokens that so many rows are cut into.
#[inline(always)]
pub const fn token_tiles(rows: u32, tile_tokens: u32) -> u32 {
    rows.div_ceil(tile_tokens)
}

/// Tokens of each of these tiles but the last, which has what is left: as even as whole core matrices of 8 allow.
#[inline(always)]
pub const fn tile_size(rows: u32, tiles: u32) -> u32 {
    rows.div_ceil(tiles).next_multiple_of(8)
}
