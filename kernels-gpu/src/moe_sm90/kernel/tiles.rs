//! Which tiles a block computes: found from the lists by their index, and written down in shared memory for the block.

use cuda_std::{
    global::{GlobalAddress, atom_global_add_u32, ld_global_b32, ld_relaxed_gpu_global_b32},
    mbarrier::mbarrier_arrive,
    shared::{SharedAddress, ld_shared_v4_b32, st_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx, warp_vote_ballot},
};

use super::{Built, Moe};
use crate::{
    moe_route::abi::tile_size,
    moe_sm90::abi::{Launch, TILE_BYTES},
    ring::Ring,
};

/// A tile, as every role of a block knows it.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First column of C; a multiple of the instance's columns.
    pub first_column: u32,
    /// First row of C.
    pub first_row: u32,
    /// Rows; 0 behind the block's last tile.
    pub tokens: u32,
    /// The expert.
    pub expert: u32,
    /// The expert's factors, as the bits of f32.
    pub alpha: [u32; 2],
}

impl Tile {
    /// What stands behind the last tile.
    const NONE: Self = Self { first_column: 0, first_row: 0, tokens: 0, expert: 0, alpha: [0; 2] };

    /// Where [`Self::tokens`] stands in what is written down.
    pub const TOKENS: u32 = 8;

    /// Reads it where it was written down.
    ///
    /// # Safety
    /// A tile was written down there, and the barrier that says so has been waited for.
    #[inline(always)]
    pub unsafe fn read(slot: SharedAddress) -> Self {
        // SAFETY: what `# Safety` above asks.
        let ([first_column, first_row, tokens, expert], [gate, up, ..]) =
            unsafe { (ld_shared_v4_b32(slot), ld_shared_v4_b32(slot + TILE_BYTES / 2)) };
        Self { first_column, first_row, tokens, expert, alpha: [gate, up] }
    }
}

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Where the tile that a ring stands at is written down.
    #[inline(always)]
    pub(super) fn slot(&self, tiles: Ring) -> SharedAddress {
        self.shared + Self::TILES + tiles.index() * TILE_BYTES
    }

    /// Writes a tile down for the other roles.
    ///
    /// # Safety
    /// The barriers have been initialised. The whole first warp calls it together, with its own ring.
    #[inline(always)]
    pub(super) unsafe fn write_down(&self, tiles: &mut Ring, tile: &Tile) {
        // SAFETY: the slot is empty after the wait.
        unsafe {
            tiles.wait_empty();
            if lane_id() == 0 {
                let slot = self.slot(*tiles);
                st_shared_v4_b32(slot, [tile.first_column, tile.first_row, tile.tokens, tile.expert]);
                st_shared_v4_b32(slot + TILE_BYTES / 2, [tile.alpha[0], tile.alpha[1], 0, 0]);
                mbarrier_arrive(tiles.full());
            }
            sync_warp(ALL_LANES);
            tiles.advance();
        }
    }

    /// Asks for the index of one more tile. The answer is the first lane's.
    ///
    /// # Safety
    /// The contract: the ticket lies there.
    #[inline(always)]
    pub(super) unsafe fn ask(&self) -> u32 {
        if lane_id() > 0 {
            return 0;
        }
        // SAFETY: what `# Safety` above asks.
        thread::grid_dim_x() + unsafe { atom_global_add_u32(GlobalAddress::new(self.launch.ticket), 1) }
    }

    /// The tile of this index; an expert's tiles of the same columns, which share weights, are neighbours.
    ///
    /// # Safety
    /// The lists are complete. The whole warp calls it together, with the same index.
    #[inline(always)]
    pub(super) unsafe fn find(&self, index: u32) -> Tile {
        let Launch { firsts, tile_firsts, experts, n, alpha, .. } = self.launch;
        let columns = n.div_ceil(Self::INSTANCE.columns());
        let token_tile = index / columns;
        // SAFETY: indices up to `experts`, of lists that have one number more; factors of an expert.
        unsafe {
            let at = |list: u64, index: u32| GlobalAddress::new(list) + u64::from(index) * 4;
            let of = |list: u64, index: u32| ld_relaxed_gpu_global_b32(at(list, index));
            // The last expert whose tiles begin at or before this one. Every lane looks at one of some distance, then at the
            // next ones, so that the warp waits for memory twice at most.
            let distance = experts.div_ceil(WARP_SIZE);
            let begun = |index: u32| {
                let begins = of(tile_firsts, index.min(experts));
                warp_vote_ballot(ALL_LANES, index < experts && begins <= token_tile).count_ones()
            };
            let mut expert = (begun(lane_id() * distance) - 1) * distance;
            if distance > 1 {
                let last = begun(if lane_id() < distance { expert + lane_id() } else { experts });
                expert += last - 1;
            }
            let [first_tile, next_tile] = [of(tile_firsts, expert), of(tile_firsts, expert + 1)];
            if token_tile >= next_tile {
                return Tile::NONE;
            }
            let [first, next] = [of(firsts, expert), of(firsts, expert + 1)];
            let matrices = [0, Self::INSTANCE.matrices as usize - 1];
            let alpha = matrices.map(|matrix| ld_global_b32(at(alpha[matrix], expert)));
            let (rows, tiles, of_expert) = (next - first, next_tile - first_tile, index - first_tile * columns);
            let (column, tile) = (of_expert / tiles, of_expert % tiles);
            let size = tile_size(rows, tiles);
            let tokens = (rows - tile * size).min(size);
            let first_column = column * Self::INSTANCE.columns();
            Tile { first_column, first_row: first + tile * size, tokens, expert, alpha }
        }
    }
}

/// The value that the first lane has.
///
/// # Safety
/// The whole warp calls it together.
#[inline(always)]
pub(super) unsafe fn from_first_lane(value: u32) -> u32 {
    // SAFETY: what `# Safety` above asks.
    unsafe { warp_shuffle_idx(ALL_LANES, value, 0, WARP_SIZE).0 }
}
