//! The entries.

use cuda_std::{
    float::fma_rn_f32,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel, tensor_map_of_parameter,
};

use super::abi::{INSTANCES, Index, Launch, instances};
use crate::{
    curve::with_curve,
    mma_sync::gated_sm120::{
        abi::{Group, Instance, N_STEP, SLABS, Tile},
        kernel::{Columns, Place, Placed, Sm120, Work},
    },
    nvfp4_blocks::QuantizedTile,
    nvfp4_rows::weight_scale_bytes,
    routed::tiles::{self, RoutedTile},
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

/// Maximum number of groups of eight tokens per warp.
const MOST_COLUMNS: usize = 8;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            const INDEX: usize = Index::$entry as usize;
            // SAFETY: the caller fulfills the contract in `mod.rs`, which `run` requires. The parameter begins with the
            // two tensor maps that `maps` points to.
            unsafe {
                let maps = tensor_map_of_parameter!($entry).address();
                Sm120::<Routed<INDEX>, { INSTANCES[INDEX].warp_columns() }>::run(Routed { launch, maps });
            }
        }
    )*};
}
instances!(entries);

/// The work of a launch of one of [`INSTANCES`].
#[derive(Clone, Copy)]
struct Routed<const INDEX: usize> {
    launch: Launch,
    /// Address of the tensor map of tokens. The map of weights follows it.
    maps: u64,
}

impl<const INDEX: usize> Work for Routed<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MAPS_IN_MEMORY: bool = false;
    type Group = Placed;
    type Tiles = RoutedTiles<INDEX>;
    type Terms = Terms;

    #[inline(always)]
    fn wait() {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }

    #[inline(always)]
    unsafe fn tiles(self, next: u32, stride: u32) -> RoutedTiles<INDEX> {
        let size = [Self::INSTANCE.tile_columns(), Self::INSTANCE.tile_tokens];
        // SAFETY: the caller waited for earlier grids, so the lists are complete, and the launch has their addresses.
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
        // SAFETY: the tile is one of the work's, so its expert has global scales.
        unsafe { self.launch.quantized(Self::INSTANCE.matrices, tile.group, rows) }
    }

    #[inline(always)]
    unsafe fn terms<const COLUMNS: usize>(
        self,
        tile: &Tile,
        group: &Placed,
        columns: Columns,
        first_token: u32,
    ) -> Terms {
        const { assert!(COLUMNS <= MOST_COLUMNS) };
        let matrix = |slab: usize| if Self::INSTANCE.matrices == 2 { slab } else { 0 };
        let global = |column: usize, odd: usize| {
            let token = first_token + column as u32 * N_STEP + odd as u32;
            // SAFETY: a row of the tile is one of the lists.
            unsafe { self.launch.global(column < COLUMNS && token < tile.tokens, group.token_row + token) }
        };
        // SAFETY: the expert has one factor per matrix or per column, and the launch has their addresses.
        unsafe {
            Terms {
                globals: core::array::from_fn(|column| {
                    if column < COLUMNS { [global(column, 0), global(column, 1)] } else { [0.0; 2] }
                }),
                alpha: core::array::from_fn(|slab| {
                    // Gate and up have one factor each. Only a linear layer, which is plain, has one factor per column.
                    let of = if Self::INSTANCE.matrices == 2 { [columns[slab][0]; 2] } else { columns[slab] };
                    of.map(|column| self.launch.alpha(matrix(slab), tile.group, column))
                }),
                bias: core::array::from_fn(|slab| {
                    columns[slab].map(|column| self.launch.bias(matrix(slab), tile.group, column))
                }),
            }
        }
    }

    #[inline(always)]
    fn gated(self, _group: &Placed, terms: &Terms, place: Place, sums: [f32; SLABS as usize]) -> f32 {
        let product = |slab: usize| terms.product(slab, place, sums[slab]);
        if Self::INSTANCE.curves {
            return with_curve!(&self.launch.activation, |curve| curve(product(0), product(1)));
        }
        self.launch.gated(self.launch.has_no_parameters(), product(0), product(1))
    }

    #[inline(always)]
    fn plain(self, _group: &Placed, terms: &Terms, slab: usize, place: Place, sum: f32) -> f32 {
        Launch::plain(self.launch.has_no_parameters(), terms.product(slab, place, sum))
    }
}

/// The factors and biases of a lane's elements of C in a tile.
#[derive(Clone, Copy)]
struct Terms {
    /// Global scales of the lane's tokens, which are two of each eight tokens.
    globals: [[f32; 2]; MOST_COLUMNS],
    /// Factors, by slab and row of the product.
    alpha: [[f32; 2]; SLABS as usize],
    /// Biases, by slab and row of the product.
    bias: [[f32; 2]; SLABS as usize],
}

impl Terms {
    /// Returns a product: its sum times the scales, plus the bias.
    #[inline(always)]
    fn product(&self, slab: usize, [column, row, odd]: Place, sum: f32) -> f32 {
        fma_rn_f32(self.globals[column][odd] * self.alpha[slab][row], sum, self.bias[slab][row])
    }
}

/// A CTA's tiles in the form of this kernel.
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
        let first_column = column_tile * instance.tile_columns();
        let matrix = [0, 1].map(|matrix| expert * instance.matrices + matrix);
        let scales_of = |matrix: u32| launch.weight_scales + u64::from(matrix) * weight_scale_bytes(n, k);
        let group = Group {
            a_map: maps,
            a_scales: launch.token_scales,
            b: matrix.map(scales_of),
            c: launch.c + u64::from(token_row) * u64::from(n) * ELEMENT_BYTES,
            alpha: [0.0; 2],
            m: tokens,
            n,
            k,
            unused: 0,
        };
        let weight_map = maps + size_of_val(&launch.token_map) as u64;
        let placed = Placed { group, token_row, token_tile, weight_map, weight_rows: matrix.map(|matrix| matrix * n) };
        Some((Tile { group: expert, first_column, first_token: 0, tokens }, placed))
    }
}
