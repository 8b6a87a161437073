//! Products of an MoE layer on Hopper, `kernels-gpu/src/wgmma/moe_sm90/`. Only the device knows the experts' numbers of
//! rows.

#[cfg(feature = "fake")]
pub(crate) mod fake;
#[cfg(feature = "fake")]
pub(crate) use fake::activated;

use kernels_gpu::decoding::most_shared_bytes;
use kernels_gpu::lists::{MAX_EXPERTS, SMALL_EXPERTS};
use kernels_gpu::wgmma::moe_sm90::abi::{INSTANCES, Instance};
use kernels_gpu::wgmma::moe_sm90::by_warp::abi as of_strips;

use crate::kernel::{Entry, Kernel};
use crate::mma_sync::moe_few_sm90::MoeFewSm90;
use crate::products::{Bits16, FEW_EXPERTS, ProductInstance, Products, SMALLEST_TILE, may_be_sorted};

/// The kernel.
pub struct MoeSm90;

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

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch, &self.instances());
    }
}

/// Returns the most rows per named expert on average for which tiles of sorted tokens have 64 tokens; above, they have 128.
/// Four warpgroups multiply a tile of 64, and two a tile of 128, so tiles of 64 are faster while nearly every expert fits
/// one. The shorter the K of down, the more of the time is the epilogue, which four warpgroups share too. Measured on an
/// H100 (benches/lab/experiments.md).
const fn most_rows_of_64(k: u32) -> u64 {
    match k {
        0..=128 => u64::MAX,
        129..=512 => 64,
        _ => 56,
    }
}

/// [`most_rows_of_64`] if tokens name [`FEW_EXPERTS`]. The larger tiles spare an expert with many rows a second tile.
const MOST_ROWS_OF_64_OF_FEW: u64 = 24;

/// Up to this many rows per named expert on average, tiles have 8 tokens, and five CTAs of strips share an SM. Does not
/// apply if tokens name [`FEW_EXPERTS`] (benches/lab/experiments.md).
const MOST_ROWS_OF_8: u64 = 3;

/// Returns the most rows per named expert on average for which tiles have 16 tokens although some experts have more. A
/// second tile costs less if the K of down is short. Applies only to layers with more experts than [`FEW_EXPERTS`]. Measured
/// on an H200 (benches/lab/experiments.md).
const fn most_rows_of_16(k: u32) -> u64 {
    match k {
        0..=128 => 20,
        129..=192 => 16,
        _ => 0,
    }
}

/// Describes an instance of this kernel or of [`moe_sm120`](crate::wgmma::moe_sm120) with the time of its
/// tiles.
pub(crate) fn product_instance(of: &Instance, tile_time: u64) -> ProductInstance {
    ProductInstance {
        entry: of.entry,
        matrices: of.matrices,
        operand_type: Some(of.operand_type),
        curves: of.curves,
        max_experts: MAX_EXPERTS,
        tile_tokens: of.tile_tokens,
        columns: of.columns(),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
        sorted: of.sorted,
        tile_time,
        ..ProductInstance::ALONE
    }
}

/// Describes an instance whose warps have one strip of weights each. The times of runs were measured on an H200 with K
/// of 256 and 512: a run takes as long as three tiles alone, and a grid of runs needs about two per CTA.
fn strips_instance(of: &of_strips::Instance) -> ProductInstance {
    let (most_k, tile_time, first_time) = if of.run > 1 { (of_strips::RUN_K, 50, 200) } else { (u32::MAX, 17, 20) };
    ProductInstance {
        entry: of.entry,
        matrices: of.matrices,
        operand_type: Some(of.operand_type),
        curves: of.curves,
        max_experts: SMALL_EXPERTS,
        tile_tokens: of.tile_tokens,
        columns: of.run_columns(),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
        most_k,
        multiprocessor_blocks: of.resident_blocks,
        tile_time,
        first_time,
        // Tiles of eight tokens exist only as strips, so they are not restricted to few tiles.
        for_few_tiles: of.tile_tokens == SMALLEST_TILE,
        ..ProductInstance::ALONE
    }
}

impl Products<Bits16> for MoeSm90 {
    /// The times of tiles were measured on an H200 (benches/lab/experiments.md).
    fn instances(&self) -> Vec<ProductInstance> {
        let tile_time = |of: &Instance| match (of.tile_tokens, of.narrow) {
            (SMALLEST_TILE, _) => 150,
            (_, true) => 81,
            _ => 140,
        };
        let of_tiles = INSTANCES.iter().map(|of| product_instance(of, tile_time(of)));
        of_tiles.chain(of_strips::INSTANCES.iter().map(strips_instance)).collect()
    }

    fn few(&self) -> Option<&'static MoeFewSm90> {
        Some(&MoeFewSm90)
    }

    /// A grid begins on the SMs that the previous grid leaves first. If fewer CTAs run on an SM than would fit there,
    /// each CTA requests more shared memory, so that the CTAs spread over all SMs.
    fn shared_bytes(&self, instance: &ProductInstance, resident_blocks: u32) -> u32 {
        if (1..instance.multiprocessor_blocks).contains(&resident_blocks) {
            most_shared_bytes(resident_blocks)
        } else {
            instance.shared_bytes
        }
    }

    fn tile_tokens(&self, rows: u64, experts: u64, k: u32) -> u32 {
        let are_few = FEW_EXPERTS.contains(&experts);
        let most_of_64 = if are_few { MOST_ROWS_OF_64_OF_FEW } else { most_rows_of_64(k) };
        let are_many = experts > *FEW_EXPERTS.end();
        if are_many && rows > MOST_ROWS_OF_8 * experts && rows <= most_rows_of_16(k) * experts {
            SMALLEST_TILE
        } else if may_be_sorted(rows, experts) {
            if rows <= most_of_64.saturating_mul(experts) { 64 } else { 128 }
        } else if rows <= MOST_ROWS_OF_8 * experts && !are_few {
            8
        } else {
            SMALLEST_TILE
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::units::OperandType;

    use super::*;
    use crate::expected::expected_token_tiles;
    use crate::products::ProductKind;
    use nvfp4_core::problem::Op;

    #[test]
    fn chosen_instances_were_fastest_on_an_h200() {
        // With a short K, 16 and 64 tokens of a rank of DeepSeek-V3 under TP 8, and 16 tokens of half of Qwen3.
        for (rows, experts, n, fastest) in [
            (128, 256, 7168, "moe_plain_bf16_t8_strips_run4"),
            (512, 256, 7168, "moe_plain_bf16_t8_strips_run4"),
            (128, 128, 2048, "moe_plain_bf16_t8_strips"),
        ] {
            let tiles = expected_token_tiles(rows, experts, 8);
            let kind = ProductKind::of(Op::Plain, OperandType::Bf16);
            let instance = MoeSm90.instance(kind, 8, tiles, experts as u32, [n, 256], 132);
            assert_eq!(instance.entry, fastest, "{rows} rows of {experts} experts, {n} columns");
        }
        // Rows, experts, and columns of C for Mixtral, gpt-oss, one rank of DeepSeek-R1, and Qwen3.
        for (rows, experts, op, n, fastest) in [
            (2, 8, Op::Gated, 14336, "moe_gated_bf16_t16_strips"),
            (2, 8, Op::Plain, 4096, "moe_plain_bf16_t16_strips"),
            (16, 8, Op::Gated, 14336, "moe_gated_bf16_t16_strips"),
            (64, 8, Op::Gated, 14336, "moe_gated_bf16_t64"),
            (16, 8, Op::Plain, 4096, "moe_plain_bf16_t16_strips"),
            (4, 128, Op::Gated, 2880, "moe_gated_bf16_t8_strips"),
            (32, 128, Op::Plain, 2880, "moe_plain_bf16_t8_strips"),
            (128, 128, Op::Gated, 2880, "moe_gated_bf16_t8_strips"),
            (1024, 128, Op::Plain, 2880, "moe_plain_bf16_t16"),
            (1, 32, Op::Gated, 2048, "moe_gated_bf16_t8_strips"),
            (8, 32, Op::Gated, 2048, "moe_gated_bf16_t8_strips"),
            (8, 32, Op::Plain, 7168, "moe_plain_bf16_t8_strips"),
            (128, 32, Op::Gated, 2048, "moe_gated_bf16_t16_strips"),
            (64, 128, Op::Gated, 768, "moe_gated_bf16_t8_strips"),
            (256, 128, Op::Gated, 768, "moe_gated_bf16_t8_strips"),
            (1024, 128, Op::Gated, 768, "moe_gated_bf16_t16_strips"),
            (512, 128, Op::Plain, 2048, "moe_plain_bf16_t16"),
            (4096, 128, Op::Gated, 768, "moe_gated_bf16_t64"),
            (256, 8, Op::Plain, 4096, "moe_plain_bf16_t128"),
            (1024, 8, Op::Gated, 14336, "moe_gated_bf16_t128"),
            (1024, 8, Op::Plain, 4096, "moe_plain_bf16_t128_narrow"),
            (4096, 8, Op::Plain, 4096, "moe_plain_bf16_t128"),
            (16384, 128, Op::Plain, 2048, "moe_plain_bf16_t128"),
        ] {
            let tile_tokens = MoeSm90.tile_tokens(rows, experts, 1024);
            let tiles = expected_token_tiles(rows, experts, tile_tokens);
            let instance = MoeSm90.instance(
                ProductKind::of(op, OperandType::Bf16),
                tile_tokens,
                tiles,
                experts as u32,
                [n, 1024],
                132,
            );
            assert_eq!(instance.entry, fastest, "{rows} rows of {experts} experts, {n} columns");
        }
    }

    #[test]
    fn short_k_keeps_small_tiles_for_more_rows() {
        for (k, tiles) in [
            (96, [16, 16, 64, 64, 64, 64, 64]),
            (192, [16, 64, 64, 64, 64, 64, 128]),
            (512, [64, 64, 64, 64, 64, 64, 128]),
            (768, [64, 64, 64, 64, 64, 128, 128]),
        ] {
            let rows = [16, 20, 21, 40, 56, 64, 65];
            assert_eq!(rows.map(|rows| MoeSm90.tile_tokens(rows * 128, 128, k)), tiles, "K of {k}");
        }
        // With few experts, and with one, the rule is the same for every K.
        assert_eq!([96, 768].map(|k| MoeSm90.tile_tokens(20 * 8, 8, k)), [64; 2]);
        assert_eq!([96, 768].map(|k| MoeSm90.tile_tokens(17, 1, k)), [64; 2]);
    }

    #[test]
    fn more_than_512_experts_have_no_strips() {
        let kind = ProductKind::of(Op::Gated, OperandType::Bf16);
        let entry = |experts| MoeSm90.instance(kind, 16, 64, experts, [768, 2048], 132).entry;
        assert_eq!([512, 513].map(entry), ["moe_gated_bf16_t16_strips", "moe_gated_bf16_t16"]);
    }
}
