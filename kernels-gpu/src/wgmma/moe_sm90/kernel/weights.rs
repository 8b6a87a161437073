//! The warp that finds tiles and loads their weights, by bulk copies of the units in their layout in memory.

use cuda_std::{global::GlobalAddress, griddepcontrol::griddepcontrol_wait};

use super::{Built, Moe};
use crate::{
    decoding::{PANELS, Tile, TileLists},
    moe::Launch,
    units::UNIT_ROWS,
    wgmma::{Piece, moe_sm90::abi::Instance},
};

/// Maximum number of pieces per stage.
const MAX_PIECES: usize = 4;

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Number of units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Number of pieces per stage.
    const PIECES: u32 = PANELS as u32 * Self::INSTANCE.shape().panel_rows() / Self::INSTANCE.piece_rows();

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
        let columns = Self::INSTANCE.columns();
        let lists =
            TileLists { rows: 0, tile_tokens, ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: the lists are complete, because this warp waits for the previous grid if they are pending. The units
        // are the expert's own.
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

    /// Returns a piece of a tile's panels; `index` counts through both panels. For rows outside of the matrix, it
    /// returns a piece with other rows, and the resulting columns are not written to C.
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
