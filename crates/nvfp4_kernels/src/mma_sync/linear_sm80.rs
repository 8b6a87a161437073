//! Linear layers on any GPU from sm_80 on, `kernels-gpu/src/mma_sync/linear_sm80/`. For any number of tokens, each warp
//! multiplies by itself, as in `linear_sm90` for few tokens.

use kernels_gpu::mma_sync::linear_sm80::abi::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::linear::{self, Cut, Instance, LinearKernel, cycles_of_warps_alone};

/// The kernel.
pub struct LinearSm80;

impl Kernel for LinearSm80 {
    fn name(&self) -> &'static str {
        "linear_sm80"
    }

    fn entries(&self) -> Vec<Entry> {
        linear::entries(self.instances())
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        linear::fake::launch(launch, self);
    }
}

impl LinearKernel for LinearSm80 {
    fn instances(&self) -> Vec<Instance> {
        INSTANCES.iter().map(Instance::OfWarps).collect()
    }

    /// Assumes an RTX 30 or RTX 40, which have the least shared memory.
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
            (4096, 1, "linear_sm80_bf16_t8"),
            (7168, 16, "linear_sm80_bf16_t16"),
            (4096, 32, "linear_sm80_bf16_t32"),
            (4096, 4096, "linear_sm80_bf16_t64"),
        ] {
            assert_eq!(entry(&LinearSm80, n, 7168, m, 108), expected, "{m} tokens, N = {n}");
        }
    }

    /// Overlapping grids and tensor maps need sm_90.
    #[test]
    fn launch_needs_no_feature_of_later_gpus() {
        let launch = launch(&LinearSm80, 4096, 1, 108);
        assert_eq!((launch.grid.blocks, launch.grid.overlaps), (4096 / 32, false));
        let parameter = launch.write(0, &mut [], &mut |_| unreachable!("the launch has no tensor maps"));
        assert!(parameter.is_ok());
    }

    /// `llc` does not check the instructions in inline assembly.
    #[test]
    fn ptx_has_no_instruction_of_later_gpus() {
        let ptx = crate::ptx("linear_sm80").unwrap();
        assert!(ptx.contains(".version 7.0"));
        let code: Vec<_> = ptx.lines().filter(|line| !line.trim_start().starts_with(['/', '.'])).collect();
        for later in ["mbarrier", "griddepcontrol", "cluster", "bulk", "e4m3", "mul.rn.bf16", "setmaxnreg"] {
            assert!(!code.iter().any(|line| line.contains(later)), "the PTX has {later}");
        }
    }
}
