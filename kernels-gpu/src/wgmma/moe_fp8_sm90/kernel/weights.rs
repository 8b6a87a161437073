//! The warp that finds tiles and loads their weights, by bulk copies of the units in their layout in memory.

use cuda_std::global::GlobalAddress;

use super::product::Product;
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
    /// Number of units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Finds the CTA's tiles, writes them to shared memory, and loads their weights to stages. Runs in one warp.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let mut stages = self.stages();
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, k, .. } = self.launch;
        let Instance { matrices, tile_tokens, .. } = Self::INSTANCE;
        let (columns, rows) = (Self::INSTANCE.columns(), self.known_rows().next_multiple_of(ROW_MULTIPLE));
        let lists = TileLists { rows, tile_tokens, ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: the lists were complete before this grid started. The units are the expert's own.
        unsafe {
            self.tiles().find(&lists, |tile| {
                let pieces = [self.piece(tile, 0), self.piece(tile, 1)];
                Piece::load_to_stages(&pieces, Self::PIECE_UNITS, k, &mut stages, self.shared + Self::STAGES);
            });
        }
    }

    /// Returns the first or the second piece of a tile: one of gate and one of up, or two consecutive pieces of the
    /// only matrix. For rows outside of the matrix, it returns a piece with other rows, and the resulting columns are
    /// not written to C.
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
