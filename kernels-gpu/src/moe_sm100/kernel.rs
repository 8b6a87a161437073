//! The entries, whose tiles each role of a block finds by their index from the lists on the device.

use core::hint::assert_unchecked;

use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32, ld_global_b32_or_zero},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    kernel, tensor_map_of_parameter,
};

use super::abi::{INSTANCES, Index, Launch, instances};
use crate::{
    epilogue::{NO_PARAMETERS, relu2, silu},
    gated_sm100::{
        abi::{Group, Instance, N_STEP, Tile},
        kernel::{Placed, Sm100, Sums, Work},
    },
    moe_route::abi::tile_size,
    nvfp4_rows::{token_scale_bytes, weight_scale_bytes},
    schedule::last_begun,
};

/// Bytes of a number of a list, and of a factor.
const NUMBER: u64 = size_of::<u32>() as u64;

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in this folder's `mod.rs`.
        #[kernel(threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1)]
        pub unsafe fn $entry(launch: Launch) {
            // SAFETY: the contract is this function's too. Two maps stand first in the parameter.
            unsafe {
                let maps = tensor_map_of_parameter!($entry).address();
                Sm100::<Routed<{ Index::$entry as usize }>, 1>::run(Routed { launch, maps });
            }
        }
    )*};
}
instances!(entries);

/// The work of a launch of one of [`INSTANCES`].
#[derive(Clone, Copy)]
struct Routed<const INDEX: usize> {
    launch: Launch,
    /// The address of the map of tokens, behind which comes that of weights.
    maps: u64,
}

/// A number of a list.
///
/// # Safety
/// The list has it, and nobody writes it meanwhile.
#[inline(always)]
unsafe fn number(list: u64, index: u32) -> u32 {
    // SAFETY: what `# Safety` above asks.
    unsafe { ld_global_b32(GlobalAddress::new(list) + u64::from(index) * NUMBER) }
}

impl<const INDEX: usize> Work for Routed<INDEX> {
    const INSTANCE: Instance = INSTANCES[INDEX];
    const MAPS_IN_MEMORY: bool = false;
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
        let Launch { tile_firsts, experts, n, .. } = self.launch;
        // SAFETY: the list has a number for each expert and one more.
        let token_tiles = unsafe { number(tile_firsts, experts) };
        RoutedTiles { work: self, next, stride, end: token_tiles * n.div_ceil(Self::INSTANCE.tile_rows()) }
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
    unsafe fn column(self, tile: &Tile, column: u32) -> Column {
        let Launch { alpha, bias, n, .. } = self.launch;
        let (expert, is_there) = (tile.group, column < n);
        let of = |matrix: usize| {
            let at = GlobalAddress::new(bias[matrix]) + (u64::from(expert) * u64::from(n) + u64::from(column)) * NUMBER;
            // SAFETY: a factor of the expert, and its number of the column.
            let (alpha, number) =
                unsafe { (number(alpha[matrix], expert), ld_global_b32_or_zero(is_there && bias[matrix] != 0, at)) };
            // The sum of anything and -0 is the former.
            (f32::from_bits(alpha), if bias[matrix] == 0 { -0.0 } else { f32::from_bits(number) })
        };
        let (first, second) = (of(0), of(Self::INSTANCE.matrices as usize - 1));
        Column { alpha: [first.0, second.0], bias: [first.1, second.1] }
    }

    #[inline(always)]
    unsafe fn tokens(self, tile: &Tile, group: &Placed, token: u32) -> [f32; N_STEP as usize] {
        let first = GlobalAddress::new(self.launch.globals) + u64::from(group.token_row + token) * NUMBER;
        core::array::from_fn(|index| {
            let is_there = token + (index as u32) < tile.tokens;
            // SAFETY: a row of the list has a global scale.
            f32::from_bits(unsafe { ld_global_b32_or_zero(is_there, first + index as u64 * NUMBER) })
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
        let activation = self.launch.activation;
        let product = |matrix: usize, token: usize| {
            fma_rn_f32(tokens[token] * column.alpha[matrix], sums[matrix][token], column.bias[matrix])
        };
        // One loop for each way: a branch inside of one would keep it from being unrolled, and sums from staying in registers.
        match (Self::INSTANCE.matrices, activation.kind == NO_PARAMETERS) {
            (2, true) => core::array::from_fn(|token| silu(product(0, token)) * product(1, token)),
            (2, false) => core::array::from_fn(|token| activation.gated(product(0, token), product(1, token))),
            (_, true) => core::array::from_fn(|token| product(0, token)),
            (_, false) => core::array::from_fn(|token| relu2(product(0, token))),
        }
    }
}

/// What a lane knows of its column: the expert's factors and the column's biases.
#[derive(Clone, Copy)]
struct Column {
    alpha: [f32; 2],
    bias: [f32; 2],
}

/// A block's tiles; those of an expert that have the same columns, and so share weights, are neighbours.
struct RoutedTiles<const INDEX: usize> {
    work: Routed<INDEX>,
    next: u32,
    stride: u32,
    /// All tiles of C.
    end: u32,
}

impl<const INDEX: usize> Iterator for RoutedTiles<INDEX> {
    type Item = (Tile, Placed);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let Routed { launch, maps } = self.work;
        let Launch { firsts, tile_firsts, experts, n, k, .. } = launch;
        let (instance, index) = (INSTANCES[INDEX], self.next);
        if index >= self.end {
            return None;
        }
        self.next += self.stride;
        let column_tiles = n.div_ceil(instance.tile_rows());
        // SAFETY: indices up to `experts`, of lists that have one number more; C has columns, and the expert tiles of rows.
        unsafe {
            assert_unchecked(column_tiles > 0);
            let expert = last_begun(experts, index / column_tiles, |expert| number(tile_firsts, expert));
            let [first_tile, next_tile] = [0, 1].map(|after| number(tile_firsts, expert + after));
            let [first, next] = [0, 1].map(|after| number(firsts, expert + after));
            let (tiles, of_expert) = (next_tile - first_tile, index - first_tile * column_tiles);
            assert_unchecked(tiles > 0);
            let (column_tile, tile) = (of_expert / tiles, of_expert % tiles);
            let (rows, size) = (next - first, tile_size(next - first, tiles));
            let (token_row, tokens) = (first + tile * size, (rows - tile * size).min(size));
            let of_tile = Tile { group: expert, first_row: column_tile * instance.tile_rows(), first_token: 0, tokens };
            let matrix = [0, 1].map(|matrix| expert * instance.matrices + matrix);
            let scales_of = |matrix: u32| launch.weight_scales + u64::from(matrix) * weight_scale_bytes(n, k);
            let group = Group {
                a_map: maps,
                a_scales: launch.token_scales + u64::from(first_tile + tile) * token_scale_bytes(k),
                b_maps: [maps + size_of_val(&launch.token_map) as u64; 2],
                b_scales: matrix.map(scales_of),
                c: launch.c + u64::from(token_row) * u64::from(n) * ELEMENT_BYTES,
                c_map: 0,
                alpha: [0.0; 2],
                m: tokens,
                n,
                k,
                unused: [0; 3],
            };
            Some((of_tile, Placed { group, token_row, weight_rows: matrix.map(|matrix| matrix * n) }))
        }
    }
}
