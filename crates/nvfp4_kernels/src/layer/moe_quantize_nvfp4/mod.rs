//! Quantization of an MoE layer's tokens to NVFP4 rows, sorted by expert, `kernels-gpu/src/layer/moe_quantize_nvfp4/`.

#[cfg(feature = "fake")]
pub(crate) mod fake;

use kernels_gpu::layer::moe_quantize_nvfp4::abi::{ENTRIES, Quantize};

use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, entry_of};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// The kernel.
pub struct MoeQuantizeNvfp4;

impl Kernel for MoeQuantizeNvfp4 {
    fn name(&self) -> &'static str {
        "moe_quantize_nvfp4"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |name| Entry { name, op: None, threads: Quantize::THREADS, shared_bytes: 0 };
        ENTRIES.into_iter().map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeQuantizeNvfp4 {
    /// Returns the launch that quantizes tokens of type `dtype`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch(&self, quantize: Quantize, dtype: TokenDtype) -> Result<Launch, Error> {
        let entry = entry_of(ENTRIES, dtype);
        let blocks = Grid::blocks(quantize.blocks())?;
        let grid = Grid { overlaps: true, ..Grid::linear(entry, blocks, Quantize::THREADS) };
        Ok(Launch::of_parameter(self.name(), grid, quantize))
    }
}
