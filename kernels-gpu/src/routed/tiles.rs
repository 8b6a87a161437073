//! Tiles of an MoE layer's products with NVFP4 tokens, for `moe_sm100` and for the same products on other GPUs. Each
//! role of a CTA finds tiles by their index in the lists on the device. The file also has the epilogue's conversion of
//! sums.

use core::hint::assert_unchecked;

use cuda_std::global::{GlobalAddress, ld_global_b32, ld_global_b32_or_zero};

use super::{Launch, QuantizedC};
use crate::{
    epilogue::{NO_PARAMETERS, relu2, silu},
    lists::{tile_size, token_tiles},
    nvfp4_blocks::QuantizedTile,
    schedule::last_begun_by_warp,
};

/// Bytes of a number of a list, and of a factor.
const NUMBER: u64 = size_of::<u32>() as u64;

/// Reads a number of a list.
///
/// # Safety
/// The list has this number, and nothing writes it during the launch.
#[inline(always)]
unsafe fn number(list: u64, index: u32) -> u32 {
    // SAFETY: the caller guarantees that the list has this number and that nothing writes it during the launch.
    unsafe { ld_global_b32(GlobalAddress::new(list) + u64::from(index) * NUMBER) }
}

impl Launch {
    /// The tiles `next`, `next + stride` and so on of C, with `tile_columns` columns and up to `tile_tokens` tokens
    /// each.
    ///
    /// # Safety
    /// The contract of the kernel that takes this parameter holds ([`moe_sm100`](crate::tcgen05::moe_sm100)), and the
    /// caller has waited for earlier grids. The whole warp makes this call and takes each tile together.
    #[inline(always)]
    pub(crate) unsafe fn routed_tiles(
        &self,
        [tile_columns, tile_tokens]: [u32; 2],
        next: u32,
        stride: u32,
    ) -> RoutedTiles {
        let &Self { firsts, tile_firsts, experts, n, rows, .. } = self;
        let column_tiles = n.div_ceil(tile_columns);
        let mut all_token_tiles = token_tiles(rows, tile_tokens);
        if rows == 0 {
            // SAFETY: the list has one number per expert and one more.
            all_token_tiles = unsafe { number(tile_firsts, experts) };
        }
        let [next, stride] = [next, stride].map(|tiles| {
            // SAFETY: C has columns.
            unsafe { assert_unchecked(column_tiles > 0) };
            [tiles / column_tiles, tiles % column_tiles]
        });
        RoutedTiles { firsts, tile_firsts, experts, rows, all_token_tiles, column_tiles, next, stride }
    }

    /// The factor of a column of an expert's matrix. The column may be beyond the last.
    ///
    /// # Safety
    /// The requirements of [`Launch::routed_tiles`]; the launch has this matrix.
    #[inline(always)]
    pub(crate) unsafe fn alpha(&self, matrix: usize, expert: u32, column: u32) -> f32 {
        let index = if self.rows == 0 { expert } else { column.min(self.n - 1) };
        // SAFETY: the launch has this matrix, and a global scale per expert or per expert and column, at this index.
        f32::from_bits(unsafe { number(self.alpha[matrix], index) })
    }

    /// The bias of a column. The column may be beyond the last.
    ///
    /// # Safety
    /// The requirements of [`Launch::alpha`].
    #[inline(always)]
    pub(crate) unsafe fn bias(&self, matrix: usize, expert: u32, column: u32) -> f32 {
        let (bias, n) = (self.bias[matrix], self.n);
        let at = GlobalAddress::new(bias) + (u64::from(expert) * u64::from(n) + u64::from(column)) * NUMBER;
        // SAFETY: if there are biases, the address belongs to a column below N; otherwise nothing is read.
        let number = unsafe { ld_global_b32_or_zero(column < n && bias != 0, at) };
        // Adding −0 keeps the sum and its sign.
        if bias == 0 { -0.0 } else { f32::from_bits(number) }
    }

    /// The global scale of a row of tokens, or 0 if `is_there` is false.
    ///
    /// # Safety
    /// The requirements of [`Launch::routed_tiles`]; if `is_there` is true, the lists have this row.
    #[inline(always)]
    pub(crate) unsafe fn global(&self, is_there: bool, row: u32) -> f32 {
        let at = GlobalAddress::new(self.globals) + u64::from(row) * NUMBER;
        // SAFETY: if `is_there`, the list of global scales has this row; otherwise nothing is read.
        f32::from_bits(unsafe { ld_global_b32_or_zero(is_there, at) })
    }

    /// Whether C of a product of `matrices` matrices is written as 16-bit numbers.
    #[inline(always)]
    pub(crate) const fn writes_bits16(&self, matrices: u32) -> bool {
        matrices == 1 || self.c != 0
    }

    /// Destination of the rows of an expert's tile in NVFP4, if they are quantized. Rows of a plain product are not.
    ///
    /// # Safety
    /// The requirements of [`Launch::routed_tiles`]; the tile is one of these tiles.
    #[inline(always)]
    pub(crate) unsafe fn quantized(
        &self,
        matrices: u32,
        expert: u32,
        [token_tile, token_row, tokens]: [u32; 3],
    ) -> QuantizedTile {
        if matrices == 1 {
            return QuantizedTile::NONE;
        }
        let QuantizedC { input_scales, values, scales, globals } = self.quantized;
        let of_expert = GlobalAddress::new(input_scales) + u64::from(expert) * NUMBER;
        // SAFETY: if there are input scales, there is one per expert; otherwise nothing is read.
        let global = f32::from_bits(unsafe { ld_global_b32_or_zero(input_scales != 0, of_expert) });
        QuantizedTile {
            values,
            scales,
            globals,
            tile: token_tile,
            first_row: token_row,
            rows: tokens,
            global,
            columns: self.n,
            format: self.output,
        }
    }

    /// Whether the activation has no parameters.
    #[inline(always)]
    pub(crate) const fn has_no_parameters(&self) -> bool {
        self.activation.kind == NO_PARAMETERS
    }

    /// An element of C, from the products of gate and up.
    #[inline(always)]
    pub(crate) fn gated(&self, no_parameters: bool, gate: f32, up: f32) -> f32 {
        if no_parameters { silu(gate) * up } else { self.activation.gated(gate, up) }
    }

    /// An element of C, from the product of the only matrix.
    #[inline(always)]
    pub(crate) fn plain(no_parameters: bool, product: f32) -> f32 {
        if no_parameters { product } else { relu2(product) }
    }
}

/// A tile of an expert's rows.
#[derive(Clone, Copy)]
pub struct RoutedTile {
    pub expert: u32,
    /// Index of the tile along its expert's columns.
    pub column_tile: u32,
    /// Index of the tile among all tiles of tokens.
    pub token_tile: u32,
    /// The tile's first row in the lists, and its number of rows.
    pub token_row: u32,
    pub tokens: u32,
}

/// A CTA's tiles. An expert's tiles with the same columns, which share weights, are neighbors.
pub struct RoutedTiles {
    firsts: u64,
    tile_firsts: u64,
    experts: u32,
    /// Value of [`Launch::rows`].
    rows: u32,
    all_token_tiles: u32,
    column_tiles: u32,
    /// Index of the next tile, divided by the number of tiles along the columns: quotient and remainder. Then no tile
    /// needs a division.
    next: [u32; 2],
    /// Difference between the indices of two tiles, divided likewise.
    stride: [u32; 2],
}

impl Iterator for RoutedTiles {
    type Item = RoutedTile;

    #[inline(always)]
    fn next(&mut self) -> Option<RoutedTile> {
        let &mut Self { firsts, tile_firsts, experts, rows, all_token_tiles, column_tiles, next, stride } = self;
        let [of_all, column] = next;
        if of_all >= all_token_tiles {
            return None;
        }
        self.next = [of_all + stride[0], column + stride[1]];
        if self.next[1] >= column_tiles {
            self.next = [self.next[0] + 1, self.next[1] - column_tiles];
        }
        // SAFETY: the whole warp is here. If there are lists, they have `experts + 1` numbers, and the indices are at
        // most `experts`. An expert with a tile has tiles of rows.
        unsafe {
            let (mut expert, mut of_tiles, mut of_rows) = (0, [0, all_token_tiles], [0, rows]);
            if rows == 0 {
                // Each of an expert's tiles of tokens has as many tiles along the columns, so the expert of the tile
                // `of_all * column_tiles + column` has the tile `of_all` of tokens.
                expert = last_begun_by_warp(experts, of_all, |expert| number(tile_firsts, expert));
                of_tiles = [0, 1].map(|after| number(tile_firsts, expert + after));
                of_rows = [0, 1].map(|after| number(firsts, expert + after));
            }
            let ([first_tile, next_tile], [first, next]) = (of_tiles, of_rows);
            let (tiles, rows) = (next_tile - first_tile, next - first);
            if tiles == 1 {
                let (column_tile, token_tile) = (column, first_tile);
                return Some(RoutedTile { expert, column_tile, token_tile, token_row: first, tokens: rows });
            }
            assert_unchecked(tiles > 0);
            let of_expert = (of_all - first_tile) * column_tiles + column;
            let (column_tile, tile) = (of_expert / tiles, of_expert % tiles);
            let size = tile_size(rows, tiles);
            let (token_row, tokens) = (first + tile * size, (rows - tile * size).min(size));
            Some(RoutedTile { expert, column_tile, token_tile: first_tile + tile, token_row, tokens })
        }
    }
}
