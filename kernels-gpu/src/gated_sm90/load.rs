//! The warps that load: weights as they are, and tokens that the grid before has decoded, by bulk copies.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    griddepcontrol::griddepcontrol_wait,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
};

use super::{Sm90, Tiles};
use crate::abi::{
    SCALE_TILE_ROWS,
    sm90::{EIGHT, EIGHT_BYTES, Group, Instance, Launch, PANELS, SCALE_TILE_BYTES, STEP_BYTES, STEP_SCALE_TILES, Tile},
};

impl<const MATRICES: u32, const TILE_TOKENS: u32> Sm90<MATRICES, TILE_TOKENS> {
    /// Global memory → stages. The step's weights are nobody's result: this need not wait for the grid before.
    #[inline(always)]
    pub(super) unsafe fn load_weights(launch: Launch, shared: u32) {
        let mut stages = Self::stages(shared);
        let mut known = u32::MAX;
        // SAFETY: the group's own maps and scales, of which the padding is whole tiles; a stage is written while it is
        // empty, and its full barrier expects each copy's bytes.
        unsafe {
            let mut tiles = Tiles::new(launch);
            while tiles.more() {
                let (tile, group) = tiles.read();
                if tile.group != known {
                    known = tile.group;
                    for matrix in 0..MATRICES as usize {
                        fence_proxy_tensormap_acquire(group.b_maps[matrix]);
                    }
                }
                for step in 0..group.steps() {
                    let stage = Self::stage(shared, stages);
                    let full = stages.full();
                    let k_byte = (step * STEP_BYTES) as i32;
                    let scales_at = u64::from(step) * u64::from(Instance::SCALE_BYTES);
                    let scales_left = group.scale_tiles() - step * STEP_SCALE_TILES;

                    stages.wait_empty();
                    // A box counts whole, whatever of it lies outside of the tensor.
                    mbarrier_arrive_expect_tx(full, Self::STAGE_BYTES);
                    for panel in 0..PANELS {
                        let (map, first_row) = Self::panel(&tile, group, panel);
                        cp_async_bulk_tensor_2d_shared_global(
                            stage + Self::values(panel),
                            map,
                            [k_byte, first_row as i32],
                            full,
                        );
                        for tile_row in 0..Self::INSTANCE.panel_scale_tiles() {
                            let source = Self::panel_scales(&tile, group, panel, tile_row) + scales_at;
                            let target = stage + Self::scales(panel) + tile_row * Instance::SCALE_BYTES;
                            copy_scales(target, source, scales_left, full);
                        }
                    }
                    stages.advance();
                }
                tiles.advance();
            }
        }
    }

    /// What the grid before left in global memory → buffers.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(launch: Launch, shared: u32) {
        let mut buffers = Self::buffers(shared);
        griddepcontrol_wait();
        // SAFETY: the group's decoded tokens, which are complete; a buffer is written while it is empty, and its full barrier
        // expects each copy's bytes.
        unsafe {
            let mut tiles = Tiles::new(launch);
            while tiles.more() {
                let (tile, group) = tiles.read();
                let there = tile.tokens.div_ceil(EIGHT) * EIGHT_BYTES;
                let width = Self::INSTANCE.width(tile.tokens) / EIGHT * EIGHT_BYTES;
                let stride = u64::from(group.m.div_ceil(EIGHT)) * u64::from(EIGHT_BYTES);
                let mut source = group.tokens + u64::from(tile.first_token / EIGHT) * u64::from(EIGHT_BYTES);
                for _ in 0..group.steps() {
                    let (buffer, full) = (Self::buffer(shared, buffers), buffers.full());
                    buffers.wait_empty();
                    mbarrier_arrive_expect_tx(full, width);
                    cp_async_bulk_shared_global(buffer, source, there, full);
                    // What is past the tile's end is summed too, but not written: any tokens will do.
                    let mut filled = there;
                    while filled < width {
                        cp_async_bulk_shared_global(buffer + filled, source, EIGHT_BYTES, full);
                        filled += EIGHT_BYTES;
                    }
                    source += stride;
                    buffers.advance();
                }
                tiles.advance();
            }
        }
    }

    /// The map of a panel's matrix, and its first row there.
    #[inline(always)]
    const fn panel(tile: &Tile, group: &Group, panel: u32) -> (u64, u32) {
        if MATRICES == 2 {
            (group.b_maps[panel as usize], tile.first_column)
        } else {
            (group.b_maps[0], tile.first_column + panel * Self::INSTANCE.panel_rows())
        }
    }

    /// Address of the scales of 128 rows of a panel; of such as lie outside of the matrix, any that there are: their values
    /// are zeros.
    #[inline(always)]
    const fn panel_scales(tile: &Tile, group: &Group, panel: u32, tile_row: u32) -> u64 {
        let (_, first_row) = Self::panel(tile, group, panel);
        let row = first_row + tile_row * SCALE_TILE_ROWS;
        let row = if row < group.n { row } else { tile.first_column };
        let matrix = if MATRICES == 2 { panel as usize } else { 0 };
        group.b_scales[matrix] + (row / SCALE_TILE_ROWS) as u64 * group.scale_stride()
    }
}

/// Copies a step's scales of 128 rows, of which `left` tiles are left. Where there is but one, it stands for the second too,
/// whose values are zeros.
#[inline(always)]
unsafe fn copy_scales(target: u32, source: u64, left: u32, full: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= STEP_SCALE_TILES {
            cp_async_bulk_shared_global(target, source, Instance::SCALE_BYTES, full);
        } else {
            for tile in 0..STEP_SCALE_TILES {
                cp_async_bulk_shared_global(target + tile * SCALE_TILE_BYTES, source, SCALE_TILE_BYTES, full);
            }
        }
    }
}

const _: () = assert!(STEP_SCALE_TILES == 2);
