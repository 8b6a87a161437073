//! Which kernels a layer takes on a device.

use gpu_arch::Capability;

use crate::fp8::TokenFormat;
use crate::kernels::builds;
use crate::kernels::kernel::Kernel;
use crate::kernels::moe_fp8_sm90::MoeFp8Sm90;
use crate::kernels::moe_pack::MoePack;
use crate::kernels::moe_quantize::MoeQuantize;
use crate::kernels::moe_route::MoeRoute;
use crate::kernels::moe_sm80::MoeSm80;
use crate::kernels::moe_sm90::MoeSm90;
use crate::kernels::moe_sm120::MoeSm120;
use crate::kernels::products::Products;

/// Every kernel of a layer's products, the one that runs everywhere last.
static PRODUCTS: [&dyn Products; 3] = [&MoeSm120, &MoeSm90, &MoeSm80];

/// The kernel of products of this name.
pub(crate) fn products_named(name: &str) -> Option<&'static dyn Products> {
    PRODUCTS.iter().copied().find(|products| products.name() == name)
}

/// The kernels that a layer needs whose tokens are in FP8.
pub(crate) static FP8_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantize, &MoeFp8Sm90];

/// The kernels of a layer on a device.
#[derive(Clone, Copy)]
pub(crate) struct MoeKernels {
    /// The one that multiplies tokens of 16 bits.
    pub products: &'static dyn Products,
    /// Whether those for tokens in FP8 run there too.
    pub fp8: bool,
    /// Whether the build of `moe_route` has clusters and grids that overlap: those from sm_90 on do.
    pub overlaps: bool,
}

impl MoeKernels {
    /// Those that run on a device, if all of those for tokens of 16 bits do.
    pub fn of(device: Capability) -> Option<Self> {
        let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), device).is_some();
        let fp8 = FP8_KERNELS.into_iter().all(runs);
        let overlaps = builds::find(MoeRoute.name(), device)?.arch().capability() >= (9, 0);
        let mut kernels = PRODUCTS.iter().map(|&products| Self { products, fp8, overlaps });
        kernels.find(|kernels| kernels.all().into_iter().all(runs))
    }

    /// The same with another kernel of products, if a caller has given code of one: that is the way to run one that is not the first
    /// choice on a device.
    pub fn with_code_of(self, given: &str) -> Self {
        products_named(given).map_or(self, |products| Self { products, ..self })
    }

    /// All that a layer needs whose tokens are 16-bit numbers.
    pub fn all(self) -> [&'static dyn Kernel; 3] {
        [&MoePack, &MoeRoute, self.products]
    }

    /// The name of the kernel that multiplies tokens of a format.
    pub fn product_kernel(self, token_format: TokenFormat) -> &'static str {
        match token_format {
            TokenFormat::Bits16 => self.products.name(),
            TokenFormat::Fp8 => MoeFp8Sm90.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_kernel_of_its_family() {
        let of = |device| MoeKernels::of(device).map(|kernels| kernels.products.name());
        let devices = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), (99, 0)].map(of);
        let [portable, hopper, consumer] = ["moe_sm80", "moe_sm90", "moe_sm120"].map(Some);
        assert_eq!(devices, [None, portable, portable, hopper, portable, consumer, consumer, portable]);
        let overlaps = |device| MoeKernels::of(device).map(|kernels| kernels.overlaps);
        assert_eq!([(8, 0), (9, 0), (10, 0), (12, 0)].map(overlaps), [false, true, false, true].map(Some));
        let given = MoeKernels::of((9, 0)).map(|kernels| kernels.with_code_of("moe_sm80"));
        assert_eq!(given.map(|kernels| (kernels.products.name(), kernels.overlaps)), Some(("moe_sm80", true)));
        let takes_fp8 = |device| MoeKernels::of(device).map(|kernels| kernels.fp8);
        assert_eq!([(9, 0), (12, 0)].map(takes_fp8), [Some(true), Some(false)]);
    }
}
