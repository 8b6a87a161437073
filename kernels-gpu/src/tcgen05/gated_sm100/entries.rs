//! Entries whose groups and tiles the host lists.

use core::mem::offset_of;

use cuda_std::{
    float::mul_rn_f32x2,
    kernel,
    parameter::{ParameterAddress, ld_param_b64, ld_param_v2_b64},
    parameter_address,
};

use super::{
    abi::{Group, INSTANCES, Index, Instance, Launch, N_STEP, Record, Tile, instances},
    kernel::{Placed, Sm100, Sums, Work},
};
use crate::epilogue::silu_x2;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(),
            min_blocks = 1,
            cluster = INSTANCES[Index::$entry as usize].cluster()
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            let Launch { records, tile_count, output, at_hand, .. } = launch;
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`.
            unsafe {
                let parameter = parameter_address!($entry);
                let work = Listed::<INDEX> { records, tile_count, output, at_hand, parameter };
                Sm100::<Listed<INDEX>, { INSTANCES[INDEX].blocks }>::run(work);
            }
        }
    )*};
}
instances!(entries);

/// Work of a launch of one of [`INSTANCES`]: fields of [`Launch`], and the address of the parameter.
#[derive(Clone, Copy)]
pub struct Listed<const INDEX: usize> {
    records: u64,
    tile_count: u32,
    output: u32,
    at_hand: u32,
    parameter: ParameterAddress,
}

/// Tiles of a CTA, each with a copy of its group. The fields of a copy stay in registers; a reference would be reloaded
/// after every wait and every copy.
pub struct Tiles {
    records: *const Record,
    count: u32,
    at_hand: u32,
    parameter: ParameterAddress,
    next: u32,
    stride: u32,
}

impl Tiles {
    /// Returns a tile from the parameter.
    ///
    /// # Safety
    /// `index` is less than `at_hand`.
    #[inline(always)]
    unsafe fn in_parameter(&self, index: u32) -> (Tile, Group) {
        const GROUP_BYTES: u32 = size_of::<Group>() as u32;

        let packed = self.parameter + (offset_of!(Launch, tiles) as u32 + index * size_of::<u64>() as u32);
        // SAFETY: the index is below `at_hand`, so the parameter contains this tile and its group.
        unsafe {
            let tile = Tile::unpacked(ld_param_b64(packed));
            let group = self.parameter + (offset_of!(Launch, groups) as u32 + tile.group * GROUP_BYTES);
            let words: [[u64; 2]; GROUP_BYTES as usize / 16] =
                core::array::from_fn(|word| ld_param_v2_b64(group + 16 * word as u32));
            (tile, bytemuck::cast(words))
        }
    }
}

impl Iterator for Tiles {
    type Item = (Tile, Group);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.count {
            return None;
        }
        let index = self.next;
        self.next += self.stride;
        // SAFETY: the index is less than the number of records, and nobody writes the array while the kernel runs: the
        // caller of `Listed::tiles` guarantees both.
        Some(unsafe {
            if index < self.at_hand {
                self.in_parameter(index)
            } else {
                let Record { tile, group } = *self.records.add(index as usize);
                (tile, group)
            }
        })
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
        let Self { records, tile_count: count, at_hand, parameter, .. } = self;
        Tiles { records: records as *const Record, count, at_hand, parameter, next, stride }
    }

    #[inline(always)]
    fn placed(group: Group) -> Placed {
        // Each group has its own tensor maps.
        Placed { group, token_row: 0, token_tile: 0, weight_rows: [0; 2] }
    }

    #[inline(always)]
    fn output(self) -> u32 {
        self.output
    }

    #[inline(always)]
    unsafe fn column(self, _tile: &Tile, _column: u32) {}

    #[inline(always)]
    unsafe fn tokens(self, _tile: &Tile, _group: &Placed, _token: u32) {}

    #[inline(always)]
    fn values(self, group: &Placed, _column: &(), _tokens: &(), sums: &Sums) -> [f32; N_STEP as usize] {
        let mut values = [0.0; N_STEP as usize];
        for (pair, values) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let product = |matrix: usize| {
                mul_rn_f32x2([group.alpha[matrix]; 2], [sums[matrix][2 * pair], sums[matrix][2 * pair + 1]])
            };
            *values =
                if Self::INSTANCE.matrices == 2 { mul_rn_f32x2(silu_x2(product(0)), product(1)) } else { product(0) };
        }
        values
    }
}
