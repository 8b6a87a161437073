//! Loading: global memory → stages. One thread.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    global::GlobalAddress,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{
        TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_shared_global_multicast,
        cp_async_bulk_tensor_2d_shared_global,
    },
};

use super::{BOTH, Placed, Sm100, Work};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    ring::Ring,
    tcgen05::gated_sm100::abi::{Instance, K_BLOCK_BYTES, Tile},
};

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
    /// Makes the maps of a tile's group known to this thread's copies, unless `known` is that group. Then sets `known`.
    ///
    /// # Safety
    /// `group` is the tile's, and the contract holds of it.
    #[inline(always)]
    pub(super) unsafe fn acquire_maps(self, known: &mut u32, tile: &Tile, group: &Placed) {
        if !W::MAPS_IN_MEMORY || tile.group == *known {
            return;
        }
        *known = tile.group;
        // SAFETY: the contract: tensor maps lie there.
        unsafe {
            fence_proxy_tensormap_acquire(TensorMapAddress::new(group.a_map));
            let b_maps = self.of_matrices(group.b_maps);
            for map in &b_maps[..Self::MATRICES] {
                fence_proxy_tensormap_acquire(TensorMapAddress::new(*map));
            }
        }
    }

    /// Starts the copies of a k-block into the next stage. Both blocks of a pair need the scales of all of the tile's tokens: once
    /// `together`, each copies half of them, to both.
    ///
    /// # Safety
    /// `group` is the tile's, the contract holds of it, and its maps have been acquired. One thread of the block calls it,
    /// with all k-blocks of its tiles in order; `stages` is that thread's, and the next one is empty. If `together`, it has been used
    /// before: then it is empty in the other block of the pair too, which has begun, since the same products read both.
    #[inline(always)]
    pub(super) unsafe fn load(
        self,
        stages: &mut Ring<BLOCKS>,
        tile: &Tile,
        group: &Placed,
        k_block: u32,
        together: bool,
    ) {
        let stage = self.shared + stages.index() * Self::STAGE_BYTES;
        let full = stages.full();
        let k_byte = (k_block * K_BLOCK_BYTES) as i32;
        let first_row = self.first_row(tile);
        let first_token = group.token_row + tile.first_token + self.rank * (Self::INSTANCE.mma_n(tile.tokens) / BLOCKS);

        // To the zeros behind the last k-block any scales will do.
        let scale_block = if Self::INSTANCE.splits > 1 { k_block.min(group.k_blocks() - 1) } else { k_block };
        let scale_bytes = group.mmas(scale_block) * SCALE_TILE_BYTES;
        let scale_offset = u64::from(scale_block) * u64::from(Instance::SCALE_BYTES);
        let b_maps = self.of_matrices(group.b_maps);
        let b_scales = self.of_matrices(group.b_scales);
        let weight_rows = self.of_matrices(group.weight_rows);
        let scales = |matrix: u64, tile_row: u32| {
            GlobalAddress::new(matrix) + (u64::from(tile_row) * group.scale_stride() + scale_offset)
        };
        // The second block of a pair may have no rows. Then the map gives zeros as values, and any scales will do.
        let weight_tile_row = (first_row / SCALE_TILE_ROWS).min((group.n - 1) / SCALE_TILE_ROWS);
        let token_tile_row = group.token_tile + tile.first_token / SCALE_TILE_ROWS;
        // Every tile has one.
        let token_tile_rows = if Self::INSTANCE.token_scale_tiles() == 1 { 1 } else { tile.token_scale_tiles() };

        // SAFETY: the group's own maps and scales, which are padded to whole tiles. The stage is empty, and
        // its full barrier expects the bytes of every copy, half of those of tokens' scales by the other block if `together`. A box counts in
        // full, even where it lies outside of the tensor.
        unsafe {
            let value_bytes = Self::TOKENS + group.a_box * K_BLOCK_BYTES;
            mbarrier_arrive_expect_tx(
                full,
                value_bytes + (Self::INSTANCE.block_matrices() + token_tile_rows) * scale_bytes,
            );
            for matrix in 0..Self::MATRICES {
                let weights = stage + Self::weights(matrix);
                let row = (weight_rows[matrix] + first_row) as i32;
                let map = TensorMapAddress::new(b_maps[matrix]);
                cp_async_bulk_tensor_2d_shared_global(weights, map, [k_byte, row], full);
                let weight_scales = stage + Self::weight_scales(matrix);
                let source = scales(b_scales[matrix], weight_tile_row);
                cp_async_bulk_shared_global(weight_scales, source, scale_bytes, full);
            }
            let tokens = stage + Self::TOKENS;
            let map = TensorMapAddress::new(group.a_map);
            cp_async_bulk_tensor_2d_shared_global(tokens, map, [k_byte, first_token as i32], full);
            for tile_row in 0..token_tile_rows {
                let token_scales = stage + Self::TOKEN_SCALES + tile_row * Instance::SCALE_BYTES;
                let source = scales(group.a_scales, token_tile_row + tile_row);
                if together {
                    let bytes = scale_bytes / BLOCKS;
                    let from = self.rank * bytes;
                    let (to, source) = (token_scales + from, source + u64::from(from));
                    cp_async_bulk_shared_global_multicast(to, source, bytes, full, BOTH << self.leader());
                } else {
                    cp_async_bulk_shared_global(token_scales, source, scale_bytes, full);
                }
            }
        }
        stages.advance();
    }
}
