//! Quantization of an MoE layer's tokens to NVFP4 rows, sorted by expert, `kernels-gpu/src/layer/moe_quantize_nvfp4/`.

#[cfg(all(test, feature = "cuda"))]
pub(in crate::kernels) mod fake;

use kernels_gpu::layer::moe_quantize_nvfp4::abi::{ENTRIES, Quantize};

use crate::error::Error;
use crate::kernels::kernel::{Entry, Kernel};
use crate::kernels::launch::{Grid, Launch, entry_of};
use crate::problem::TokenDtype;

/// The kernel.
pub(crate) struct MoeQuantizeNvfp4;

impl Kernel for MoeQuantizeNvfp4 {
    fn name(&self) -> &'static str {
        "moe_quantize_nvfp4"
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |name| Entry { name, op: None, threads: Quantize::THREADS, shared_bytes: 0 };
        ENTRIES.into_iter().map(entry).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
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
