//! Which kernels a layer takes on a device.

use gpu_arch::Capability;
use kernels_gpu::layer::moe_route::abi::Route;
use kernels_gpu::sorted::ROW_MULTIPLE;

use super::MoeArguments;
use crate::error::Error;
use crate::kernels::builds;
use crate::kernels::kernel::Kernel;
use crate::kernels::layer::moe_pack::MoePack;
use crate::kernels::layer::moe_quantize::MoeQuantize;
use crate::kernels::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use crate::kernels::layer::moe_route::MoeRoute;
use crate::kernels::mma_sync::moe_few_sm90::MoeFewSm90;
use crate::kernels::mma_sync::moe_nvfp4_sm120::MoeNvfp4Sm120;
use crate::kernels::mma_sync::moe_sm80::MoeSm80;
use crate::kernels::nvfp4_products::{self, Nvfp4Products};
use crate::kernels::products::{Products, SMALLEST_TILE};
use crate::kernels::tcgen05::moe_sm100::MoeSm100;
use crate::kernels::wgmma::moe_fp8_sm90::{self, MoeFp8Sm90};
use crate::kernels::wgmma::moe_sm90::MoeSm90;
use crate::kernels::wgmma::moe_sm120::MoeSm120;
use crate::moe::MoeSizes;
use crate::problem::TokenFormat;

/// Every kernel of a layer's products of 16-bit tokens, the one that runs everywhere last.
static PRODUCTS: [&dyn Products; 3] = [&MoeSm120, &MoeSm90, &MoeSm80];

/// The kernel of products of this name.
pub(crate) fn products_named(name: &str) -> Option<&'static dyn Products> {
    PRODUCTS.iter().copied().find(|products| products.name() == name)
}

/// The kernels that a layer needs whose tokens are in FP8.
pub(crate) static FP8_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantize, &MoeFp8Sm90];

/// Every kernel of a layer's products of tokens in NVFP4.
static NVFP4_PRODUCTS: [&dyn Nvfp4Products; 2] = [&MoeNvfp4Sm120, &MoeSm100];

/// The kernels of a layer on a device.
#[derive(Clone, Copy)]
pub(crate) struct MoeKernels {
    /// The one that multiplies tokens of 16 bits.
    pub products: &'static dyn Products,
    /// Whether those for tokens in FP8 run there too.
    pub fp8: bool,
    /// The one that multiplies tokens in NVFP4, if those for them run there.
    pub nvfp4: Option<&'static dyn Nvfp4Products>,
    /// The most blocks of a cluster, of the build of `moe_route` and the card; 1 if there are no clusters.
    pub largest_cluster: u32,
}

impl MoeKernels {
    /// Those that run on a device, if there are any.
    pub fn of(device: Capability) -> Option<Self> {
        let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), device).is_some();
        let all_run = |kernels: &[&dyn Kernel]| kernels.iter().all(|&kernel| runs(kernel));
        let fp8 = all_run(&FP8_KERNELS);
        let nvfp4 = NVFP4_PRODUCTS.iter().copied().find(|&products| all_run(&of_nvfp4(products)));
        let has_clusters = builds::find(MoeRoute.name(), device)?.arch().capability() >= (9, 0);
        let largest_cluster = if has_clusters { Route::PORTABLE_CLUSTER } else { 1 };
        let products = PRODUCTS.iter().copied().find(|&products| all_run(&of_bits16(products)))?;
        Some(Self { products, fp8, nvfp4, largest_cluster })
    }

    /// The same on a card whose clusters may have so many blocks.
    #[cfg(feature = "cuda")]
    pub fn with_largest_cluster(self, largest_cluster: u32) -> Self {
        Self { largest_cluster, ..self }
    }

    /// Whether the build of `moe_route` has grids that overlap: those with clusters have.
    pub fn overlaps(self) -> bool {
        self.largest_cluster > 1
    }

    /// The same with another kernel of products, if a caller has given code of one: that is the way to run one that is not the first
    /// choice on a device.
    pub fn with_code_of(self, given: &str) -> Self {
        products_named(given).map_or(self, |products| Self { products, ..self })
    }

    /// Whether tokens of a format are multiplied there.
    pub fn takes(self, format: TokenFormat) -> bool {
        self.of_format(format).is_some()
    }

    /// All that a layer needs whose tokens have this format, if they are multiplied there.
    pub fn of_format(self, format: TokenFormat) -> Option<Vec<&'static dyn Kernel>> {
        match format {
            TokenFormat::Bits16 => Some(of_bits16(self.products)),
            TokenFormat::Fp8 => self.fp8.then(|| FP8_KERNELS.into()),
            TokenFormat::Nvfp4 => self.nvfp4.map(|products| of_nvfp4(products).into()),
        }
    }

    /// The kernel that computes a chunk in two launches, if there is one and its tokens are few: of 16 bits, of gated experts, and
    /// without one that all of them share.
    pub fn few(self, sizes: &MoeSizes, chunk: &MoeArguments) -> Option<&'static MoeFewSm90> {
        let is_plain = sizes.token_format == TokenFormat::Bits16
            && sizes.activation.has_gate()
            && sizes.shared_intermediate.is_none()
            && !chunk.weights_on_input;
        self.products.few().filter(|few| is_plain && few.takes(sizes, chunk.token_count))
    }

    /// The format of tokens where nobody asks for another one: 16 bits, but NVFP4 where a card's own kernels multiply it and nothing else.
    pub fn default_format(self) -> TokenFormat {
        let has_own = self.products.name() != MoeSm80.name();
        if self.nvfp4.is_some() && !has_own { TokenFormat::Nvfp4 } else { TokenFormat::Bits16 }
    }

    /// Refuses what is not multiplied there.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the remedy.
    pub fn check_takes(self, format: TokenFormat, device: &str) -> Result<(), Error> {
        if self.takes(format) {
            return Ok(());
        }
        let tokens = |format: TokenFormat| match format {
            TokenFormat::Bits16 => "16-bit tokens",
            TokenFormat::Fp8 => "FP8 tokens",
            TokenFormat::Nvfp4 => "NVFP4 tokens",
        };
        Err(Error::NotComputed(format!(
            "there is no MoE layer with {} for {device} yet; take {} or the CPU",
            tokens(format),
            tokens(self.default_format())
        )))
    }

    /// The name of the kernel that multiplies tokens of a format.
    ///
    /// # Panics
    /// If none does.
    pub fn product_kernel(self, token_format: TokenFormat) -> &'static str {
        match token_format {
            TokenFormat::Bits16 => self.products.name(),
            TokenFormat::Fp8 => MoeFp8Sm90.name(),
            TokenFormat::Nvfp4 => self.nvfp4.expect("a kernel for these tokens").name(),
        }
    }
}

/// How the rows of a chunk come to the products: a function of sizes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowPlan {
    /// Tokens of the tiles that rows are cut into.
    pub tile_tokens: u32,
    /// Those of the expert that all tokens share.
    pub shared_tile_tokens: u32,
    /// Whether products take 16-bit numbers sorted by expert ([`sorted`](kernels_gpu::sorted)): tokens and intermediate.
    pub are_sorted: bool,
    /// Whether those of the shared expert do, if there is one.
    pub shared_are_sorted: bool,
    /// What each expert's rows are filled up to a multiple of.
    pub row_multiple: u32,
}

impl RowPlan {
    /// That of so many tokens, for these kernels.
    pub fn new(sizes: &MoeSizes, tokens: usize, kernels: MoeKernels) -> Self {
        let format = sizes.token_format;
        let tile_tokens = |rows: usize, experts: usize| {
            let (rows, experts) = (rows as u64, experts as u64);
            match format {
                TokenFormat::Bits16 => kernels.products.tile_tokens(rows, experts),
                TokenFormat::Fp8 => moe_fp8_sm90::tile_tokens(rows, experts),
                TokenFormat::Nvfp4 => nvfp4_products::tile_tokens(rows, experts),
            }
        };
        let are_sorted = |tile| format == TokenFormat::Bits16 && kernels.products.sorts(tile);
        let routed = tile_tokens(tokens * sizes.top_k, sizes.named_experts);
        // Lists are filled up alike: where the routed rows are sorted, so are the shared expert's, however few.
        let least_shared = if are_sorted(routed) { SMALLEST_TILE as usize + 1 } else { 0 };
        let shared = tile_tokens(tokens.max(least_shared), 1);
        Self {
            tile_tokens: routed,
            shared_tile_tokens: shared,
            are_sorted: are_sorted(routed),
            shared_are_sorted: sizes.shared_intermediate.is_some() && are_sorted(shared),
            row_multiple: if format == TokenFormat::Fp8 || are_sorted(routed) { ROW_MULTIPLE } else { 1 },
        }
    }
}

/// All that a layer needs whose tokens are 16-bit numbers.
fn of_bits16(products: &'static dyn Products) -> Vec<&'static dyn Kernel> {
    let few = products.few().map(|few| few as &dyn Kernel);
    [&MoePack as &dyn Kernel, &MoeRoute, products].into_iter().chain(few).collect()
}

/// All that a layer needs whose tokens are in NVFP4.
fn of_nvfp4(products: &'static dyn Nvfp4Products) -> [&'static dyn Kernel; 4] {
    [&MoePack, &MoeRoute, &MoeQuantizeNvfp4, products]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_kernel_of_its_family() {
        let of = |device| MoeKernels::of(device).map(|kernels| kernels.product_kernel(kernels.default_format()));
        let of_nvfp4 = |device| MoeKernels::of(device).unwrap().product_kernel(TokenFormat::Nvfp4);
        assert_eq!([(10, 0), (12, 1)].map(of_nvfp4), ["moe_sm100", "moe_nvfp4_sm120"]);
        let devices = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (99, 0)].map(of);
        let [portable, hopper, blackwell] = ["moe_sm80", "moe_sm90", "moe_sm100"].map(Some);
        let consumer = Some("moe_sm120");
        let expected = [None, portable, portable, hopper, blackwell, blackwell, consumer, consumer, portable];
        assert_eq!(devices, expected);
        let overlaps = |device| MoeKernels::of(device).map(|kernels| kernels.overlaps());
        assert_eq!([(8, 0), (9, 0), (10, 0), (12, 0)].map(overlaps), [false, true, true, true].map(Some));
        let given = MoeKernels::of((9, 0)).map(|kernels| kernels.with_code_of("moe_sm80"));
        assert_eq!(given.map(|kernels| (kernels.products.name(), kernels.overlaps())), Some(("moe_sm80", true)));
        let takes = |device| TokenFormat::ALL.map(|format| MoeKernels::of(device).unwrap().takes(format));
        assert_eq!(takes((9, 0)), [true, true, false]);
        assert_eq!([(10, 0), (12, 0)].map(takes), [[true, false, true]; 2]);
        let refusal =
            |device, format| MoeKernels::of(device).unwrap().check_takes(format, "it").unwrap_err().to_string();
        let text = refusal((10, 0), TokenFormat::Fp8);
        assert_eq!(text, "there is no MoE layer with FP8 tokens for it yet; take NVFP4 tokens or the CPU");
        let text = refusal((12, 0), TokenFormat::Fp8);
        assert_eq!(text, "there is no MoE layer with FP8 tokens for it yet; take 16-bit tokens or the CPU");
    }
}
