//! Linear layers on Hopper, `kernels-gpu/src/wgmma/linear_sm90/`. Warpgroups multiply, or for few tokens each warp by
//! itself (`by_warp/` there).

use kernels_gpu::decoding::SHARED_BYTES;
use kernels_gpu::linear::k_blocks;
use kernels_gpu::mma_sync::linear as of_warps;
use kernels_gpu::wgmma::linear_sm90::{abi as of_warpgroups, by_warp};

use crate::kernel::{Entry, Kernel};
use crate::linear::{self, Cut, Instance, LinearKernel};

/// The kernel.
pub struct LinearSm90;

impl Kernel for LinearSm90 {
    fn name(&self) -> &'static str {
        "linear_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        linear::entries(self.instances())
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        linear::fake::launch(launch, self);
    }
}

impl LinearKernel for LinearSm90 {
    fn instances(&self) -> Vec<Instance> {
        let of_warps = by_warp::INSTANCES.iter().map(Instance::OfWarps);
        of_warps.chain(of_warpgroups::INSTANCES.iter().map(Instance::OfWarpgroups)).collect()
    }

    fn k_block_cycles(&self, cut: Cut, n: u32, sms: u32) -> u64 {
        let (ctas, sms) = (cut.ctas(n), u64::from(sms));
        match cut.instance {
            Instance::OfWarps(of) => warp_cycles(of, ctas, sms),
            Instance::OfWarpgroups(of) => ctas.div_ceil(sms) * warpgroup_cycles(of, cut.box_tokens().into()),
        }
    }

    fn parts(&self, n: u32, k: u32) -> u32 {
        if n <= SPLIT_MOST_COLUMNS && k_blocks(k) >= SPLIT_LEAST_K_BLOCKS { 2 } else { 1 }
    }
}

/// Maximum N of layers whose K is split. With few tokens there is one tile per 64 columns, so these layers keep at most
/// 66 of an H100's 132 SMs busy; with two CTAs per tile, all of them.
const SPLIT_MOST_COLUMNS: u32 = 66 * 64;

/// Minimum number of k-blocks of layers whose K is split. With many tokens the SMs are busy anyway, and the first part's
/// sums go to memory and back. On an H200, a layer 4096×14336 takes 0.66 to 0.82 of the time with up to 128 tokens, and
/// 1.03 to 1.05 of it from 256 on (benches/lab/measurements/h200-two-parts.txt).
const SPLIT_LEAST_K_BLOCKS: u32 = 96;

/// Estimates the cycles that an SM takes for one k-block of all its CTAs, with constants measured on an H200: the time
/// of a CTA alone, and 80 percent of it per further resident CTA. If not all CTAs are resident at once, the time is a
/// quarter longer, because the start of a CTA takes time too.
fn warp_cycles(instance: &of_warps::Instance, ctas: u64, sms: u64) -> u64 {
    let room = u64::from(SHARED_BYTES / instance.shared_bytes());
    let together = |resident: u64| (250 + 40 * instance.products() as u64) * (20 + 80 * resident) / 100;
    let (full_rounds, rest) = (ctas / (sms * room), ctas % (sms * room));
    let last_round = if rest == 0 { 0 } else { together(rest.div_ceil(sms)) };
    let cycles = full_rounds * together(room) + last_round;
    if ctas > sms * room { cycles * 5 / 4 } else { cycles }
}

/// Estimates the cycles that a CTA takes for one k-block of a tile with `tokens` tokens, measured on an H200: a fixed
/// part and a part per token. With two warpgroups of 64 columns each, decoding bounds the time up to about 170 tokens,
/// and products bound it above.
fn warpgroup_cycles(instance: &of_warpgroups::Instance, tokens: u64) -> u64 {
    match instance.columns() {
        64 if instance.tile_tokens < 128 => 466 + 16 * tokens / 10,
        64 => 530 + 19 * tokens / 10,
        128 => (700 + 51 * tokens / 10).max(150 + 83 * tokens / 10),
        _ => 1190 + 9 * tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::tests::{entry, launch, sizes};
    use crate::linear::{LinearArguments, PlacedLinear};
    use crate::refused::Refused;

    #[test]
    fn tiles_grow_with_the_number_of_tokens() {
        for (n, m, expected) in [
            (4096, 1, "linear_mma8_bf16"),
            (28672, 1, "linear_mma8_bf16"),
            (7168, 16, "linear_mma16_bf16"),
            (28672, 16, "linear_mma16_bf16"),
            (7168, 32, "linear_mma32_bf16"),
            (10240, 24, "linear_mma32_bf16_s8"),
            (17408, 32, "linear_mma32_bf16_s8"),
            (28672, 32, "linear_bf16_t128_c256"),
            (4096, 64, "linear_mma32_bf16"),
            (5120, 64, "linear_bf16_t64_decoded"),
            (4096, 128, "linear_bf16_t64_decoded"),
            (4096, 256, "linear_bf16_t128_decoded"),
            (5120, 256, "linear_bf16_t128_c128"),
            (4096, 512, "linear_bf16_t128_c128"),
            (5120, 512, "linear_bf16_t256_c128"),
            (4096, 4096, "linear_bf16_t256_c128"),
        ] {
            assert_eq!(entry(&LinearSm90, n, 7168, m, 132), expected, "{m} tokens, N = {n}");
        }
    }

    /// Three tiles of 88 tokens keep 120 of 132 SMs busy, two tiles of 128 tokens only 80.
    #[test]
    fn tokens_are_cut_so_that_more_sms_work() {
        let tiles = |n, m| LinearSm90.cut(&sizes(n, 5120), m, 132, &Refused::default()).unwrap().token_tiles;
        assert_eq!([tiles(5120, 256), tiles(5120, 512), tiles(4096, 512), tiles(4096, 4096)], [3, 3, 4, 16]);
    }

    /// A token's bits depend on the number of parts, so every number of tokens and every GPU has the same one.
    #[test]
    fn number_of_parts_depends_on_n_and_k_alone() {
        for (n, k, parts) in
            [(4096, 14336, 2), (4224, 12288, 2), (16, 12288, 2), (4240, 14336, 1), (4096, 12160, 1), (28672, 4096, 1)]
        {
            for m in [1, 8, 9, 16, 32, 33, 64, 128, 129, 256, 512, 4096, 65536] {
                for sms in [1, 78, 114, 132] {
                    let cut = LinearSm90.cut(&sizes(n, k), m, sms, &Refused::default()).unwrap();
                    assert_eq!(cut.instance.parts(), parts, "{m} tokens of {n}×{k}");
                }
            }
        }
    }

    #[test]
    fn split_layers_with_few_tokens_use_clusters() {
        let grid = |m| {
            let sizes = sizes(4096, 14336);
            let layer = PlacedLinear { sizes, packed: 0x100, alpha: 0, bias: 0, input_scale: 0 };
            let arguments = LinearArguments { token_count: m, tokens: 0x1000, token_pitch: 28672, output: 0x2000 };
            LinearSm90.launch(&layer, &arguments, 132, &Refused::default()).unwrap().grid
        };
        for m in [1, 8, 32, 64, 128] {
            assert_eq!((grid(m).blocks, grid(m).cluster), (128, 2), "{m} tokens");
        }
        assert_eq!((grid(4096).blocks, grid(4096).cluster), (132, 1));
    }

    #[test]
    fn few_tokens_have_one_cta_per_64_columns() {
        for n in [1024, 2048, 4096] {
            assert_eq!(launch(&LinearSm90, n, 8, 132).grid.blocks, n as u32 / 64);
        }
    }
}
