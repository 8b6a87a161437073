//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::{global::GlobalAddress, griddepcontrol::griddepcontrol_wait};

use super::{Built, Moe};
use crate::{
    decoding::{PANELS, Tile, TileLists},
    moe::Launch,
    units::UNIT_ROWS,
    wgmma::{Piece, moe_sm90::abi::Instance},
};

/// The most pieces of a stage.
const MAX_PIECES: usize = 4;

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Pieces of a stage.
    const PIECES: u32 = PANELS as u32 * Self::INSTANCE.shape().panel_rows() / Self::INSTANCE.piece_rows();

    /// Finds the block's tiles, writes them down, and loads their weights to stages. One warp.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialized. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let mut stages = self.stages();
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, k, .. } = self.launch;
        let Instance { matrices, tile_tokens, .. } = Self::INSTANCE;
        let columns = Self::INSTANCE.columns();
        let lists =
            TileLists { rows: 0, tile_tokens, ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: lists are read when they are complete. Units are the expert's own.
        unsafe {
            if self.launch.lists_pending != 0 {
                griddepcontrol_wait();
            }
            self.tiles().find(&lists, |tile| {
                let pieces: [Piece; MAX_PIECES] = core::array::from_fn(|index| self.piece(tile, index as u32));
                Piece::load_to_stages(&pieces[..Self::PIECES as usize], Self::PIECE_UNITS, k, &mut stages, self.shared);
            });
        }
    }

    /// A piece of a tile's panels, counted through both. If its rows lie outside of the matrix, it is others: what becomes of them
    /// is not written to C.
    #[inline(always)]
    fn piece(&self, tile: &Tile, index: u32) -> Piece {
        let (n, k) = (self.launch.n, self.launch.k);
        let (panel, row) = (index * 2 / Self::PIECES, index * Self::INSTANCE.piece_rows());
        let (matrix, row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (self.launch.b[0], row),
            (2, _) => (self.launch.b[1], row - Self::INSTANCE.shape().panel_rows()),
            _ => (self.launch.b[0], row),
        };
        let row = if tile.first_column + row < n { tile.first_column + row } else { tile.first_column };
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        Piece::new(expert, n, k, row / UNIT_ROWS, Self::PIECE_UNITS)
    }
}
