//! The products of an MoE layer on Hopper, `kernels-gpu/src/moe_sm90/`: experts' rows are known on the device alone.

#[cfg(all(test, feature = "cuda"))]
mod fake;

use kernels_gpu::moe_sm90::abi::{self, INSTANCES, Instance};
use kernels_gpu::units::TokenType;

use super::kernel::{Entry, Kernel, op_of};
use super::launch::{Grid, Launch};
use crate::problem::Op;

/// The kernel.
pub(crate) struct MoeSm90;

impl Kernel for MoeSm90 {
    fn name(&self) -> &'static str {
        "moe_sm90"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeSm90 {
    /// The instance of an operation for tokens of a type, in tiles of so many tokens: of those, the one that is expected to take least
    /// time. `token_tiles` of tokens are expected, and C has `n` columns.
    ///
    /// All multiprocessors take a tile each, then the next ones. What a multiprocessor can decode in a time is limited, and so is how
    /// soon one k-block follows another. On an H200 a narrow tile, a quarter as wide, takes four sevenths of a wide one's
    /// time (docs/experiments.md).
    pub fn instance(
        &self,
        op: Op,
        token_type: TokenType,
        tile_tokens: u32,
        token_tiles: u64,
        n: u32,
        sms: u32,
    ) -> &'static Instance {
        let is_it =
            |of: &&Instance| (op_of(of.matrices), of.token_type, of.tile_tokens) == (op, token_type, tile_tokens);
        let sevenths = |of: &Instance| {
            let tiles = token_tiles * u64::from(n.div_ceil(of.columns()));
            tiles.div_ceil(sms.into()) * if of.narrow { 4 } else { 7 }
        };
        let instances = INSTANCES.iter().filter(is_it);
        instances
            .min_by_key(|of| sevenths(of))
            .expect("there is an instance for both operations and types, and each size of a tile")
    }

    /// The launch of a product of at most `rows` rows. It takes as many blocks as there can be tiles, up to one for each
    /// multiprocessor; a block goes on to further tiles by itself.
    pub fn product(&self, instance: &Instance, launch: abi::Launch, rows: u64, sms: u32) -> Launch {
        let token_tiles = most_token_tiles(rows, launch.experts.into(), instance.tile_tokens);
        let tiles = token_tiles * u64::from(launch.n.div_ceil(instance.columns()));
        let grid = Grid {
            shared_bytes: instance.shared_bytes(),
            overlaps: true,
            ..Grid::linear(instance.entry, tiles.min(u64::from(sms)) as u32, instance.threads())
        };
        Launch::of_parameter(self.name(), grid, launch)
    }
}

/// The most tiles of so many tokens that rows of so many experts can be cut into: if all experts have a row, and one of them all
/// the others.
pub(super) fn most_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let hit = rows.min(experts);
    hit + (rows - hit) / u64::from(tile_tokens)
}
