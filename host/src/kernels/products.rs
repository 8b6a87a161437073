//! The kernels that multiply in an MoE layer, one for each family of cards: what they have in common, and how many tiles they take.

use std::ops::RangeInclusive;

use kernels_gpu::moe::Launch as Product;
use kernels_gpu::units::OperandType;

use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch};
use super::mma_sync::moe_few_sm90::MoeFewSm90;
use crate::problem::Op;

/// What is launched of an instance of such a kernel, and what its tiles are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProductInstance {
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The type of tokens and C.
    pub operand_type: OperandType,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Columns of C of a tile.
    pub columns: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether tokens are sorted by expert ([`sorted`](kernels_gpu::sorted)).
    pub sorted: bool,
    /// The most blocks of a grid for each multiprocessor.
    pub multiprocessor_blocks: u32,
    /// How long a tile takes beside one of another instance for as many tokens.
    pub tile_time: u64,
    /// What comes to that once, for all tiles of a multiprocessor.
    pub first_time: u64,
    /// Whether it is for few tiles alone.
    pub for_few_tiles: bool,
}

/// The most tiles of a multiprocessor that are few. On an H200 wide tiles are as fast or faster where there are more.
const FEW_TILES: u64 = 28;

/// A kernel of a layer's products. All of them take the same parameter, the same lists and the same packed weights; they differ in
/// their instances, and in when which of these is the fastest.
pub(crate) trait Products: Kernel {
    /// Every instance.
    fn instances(&self) -> Vec<ProductInstance>;

    /// Tokens of the tiles that so many rows are cut into, of so many experts that are named.
    fn tile_tokens(&self, rows: u64, experts: u64) -> u32;

    /// Whether the instances of such tiles take tokens sorted by expert.
    fn sorts(&self, tile_tokens: u32) -> bool {
        self.instances().iter().any(|of| of.tile_tokens == tile_tokens && of.sorted)
    }

    /// Whether a grid may begin while the one before it still runs.
    fn overlaps(&self) -> bool {
        true
    }

    /// The kernel that has another way for a layer's few tokens on the same cards, if there is one.
    fn few(&self) -> Option<&'static MoeFewSm90> {
        None
    }

    /// The instance of an operation for tokens of a type, in tiles of so many tokens: of those, the one that is expected to take least
    /// time. `token_tiles` of tokens are expected, and C has `n` columns.
    ///
    /// All multiprocessors take a tile each, then the next ones.
    fn instance(
        &self,
        op: Op,
        operand_type: OperandType,
        tile_tokens: u32,
        token_tiles: u64,
        n: u32,
        sms: u32,
    ) -> ProductInstance {
        let is_it = |of: &ProductInstance| {
            (op_of(of.matrices), of.operand_type, of.tile_tokens) == (op, operand_type, tile_tokens)
        };
        let rounds = |of: &ProductInstance| (token_tiles * u64::from(n.div_ceil(of.columns))).div_ceil(sms.into());
        let time = |of: &ProductInstance| of.first_time + rounds(of) * of.tile_time;
        let takes = |of: &ProductInstance| !of.for_few_tiles || rounds(of) <= FEW_TILES;
        let instances = self.instances().into_iter().filter(is_it).filter(takes);
        instances.min_by_key(time).expect("there is an instance for both operations and types, and each size of a tile")
    }

    /// Dynamic shared memory that each block of a launch asks for, if so many of them come to each multiprocessor.
    fn shared_bytes(&self, instance: &ProductInstance, _resident_blocks: u32) -> u32 {
        instance.shared_bytes
    }

    /// The launch of a product of at most `rows` rows. It takes as many blocks as there can be tiles, up to some for each
    /// multiprocessor; a block goes on to further tiles by itself.
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

/// Tokens of the smallest tiles that every kernel has. Their tokens are never sorted: they are few, and a launch less counts.
pub(super) const SMALLEST_TILE: u32 = 16;

/// Whether most experts' rows fit the smallest tile, if there are so many of so many experts that are named. Then every kernel takes
/// those. Rows of several experts are spread over them: where they fill three quarters of a tile on average, one expert in ten takes
/// a second one, and decodes its weights twice; where they fill all of it, four in ten do (docs/experiments.md).
pub(super) fn fit_smallest_tile(rows: u64, experts: u64) -> bool {
    let most = if experts == 1 { SMALLEST_TILE } else { SMALLEST_TILE * 3 / 4 };
    rows <= u64::from(most) * experts
}

/// Where so many experts are named, tiles are so few that all wait for an expert with many more rows than the average.
pub(super) const FEW_EXPERTS: RangeInclusive<u64> = 8..=16;

/// Whether so many rows of so many experts that are named come to tiles whose tokens are sorted, on a kernel that has such tiles: where
/// they don't fit the smallest tiles, and of few experts from eight rows on, on average (docs/experiments.md).
pub(super) fn may_be_sorted(rows: u64, experts: u64) -> bool {
    !fit_smallest_tile(rows, experts) || (FEW_EXPERTS.contains(&experts) && rows >= 8 * experts)
}

/// The most tiles of so many tokens that rows of so many experts can be cut into: if all experts have a row, and one of them all
/// the others.
pub(super) fn most_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let hit = rows.min(experts);
    hit + (rows - hit) / u64::from(tile_tokens)
}

/// As many rows as are expected of so many choices, if each may name any of `named` experts, of which `experts` are the layer's.
pub(super) fn expected_rows(choices: u64, experts: u64, named: u64) -> u64 {
    (choices * experts).div_ceil(named).min(choices)
}

/// As many tiles as are expected if every row may be any expert's: one of each expert that is hit, and where these have more rows than
/// half a tile, half a tile more than the rows would fill.
pub(super) fn expected_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let tile_tokens = u64::from(tile_tokens);
    if experts == 1 {
        return rows.div_ceil(tile_tokens);
    }
    let mean = rows as f64 / experts as f64;
    let hit = (experts as f64 * (1.0 - (-mean).exp())).round().max(1.0) as u64;
    (rows / tile_tokens + hit / 2).max(hit).min(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_expected_where_experts_are_named() {
        assert_eq!([1, 16, 64, 4096].map(|rows| expected_token_tiles(rows, 128, 16)), [1, 15, 50, 320]);
        assert_eq!([16, 17].map(|rows| expected_token_tiles(rows, 1, 16)), [1, 2]);
        assert_eq!(expected_token_tiles(0, 128, 16), 0);
    }
}
