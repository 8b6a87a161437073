//! Products of an MoE layer on GeForce RTX 50, RTX PRO and DGX Spark, `kernels-gpu/src/wgmma/moe_sm120.rs`. Computes
//! the same products as `moe_sm90`; each warp multiplies by itself.

use kernels_gpu::wgmma::moe_sm90::abi::Instance;
use kernels_gpu::wgmma::moe_sm120::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::products::{Bits16, ProductInstance, Products, SMALLEST_TILE, fit_smallest_tile};
use crate::wgmma::moe_sm90::product_instance;

/// The kernel.
pub struct MoeSm120;

impl Kernel for MoeSm120 {
    fn name(&self) -> &'static str {
        "moe_sm120"
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

impl Products<Bits16> for MoeSm120 {
    /// Memory bandwidth bounds the time of a tile, so the time is proportional to its bytes. Narrow tiles read tokens
    /// twice as often.
    fn instances(&self) -> Vec<ProductInstance> {
        let time = |of: &Instance| u64::from(of.stage_bytes() + of.shape().buffer_bytes() / 4);
        INSTANCES.iter().map(|of| product_instance(of, time(of))).collect()
    }

    /// Returns 64 tokens, unless the rows of most experts fit the smallest tile. Shared memory has no room for larger
    /// tiles.
    fn tile_tokens(&self, rows: u64, experts: u64, _: u32) -> u32 {
        if fit_smallest_tile(rows, experts) { SMALLEST_TILE } else { 64 }
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
        let entry = |token_tiles| MoeSm120.instance(kind, 16, token_tiles, 8, [768, 2048], 170).entry;
        assert_eq!([4, 128].map(entry), ["moe_sm120_gated_bf16_t16_narrow", "moe_sm120_gated_bf16_t16"]);
    }

    /// ptxas warns that multicast copies are slow on these GPUs.
    #[test]
    fn ptx_has_no_multicast_copies() {
        let ptx = crate::ptx("moe_sm120").unwrap();
        assert!(ptx.contains("cp.async.bulk") && !ptx.contains("multicast"));
    }
}
