//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::global::GlobalAddress;

use super::Product;
use crate::{
    decoding::{Tile, TileLists},
    sorted::ROW_MULTIPLE,
    units::UNIT_ROWS,
    wgmma::{
        Piece,
        moe_fp8_sm90::abi::{Instance, Launch},
    },
};

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    /// Units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Finds the block's tiles, writes them down, and loads their weights to stages. One warp.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialized. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let mut stages = self.stages();
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, k, .. } = self.launch;
        let Instance { matrices, tile_tokens, .. } = Self::INSTANCE;
        let (columns, rows) = (Self::INSTANCE.columns(), self.known_rows().next_multiple_of(ROW_MULTIPLE));
        let lists = TileLists { rows, tile_tokens, ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: the lists were complete before this grid began. Units are the expert's own.
        unsafe {
            self.tiles().find(&lists, |tile| {
                let pieces = [self.piece(tile, 0), self.piece(tile, 1)];
                Piece::load_to_stages(&pieces, Self::PIECE_UNITS, k, &mut stages, self.shared + Self::STAGES);
            });
        }
    }

    /// The first or the second piece of a tile: of gate and of up, or one behind the other. If its rows lie outside of the matrix, it
    /// is others: what becomes of them is not written to C.
    #[inline(always)]
    fn piece(&self, tile: &Tile, index: u32) -> Piece {
        let (n, k) = (self.launch.n, self.launch.k);
        let (matrix, row) = if Self::INSTANCE.matrices == 2 {
            (self.launch.b[index as usize], tile.first_column)
        } else {
            (self.launch.b[0], tile.first_column + index * Self::INSTANCE.piece_rows())
        };
        let row = if row < n { row } else { tile.first_column };
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        Piece::new(expert, n, k, row / UNIT_ROWS, Self::PIECE_UNITS)
    }
}
