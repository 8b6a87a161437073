//! Warps that load by bulk copies: one loads weights in their layout in memory, the other one loads the tokens that the
//! previous grid has decoded.

use cuda_std::{
    global::GlobalAddress, griddepcontrol::griddepcontrol_wait, mbarrier::mbarrier_arrive_expect_tx,
    shared::SharedAddress, tma::cp_async_bulk_shared_global,
};

use super::{Sm90, Tiles};
use crate::{
    decoding::PANELS,
    wgmma::gated_sm90::abi::{
        CORE_MATRIX_ROWS, SLAB_BYTES, SLAB_ROWS, SLAB_SCALE_BYTES, SLAB_VALUE_BYTES, STRIP_BYTES, Tile,
    },
};

impl<const INDEX: usize> Sm90<INDEX> {
    /// Loads slabs of weights to stages. Runs in one thread.
    ///
    /// Weights do not depend on the previous grid, so the first k-block is loaded at once. The other k-blocks are
    /// loaded after the previous grid has ended, together with the tokens. If they were loaded earlier, they would
    /// delay the tokens.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. One thread of the CTA calls
    /// this.
    #[inline(always)]
    pub(super) unsafe fn load_weights(mut tiles: Tiles, shared: SharedAddress) {
        let mut stages = Self::stages(shared);
        // SAFETY: the copies read the group's own slabs. A stage is written while it is empty, and its full barrier
        // expects the bytes of every copy.
        unsafe {
            loop {
                let tile = tiles.read();
                tiles.prefetch(tile.next);
                for k_block in 0..tile.group.k_blocks() {
                    let (stage, full) = (Self::stage(shared, stages), stages.full());
                    stages.wait_empty();
                    mbarrier_arrive_expect_tx(full, Self::STAGE_BYTES);
                    for panel in 0..PANELS as u32 {
                        for slab in 0..Self::INSTANCE.panel_slabs() {
                            let source = Self::slabs(&tile, panel, slab) + u64::from(k_block * SLAB_BYTES);
                            let target = stage + Self::panel(panel) + slab * SLAB_BYTES;
                            if Self::INSTANCE.narrow {
                                let (values, half) = (Self::INSTANCE.value_bytes(), tile.half_of_slab());
                                cp_async_bulk_shared_global(target, source + u64::from(half * values), values, full);
                                let scales = source + u64::from(SLAB_VALUE_BYTES);
                                cp_async_bulk_shared_global(target + values, scales, SLAB_SCALE_BYTES, full);
                            } else {
                                cp_async_bulk_shared_global(target, source, SLAB_BYTES, full);
                            }
                        }
                    }
                    stages.advance();
                    if k_block == 0 {
                        griddepcontrol_wait();
                    }
                }
                if !tiles.advance(tile.next) {
                    return;
                }
            }
        }
    }

    /// Loads decoded tokens to buffers, after the grid that decodes them has ended. Runs in one thread.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. One thread of the CTA calls
    /// this.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(mut tiles: Tiles, shared: SharedAddress) {
        let mut buffers = Self::buffers(shared);
        // SAFETY: the copies read the group's decoded tokens, which are complete after the wait. A buffer is written
        // while it is empty, and its full barrier expects the bytes of every copy.
        unsafe {
            // Read before the wait: after the wait, the loads of weights would delay it.
            let mut tile = tiles.read();
            griddepcontrol_wait();
            loop {
                let present = tile.tokens.div_ceil(CORE_MATRIX_ROWS) * STRIP_BYTES;
                let needed = Self::INSTANCE.mma_n(tile.tokens) / CORE_MATRIX_ROWS * STRIP_BYTES;
                let stride = u64::from(tile.group.m.div_ceil(CORE_MATRIX_ROWS)) * u64::from(STRIP_BYTES);
                let first_strip = u64::from(tile.first_token / CORE_MATRIX_ROWS);
                let mut source = GlobalAddress::new(tile.group.tokens) + first_strip * u64::from(STRIP_BYTES);
                for _ in 0..tile.group.k_blocks() {
                    let (buffer, full) = (Self::buffer(shared, buffers), buffers.full());
                    buffers.wait_empty();
                    mbarrier_arrive_expect_tx(full, needed);
                    cp_async_bulk_shared_global(buffer, source, present, full);
                    // Columns past the tile's tokens are multiplied too but not written to C, so any tokens can fill
                    // them.
                    let mut filled = present;
                    while filled < needed {
                        cp_async_bulk_shared_global(buffer + filled, source, STRIP_BYTES, full);
                        filled += STRIP_BYTES;
                    }
                    source = source + stride;
                    buffers.advance();
                }
                if !tiles.advance(tile.next) {
                    return;
                }
                tile = tiles.read();
            }
        }
    }

    /// Address of the slabs of a panel's `slab`-th rows; their k-blocks are in sequence. For rows outside of the matrix
    /// it is the address of other rows, and the resulting columns are not written to C.
    #[inline(always)]
    fn slabs(tile: &Tile, panel: u32, slab: u32) -> GlobalAddress {
        let [gate, up] = tile.group.b;
        let (matrix, first_row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (gate, tile.first_column),
            (2, _) => (up, tile.first_column),
            _ => (gate, tile.first_column + panel * Self::INSTANCE.shape().panel_rows()),
        };
        let row = first_row + slab * SLAB_ROWS;
        let row = if row < tile.group.n { row } else { tile.first_column };
        GlobalAddress::new(matrix) + u64::from(row / SLAB_ROWS) * u64::from(tile.group.k_blocks() * SLAB_BYTES)
    }
}
