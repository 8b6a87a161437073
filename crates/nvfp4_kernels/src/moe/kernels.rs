//! The kernels of a layer on a device.

use gpu_arch::Capability;
use kernels_gpu::layer::moe_route::abi::Route;
use kernels_gpu::sorted::ROW_MULTIPLE;

use super::MoeArguments;
use super::weights::operand_type_of;
use crate::builds;
use crate::kernel::Kernel;
use crate::layer::moe_pack::MoePack;
use crate::layer::moe_quantize::MoeQuantize;
use crate::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use crate::layer::moe_route::MoeRoute;
use crate::mma_sync::moe_few_sm90::MoeFewSm90;
use crate::mma_sync::moe_nvfp4_sm120::MoeNvfp4Sm120;
use crate::mma_sync::moe_sm80::MoeSm80;
use crate::nvfp4_products::{Nvfp4, has_room};
use crate::products::{
    Bits16, Fp8, ProductKind, ProductSizes, Products, SMALLEST_TILE, may_be_sorted, tile_tokens_left,
};
use crate::refused::Refused;
use crate::tcgen05::moe_sm100::MoeSm100;
use crate::wgmma::moe_fp8_sm90::MoeFp8Sm90;
use crate::wgmma::moe_sm90::MoeSm90;
use crate::wgmma::moe_sm120::MoeSm120;
use nvfp4_core::Error;
use nvfp4_core::moe::{Form, MoeSizes};
use nvfp4_core::problem::{Op, TokenFormat};

/// Kernels that multiply 16-bit tokens. The first one that runs on a device is used; the last one runs everywhere.
static BITS16: [&dyn Products<Bits16>; 3] = [&MoeSm120, &MoeSm90, &MoeSm80];

/// Returns the kernel of the products with this name.
pub fn products_named(name: &str) -> Option<&'static dyn Products<Bits16>> {
    BITS16.iter().copied().find(|products| products.name() == name)
}

/// Kernels of a layer with FP8 tokens.
pub static FP8_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantize, &MoeFp8Sm90];

/// Kernels that multiply NVFP4 tokens.
static NVFP4: [&dyn Products<Nvfp4>; 2] = [&MoeNvfp4Sm120, &MoeSm100];

/// The kernels of a layer on a device.
#[derive(Clone)]
pub struct MoeKernels {
    /// Kernel that multiplies 16-bit tokens.
    pub bits16: &'static dyn Products<Bits16>,
    /// Kernel that multiplies FP8 tokens, if [`FP8_KERNELS`] run on the device.
    pub fp8: Option<&'static dyn Products<Fp8>>,
    /// Kernel that multiplies NVFP4 tokens, if the kernels of such layers run on the device.
    pub nvfp4: Option<&'static dyn Products<Nvfp4>>,
    /// Maximum CTAs of a cluster of `moe_route`: a limit of its build and of the GPU. 1: no clusters.
    pub largest_cluster: u32,
    /// Instances that the plan must not choose.
    pub refused: Refused,
}

/// Kernels of a layer with tokens in one format.
pub struct FormatKernels {
    /// Kernel that multiplies.
    pub product: &'static dyn Kernel,
    /// All kernels.
    pub all: Vec<&'static dyn Kernel>,
}

impl MoeKernels {
    /// Returns the kernels that run on a device, if there are any.
    pub fn of(device: Capability) -> Option<Self> {
        let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), device).is_some();
        let all_run = |kernels: &[&dyn Kernel]| kernels.iter().all(|&kernel| runs(kernel));
        let fp8 = all_run(&FP8_KERNELS).then_some(&MoeFp8Sm90 as &dyn Products<Fp8>);
        let nvfp4 = NVFP4.iter().copied().find(|&products| all_run(&of_nvfp4(products)));
        let has_clusters = builds::find(MoeRoute.name(), device)?.arch().capability() >= (9, 0);
        let largest_cluster = if has_clusters { Route::PORTABLE_CLUSTER } else { 1 };
        let bits16 = BITS16.iter().copied().find(|&products| all_run(&of_bits16(products)))?;
        Some(Self { bits16, fp8, nvfp4, largest_cluster, refused: Refused::default() })
    }

    /// Returns the same kernels without these instances.
    pub fn without(self, refused: Refused) -> Self {
        Self { refused, ..self }
    }

    /// Returns the same kernels for a GPU with clusters of up to `largest_cluster` CTAs.
    pub fn with_largest_cluster(self, largest_cluster: u32) -> Self {
        Self { largest_cluster, ..self }
    }

    /// Whether grids of `moe_route` overlap the grid before: builds with clusters do.
    pub fn overlaps(&self) -> bool {
        self.largest_cluster > 1
    }

    /// Returns the same kernels, with the kernel named `given` for 16-bit tokens if there is one of this name. So a caller who
    /// gives code can run a kernel that is not the first choice on a device.
    pub fn with_code_of(self, given: &str) -> Self {
        let bits16 = products_named(given).unwrap_or(self.bits16);
        Self { bits16, ..self }
    }

    /// Returns all kernels of a layer with tokens in a format, if they run on the device.
    pub fn of_format(&self, format: TokenFormat) -> Option<FormatKernels> {
        match format {
            TokenFormat::Bits16 => Some(FormatKernels { product: self.bits16, all: of_bits16(self.bits16) }),
            TokenFormat::Fp8 => self.fp8.map(|product| FormatKernels { product, all: FP8_KERNELS.into() }),
            TokenFormat::Nvfp4 => self.nvfp4.map(|product| FormatKernels { product, all: of_nvfp4(product).into() }),
        }
    }

    /// Returns the kernel that computes a chunk in two launches, if there is one and it supports the chunk: few 16-bit tokens,
    /// gated experts whose activation is no curve, and no shared expert.
    pub fn few(&self, sizes: &MoeSizes, chunk: &MoeArguments) -> Option<&'static MoeFewSm90> {
        let is_plain = sizes.token_format == TokenFormat::Bits16
            && matches!(sizes.activation.form(), Form::Formula(_))
            && sizes.shared_intermediate.is_none()
            && !chunk.weights_on_input;
        let tokens = chunk.token_count;
        self.bits16
            .few()
            .filter(|few| is_plain && few.takes(sizes, tokens) && few.is_left(sizes.dtype, tokens, &self.refused))
    }

    /// Returns the default format of tokens: 16-bit, or NVFP4 on GPUs whose own kernels multiply only NVFP4.
    pub fn default_format(&self) -> TokenFormat {
        let has_own = self.bits16.name() != MoeSm80.name();
        if self.nvfp4.is_some() && !has_own { TokenFormat::Nvfp4 } else { TokenFormat::Bits16 }
    }

    /// Returns all kernels of a layer with tokens in a format. `device`: the device in words.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the remedy, if they do not run on the device.
    pub fn check(&self, format: TokenFormat, device: &str) -> Result<FormatKernels, Error> {
        self.of_format(format).ok_or_else(|| self.refusal(format, device))
    }

    /// Returns the kernel that multiplies FP8 tokens.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the remedy, if there is none.
    pub fn fp8_products(&self) -> Result<&'static dyn Products<Fp8>, Error> {
        self.fp8.ok_or_else(|| self.refusal(TokenFormat::Fp8, "this device"))
    }

    /// Returns the kernel that multiplies NVFP4 tokens.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the remedy, if there is none.
    pub fn nvfp4_products(&self) -> Result<&'static dyn Products<Nvfp4>, Error> {
        self.nvfp4.ok_or_else(|| self.refusal(TokenFormat::Nvfp4, "this device"))
    }

    /// Returns the error for a format that the device has no kernel for.
    fn refusal(&self, format: TokenFormat, device: &str) -> Error {
        let tokens = |format: TokenFormat| match format {
            TokenFormat::Bits16 => "16-bit tokens",
            TokenFormat::Fp8 => "FP8 tokens",
            TokenFormat::Nvfp4 => "NVFP4 tokens",
        };
        Error::NotComputed(format!(
            "there is no MoE layer with {} for {device} yet; take {} or the CPU",
            tokens(format),
            tokens(self.default_format())
        ))
    }
}

/// Tiles of the rows of a chunk: a function of sizes and of the instances that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlan {
    /// Tiles of the routed experts.
    pub routed: TilePlan,
    /// Tiles of the shared expert.
    pub shared: TilePlan,
    /// Each expert's number of rows is rounded up to a multiple of this number.
    pub row_multiple: u32,
}

/// Tiles of the rows of the routed experts or of the shared one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePlan {
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Whether the operands of both products are 16-bit rows sorted by expert ([`sorted`](kernels_gpu::sorted)).
    pub are_sorted: bool,
}

impl RowPlan {
    /// Returns the plan of a chunk of `tokens` tokens for these kernels.
    pub fn new(sizes: &MoeSizes, tokens: usize, kernels: &MoeKernels) -> Self {
        let (format, refused) = (sizes.token_format, &kernels.refused);
        let curves = matches!(sizes.activation.form(), Form::Curve(..));
        let bits16 = kernels.bits16;
        let tiles = |rows: usize, [named, experts]: [usize; 2], width: usize, sorted: [bool; 2]| {
            let (rows, named, k) = (rows as u64, named as u64, width as u32);
            let products = products(sizes, experts as u32, k, curves);
            let tile_tokens = match format {
                TokenFormat::Bits16 => {
                    let [least, most] = bits16.tile_range(curves, sizes.experts as u32);
                    let preferred = bits16.tile_tokens(rows, named, k).clamp(least, most);
                    tile_tokens_left(bits16, preferred, &products, refused, |tile| {
                        sorted[usize::from(bits16.sorts(tile))]
                    })
                }
                // Without a kernel for the format there are no launches, and the tile does not matter.
                TokenFormat::Fp8 => kernels.fp8.map_or(SMALLEST_TILE, |fp8| {
                    tile_tokens_left(fp8, fp8.tile_tokens(rows, named, k), &products, refused, |_| true)
                }),
                TokenFormat::Nvfp4 => kernels.nvfp4.map_or(SMALLEST_TILE, |nvfp4| {
                    let preferred = nvfp4.tile_tokens(rows, named, k);
                    let has_room = |tile| has_room(rows, experts as u64, named, tile);
                    tile_tokens_left(nvfp4, preferred, &products, refused, has_room)
                }),
            };
            let are_sorted = format == TokenFormat::Bits16 && bits16.sorts(tile_tokens);
            TilePlan { tile_tokens, are_sorted }
        };
        let (choices, named) = (tokens * sizes.top_k, sizes.named_experts);
        // Whether rows may be unsorted and sorted: only some workspaces have room for sorted rows.
        let may_be_sorted = |rows: usize, experts: usize| may_be_sorted(rows as u64, experts as u64);
        let room_for_sorted = may_be_sorted(choices, named);
        let routed = tiles(choices, [named, sizes.experts], sizes.intermediate, [true, room_for_sorted]);
        // All lists have the same row multiple. So if the routed rows are sorted, the shared expert's rows are too, however few.
        let least_shared = if routed.are_sorted { SMALLEST_TILE as usize + 1 } else { 0 };
        let sorted = [!routed.are_sorted, room_for_sorted || may_be_sorted(tokens, 1)];
        let shared =
            sizes.shared_intermediate.map_or(routed, |width| tiles(tokens.max(least_shared), [1, 1], width, sorted));
        let is_rounded = format == TokenFormat::Fp8 || routed.are_sorted;
        Self { routed, shared, row_multiple: if is_rounded { ROW_MULTIPLE } else { 1 } }
    }
}

/// Returns the products of experts with an intermediate of `width` columns: gate and up, or up alone, then down.
fn products(sizes: &MoeSizes, experts: u32, width: u32, curves: bool) -> [(ProductKind, ProductSizes); 2] {
    let op = if sizes.activation.has_gate() { Op::Gated } else { Op::Plain };
    let (operand_type, hidden) = (operand_type_of(sizes), sizes.hidden as u32);
    let down = ProductKind { op: Op::Plain, operand_type, curves: false, early: false };
    let gate_up = ProductKind { op, curves, ..down };
    [(gate_up, ProductSizes { experts, n: width, k: hidden }), (down, ProductSizes { experts, n: hidden, k: width })]
}

/// Returns all kernels of a layer with 16-bit tokens.
fn of_bits16(products: &'static dyn Products<Bits16>) -> Vec<&'static dyn Kernel> {
    let few = products.few().map(|few| few as &dyn Kernel);
    [&MoePack as &dyn Kernel, &MoeRoute, products].into_iter().chain(few).collect()
}

/// Returns all kernels of a layer with NVFP4 tokens.
fn of_nvfp4(products: &'static dyn Products<Nvfp4>) -> [&'static dyn Kernel; 4] {
    [&MoePack, &MoeRoute, &MoeQuantizeNvfp4, products]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_kernel_of_its_family() {
        let name = |kernels: &MoeKernels, format| kernels.check(format, "it").unwrap().product.name();
        let of = |device| MoeKernels::of(device).map(|kernels| name(&kernels, kernels.default_format()));
        let of_nvfp4 = |device| name(&MoeKernels::of(device).unwrap(), TokenFormat::Nvfp4);
        assert_eq!([(10, 0), (12, 1)].map(of_nvfp4), ["moe_sm100", "moe_nvfp4_sm120"]);
        let devices = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (99, 0)].map(of);
        let [portable, hopper, blackwell] = ["moe_sm80", "moe_sm90", "moe_sm100"].map(Some);
        let consumer = Some("moe_sm120");
        let expected = [None, portable, portable, hopper, blackwell, blackwell, consumer, consumer, portable];
        assert_eq!(devices, expected);
        let overlaps = |device| MoeKernels::of(device).map(|kernels| kernels.overlaps());
        assert_eq!([(8, 0), (9, 0), (10, 0), (12, 0)].map(overlaps), [false, true, true, true].map(Some));
        let given = MoeKernels::of((9, 0)).map(|kernels| kernels.with_code_of("moe_sm80"));
        assert_eq!(given.map(|kernels| (kernels.bits16.name(), kernels.overlaps())), Some(("moe_sm80", true)));
        let takes = |device| TokenFormat::ALL.map(|format| MoeKernels::of(device).unwrap().of_format(format).is_some());
        assert_eq!(takes((9, 0)), [true, true, false]);
        assert_eq!([(10, 0), (12, 0)].map(takes), [[true, false, true]; 2]);
        let refusal = |device, format| MoeKernels::of(device).unwrap().check(format, "it").err().unwrap().to_string();
        let text = refusal((10, 0), TokenFormat::Fp8);
        assert_eq!(text, "there is no MoE layer with FP8 tokens for it yet; take NVFP4 tokens or the CPU");
        let text = refusal((12, 0), TokenFormat::Fp8);
        assert_eq!(text, "there is no MoE layer with FP8 tokens for it yet; take 16-bit tokens or the CPU");
    }
}
