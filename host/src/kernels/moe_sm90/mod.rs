//! The products of an MoE layer on Hopper, `kernels-gpu/src/moe_sm90/`: experts' rows are known on the device alone.

#[cfg(all(test, feature = "cuda"))]
pub(super) mod fake;
#[cfg(all(test, feature = "cuda"))]
pub(super) use fake::activated;

use std::ops::RangeInclusive;

use kernels_gpu::moe_sm90::abi::{INSTANCES, Instance};
use kernels_gpu::moe_sm90::by_warp::abi as of_strips;
use kernels_gpu::sm90::most_shared_bytes;

use super::kernel::{Entry, Kernel};
use super::moe_few_sm90::MoeFewSm90;
use super::products::{ProductInstance, Products, SMALLEST_TILE, fit_smallest_tile};

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
        let entry = |of: ProductInstance| {
            let most =
                (1..=of.multiprocessor_blocks).map(|resident_blocks| self.shared_bytes(&of, resident_blocks)).max();
            Entry::of_instance(of.entry, of.matrices, of.threads, most.unwrap_or(of.shared_bytes))
        };
        self.instances().into_iter().map(entry).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch, &self.instances());
    }
}

/// Up to so many rows of an expert that is named, on average, tiles have 64 tokens, and 128 where there are more. On an H200 the former
/// are a little faster with 32 rows, and the latter with 64, where half of the experts have more (docs/experiments.md).
const MOST_ROWS_OF_64: u64 = 40;

/// Where so many experts are named, tiles have 128 tokens and not 64 all the same: tiles are so few then that all wait for an expert
/// with many more rows than the average, and a second tile (docs/experiments.md).
const FEW_EXPERTS: RangeInclusive<u64> = 8..=16;

/// An instance of these or of [`moe_sm120`](super::moe_sm120), whose tiles take so long.
pub(super) fn product_instance(of: &Instance, tile_time: u64) -> ProductInstance {
    ProductInstance {
        entry: of.entry,
        matrices: of.matrices,
        token_type: of.token_type,
        tile_tokens: of.tile_tokens,
        columns: of.columns(),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
        sorted: of.sorted,
        multiprocessor_blocks: 1,
        tile_time,
        first_time: 0,
        for_few_tiles: false,
    }
}

/// An instance whose warps each have a strip of weights.
fn strips_instance(of: &of_strips::Instance) -> ProductInstance {
    ProductInstance {
        entry: of.entry,
        matrices: of.matrices,
        token_type: of.token_type,
        tile_tokens: of_strips::TILE_TOKENS,
        columns: of.columns(),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
        sorted: false,
        multiprocessor_blocks: of.resident_blocks,
        tile_time: 17,
        first_time: 20,
        for_few_tiles: true,
    }
}

impl Products for MoeSm90 {
    /// The times of tiles are those on an H200 (docs/experiments.md).
    fn instances(&self) -> Vec<ProductInstance> {
        let of_tiles = INSTANCES.iter().map(|of| product_instance(of, if of.narrow { 81 } else { 140 }));
        of_tiles.chain(of_strips::INSTANCES.iter().map(strips_instance)).collect()
    }

    fn few(&self) -> Option<&'static MoeFewSm90> {
        Some(&MoeFewSm90)
    }

    /// A grid begins while the one before it ends, on the multiprocessors that are done first. Where it has fewer blocks than fit there,
    /// each asks for so much that they spread over all of them.
    fn shared_bytes(&self, instance: &ProductInstance, resident_blocks: u32) -> u32 {
        if (1..instance.multiprocessor_blocks).contains(&resident_blocks) {
            most_shared_bytes(resident_blocks)
        } else {
            instance.shared_bytes
        }
    }

    fn tile_tokens(&self, rows: u64, experts: u64) -> u32 {
        if fit_smallest_tile(rows, experts) {
            SMALLEST_TILE
        } else if rows <= MOST_ROWS_OF_64 * experts && !FEW_EXPERTS.contains(&experts) {
            64
        } else {
            128
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::units::TokenType;

    use super::*;
    use crate::kernels::products::expected_token_tiles;
    use crate::problem::Op;

    #[test]
    fn the_instance_is_the_one_that_was_fastest_on_a_card() {
        // Mixtral, gpt-oss, DeepSeek-R1's rank and Qwen3: rows, experts, and C's columns.
        for (rows, experts, op, n, fastest) in [
            (2, 8, Op::Gated, 14336, "moe_gated_bf16_t16_strips"),
            (2, 8, Op::Plain, 4096, "moe_plain_bf16_t16_strips"),
            (16, 8, Op::Gated, 14336, "moe_gated_bf16_t16"),
            (64, 8, Op::Gated, 14336, "moe_gated_bf16_t16_strips"),
            (16, 8, Op::Plain, 4096, "moe_plain_bf16_t16_strips"),
            (4, 128, Op::Gated, 2880, "moe_gated_bf16_t16_strips"),
            (32, 128, Op::Plain, 2880, "moe_plain_bf16_t16_strips"),
            (128, 128, Op::Gated, 2880, "moe_gated_bf16_t16"),
            (1024, 128, Op::Plain, 2880, "moe_plain_bf16_t16"),
            (1, 32, Op::Gated, 2048, "moe_gated_bf16_t16_strips"),
            (8, 32, Op::Gated, 2048, "moe_gated_bf16_t16_strips"),
            (8, 32, Op::Plain, 7168, "moe_plain_bf16_t16_strips"),
            (64, 128, Op::Gated, 768, "moe_gated_bf16_t16_strips"),
            (256, 128, Op::Gated, 768, "moe_gated_bf16_t16_strips"),
            (1024, 128, Op::Gated, 768, "moe_gated_bf16_t16"),
            (512, 128, Op::Plain, 2048, "moe_plain_bf16_t16"),
            (4096, 128, Op::Gated, 768, "moe_gated_bf16_t64"),
            (256, 8, Op::Plain, 4096, "moe_plain_bf16_t128"),
            (1024, 8, Op::Gated, 14336, "moe_gated_bf16_t128"),
            (1024, 8, Op::Plain, 4096, "moe_plain_bf16_t128_narrow"),
            (4096, 8, Op::Plain, 4096, "moe_plain_bf16_t128"),
            (16384, 128, Op::Plain, 2048, "moe_plain_bf16_t128"),
        ] {
            let tile_tokens = MoeSm90.tile_tokens(rows, experts);
            let tiles = expected_token_tiles(rows, experts, tile_tokens);
            let instance = MoeSm90.instance(op, TokenType::Bf16, tile_tokens, tiles, n, 132);
            assert_eq!(instance.entry, fastest, "{rows} rows of {experts} experts, {n} columns");
        }
    }
}
