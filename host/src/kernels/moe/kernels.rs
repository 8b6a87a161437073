//! Which kernels a layer takes on a device.

use gpu_arch::Capability;

use crate::fp8::TokenFormat;
use crate::kernels::builds;
use crate::kernels::kernel::Kernel;
use crate::kernels::moe_fp8_sm90::MoeFp8Sm90;
use crate::kernels::moe_pack::MoePack;
use crate::kernels::moe_quantize::MoeQuantize;
use crate::kernels::moe_route::MoeRoute;
use crate::kernels::moe_sm90::MoeSm90;
use crate::kernels::moe_sm120::MoeSm120;
use crate::kernels::products::Products;

/// Every kernel of a layer's products.
static PRODUCTS: [&dyn Products; 2] = [&MoeSm120, &MoeSm90];

/// The kernels that a layer needs whose tokens are in FP8.
pub(crate) static FP8_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantize, &MoeFp8Sm90];

/// The kernels of a layer on a device.
#[derive(Clone, Copy)]
pub(crate) struct MoeKernels {
    /// The one that multiplies tokens of 16 bits.
    pub products: &'static dyn Products,
    /// Whether those for tokens in FP8 run there too.
    pub fp8: bool,
}

impl MoeKernels {
    /// Those that run on a device, if all of those for tokens of 16 bits do.
    pub fn of(device: Capability) -> Option<Self> {
        let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), device).is_some();
        let fp8 = FP8_KERNELS.into_iter().all(runs);
        let mut kernels = PRODUCTS.iter().map(|&products| Self { products, fp8 });
        kernels.find(|kernels| kernels.all().into_iter().all(runs))
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
        let devices = [(8, 9), (9, 0), (10, 0), (12, 0), (12, 1)];
        assert_eq!(devices.map(of), [None, Some("moe_sm90"), None, Some("moe_sm120"), Some("moe_sm120")]);
        let takes_fp8 = |device| MoeKernels::of(device).map(|kernels| kernels.fp8);
        assert_eq!([(9, 0), (12, 0)].map(takes_fp8), [Some(true), Some(false)]);
    }
}
