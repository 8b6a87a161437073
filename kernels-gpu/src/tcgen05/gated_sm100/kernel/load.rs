//! Loads from global memory to stages. Runs in one thread.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    global::GlobalAddress,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{
        TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_shared_global_multicast,
        cp_async_bulk_tensor_2d_shared_global,
    },
};

use super::{
    sm100::{BOTH, Sm100},
    work::{Placed, Work},
};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    ring::Ring,
    tcgen05::gated_sm100::abi::{Instance, K_BLOCK_BYTES, Tile},
};

impl<W: Work, const BLOCKS: u32> Sm100<W, BLOCKS> {
    /// Makes the tensor maps of a tile's group visible to this thread's copies, unless `known` is this group. Then sets
    /// `known`.
    ///
    /// # Safety
    /// `group` is the tile's group, and its fields satisfy the contract in `gated_sm100/mod.rs`.
    #[inline(always)]
    pub(super) unsafe fn acquire_maps(self, known: &mut u32, tile: &Tile, group: &Placed) {
        if !W::MAPS_IN_MEMORY || tile.group == *known {
            return;
        }
        *known = tile.group;
        // SAFETY: the caller guarantees that tensor maps lie at these addresses.
        unsafe {
            fence_proxy_tensormap_acquire(TensorMapAddress::new(group.a_map));
            let b_maps = self.of_matrices(group.b_maps);
            for map in &b_maps[..Self::MATRICES] {
                fence_proxy_tensormap_acquire(TensorMapAddress::new(*map));
            }
        }
    }

    /// Starts the copies of a k-block to the next stage. Both CTAs of a pair need the scales of all of the tile's
    /// tokens. If `together`, each CTA copies half of these scales to both CTAs.
    ///
    /// # Safety
    /// `group` is the tile's group, satisfies the contract in `gated_sm100/mod.rs`, and its tensor maps are acquired.
    /// One thread of the CTA calls this, for all k-blocks of its tiles in order. `stages` belongs to this thread, and
    /// the next stage is empty. If `together`, the stage has been used before. It is then also empty in the other CTA
    /// of the pair, which has started, because the same products read both CTAs' stages.
    #[inline(always)]
    pub(super) unsafe fn load(
        self,
        stages: &mut Ring<BLOCKS>,
        tile: &Tile,
        group: &Placed,
        k_block: u32,
        together: bool,
    ) {
        // SAFETY: the caller guarantees the requirements.
        unsafe { self.load_parts::<true, true>(stages, tile, group, k_block, together) };
    }

    /// Starts the copies of a k-block's weights (if `WEIGHTS`) and of its tokens (if `TOKENS`) to the next stage. The call
    /// for weights also announces the bytes of both, so it comes first.
    ///
    /// # Safety
    /// The requirements of [`Self::load`]. If a stage's weights and tokens are loaded separately, the calls have the
    /// same stage, tile and k-block, and nothing waits for the stage before both.
    #[inline(always)]
    pub(super) unsafe fn load_parts<const WEIGHTS: bool, const TOKENS: bool>(
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

        // For the zeros past the last k-block, any scales will do.
        let scale_block = if Self::INSTANCE.splits > 1 { k_block.min(group.k_blocks() - 1) } else { k_block };
        let scale_bytes = group.mmas(scale_block) * SCALE_TILE_BYTES;
        let scale_offset = u64::from(scale_block) * u64::from(Instance::SCALE_BYTES);
        let b_maps = self.of_matrices(group.b_maps);
        let b_scales = self.of_matrices(group.b_scales);
        let weight_rows = self.of_matrices(group.weight_rows);
        let scales = |matrix: u64, tile_row: u32| {
            GlobalAddress::new(matrix) + (u64::from(tile_row) * group.scale_stride() + scale_offset)
        };
        // The second CTA of a pair may have no rows. Then the tensor map fills the values with zeros, and any scales
        // will do.
        let weight_tile_row = (first_row / SCALE_TILE_ROWS).min((group.n - 1) / SCALE_TILE_ROWS);
        let token_tile_row = group.token_tile + tile.first_token / SCALE_TILE_ROWS;
        // Every tile has at least one.
        let token_tile_rows = if Self::INSTANCE.token_scale_tiles() == 1 { 1 } else { tile.token_scale_tiles() };

        // SAFETY: the copies use the group's own tensor maps and scales, which are padded to whole tiles. The stage is
        // empty, and its full barrier expects the bytes of every copy; if `together`, the other CTA copies half of the
        // tokens' scales. A box counts in full, also outside of the tensor.
        unsafe {
            if WEIGHTS {
                let value_bytes = Self::TOKENS + group.a_box * K_BLOCK_BYTES;
                mbarrier_arrive_expect_tx(
                    full,
                    value_bytes + (Self::INSTANCE.block_matrices() + token_tile_rows) * scale_bytes,
                );
            }
            let matrices = if WEIGHTS { Self::MATRICES } else { 0 };
            for matrix in 0..matrices {
                let weights = stage + Self::weights(matrix);
                let row = (weight_rows[matrix] + first_row) as i32;
                let map = TensorMapAddress::new(b_maps[matrix]);
                cp_async_bulk_tensor_2d_shared_global(weights, map, [k_byte, row], full);
                let weight_scales = stage + Self::weight_scales(matrix);
                let source = scales(b_scales[matrix], weight_tile_row);
                cp_async_bulk_shared_global(weight_scales, source, scale_bytes, full);
            }
            if TOKENS {
                let tokens = stage + Self::TOKENS;
                let map = TensorMapAddress::new(group.a_map);
                cp_async_bulk_tensor_2d_shared_global(tokens, map, [k_byte, first_token as i32], full);
            }
            let token_tile_rows = if TOKENS { token_tile_rows } else { 0 };
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
