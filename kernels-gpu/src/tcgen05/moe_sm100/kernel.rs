//! Entries whose CTAs look up their tiles in the lists on the device. Each role of a CTA finds a tile by its index.

use cuda_std::{
    float::fma_rn_f32,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel, tensor_map_of_parameter,
};

use super::abi::{INSTANCES, Index, instances};
use crate::{
    curve::with_curve,
    nvfp4_blocks::QuantizedTile,
    nvfp4_rows::weight_scale_bytes,
    routed::{
        Launch,
        tiles::{self, RoutedTile},
    },
    tcgen05::gated_sm100::{
        abi::{Group, Instance, N_STEP, Tile},
        kernel::{Placed, Sm100, Sums, Work},
    },
    unroll::unroll,
};

/// Bytes per element of C.
const ELEMENT_BYTES: u64 = 2;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs` holds.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the caller guarantees the contract in this folder's `mod.rs`. The parameter begins with two
            // tensor maps.
            unsafe {
                let maps = tensor_map_of_parameter!($entry).address();
                Sm100::<Routed<{ Index::$entry as usize }>, 1>::run(Routed { launch, maps });
            }
        }
    )*};
}
instances!(entries);

/// Work of a launch of one of [`INSTANCES`].
#[derive(Clone, Copy)]
struct Routed<const INDEX: usize> {
    launch: Launch,
    /// Address of the tensor map of tokens. The tensor map of weights follows it.
    maps: u64,
}

impl<const INDEX: usize> Work for Routed<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MAPS_IN_MEMORY: bool = false;
    const AT_ONCE: bool = false;
    type Group = Placed;
    type Tiles = RoutedTiles<INDEX>;
    type Column = Column;
    type Tokens = [f32; N_STEP as usize];

    #[inline(always)]
    fn wait() {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }

    #[inline(always)]
    unsafe fn tiles(self, next: u32, stride: u32) -> RoutedTiles<INDEX> {
        let size = [Self::INSTANCE.tile_rows(), Self::INSTANCE.tile_tokens];
        // SAFETY: the caller waited for earlier grids, so the lists are complete, and the contract guarantees that
        // their addresses are valid.
        RoutedTiles { work: self, tiles: unsafe { self.launch.routed_tiles(size, next, stride) } }
    }

    #[inline(always)]
    fn placed(group: Placed) -> Placed {
        group
    }

    #[inline(always)]
    fn output(self) -> u32 {
        self.launch.output
    }

    #[inline(always)]
    fn writes_bits16(self) -> bool {
        self.launch.writes_bits16(Self::INSTANCE.matrices)
    }

    #[inline(always)]
    unsafe fn quantized(self, tile: &Tile, group: &Placed) -> QuantizedTile {
        let rows = [group.token_tile, group.token_row, tile.tokens];
        // SAFETY: the tile belongs to the work, so its expert has global scales.
        unsafe { self.launch.quantized(Self::INSTANCE.matrices, tile.group, rows) }
    }

    #[inline(always)]
    unsafe fn column(self, tile: &Tile, column: u32) -> Column {
        // SAFETY: the expert has one factor per matrix, and each bias has one number per column of the expert.
        let of = |matrix: usize| unsafe {
            (self.launch.alpha(matrix, tile.group, column), self.launch.bias(matrix, tile.group, column))
        };
        let (first, second) = (of(0), of(Self::INSTANCE.matrices as usize - 1));
        Column { alpha: [first.0, second.0], bias: [first.1, second.1] }
    }

    #[inline(always)]
    unsafe fn tokens(self, tile: &Tile, group: &Placed, token: u32) -> [f32; N_STEP as usize] {
        core::array::from_fn(|index| {
            let token = token + index as u32;
            // SAFETY: a row of the tile is a row of the lists.
            unsafe { self.launch.global(token < tile.tokens, group.token_row + token) }
        })
    }

    #[inline(always)]
    fn values(
        self,
        _group: &Placed,
        column: &Column,
        tokens: &[f32; N_STEP as usize],
        sums: &Sums,
    ) -> [f32; N_STEP as usize] {
        let launch = self.launch;
        let product = |matrix: usize, token: usize| {
            fma_rn_f32(tokens[token] * column.alpha[matrix], sums[matrix][token], column.bias[matrix])
        };
        // One loop per variant: a branch inside of a loop would prevent unrolling, and sums would not stay in
        // registers.
        if Self::INSTANCE.curves {
            let mut values = [0.0; N_STEP as usize];
            with_curve!(&launch.activation, |curve| {
                unroll!(TOKEN in 0 1 2 3 4 5 6 7, {
                    values[TOKEN] = curve(product(0, TOKEN), product(1, TOKEN));
                });
            });
            return values;
        }
        let gated = |no_parameters, token| launch.gated(no_parameters, product(0, token), product(1, token));
        match (Self::INSTANCE.matrices, launch.has_no_parameters()) {
            (2, true) => core::array::from_fn(|token| gated(true, token)),
            (2, false) => core::array::from_fn(|token| gated(false, token)),
            (_, true) => core::array::from_fn(|token| Launch::plain(true, product(0, token))),
            (_, false) => core::array::from_fn(|token| Launch::plain(false, product(0, token))),
        }
    }
}

/// A lane's data of its column: the expert's factors and the column's biases.
#[derive(Clone, Copy)]
struct Column {
    alpha: [f32; 2],
    bias: [f32; 2],
}

/// Tiles of a CTA in this kernel's form.
struct RoutedTiles<const INDEX: usize> {
    work: Routed<INDEX>,
    tiles: tiles::RoutedTiles,
}

impl<const INDEX: usize> Iterator for RoutedTiles<INDEX> {
    type Item = (Tile, Placed);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let Routed { launch, maps } = self.work;
        let Launch { n, k, .. } = launch;
        let instance = INSTANCES[INDEX];
        let RoutedTile { expert, column_tile, token_tile, token_row, tokens } = self.tiles.next()?;
        let of_tile = Tile { group: expert, first_row: column_tile * instance.tile_rows(), first_token: 0, tokens };
        let matrix = [0, 1].map(|matrix| expert * instance.matrices + matrix);
        let scales_of = |matrix: u32| launch.weight_scales + u64::from(matrix) * weight_scale_bytes(n, k);
        let group = Group {
            a_map: maps,
            a_scales: launch.token_scales,
            b_maps: [maps + size_of_val(&launch.token_map) as u64; 2],
            b_scales: matrix.map(scales_of),
            c: launch.c + u64::from(token_row) * u64::from(n) * ELEMENT_BYTES,
            c_map: 0,
            alpha: [0.0; 2],
            m: tokens,
            n,
            k,
            a_box: INSTANCES[INDEX].block_tokens(),
            unused: [0; 2],
        };
        Some((of_tile, Placed { group, token_row, token_tile, weight_rows: matrix.map(|matrix| matrix * n) }))
    }
}
