//! Products of an MoE layer with NVFP4 tokens on GeForce RTX 50, RTX PRO and DGX Spark,
//! `kernels-gpu/src/mma_sync/moe_nvfp4_sm120/`. Computes the same products as `moe_sm100`, by the method of
//! `gated_sm120`.

use kernels_gpu::mma_sync::gated_sm120::abi::{Instance, SLAB_ROWS};
use kernels_gpu::mma_sync::moe_nvfp4_sm120::abi::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::nvfp4_products::{self, Nvfp4};
use crate::products::{ProductInstance, Products};

/// The kernel.
pub struct MoeNvfp4Sm120;

impl Kernel for MoeNvfp4Sm120 {
    fn name(&self) -> &'static str {
        "moe_nvfp4_sm120"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        crate::tcgen05::moe_sm100::fake::launch(launch, &self.instances());
    }
}

impl Products<Nvfp4> for MoeNvfp4Sm120 {
    fn instances(&self) -> Vec<ProductInstance> {
        let instance = |of: &Instance| ProductInstance {
            entry: of.entry,
            matrices: of.matrices,
            curves: of.curves,
            tile_tokens: of.tile_tokens,
            columns: of.tile_columns(),
            weight_rows: SLAB_ROWS,
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
            ..ProductInstance::ALONE
        };
        INSTANCES.iter().map(instance).collect()
    }

    fn tile_tokens(&self, rows: u64, experts: u64, _: u32) -> u32 {
        nvfp4_products::tile_tokens(rows, experts)
    }
}
