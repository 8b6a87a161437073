//! Products of an MoE layer on any GPU from sm_80 on, `kernels-gpu/src/mma_sync/moe_sm80/`.

use kernels_gpu::lists::MAX_EXPERTS;
use kernels_gpu::mma_sync::moe_sm80::abi::{INSTANCES, Instance};

use crate::kernel::{Entry, Kernel};
use crate::products::{Bits16, ProductInstance, Products, SMALLEST_TILE, fit_smallest_tile};

/// Maximum CTAs per SM: the number that fits an SM with much shared memory if tiles are smallest. CTAs that do not fit
/// start later and find no tile, because each tile is taken by a ticket.
const MULTIPROCESSOR_BLOCKS: u32 = 4;

/// The kernel.
pub struct MoeSm80;

impl Kernel for MoeSm80 {
    fn name(&self) -> &'static str {
        "moe_sm80"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        crate::wgmma::moe_sm90::fake::launch(launch, &self.instances());
    }
}

impl Products<Bits16> for MoeSm80 {
    /// For few tokens, memory bandwidth bounds the time of a tile, so the time is proportional to its bytes. Tokens
    /// come from the L2 cache, four times as fast.
    fn instances(&self) -> Vec<ProductInstance> {
        let instance = |of: &Instance| ProductInstance {
            entry: of.entry,
            matrices: of.matrices,
            operand_type: Some(of.operand_type),
            curves: of.curves,
            max_experts: MAX_EXPERTS,
            tile_tokens: of.tile_tokens,
            columns: of.columns(),
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
            multiprocessor_blocks: MULTIPROCESSOR_BLOCKS,
            tile_time: u64::from(of.weight_bytes() + of.token_bytes() / 4),
            ..ProductInstance::ALONE
        };
        INSTANCES.iter().map(instance).collect()
    }

    /// Returns 64 tokens, unless the rows of most experts fit the smallest tile.
    fn tile_tokens(&self, rows: u64, experts: u64, _: u32) -> u32 {
        if fit_smallest_tile(rows, experts) { SMALLEST_TILE } else { 64 }
    }

    fn overlaps(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::units::OperandType;

    use super::*;
    use crate::products::ProductKind;
    use nvfp4_core::problem::Op;

    #[test]
    fn few_tiles_are_narrow_and_many_are_wide() {
        let kind = ProductKind::of(Op::Gated, OperandType::Bf16);
        let entry = |token_tiles| MoeSm80.instance(kind, 16, token_tiles, 8, [768, 2048], 108).entry;
        assert_eq!([4, 128].map(entry), ["moe_sm80_gated_bf16_t16_narrow", "moe_sm80_gated_bf16_t16"]);
    }

    /// `llc` does not check the instructions in inline assembly.
    #[test]
    fn ptx_has_no_instruction_of_later_gpus() {
        for kernel in ["moe_sm80", "moe_route"] {
            let ptx = crate::ptx_for(kernel, "sm_80").unwrap();
            assert!(ptx.contains(".version 7.0"), "{kernel}");
            let code: Vec<_> = ptx.lines().filter(|line| !line.trim_start().starts_with(['/', '.'])).collect();
            for later in ["mbarrier", "griddepcontrol", "cluster", "bulk", "e4m3", "mul.rn.bf16", "setmaxnreg"] {
                assert!(!code.iter().any(|line| line.contains(later)), "{kernel} has {later}");
            }
        }
    }
}
