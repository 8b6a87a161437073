//! Packing of an MoE layer's weights, `kernels-gpu/src/layer/moe_pack/`: from a checkpoint's layout into units, or into
//! rows if tokens are multiplied in NVFP4. The kernel packs on the device; the modules below pack on the host.

#[cfg(feature = "fake")]
mod fake;
pub mod row_order;
// Packing on the host, for the emulated backend and as the tests' reference for the kernel.
pub mod nvfp4;
pub mod units;

use kernels_gpu::layer::moe_pack::abi::{ENTRY, NVFP4_ENTRY, Pack, PackNvfp4};

use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch};
use nvfp4_core::Error;

/// The kernel.
pub struct MoePack;

impl Kernel for MoePack {
    fn name(&self) -> &'static str {
        "moe_pack"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |(name, threads)| Entry { name, op: None, threads, shared_bytes: 0 };
        [(ENTRY, Pack::THREADS), (NVFP4_ENTRY, PackNvfp4::THREADS)].map(entry).into()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoePack {
    /// Returns the launch that packs matrices into units.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch(&self, pack: Pack) -> Result<Launch, Error> {
        let blocks = Grid::blocks(Pack::blocks(pack.matrices, pack.rows, pack.k))?;
        Ok(Launch::of_parameter(self.name(), Grid::linear(ENTRY, blocks, Pack::THREADS), pack))
    }

    /// Returns the launch that packs matrices for NVFP4 tokens.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch_nvfp4(&self, pack: PackNvfp4) -> Result<Launch, Error> {
        let blocks = Grid::blocks(PackNvfp4::blocks(pack.matrices, pack.rows))?;
        Ok(Launch::of_parameter(self.name(), Grid::linear(NVFP4_ENTRY, blocks, PackNvfp4::THREADS), pack))
    }
}
