//! Loading: global memory → stages. One thread.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    global::GlobalAddress,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::{TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_cta_global},
};

use super::Sm120;
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    gated_sm120::abi::{
        Group, K_BLOCK_BYTES, MMA_K, SLAB_ROWS, SLABS, STEPS, TOKEN_SCALE_ROWS, Tile, slab_bytes, slab_row_bytes,
    },
    ring::Ring,
};

/// Where a tile's operands begin.
struct Sources {
    /// The slabs, one k-block after the other.
    weights: [GlobalAddress; SLABS as usize],
    map: TensorMapAddress,
    first_token: u32,
    /// The first token's row in its scale tile, one tile for each step.
    token_scales: GlobalAddress,
}

impl<const INDEX: usize, const COLUMNS: usize> Sm120<INDEX, COLUMNS> {
    /// Loads every k-block of the block's tiles.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. One thread of the block calls it, once the barriers are there.
    #[inline(always)]
    pub(super) unsafe fn load(self) {
        let mut stages = self.stages();
        let mut known = u32::MAX;
        for (tile, group) in self.tiles() {
            let sources = Self::sources(&tile, &group);
            if tile.group != known {
                known = tile.group;
                // SAFETY: the contract: a tensor map lies there.
                unsafe { fence_proxy_tensormap_acquire(sources.map) };
            }
            for k_block in 0..group.k_blocks() {
                // SAFETY: the tile's own operands; this thread alone loads.
                unsafe { self.load_k_block(&mut stages, &sources, k_block, group.steps(k_block)) };
            }
        }
    }

    /// Where the operands of a tile begin.
    #[inline(always)]
    fn sources(tile: &Tile, group: &Group) -> Sources {
        let &Group { a_map, a_scales, b, n, k, .. } = group;
        let slab = |matrix: u64, row: u32| GlobalAddress::new(matrix) + u64::from(row) * slab_row_bytes(k);
        let first = tile.first_column / SLAB_ROWS;
        let weights = if Self::INSTANCE.matrices == 2 {
            [slab(b[0], first), slab(b[1], first)]
        } else {
            // Below the last slab there is none; nobody stores what is multiplied for it.
            let last = (n - 1) / SLAB_ROWS;
            [slab(b[0], first), slab(b[0], if first < last { first + 1 } else { last })]
        };
        let tile_row = u64::from(tile.first_token / SCALE_TILE_ROWS) * u64::from(k.div_ceil(MMA_K) * SCALE_TILE_BYTES);
        let row = u64::from(tile.first_token % TOKEN_SCALE_ROWS * (SCALE_TILE_BYTES / TOKEN_SCALE_ROWS));
        Sources {
            weights,
            map: TensorMapAddress::new(a_map),
            first_token: tile.first_token,
            token_scales: GlobalAddress::new(a_scales) + (tile_row + row),
        }
    }

    /// Starts the copies of a k-block of so many steps into the next stage.
    ///
    /// # Safety
    /// `sources` are of a tile whose map has been acquired. One thread of the block calls it, with all k-blocks of its tiles in
    /// order; `stages` is that thread's.
    #[inline(always)]
    unsafe fn load_k_block(self, stages: &mut Ring, sources: &Sources, k_block: u32, steps: u32) {
        let (full, stage) = (stages.full(), stages.index());
        let (weight_bytes, scale_bytes) = (slab_bytes(steps), Self::INSTANCE.step_scale_bytes());
        // SAFETY: the group's own slabs, map and scales, which are padded to whole tiles. A stage is written while it is empty, and
        // its full barrier expects the bytes of every copy. A box counts in full, even where it lies outside of the tensor.
        unsafe {
            stages.wait_empty();
            let bytes = SLABS * weight_bytes + Self::INSTANCE.token_bytes() + steps * scale_bytes;
            mbarrier_arrive_expect_tx(full, bytes);
            for slab in 0..SLABS {
                let source = sources.weights[slab as usize] + u64::from(k_block) * u64::from(slab_bytes(STEPS));
                cp_async_bulk_shared_global(
                    self.weights_of(stage) + slab * slab_bytes(STEPS),
                    source,
                    weight_bytes,
                    full,
                );
            }
            let corner = [(k_block * K_BLOCK_BYTES) as i32, sources.first_token as i32];
            cp_async_bulk_tensor_2d_shared_cta_global(self.tokens_of(stage), sources.map, corner, full);
            for step in 0..steps {
                let source = sources.token_scales + u64::from(k_block * STEPS + step) * u64::from(SCALE_TILE_BYTES);
                cp_async_bulk_shared_global(
                    self.token_scales_of(stage) + step * scale_bytes,
                    source,
                    scale_bytes,
                    full,
                );
            }
        }
        stages.advance();
    }
}
