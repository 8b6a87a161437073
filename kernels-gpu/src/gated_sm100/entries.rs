//! The entries, whose groups and tiles the host has listed.

use cuda_std::kernel;

use super::{
    abi::{Group, INSTANCES, Index, Instance, Launch, N_STEP, Record, Tile, instances},
    kernel::{Placed, Sm100, Sums, Work},
};
use crate::epilogue::silu;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(),
            min_blocks = 1,
            cluster = INSTANCES[Index::$entry as usize].cluster()
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            // SAFETY: the contract is this function's too.
            unsafe { Sm100::<Listed<INDEX>, { INSTANCES[INDEX].blocks }>::run(Listed { launch }) }
        }
    )*};
}
instances!(entries);

/// The work of a launch of one of [`INSTANCES`].
#[derive(Clone, Copy)]
pub struct Listed<const INDEX: usize> {
    pub launch: Launch,
}

/// A block's tiles, each with its group: a copy, whose fields stay in registers. Behind a reference, every wait and every copy would
/// have them loaded again.
pub struct Tiles {
    records: *const Record,
    count: u32,
    next: u32,
    stride: u32,
}

impl Iterator for Tiles {
    type Item = (Tile, Group);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.count {
            return None;
        }
        // SAFETY: inside of the array, which does not change while the kernel runs: `Listed::tiles` asks for it.
        let Record { tile, group } = unsafe { *self.records.add(self.next as usize) };
        self.next += self.stride;
        Some((tile, group))
    }
}

impl<const INDEX: usize> Work for Listed<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MAPS_IN_MEMORY: bool = true;
    const AT_ONCE: bool = true;
    type Group = Group;
    type Tiles = Tiles;
    type Column = ();
    type Tokens = ();

    #[inline(always)]
    fn wait() {}

    #[inline(always)]
    unsafe fn tiles(self, next: u32, stride: u32) -> Tiles {
        let Launch { records, tile_count: count, .. } = self.launch;
        Tiles { records: records as *const Record, count, next, stride }
    }

    #[inline(always)]
    fn placed(group: Group) -> Placed {
        // Maps are the group's own.
        Placed { group, token_row: 0, token_tile: 0, weight_rows: [0; 2] }
    }

    #[inline(always)]
    fn output(self) -> u32 {
        self.launch.output
    }

    #[inline(always)]
    unsafe fn column(self, _tile: &Tile, _column: u32) {}

    #[inline(always)]
    unsafe fn tokens(self, _tile: &Tile, _group: &Placed, _token: u32) {}

    #[inline(always)]
    fn values(self, group: &Placed, _column: &(), _tokens: &(), sums: &Sums) -> [f32; N_STEP as usize] {
        core::array::from_fn(|token| {
            let gate = group.alpha[0] * sums[0][token];
            if Self::INSTANCE.matrices == 2 { silu(gate) * (group.alpha[1] * sums[1][token]) } else { gate }
        })
    }
}
