//! Kernels that multiply in an MoE layer, one per GPU family: their common trait, and their numbers of tiles.

use std::ops::RangeInclusive;

use kernels_gpu::moe::Launch as Product;
use kernels_gpu::units::OperandType;

use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch};
use super::mma_sync::moe_few_sm90::MoeFewSm90;
use nvfp4_core::problem::Op;

/// Launch and tile properties of an instance of a kernel that multiplies 16-bit tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductInstance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of weight matrices: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Type of tokens and C.
    pub operand_type: OperandType,
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Columns of C per tile.
    pub columns: u32,
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
    /// Maximum K.
    pub most_k: u32,
    /// Whether tokens are sorted by expert ([`sorted`](kernels_gpu::sorted)).
    pub sorted: bool,
    /// Maximum CTAs of a grid per SM.
    pub multiprocessor_blocks: u32,
    /// Time of a tile, comparable between instances with the same number of tokens per tile.
    pub tile_time: u64,
    /// Fixed start-up cost per SM, in the unit of `tile_time`.
    pub first_time: u64,
    /// Whether the instance is used only if an SM has few tiles.
    pub for_few_tiles: bool,
}

/// Up to this many tiles per SM, few-tile instances may be used. On an H200, wide tiles are as fast or faster with more
/// tiles.
const FEW_TILES: u64 = 28;

/// A kernel for a layer's products. All such kernels take the same parameter, lists and packed weights. They differ in
/// their instances, and in which instance is fastest when.
pub trait Products: Kernel {
    /// Returns every instance.
    fn instances(&self) -> Vec<ProductInstance>;

    /// Returns the tokens per tile for `rows` rows of `experts` named experts.
    fn tile_tokens(&self, rows: u64, experts: u64) -> u32;

    /// Whether the instances with such tiles take tokens sorted by expert.
    fn sorts(&self, tile_tokens: u32) -> bool {
        self.instances().iter().any(|of| of.tile_tokens == tile_tokens && of.sorted)
    }

    /// Whether a grid may begin while the previous one runs.
    fn overlaps(&self) -> bool {
        true
    }

    /// Returns the kernel with another method for a layer's few tokens on the same GPUs, if there is one.
    fn few(&self) -> Option<&'static MoeFewSm90> {
        None
    }

    /// Returns the instance of an operation for a token type and a tile size with the least expected time.
    /// `token_tiles`: expected number of token tiles. `n`: columns of C. `k`: columns of the weights.
    ///
    /// All SMs process one tile each, then the next ones.
    fn instance(
        &self,
        op: Op,
        operand_type: OperandType,
        tile_tokens: u32,
        token_tiles: u64,
        [n, k]: [u32; 2],
        sms: u32,
    ) -> ProductInstance {
        let is_it = |of: &ProductInstance| {
            (op_of(of.matrices), of.operand_type, of.tile_tokens) == (op, operand_type, tile_tokens)
        };
        let rounds = |of: &ProductInstance| (token_tiles * u64::from(n.div_ceil(of.columns))).div_ceil(sms.into());
        let time = |of: &ProductInstance| of.first_time + rounds(of) * of.tile_time;
        let takes = |of: &ProductInstance| k <= of.most_k && (!of.for_few_tiles || rounds(of) <= FEW_TILES);
        let instances = self.instances().into_iter().filter(is_it).filter(takes);
        instances.min_by_key(time).expect("both operations and types have an instance of every tile size")
    }

    /// Returns the dynamic shared memory that each CTA requests if `_resident_blocks` CTAs run on each SM, in bytes.
    fn shared_bytes(&self, instance: &ProductInstance, _resident_blocks: u32) -> u32 {
        instance.shared_bytes
    }

    /// Returns the launch of a product of at most `rows` rows. The grid has one CTA per possible tile, up to a limit
    /// per SM. A CTA continues with further tiles by itself.
    fn product(&self, instance: &ProductInstance, launch: Product, rows: u64, sms: u32) -> Launch {
        let token_tiles = most_token_tiles(rows, launch.experts.into(), instance.tile_tokens);
        let tiles = token_tiles * u64::from(launch.n.div_ceil(instance.columns));
        let most = u64::from(instance.multiprocessor_blocks) * u64::from(sms);
        let blocks = tiles.min(most) as u32;
        let grid = Grid {
            shared_bytes: self.shared_bytes(instance, blocks.div_ceil(sms)),
            overlaps: self.overlaps(),
            ..Grid::linear(instance.entry, blocks, instance.threads)
        };
        Launch::of_parameter(self.name(), grid, launch)
    }
}

/// Tokens of the smallest tile, which every kernel has. These tokens are never sorted: they are few, and saving a
/// launch counts.
pub(super) const SMALLEST_TILE: u32 = 16;

/// Whether the rows of most experts fit the smallest tile, for `rows` rows of `experts` named experts. Then every
/// kernel uses that tile. The rows of several experts vary around the average. If they fill three quarters of a tile on
/// average, one expert in ten needs a second tile and decodes its weights twice. If they fill all of it, four in ten do
/// (benches/lab/experiments.md).
pub(super) fn fit_smallest_tile(rows: u64, experts: u64) -> bool {
    let most = if experts == 1 { SMALLEST_TILE } else { SMALLEST_TILE * 3 / 4 };
    rows <= u64::from(most) * experts
}

/// Numbers of named experts with so few tiles that all SMs wait for an expert with many more rows than the average.
pub(super) const FEW_EXPERTS: RangeInclusive<u64> = 8..=16;

/// Whether `rows` rows of `experts` named experts are multiplied in tiles of sorted tokens, on a kernel with such
/// tiles: if they do not fit the smallest tiles, or with few experts if they have at least eight rows on average
/// (benches/lab/experiments.md).
pub(super) fn may_be_sorted(rows: u64, experts: u64) -> bool {
    !fit_smallest_tile(rows, experts) || (FEW_EXPERTS.contains(&experts) && rows >= 8 * experts)
}

/// Returns the maximum number of tiles of `tile_tokens` tokens for rows of `experts` experts: all experts have a row,
/// and one expert has all others.
pub(super) fn most_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let hit = rows.min(experts);
    hit + (rows - hit) / u64::from(tile_tokens)
}
