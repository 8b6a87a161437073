//! The load warp: global memory → stages, by bulk copies.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
};

use super::{Sm90, Tiles};
use crate::abi::{
    SCALE_TILE_ROWS,
    sm90::{
        Group, Instance, Launch, PANELS, SCALE_TILE_BYTES, SLAB_BYTES, SLAB_ROWS, STEP_BYTES, STEP_SCALE_TILES, Tile,
    },
};

impl<const MATRICES: u32, const TILE_TOKENS: u32> Sm90<MATRICES, TILE_TOKENS> {
    #[inline(always)]
    pub(super) unsafe fn load(launch: Launch, shared: u32) {
        let mut stages = Self::stages(shared);
        let mut known = u32::MAX;
        // SAFETY: the group's own slabs, map and scales, of which the padding is whole tiles; a stage is written while it is
        // empty, and its full barrier expects each copy's bytes.
        unsafe {
            let mut tiles = Tiles::new(launch);
            while tiles.more() {
                let (tile, group) = tiles.read();
                if tile.group != known {
                    known = tile.group;
                    fence_proxy_tensormap_acquire(group.a_map);
                }
                let token_scale_tiles = (tile.first_token % SCALE_TILE_ROWS + tile.tokens).div_ceil(SCALE_TILE_ROWS);
                let token_scales =
                    group.a_scales + u64::from(tile.first_token / SCALE_TILE_ROWS) * group.scale_stride();
                for step in 0..group.steps() {
                    let stage = Self::stage(shared, stages);
                    let full = stages.full();
                    let k_byte = (step * STEP_BYTES) as i32;
                    let scales_at = u64::from(step) * u64::from(Instance::SCALE_BYTES);
                    let scales_left = group.scale_tiles() - step * STEP_SCALE_TILES;

                    stages.wait_empty();
                    // A box counts whole, whatever of it lies outside of the tensor.
                    mbarrier_arrive_expect_tx(
                        full,
                        PANELS * Self::INSTANCE.panel_bytes()
                            + Self::INSTANCE.token_bytes()
                            + token_scale_tiles * Instance::SCALE_BYTES,
                    );
                    for panel in 0..PANELS {
                        for slab in 0..Self::INSTANCE.panel_slabs() {
                            let source = Self::slabs(&tile, group, panel, slab) + u64::from(step * SLAB_BYTES);
                            let target = stage + Self::panel(panel) + slab * SLAB_BYTES;
                            cp_async_bulk_shared_global(target, source, SLAB_BYTES, full);
                        }
                    }
                    cp_async_bulk_tensor_2d_shared_global(
                        stage + Self::TOKENS,
                        group.a_map,
                        [k_byte, tile.first_token as i32],
                        full,
                    );
                    for tile_row in 0..token_scale_tiles {
                        let source = token_scales + u64::from(tile_row) * group.scale_stride() + scales_at;
                        let target = stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES;
                        copy_scales(target, source, scales_left, full);
                    }
                    stages.advance();
                }
                tiles.advance();
            }
        }
    }

    /// Address of a panel's slabs of the same rows; of such as lie outside of the matrix, of any that there are: what they
    /// make of C is not written.
    #[inline(always)]
    const fn slabs(tile: &Tile, group: &Group, panel: u32, slab: u32) -> u64 {
        let (matrix, first_row) = if MATRICES == 2 {
            (panel as usize, tile.first_column)
        } else {
            (0, tile.first_column + panel * Self::INSTANCE.panel_rows())
        };
        let row = first_row + slab * SLAB_ROWS;
        let row = if row < group.n { row } else { tile.first_column };
        group.b[matrix] + (row / SLAB_ROWS) as u64 * (group.steps() * SLAB_BYTES) as u64
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
