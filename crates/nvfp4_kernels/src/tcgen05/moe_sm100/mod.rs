//! Products of an MoE layer with NVFP4 tokens on B200 and B300, `kernels-gpu/src/tcgen05/moe_sm100/`. Only the device
//! knows the experts' numbers of rows.

#[cfg(feature = "fake")]
pub(crate) mod fake;

use kernels_gpu::tcgen05::gated_sm100::abi::{Instance, TILE_ROWS};
use kernels_gpu::tcgen05::moe_sm100::abi::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::nvfp4_products::{self, Nvfp4};
use crate::products::{ProductInstance, Products};

/// The kernel.
pub struct MoeSm100;

impl Kernel for MoeSm100 {
    fn name(&self) -> &'static str {
        "moe_sm100"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |of: &Instance| Entry::of_instance(of.entry, of.matrices, of.threads(), of.shared_bytes());
        INSTANCES.iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch, &self.instances());
    }
}

impl Products<Nvfp4> for MoeSm100 {
    fn instances(&self) -> Vec<ProductInstance> {
        let instance = |of: &Instance| ProductInstance {
            entry: of.entry,
            matrices: of.matrices,
            curves: of.curves,
            tile_tokens: of.tile_tokens,
            columns: of.tile_rows(),
            weight_rows: TILE_ROWS,
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
            early: of.early,
            ..ProductInstance::ALONE
        };
        INSTANCES.iter().map(instance).collect()
    }

    fn tile_tokens(&self, rows: u64, experts: u64, _: u32) -> u32 {
        nvfp4_products::tile_tokens(rows, experts)
    }
}
