//! The entries, for groups and tiles in lists of the host.

use cuda_std::kernel;

use super::{
    abi::{Group, INSTANCES, Index, Instance, Launch, SLABS, Tile, instances},
    kernel::{Columns, Place, Placed, Sm120, Work},
};
use crate::{
    epilogue::silu,
    schedule::{OfGroup, Tiles},
};

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires.
            unsafe { Sm120::<Listed<INDEX>, { INSTANCES[INDEX].warp_columns() }>::run(Listed { launch }) }
        }
    )*};
}
instances!(entries);

/// The work of a launch of one of [`INSTANCES`].
#[derive(Clone, Copy)]
struct Listed<const INDEX: usize> {
    launch: Launch,
}

impl OfGroup for Tile {
    #[inline(always)]
    fn group(&self) -> u32 {
        self.group
    }
}

impl<const INDEX: usize> Work for Listed<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MAPS_IN_MEMORY: bool = true;
    type Group = Group;
    type Tiles = Tiles<Tile, Group>;
    type Terms = ();

    #[inline(always)]
    fn wait() {}

    #[inline(always)]
    unsafe fn tiles(self, next: u32, stride: u32) -> Tiles<Tile, Group> {
        let Launch { tiles, tile_count, groups, .. } = self.launch;
        // SAFETY: the parameter's arrays have `tile_count` tiles and their groups, by the kernel's contract; the caller
        // waited for earlier grids.
        unsafe { Tiles::new(tiles, tile_count, groups, next, stride) }
    }

    #[inline(always)]
    fn placed(group: Group) -> Placed {
        // The group has its own map of tokens. There is no map of weights.
        Placed { group, token_row: 0, token_tile: 0, weight_map: 0, weight_rows: [0; 2] }
    }

    #[inline(always)]
    fn output(self) -> u32 {
        self.launch.output
    }

    #[inline(always)]
    unsafe fn terms<const COLUMNS: usize>(self, _tile: &Tile, _group: &Placed, _columns: Columns, _token: u32) {}

    #[inline(always)]
    fn gated(self, group: &Placed, _terms: &(), _place: Place, sums: [f32; SLABS as usize]) -> f32 {
        silu(group.alpha[0] * sums[0]) * (group.alpha[1] * sums[1])
    }

    #[inline(always)]
    fn plain(self, group: &Placed, _terms: &(), _slab: usize, _place: Place, sum: f32) -> f32 {
        group.alpha[0] * sum
    }
}
