//! Linear layers on GeForce RTX 50, RTX PRO and DGX Spark, `kernels-gpu/src/mma_sync/linear_sm120.rs`. For any number
//! of tokens, each warp multiplies by itself, as in `linear_sm90` for few tokens.

use kernels_gpu::mma_sync::linear_sm120::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::linear::{self, Cut, Instance, LinearKernel, cycles_of_warps_alone};

/// The kernel.
pub struct LinearSm120;

impl Kernel for LinearSm120 {
    fn name(&self) -> &'static str {
        "linear_sm120"
    }

    fn entries(&self) -> Vec<Entry> {
        linear::entries(self.instances())
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        linear::fake::launch(launch, self);
    }
}

impl LinearKernel for LinearSm120 {
    fn instances(&self) -> Vec<Instance> {
        INSTANCES.iter().map(Instance::OfWarps).collect()
    }

    fn k_block_cycles(&self, cut: Cut, n: u32, sms: u32) -> u64 {
        cycles_of_warps_alone(cut, n, sms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::tests::{entry, launch};

    #[test]
    fn tiles_grow_with_the_number_of_tokens() {
        for (n, m, expected) in [
            (4096, 1, "linear_sm120_bf16_t8"),
            (7168, 16, "linear_sm120_bf16_t16"),
            (4096, 32, "linear_sm120_bf16_t16"),
            (4096, 64, "linear_sm120_bf16_t32"),
            (14336, 64, "linear_sm120_bf16_t64"),
            (4096, 4096, "linear_sm120_bf16_t64"),
        ] {
            assert_eq!(entry(&LinearSm120, n, 7168, m, 170), expected, "{m} tokens, N = {n}");
        }
    }

    #[test]
    fn one_token_has_one_cta_per_32_columns() {
        for n in [4096, 5120, 7168] {
            assert_eq!(launch(&LinearSm120, n, 1, 170).grid.blocks, n as u32 / 32);
        }
    }

    /// ptxas warns that multicast copies are slow on these GPUs.
    #[test]
    fn ptx_has_no_multicast_copies() {
        let ptx = crate::ptx("linear_sm120").unwrap();
        assert!(ptx.contains("cp.async.bulk") && !ptx.contains("multicast"));
    }
}
