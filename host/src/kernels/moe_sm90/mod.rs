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

    fn proven(&self) -> bool {
        true
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
    /// soon one k-block follows another. The times of a tile beside each other are those of an H200 (docs/experiments.md).
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
        let time = |of: &Instance| {
            let tiles = token_tiles * u64::from(n.div_ceil(of.columns()));
            let of_tile = match (of.narrow, of.by_warps) {
                (false, _) => 28,
                (true, false) => 15,
                (true, true) => 18,
            };
            tiles.div_ceil(sms.into()) * of_tile
        };
        let instances = INSTANCES.iter().filter(is_it);
        instances
            .min_by_key(|of| time(of))
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
fn most_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
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
    fn the_instance_is_the_one_that_was_fastest_on_a_card() {
        // Mixtral, gpt-oss, DeepSeek-R1's rank and Qwen3 with 1 or 8 tokens: rows, experts, and C's columns.
        for (rows, experts, op, n, fastest) in [
            (2, 8, Op::Gated, 14336, "moe_gated_bf16_t16"),
            (2, 8, Op::Plain, 4096, "moe_plain_bf16_t16_narrow"),
            (16, 8, Op::Gated, 14336, "moe_gated_bf16_t16"),
            (16, 8, Op::Plain, 4096, "moe_plain_bf16_t16_warps"),
            (4, 128, Op::Gated, 2880, "moe_gated_bf16_t16_warps"),
            (32, 128, Op::Plain, 2880, "moe_plain_bf16_t16_warps"),
            (1, 32, Op::Gated, 2048, "moe_gated_bf16_t16_narrow"),
            (8, 32, Op::Gated, 2048, "moe_gated_bf16_t16_warps"),
            (8, 32, Op::Plain, 7168, "moe_plain_bf16_t16"),
            (64, 128, Op::Gated, 768, "moe_gated_bf16_t16_warps"),
        ] {
            let tiles = expected_token_tiles(rows, experts, 16);
            let instance = MoeSm90.instance(op, TokenType::Bf16, 16, tiles, n, 132);
            assert_eq!(instance.entry, fastest, "{rows} rows of {experts} experts, {n} columns");
        }
    }

    #[test]
    fn tiles_are_expected_where_experts_are_named() {
        assert_eq!([1, 16, 64, 4096].map(|rows| expected_token_tiles(rows, 128, 16)), [1, 15, 50, 256]);
        assert_eq!(expected_token_tiles(0, 128, 16), 0);
    }
}
