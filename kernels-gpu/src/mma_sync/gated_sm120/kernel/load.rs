//! Loads from global memory to stages. One thread of a warp does this.

use cuda_std::{
    fence::fence_proxy_tensormap_acquire,
    global::GlobalAddress,
    mbarrier::{Mbarrier, mbarrier_arrive_expect_tx},
    tma::{TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_cta_global},
    warp::{ALL_LANES, sync_warp},
};

use super::{
    sm120::Sm120,
    work::{Placed, Work},
};
use crate::{
    format::{SCALE_TILE_BYTES, SCALE_TILE_ROWS},
    mma_sync::gated_sm120::abi::{
        Group, K_BLOCK_BYTES, MMA_K, SLAB_ROWS, SLABS, STEPS, TOKEN_SCALE_ROWS, Tile, Weights, slab_bytes,
        slab_row_bytes, slab_value_bytes,
    },
    ring::Ring,
};

/// Sources of a tile's operands.
struct Sources {
    /// Addresses of the slabs, one k-block after the other; or of the scale tiles of each matrix.
    weights: [GlobalAddress; SLABS as usize],
    /// The first row of each slab in the map of weights, for weights in rows.
    rows: [u32; SLABS as usize],
    weight_map: TensorMapAddress,
    map: TensorMapAddress,
    first_token: u32,
    /// Address of the first token's row in its scale tile. There is one scale tile per step.
    token_scales: GlobalAddress,
}

impl<W: Work, const COLUMNS: usize> Sm120<W, COLUMNS> {
    /// Loads every k-block of the CTA's tiles.
    ///
    /// # Safety
    /// The contract of the kernel holds, and the caller has waited for earlier grids. One whole warp of the CTA makes this
    /// call, after the barriers have been initialized, and `elected` is `true` in one of its threads.
    #[inline(always)]
    pub(super) unsafe fn load(self, elected: bool) {
        let mut stages = self.stages();
        let mut known = u32::MAX;
        // SAFETY: earlier grids were waited for, so tiles and groups are complete; by the kernel's contract the launch
        // has their addresses. The whole warp takes the tiles.
        for (tile, group) in unsafe { self.tiles() } {
            if elected {
                let group = W::placed(group);
                let sources = Self::sources(&tile, &group);
                if W::MAPS_IN_MEMORY && tile.group != known {
                    known = tile.group;
                    // SAFETY: by the contract, the group's `a_map` is the address of a tensor map.
                    unsafe { fence_proxy_tensormap_acquire(sources.map) };
                }
                for k_block in 0..group.k_blocks() {
                    // SAFETY: the sources are this tile's operands; this thread alone loads.
                    unsafe { self.load_k_block(&mut stages, &sources, k_block, group.steps(k_block)) };
                }
            }
            // SAFETY: the whole warp is here.
            unsafe { sync_warp(ALL_LANES) };
        }
    }

    /// The sources of a tile's operands.
    #[inline(always)]
    fn sources(tile: &Tile, group: &Placed) -> Sources {
        let &Placed { group: Group { a_map, a_scales, b, n, k, .. }, token_row, token_tile, weight_map, weight_rows } =
            group;
        let first = tile.first_column / SLAB_ROWS;
        // If there is no slab below, the last slab takes its place: the products are not stored.
        let last = (n - 1) / SLAB_ROWS;
        let gated = Self::INSTANCE.matrices == 2;
        let second = if gated { first } else { (first + 1).min(last) };
        let slab = |matrix: u64, row: u32| GlobalAddress::new(matrix) + u64::from(row) * slab_row_bytes(k);
        let scale_tiles = |tile: u32| u64::from(tile) * u64::from(k.div_ceil(MMA_K) * SCALE_TILE_BYTES);
        let matrices = [0, if gated { 1 } else { 0 }];
        let weights = match Self::INSTANCE.weights {
            Weights::Slabs => [slab(b[0], first), slab(b[matrices[1]], second)],
            Weights::Rows => {
                matrices.map(|matrix| GlobalAddress::new(b[matrix]) + scale_tiles(tile.first_column / SCALE_TILE_ROWS))
            }
        };
        let tile_row = scale_tiles(token_tile + tile.first_token / SCALE_TILE_ROWS);
        let row = u64::from(tile.first_token % TOKEN_SCALE_ROWS * (SCALE_TILE_BYTES / TOKEN_SCALE_ROWS));
        Sources {
            weights,
            rows: [weight_rows[0] + first * SLAB_ROWS, weight_rows[matrices[1]] + second * SLAB_ROWS],
            weight_map: TensorMapAddress::new(weight_map),
            map: TensorMapAddress::new(a_map),
            first_token: token_row + tile.first_token,
            token_scales: GlobalAddress::new(a_scales) + (tile_row + row),
        }
    }

    /// Starts the copies of a k-block of `steps` steps to the next stage.
    ///
    /// # Safety
    /// `sources` belong to a tile whose map has been acquired. One thread of the CTA makes this call, with all k-blocks
    /// of its tiles in order; `stages` is that thread's.
    #[inline(always)]
    unsafe fn load_k_block(self, stages: &mut Ring, sources: &Sources, k_block: u32, steps: u32) {
        let (full, stage) = (stages.full(), stages.index());
        let scale_bytes = Self::INSTANCE.step_scale_bytes();
        let k_byte = (k_block * K_BLOCK_BYTES) as i32;
        // SAFETY: the sources are the group's own weights, maps and scales, which are padded to whole tiles. A stage is
        // written while it is empty, and its full barrier expects the bytes of every copy. A box counts in full, even
        // where it lies outside of the tensor.
        unsafe {
            stages.wait_empty();
            mbarrier_arrive_expect_tx(
                full,
                Self::weight_copy_bytes(steps) + Self::INSTANCE.token_bytes() + steps * scale_bytes,
            );
            self.load_weights(stage, sources, k_block, steps, full);
            let corner = [k_byte, sources.first_token as i32];
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

    /// Bytes that the copies of weights report, for a k-block of `steps` steps.
    #[inline(always)]
    const fn weight_copy_bytes(steps: u32) -> u32 {
        match Self::INSTANCE.weights {
            Weights::Slabs => SLABS * slab_bytes(steps),
            Weights::Rows => SLABS * slab_value_bytes(STEPS) + Self::INSTANCE.matrices * steps * SCALE_TILE_BYTES,
        }
    }

    /// Starts the copies of the weights of a k-block of `steps` steps, which report to `full`.
    ///
    /// # Safety
    /// The requirements of [`Self::load_k_block`]; the stage is empty.
    #[inline(always)]
    unsafe fn load_weights(self, stage: u32, sources: &Sources, k_block: u32, steps: u32, full: Mbarrier) {
        let stage = self.weights_of(stage);
        for slab in 0..SLABS {
            let weights = sources.weights[slab as usize];
            // SAFETY: the stage is empty and has room for the slabs; the full barrier expects their bytes; by the
            // contract `sources` are addresses of the weights.
            unsafe {
                match Self::INSTANCE.weights {
                    Weights::Slabs => {
                        let source = weights + u64::from(k_block) * u64::from(slab_bytes(STEPS));
                        cp_async_bulk_shared_global(stage + slab * slab_bytes(STEPS), source, slab_bytes(steps), full);
                    }
                    Weights::Rows => {
                        let corner = [(k_block * K_BLOCK_BYTES) as i32, sources.rows[slab as usize] as i32];
                        let values = stage + slab * slab_value_bytes(STEPS);
                        cp_async_bulk_tensor_2d_shared_cta_global(values, sources.weight_map, corner, full);
                        if slab < Self::INSTANCE.matrices {
                            let source = weights + u64::from(k_block * STEPS) * u64::from(SCALE_TILE_BYTES);
                            let scales = stage + Self::weight_scales(slab);
                            cp_async_bulk_shared_global(scales, source, steps * SCALE_TILE_BYTES, full);
                        }
                    }
                }
            }
        }
    }
}
