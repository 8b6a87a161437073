//! The warps that load: weights as they lie in memory, and tokens that the grid before has decoded, by bulk copies.

use cuda_std::{
    griddepcontrol::griddepcontrol_wait, mbarrier::mbarrier_arrive_expect_tx, tma::cp_async_bulk_shared_global,
};

use super::{Sm90, Tiles};
use crate::gated_sm90::abi::{CORE_MATRIX_ROWS, PANELS, SLAB_BYTES, SLAB_ROWS, STRIP_BYTES, Tile};

impl<const INDEX: usize> Sm90<INDEX> {
    /// Slabs of weights → stages. The first needs nothing of the grid before; the others leave it to tokens to be first.
    #[inline(always)]
    pub(super) unsafe fn load_weights(mut tiles: Tiles, shared: u32) {
        let mut stages = Self::stages(shared);
        // SAFETY: the group's own slabs; a stage is written while it is empty, and its full barrier expects each copy's bytes.
        unsafe {
            loop {
                let tile = tiles.read();
                tiles.prefetch(tile.next);
                for step in 0..tile.group.steps() {
                    let (stage, full) = (Self::stage(shared, stages), stages.full());
                    stages.wait_empty();
                    mbarrier_arrive_expect_tx(full, Self::STAGE_BYTES);
                    for panel in 0..PANELS {
                        for slab in 0..Self::INSTANCE.panel_slabs() {
                            let source = Self::slabs(&tile, panel, slab) + u64::from(step * SLAB_BYTES);
                            let target = stage + Self::panel(panel) + slab * SLAB_BYTES;
                            cp_async_bulk_shared_global(target, source, SLAB_BYTES, full);
                        }
                    }
                    stages.advance();
                    // Tokens can be loaded from then on, and would wait behind all these weights.
                    if step == 0 {
                        griddepcontrol_wait();
                    }
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }

    /// Decoded tokens → buffers, once the grid before has left them.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(mut tiles: Tiles, shared: u32) {
        let mut buffers = Self::buffers(shared);
        // SAFETY: the group's decoded tokens, which are complete; a buffer is written while it is empty, and its full barrier
        // expects each copy's bytes.
        unsafe {
            // Before the wait: behind it, weights are in the way.
            let mut tile = tiles.read();
            griddepcontrol_wait();
            loop {
                let there = tile.tokens.div_ceil(CORE_MATRIX_ROWS) * STRIP_BYTES;
                let width = Self::INSTANCE.mma_n(tile.tokens) / CORE_MATRIX_ROWS * STRIP_BYTES;
                let stride = u64::from(tile.group.m.div_ceil(CORE_MATRIX_ROWS)) * u64::from(STRIP_BYTES);
                let mut source =
                    tile.group.tokens + u64::from(tile.first_token / CORE_MATRIX_ROWS) * u64::from(STRIP_BYTES);
                for _ in 0..tile.group.steps() {
                    let (buffer, full) = (Self::buffer(shared, buffers), buffers.full());
                    buffers.wait_empty();
                    mbarrier_arrive_expect_tx(full, width);
                    cp_async_bulk_shared_global(buffer, source, there, full);
                    // What is past the tile's end is summed too, but not written: any tokens will do.
                    let mut filled = there;
                    while filled < width {
                        cp_async_bulk_shared_global(buffer + filled, source, STRIP_BYTES, full);
                        filled += STRIP_BYTES;
                    }
                    source += stride;
                    buffers.advance();
                }
                if !tiles.advance(tile.next) {
                    return;
                }
                tile = tiles.read();
            }
        }
    }

    /// Address of a panel's slabs of the same rows; of such as lie outside of the matrix, of any that there are: what they
    /// make of C is not written.
    #[inline(always)]
    const fn slabs(tile: &Tile, panel: u32, slab: u32) -> u64 {
        let [gate, up] = tile.group.b;
        let (matrix, first_row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (gate, tile.first_column),
            (2, _) => (up, tile.first_column),
            _ => (gate, tile.first_column + panel * Self::INSTANCE.panel_rows()),
        };
        let row = first_row + slab * SLAB_ROWS;
        let row = if row < tile.group.n { row } else { tile.first_column };
        matrix + (row / SLAB_ROWS) as u64 * (tile.group.steps() * SLAB_BYTES) as u64
    }
}
