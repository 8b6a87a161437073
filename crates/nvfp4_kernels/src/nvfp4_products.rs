//! Kernels that multiply NVFP4 tokens in an MoE layer, one per GPU family: their common trait, and their numbers of
//! tiles.

use kernels_gpu::epilogue::Activation;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::ROUTE_CHOICES;
use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::nvfp4_rows::row_bytes;
use kernels_gpu::routed::{Launch as Parameter, QuantizedC, TensorMap};

use super::group::Address;
use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch, Parameter as LaunchParameter};
use super::products::most_token_tiles as most_tiles;
use super::tensor_map::MapArguments;
use nvfp4_core::problem::Op;

/// Launch and tile properties of an instance of a kernel that multiplies NVFP4 tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvfp4Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of weight matrices: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Maximum tokens of a tile, and rows of the box of the token map.
    pub tile_tokens: u32,
    /// Columns of C per tile.
    pub columns: u32,
    /// Rows of the box of the weight map.
    pub weight_rows: u32,
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
    /// Whether weights are loaded before the wait for earlier launches
    /// ([`Instance::early`](kernels_gpu::tcgen05::gated_sm100::abi::Instance::early)).
    pub early: bool,
}

/// Up to this many rows, a launch before a product quantizes its operand with several warps per row, and a product
/// loads weights before that launch has ended, if it has such an instance. With more rows, there are enough rows for
/// all SMs, and quantizing takes longer than the stages' weights.
pub const FEW_ROWS: u64 = ROUTE_CHOICES as u64;

/// Tokens per tile, by average number of rows per named expert: the first row whose bound is not exceeded. Nearly every
/// expert's rows then fit one tile, so that its weights are read once. A tile larger than its tokens costs only shared
/// memory, because missing groups of eight tokens are not multiplied.
const TILE_TOKENS: [(u64, u32); 2] = [(8, 16), (40, 64)];

/// Tokens per tile for more rows per expert.
const LARGEST_TILE: u32 = 128;

/// Returns the tokens per tile for `rows` rows of `experts` named experts.
pub fn tile_tokens(rows: u64, experts: u64) -> u32 {
    TILE_TOKENS.iter().find(|(most, _)| rows <= most * experts).map_or(LARGEST_TILE, |&(_, tokens)| tokens)
}

/// Inputs and outputs of a product, as in [`Parameter`]. Tensor maps are built from the addresses of values.
#[derive(Clone, Copy)]
pub struct Product {
    /// Values of the tokens, and number of rows that they have room for.
    pub tokens: Address,
    pub rows: u64,
    pub token_scales: Address,
    pub globals: Address,
    /// 0: there are no lists, because all rows belong to the single expert.
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

/// Returns the maximum number of token tiles for up to `rows` rows of `experts` experts, if tokens name `named`
/// experts. Fewer rows may have smaller and therefore more tiles.
pub fn most_token_tiles(rows: u64, experts: u64, named: u64) -> u64 {
    let bounds = TILE_TOKENS.iter().map(|&(most, tokens)| (most * named, tokens)).chain([(u64::MAX, LARGEST_TILE)]);
    bounds.map(|(most, tokens)| most_tiles(rows.min(most), experts, tokens)).max().unwrap_or(0)
}

/// A kernel for a layer's products of NVFP4 tokens. All such kernels take the same parameter, lists and packed weights.
/// They differ in their instances.
pub trait Nvfp4Products: Kernel {
    /// Returns every instance: both operations, every tile size.
    fn instances(&self) -> Vec<Nvfp4Instance>;

    /// Returns the launch of a product of at most `rows` rows in tiles of `tile_tokens` tokens. The grid has one CTA
    /// per possible tile, at most one per SM. A CTA continues with further tiles by itself. `early`: the lists are
    /// complete before the launch before this one lets it start, so weights may be loaded early.
    ///
    /// # Panics
    /// If there is no instance with such tiles.
    fn product(&self, op: Op, tile_tokens: u32, early: bool, product: Product, rows: u64, sms: u32) -> Launch {
        let is_it = |of: &Nvfp4Instance| (op_of(of.matrices), of.tile_tokens) == (op, tile_tokens);
        // `true` is greater: an early instance is preferred where it is allowed.
        let allowed = |of: &Nvfp4Instance| is_it(of) && (early || !of.early);
        let instance = self.instances().into_iter().filter(allowed).max_by_key(|of| of.early);
        let instance = instance.expect("both operations have an instance of every tile size");
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
            let mut encode =
                |map: &MapArguments| Ok::<_, nvfp4_core::Error>(TensorMap(bytemuck::cast(writer.encode(map)?)));
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
    fn nearly_every_expert_fits_one_tile() {
        for (rows, experts, expected) in
            [(1, 8, 16), (64, 8, 16), (65, 8, 64), (320, 8, 64), (4096, 8, 128), (9, 1, 64)]
        {
            assert_eq!(tile_tokens(rows, experts), expected, "{rows} rows of {experts} experts");
        }
    }

    #[test]
    fn fewer_rows_never_exceed_the_most_tiles() {
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
