//! The kernels that multiply tokens in NVFP4 in an MoE layer, one for each family of cards: what they have in common, and how many tiles
//! they take.

use kernels_gpu::epilogue::Activation;
use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::nvfp4_rows::row_bytes;
use kernels_gpu::routed::{Launch as Parameter, QuantizedC, TensorMap};

use super::group::Address;
use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch, Parameter as LaunchParameter};
use super::products::most_token_tiles as most_tiles;
use super::tensor_map::MapArguments;
use crate::problem::Op;

/// What is launched of an instance of such a kernel, and what its tiles are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nvfp4Instance {
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The most tokens of a tile, and rows of the box of the map of tokens.
    pub tile_tokens: u32,
    /// Columns of C of a tile.
    pub columns: u32,
    /// Rows of the box of the map of weights.
    pub weight_rows: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Tokens of a tile, by how many rows the experts have that are named, on average: the first whose bound is not exceeded. Nearly every
/// expert's rows then fit one tile, so that its weights are read once; that a tile is larger than its tokens costs shared memory alone,
/// since no products are made of eight tokens that a tile lacks.
const TILE_TOKENS: [(u64, u32); 2] = [(8, 16), (40, 64)];

/// Tokens of a tile where experts have more rows than that.
const LARGEST_TILE: u32 = 128;

/// Tokens of the tiles that so many rows are cut into, of so many experts that are named.
pub(crate) fn tile_tokens(rows: u64, experts: u64) -> u32 {
    TILE_TOKENS.iter().find(|(most, _)| rows <= most * experts).map_or(LARGEST_TILE, |&(_, tokens)| tokens)
}

/// What a product reads and writes, as [`Parameter`] has it. Tensor maps are made of the addresses of values.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    /// Values of the tokens, and rows that there is room for.
    pub tokens: Address,
    pub rows: u64,
    pub token_scales: Address,
    pub globals: Address,
    /// 0 if there are no lists, since all rows are those of the only expert.
    pub firsts: Address,
    pub tile_firsts: Address,
    /// Values of the weights.
    pub weights: Address,
    pub weight_scales: Address,
    pub alpha: [Address; 2],
    pub bias: [Address; 2],
    pub c: Address,
    pub quantized: QuantizedC,
    pub n: u32,
    pub k: u32,
    pub experts: u32,
    pub output: u32,
    pub activation: Activation,
}

/// The most tiles of tokens that up to so many rows are cut into, of so many experts, if tokens name as many as `named`. Fewer rows
/// may have smaller tiles, and more of them.
pub(crate) fn most_token_tiles(rows: u64, experts: u64, named: u64) -> u64 {
    let bounds = TILE_TOKENS.iter().map(|&(most, tokens)| (most * named, tokens)).chain([(u64::MAX, LARGEST_TILE)]);
    bounds.map(|(most, tokens)| most_tiles(rows.min(most), experts, tokens)).max().unwrap_or(0)
}

/// A kernel of a layer's products of tokens in NVFP4. All of them take the same parameter, the same lists and the same packed weights; they
/// differ in their instances.
pub(crate) trait Nvfp4Products: Kernel {
    /// Every instance: of both operations, for each size of a tile.
    fn instances(&self) -> Vec<Nvfp4Instance>;

    /// The launch of a product of at most `rows` rows, in tiles of so many tokens. It takes as many blocks as there can be tiles, up to one
    /// for each multiprocessor; a block goes on to further tiles by itself.
    ///
    /// # Panics
    /// If there is no instance of such tiles.
    fn product(&self, op: Op, tile_tokens: u32, product: Product, rows: u64, sms: u32) -> Launch {
        let is_it = |of: &Nvfp4Instance| (op_of(of.matrices), of.tile_tokens) == (op, tile_tokens);
        let instance = self.instances().into_iter().find(is_it);
        let instance = instance.expect("an instance for both operations and each size of a tile");
        let Product { n, k, experts, .. } = product;
        let tiles = most_tiles(rows, experts.into(), tile_tokens) * u64::from(n.div_ceil(instance.columns));
        let grid = Grid {
            shared_bytes: instance.shared_bytes,
            overlaps: true,
            ..Grid::linear(instance.entry, tiles.min(u64::from(sms)) as u32, instance.threads)
        };
        let map = |address, rows: u64, box_rows| MapArguments {
            row_pitch: row_bytes(k).into(),
            ..MapArguments::values(address, rows as u32, k, K_BLOCK, box_rows)
        };
        let token_map = map(product.tokens, product.rows, instance.tile_tokens);
        let weight_rows = u64::from(experts) * u64::from(instance.matrices) * u64::from(n);
        let weight_map = map(product.weights, weight_rows, instance.weight_rows);
        Launch::new(self.name(), grid, 0, move |writer| {
            let mut encode = |map: &MapArguments| Ok::<_, crate::Error>(TensorMap(bytemuck::cast(writer.encode(map)?)));
            let Product { token_scales, globals, firsts, tile_firsts, weight_scales, .. } = product;
            let Product { alpha, bias, c, quantized, output, activation, .. } = product;
            Ok(LaunchParameter::new(Parameter {
                token_map: encode(&token_map)?,
                weight_map: encode(&weight_map)?,
                token_scales,
                globals,
                firsts,
                tile_firsts,
                weight_scales,
                alpha,
                bias,
                c,
                quantized,
                n,
                k,
                experts,
                output,
                activation,
                rows: if firsts == 0 { rows as u32 } else { 0 },
                unused: [0; 2],
            }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_take_nearly_every_expert_whole() {
        for (rows, experts, expected) in
            [(1, 8, 16), (64, 8, 16), (65, 8, 64), (320, 8, 64), (4096, 8, 128), (9, 1, 64)]
        {
            assert_eq!(tile_tokens(rows, experts), expected, "{rows} rows of {experts} experts");
        }
    }

    #[test]
    fn there_is_room_for_the_tiles_of_any_fewer_rows() {
        for (experts, named) in [(8, 8), (3, 8), (128, 128), (1, 1)] {
            for rows in [0, 1, 9, 64, 65, 100, 321, 1000, 40_000] {
                let most = most_token_tiles(rows, experts, named);
                for fewer in (0..=rows).step_by(1 + rows as usize / 100).chain([rows]) {
                    assert!(most_tiles(fewer, experts, tile_tokens(fewer, named)) <= most, "{fewer} of {rows}");
                }
            }
        }
    }
}
