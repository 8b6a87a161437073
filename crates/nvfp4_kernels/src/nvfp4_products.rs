//! Products of NVFP4 tokens in an MoE layer: their operands, and their numbers of tiles.

use kernels_gpu::epilogue::Activation;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::ROUTE_CHOICES;
use kernels_gpu::nvfp4_rows::K_BLOCK;
use kernels_gpu::nvfp4_rows::row_bytes;
use kernels_gpu::routed::{Launch as Parameter, QuantizedC, TensorMap};

use super::group::Address;
use super::launch::{Grid, Launch, Parameter as LaunchParameter};
use super::products::{Operands, ProductInstance, most_token_tiles as most_tiles};
use super::tensor_map::MapArguments;

/// Up to this many rows, a launch before a product quantizes its operand with several warps per row, and a product
/// loads weights before that launch has ended, if it has an instance for that. With more rows, there are enough rows for
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

/// Whether a workspace for `rows` rows has room for tiles of `tokens` tokens.
pub fn has_room(rows: u64, experts: u64, named: u64, tokens: u32) -> bool {
    most_tiles(rows, experts, tokens) <= most_token_tiles(rows, experts, named)
}

/// Operands of NVFP4 tokens, as in [`Parameter`]. Tensor maps are built from the addresses of values.
#[derive(Clone, Copy)]
pub struct Nvfp4 {
    /// Address of the values of the tokens.
    pub tokens: Address,
    /// Number of rows that the values have room for.
    pub rows: u64,
    pub token_scales: Address,
    pub globals: Address,
    /// Address of the first row of each expert. 0: there are no lists, because all rows belong to the single expert.
    pub firsts: Address,
    pub tile_firsts: Address,
    /// Address of the values of the weights.
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
/// experts. Fewer rows may have smaller and therefore more tiles. Many rows have room for the second largest tiles, which
/// replace the largest ones if those have failed a self-test.
pub fn most_token_tiles(rows: u64, experts: u64, named: u64) -> u64 {
    let [.., (_, second_largest)] = TILE_TOKENS;
    let bounds = TILE_TOKENS.iter().map(|&(most, tokens)| (most * named, tokens)).chain([(u64::MAX, second_largest)]);
    bounds.map(|(most, tokens)| most_tiles(rows.min(most), experts, tokens)).max().unwrap_or(0)
}

impl Operands for Nvfp4 {
    fn columns(&self) -> u32 {
        self.n
    }

    fn k(&self) -> u32 {
        self.k
    }

    fn experts(&self) -> u32 {
        self.experts
    }

    fn launch(self, kernel: &'static str, grid: Grid, instance: &ProductInstance, rows: u64) -> Launch {
        let Self { n, k, experts, .. } = self;
        let map = |address, rows: u64, box_rows| MapArguments {
            row_pitch: row_bytes(k).into(),
            ..MapArguments::values(address, rows as u32, k, K_BLOCK, box_rows)
        };
        let token_map = map(self.tokens, self.rows, instance.tile_tokens);
        let weight_rows = u64::from(experts) * u64::from(instance.matrices) * u64::from(n);
        let weight_map = map(self.weights, weight_rows, instance.weight_rows);
        Launch::new(kernel, grid, 0, move |writer| {
            let mut encode =
                |map: &MapArguments| Ok::<_, nvfp4_core::Error>(TensorMap(bytemuck::cast(writer.encode(map)?)));
            let Self { token_scales, globals, firsts, tile_firsts, weight_scales, .. } = self;
            let Self { alpha, bias, c, quantized, output, activation, .. } = self;
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
                let next = if tile_tokens(rows, named) == 128 { 64 } else { 128 };
                assert!(has_room(rows, experts, named, next), "a size of tiles replaces the planned one");
            }
        }
    }
}
