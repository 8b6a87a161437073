//! Quantization of an MoE layer's tokens to NVFP4 rows, sorted by expert, `kernels-gpu/src/layer/moe_quantize_nvfp4/`.

#[cfg(feature = "fake")]
pub(crate) mod fake;

use kernels_gpu::layer::moe_quantize_nvfp4::abi::{ENTRIES, FEW_ENTRIES, Quantize, ROUTE_ENTRIES, RouteQuantize};

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
        let (threads, shared_bytes) = (Quantize::FEW_THREADS, Quantize::FEW_SHARED_BYTES);
        let few = |name| Entry { name, op: None, threads, shared_bytes };
        let route = |name| Entry { shared_bytes: RouteQuantize::SHARED_BYTES, ..few(name) };
        let of_few = FEW_ENTRIES.into_iter().map(few).chain(ROUTE_ENTRIES.into_iter().map(route));
        ENTRIES.into_iter().map(entry).chain(of_few).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeQuantizeNvfp4 {
    /// Returns the launch that quantizes tokens of type `dtype`. `few`: several warps share a token.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch(&self, quantize: Quantize, dtype: TokenDtype, few: bool) -> Result<Launch, Error> {
        let linear = if few {
            let linear =
                Grid::linear(entry_of(FEW_ENTRIES, dtype), Grid::blocks(quantize.few_blocks())?, Quantize::FEW_THREADS);
            Grid { shared_bytes: Quantize::FEW_SHARED_BYTES, ..linear }
        } else {
            Grid::linear(entry_of(ENTRIES, dtype), Grid::blocks(quantize.blocks())?, Quantize::THREADS)
        };
        let grid = Grid { overlaps: true, ..linear };
        Ok(Launch::of_parameter(self.name(), grid, quantize))
    }

    /// Returns the launch that makes the lists of few tokens of type `dtype`, and quantizes the tokens.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn route(&self, route: RouteQuantize, dtype: TokenDtype) -> Result<Launch, Error> {
        let blocks = Grid::blocks(route.quantize.few_blocks())?;
        let grid = Grid {
            shared_bytes: RouteQuantize::SHARED_BYTES,
            overlaps: true,
            ..Grid::linear(entry_of(ROUTE_ENTRIES, dtype), blocks, Quantize::FEW_THREADS)
        };
        Ok(Launch::of_parameter(self.name(), grid, route))
    }
}
