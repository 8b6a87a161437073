//! The kernels that multiply in an MoE layer, one for each family of cards: what they have in common, and how many tiles they take.

use kernels_gpu::moe_sm90::abi::{Instance, Launch as Product};
use kernels_gpu::units::TokenType;

use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch};
use crate::problem::Op;

/// A kernel of a layer's products. All of them take the same parameter, the same lists and the same packed weights; they differ in
/// their instances, and in when which of these is the fastest.
pub(crate) trait Products: Kernel {
    /// Every instance.
    fn instances(&self) -> &'static [Instance];

    /// Tokens of the tiles that so many rows are cut into, of so many experts that are named.
    fn tile_tokens(&self, rows: u64, experts: u64) -> u32;

    /// How long a tile of an instance takes beside one of another instance for as many tokens.
    fn tile_time(&self, instance: &Instance) -> u64;

    /// The instance of an operation for tokens of a type, in tiles of so many tokens: of those, the one that is expected to take least
    /// time. `token_tiles` of tokens are expected, and C has `n` columns.
    ///
    /// All multiprocessors take a tile each, then the next ones.
    fn instance(
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
        let time = |of: &Instance| {
            let tiles = token_tiles * u64::from(n.div_ceil(of.columns()));
            tiles.div_ceil(sms.into()) * self.tile_time(of)
        };
        let instances = self.instances().iter().filter(is_it);
        instances
            .min_by_key(|of| time(of))
            .expect("there is an instance for both operations and types, and each size of a tile")
    }

    /// The launch of a product of at most `rows` rows. It takes as many blocks as there can be tiles, up to one for each
    /// multiprocessor; a block goes on to further tiles by itself.
    fn product(&self, instance: &Instance, launch: Product, rows: u64, sms: u32) -> Launch {
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

/// As many tiles as are expected if every row may be any expert's.
pub(super) fn expected_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let mean = rows as f64 / experts as f64;
    let hit = (experts as f64 * (1.0 - (-mean).exp())).round().max(1.0) as u64;
    hit * rows.div_ceil(hit).div_ceil(tile_tokens.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_expected_where_experts_are_named() {
        assert_eq!([1, 16, 64, 4096].map(|rows| expected_token_tiles(rows, 128, 16)), [1, 15, 50, 256]);
        assert_eq!(expected_token_tiles(0, 128, 16), 0);
    }
}
