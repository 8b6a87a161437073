//! Products of an MoE layer with NVFP4 tokens on B200 and B300, `kernels-gpu/src/tcgen05/moe_sm100/`. Only the device
//! knows the experts' numbers of rows.

#[cfg(feature = "fake")]
pub(crate) mod fake;

use kernels_gpu::tcgen05::gated_sm100::abi::{Instance, TILE_ROWS};
use kernels_gpu::tcgen05::moe_sm100::abi::INSTANCES;

use crate::kernel::{Entry, Kernel};
use crate::nvfp4_products::{Nvfp4Instance, Nvfp4Products};

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

impl Nvfp4Products for MoeSm100 {
    fn instances(&self) -> Vec<Nvfp4Instance> {
        let instance = |of: &Instance| Nvfp4Instance {
            entry: of.entry,
            matrices: of.matrices,
            tile_tokens: of.tile_tokens,
            columns: of.tile_rows(),
            weight_rows: TILE_ROWS,
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
            early: of.early,
        };
        INSTANCES.iter().map(instance).collect()
    }
}
