//! Products of an MoE layer with FP8 tokens (e4m3) on Hopper, `kernels-gpu/src/wgmma/moe_fp8_sm90/`.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::units::OperandType;
use kernels_gpu::wgmma::moe_fp8_sm90::abi::{self, INSTANCES, Instance};

use crate::kernel::{Entry, Kernel, op_of};
use crate::products::{Fp8, ProductInstance, Products};
use crate::refused::Refused;
use nvfp4_core::problem::Op;

/// The kernel.
pub struct MoeFp8Sm90;

impl Kernel for MoeFp8Sm90 {
    fn name(&self) -> &'static str {
        "moe_fp8_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

/// Up to this many rows per expert on average, tiles have 128 tokens; above, 256. On an H200, tiles of 128 are faster
/// with 128 rows, and tiles of 256 with 256 rows (benches/lab/experiments.md).
const MOST_ROWS_OF_128: f64 = 160.0;

/// Returns the tokens per tile for `rows` expected rows of `experts` experts.
///
/// Below 128 tokens, this is the smallest tile that fits the rows of nearly every expert, so that its weights are
/// decoded once. If tokens name experts at random, one expert in forty has more rows than the mean plus two standard
/// deviations. A single expert has exactly the expected rows.
fn tile_tokens(rows: u64, experts: u64) -> u32 {
    let mean = rows as f64 / experts as f64;
    let most = if experts == 1 { mean } else { mean + 2.0 * mean.sqrt() };
    let fits = |tokens| if tokens == 128 { mean <= MOST_ROWS_OF_128 } else { most <= f64::from(tokens) };
    let mut sizes = INSTANCES.iter().map(|instance| instance.tile_tokens);
    sizes.find(|&tokens| fits(tokens)).unwrap_or(abi::MAX_TILE_TOKENS)
}

/// Estimates the cycles of one k-block of a tile on an H200: a part for its weights and a part per token. Measured with
/// 4096×7168 and 1, 64 and 512 tokens.
fn k_block_cycles(instance: &Instance) -> u64 {
    let tokens = u64::from(instance.tile_tokens);
    if instance.consumers == 2 { 1050 + 33 * tokens / 10 } else { 1180 + 94 * tokens / 10 }
}

/// Returns the instance for a linear layer with `columns` columns of C: the instance whose tiles end first. Among
/// equals, the wider tiles win, because they read tokens less often. `None`: every instance is refused.
pub(crate) fn for_linear(tokens: u64, columns: u32, sms: u32, refused: &Refused) -> Option<ProductInstance> {
    let cycles = |of: &&Instance| {
        let tiles = tokens.div_ceil(of.tile_tokens.into()) * u64::from(columns.div_ceil(of.columns()));
        (tiles.div_ceil(sms.into()) * k_block_cycles(of), of.is_narrow())
    };
    let plain = INSTANCES.iter().filter(|of| op_of(of.matrices) == Op::Plain && !refused.contains(of.entry));
    plain.min_by_key(cycles).map(product_instance)
}

fn product_instance(of: &Instance) -> ProductInstance {
    ProductInstance {
        entry: of.entry,
        matrices: of.matrices,
        operand_type: Some(OperandType::E4m3),
        curves: of.curves,
        tile_tokens: of.tile_tokens,
        columns: of.columns(),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
        ..ProductInstance::ALONE
    }
}

impl Products<Fp8> for MoeFp8Sm90 {
    /// MoE layers use the wide tiles.
    fn instances(&self) -> Vec<ProductInstance> {
        INSTANCES.iter().filter(|of| !of.is_narrow()).map(product_instance).collect()
    }

    fn tile_tokens(&self, rows: u64, experts: u64, _: u32) -> u32 {
        tile_tokens(rows, experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_every_expert_fits_one_tile() {
        for (rows, experts, expected) in [
            (1, 8, 16),
            (9 * 128, 128, 16),
            (16 * 128, 128, 32),
            (32 * 128, 128, 64),
            (64 * 32, 32, 128),
            (128 * 8, 8, 128),
            (256 * 8, 8, 256),
        ] {
            assert_eq!(tile_tokens(rows, experts), expected, "{rows} rows of {experts} experts");
        }
        assert_eq!([16, 17, 128, 161, 1000].map(|rows| tile_tokens(rows, 1)), [16, 32, 128, 256, 256]);
    }

    #[test]
    fn linear_layers_take_tiles_that_keep_most_sms_busy() {
        for (tokens, columns, expected) in [
            (1, 4096, "moe_fp8_plain_t16_narrow"),
            (64, 4096, "moe_fp8_plain_t16_narrow"),
            (64, 7168, "moe_fp8_plain_t64_narrow"),
            (512, 4096, "moe_fp8_plain_t128_narrow"),
            (16, 132 * 256, "moe_fp8_plain_t16"),
            (30, 132 * 256, "moe_fp8_plain_t32"),
            (60, 132 * 256, "moe_fp8_plain_t64"),
            (128, 132 * 256, "moe_fp8_plain_t128"),
            (4096, 4096, "moe_fp8_plain_t256"),
        ] {
            let instance = for_linear(tokens, columns, 132, &Refused::default()).unwrap();
            assert_eq!(instance.entry, expected, "{tokens} tokens, {columns} columns");
        }
    }
}
