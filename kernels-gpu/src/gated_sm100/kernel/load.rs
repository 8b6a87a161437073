//! Loading: global memory → stages. One thread.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_global},
};

use super::Sm100;
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    gated_sm100::abi::{Group, Instance, K_BLOCK_BYTES, Tile},
    ring::Ring,
};

impl<const INDEX: usize, const BLOCKS: u32> Sm100<INDEX, BLOCKS> {
    /// Makes the maps of a tile's group known to this thread's copies, unless those of group `known` are the same.
    #[inline(always)]
    pub(super) unsafe fn acquire_maps(self, known: &mut u32, tile: &Tile, group: &Group) {
        if tile.group == *known {
            return;
        }
        *known = tile.group;
        // SAFETY: the group's own maps.
        unsafe {
            fence_proxy_tensormap_acquire(group.a_map);
            for matrix in 0..Self::MATRICES {
                fence_proxy_tensormap_acquire(group.b_maps[matrix]);
            }
        }
    }

    /// Starts the copies of a step into the next stage.
    #[inline(always)]
    pub(super) unsafe fn load(self, stages: &mut Ring<BLOCKS>, tile: &Tile, group: &Group, step: u32) {
        let stage = self.shared + stages.index() * Self::STAGE_BYTES;
        let full = stages.full();
        let k_byte = (step * K_BLOCK_BYTES) as i32;
        let first_row = self.first_row(tile);
        let first_token = tile.first_token + self.rank * (Self::INSTANCE.mma_n(tile.tokens) / BLOCKS);

        let scale_bytes = group.mmas(step) * SCALE_TILE_BYTES;
        let scale_offset = u64::from(step) * u64::from(Instance::SCALE_BYTES);
        let scales = |tile_row: u32| u64::from(tile_row) * group.scale_stride() + scale_offset;
        // The second of a pair may be without rows: zeros as values, by the map; scales that are some.
        let weight_tile_row = (first_row / SCALE_TILE_ROWS).min((group.n - 1) / SCALE_TILE_ROWS);
        let token_tile_row = tile.first_token / SCALE_TILE_ROWS;
        let token_tile_rows = tile.token_scale_tiles();

        // SAFETY: the group's own maps and scales, of which the padding is whole tiles; a stage is written while it is
        // empty, and its full barrier expects each copy's bytes. A box counts whole, whatever lies outside of the tensor.
        unsafe {
            stages.wait_empty();
            let value_bytes = Self::TOKENS + Self::INSTANCE.token_bytes();
            mbarrier_arrive_expect_tx(full, value_bytes + (Self::INSTANCE.matrices + token_tile_rows) * scale_bytes);
            for matrix in 0..Self::MATRICES {
                let weights = stage + Self::weights(matrix);
                let row = first_row as i32;
                cp_async_bulk_tensor_2d_shared_global(weights, group.b_maps[matrix], [k_byte, row], full);
                let weight_scales = stage + Self::weight_scales(matrix);
                let source = group.b_scales[matrix] + scales(weight_tile_row);
                cp_async_bulk_shared_global(weight_scales, source, scale_bytes, full);
            }
            let tokens = stage + Self::TOKENS;
            cp_async_bulk_tensor_2d_shared_global(tokens, group.a_map, [k_byte, first_token as i32], full);
            for tile_row in 0..token_tile_rows {
                let token_scales = stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES;
                let source = group.a_scales + scales(token_tile_row + tile_row);
                cp_async_bulk_shared_global(token_scales, source, scale_bytes, full);
            }
        }
        stages.advance();
    }
}
