//! Which kernels a layer takes on a device.

use gpu_arch::Capability;

use crate::error::Error;
use crate::fp8::TokenFormat;
use crate::kernels::builds;
use crate::kernels::kernel::Kernel;
use crate::kernels::moe_fp8_sm90::MoeFp8Sm90;
use crate::kernels::moe_pack::MoePack;
use crate::kernels::moe_quantize::MoeQuantize;
use crate::kernels::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use crate::kernels::moe_route::MoeRoute;
use crate::kernels::moe_sm90::MoeSm90;
use crate::kernels::moe_sm100::MoeSm100;
use crate::kernels::moe_sm120::MoeSm120;
use crate::kernels::products::Products;

/// Every kernel of a layer's products of 16-bit tokens.
static PRODUCTS: [&dyn Products; 2] = [&MoeSm120, &MoeSm90];

/// The kernels that a layer needs whose tokens are in FP8.
pub(crate) static FP8_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantize, &MoeFp8Sm90];

/// The kernels that a layer needs whose tokens are in NVFP4.
pub(crate) static NVFP4_KERNELS: [&dyn Kernel; 4] = [&MoePack, &MoeRoute, &MoeQuantizeNvfp4, &MoeSm100];

/// The kernels of a layer on a device.
#[derive(Clone, Copy)]
pub(crate) struct MoeKernels {
    /// The one that multiplies tokens of 16 bits, if one of those runs there.
    pub products: Option<&'static dyn Products>,
    /// Whether those for tokens in FP8 do.
    pub fp8: bool,
    /// Whether those for tokens in NVFP4 do.
    pub nvfp4: bool,
}

impl MoeKernels {
    /// Those that run on a device, if tokens of any format are multiplied there.
    pub fn of(device: Capability) -> Option<Self> {
        let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), device).is_some();
        let all_run = |kernels: &[&dyn Kernel]| kernels.iter().all(|&kernel| runs(kernel));
        let products = PRODUCTS.iter().copied().find(|&products| all_run(&of_bits16(products)));
        let kernels = Self { products, fp8: all_run(&FP8_KERNELS), nvfp4: all_run(&NVFP4_KERNELS) };
        TokenFormat::ALL.into_iter().any(|format| kernels.takes(format)).then_some(kernels)
    }

    /// Whether tokens of a format are multiplied there.
    pub fn takes(self, format: TokenFormat) -> bool {
        self.of_format(format).is_some()
    }

    /// All that a layer needs whose tokens have this format, if they are multiplied there.
    pub fn of_format(self, format: TokenFormat) -> Option<Vec<&'static dyn Kernel>> {
        match format {
            TokenFormat::Bits16 => self.products.map(|products| of_bits16(products).into()),
            TokenFormat::Fp8 => self.fp8.then(|| FP8_KERNELS.into()),
            TokenFormat::Nvfp4 => self.nvfp4.then(|| NVFP4_KERNELS.into()),
        }
    }

    /// The format of tokens where nobody asks for another one: 16 bits, or else what is multiplied there.
    pub fn default_format(self) -> TokenFormat {
        TokenFormat::ALL.into_iter().find(|&format| self.takes(format)).unwrap_or_default()
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
            TokenFormat::Bits16 => self.products.expect("a format that is multiplied there").name(),
            TokenFormat::Fp8 => MoeFp8Sm90.name(),
            TokenFormat::Nvfp4 => MoeSm100.name(),
        }
    }
}

/// All that a layer needs whose tokens are 16-bit numbers.
fn of_bits16(products: &'static dyn Products) -> [&'static dyn Kernel; 3] {
    [&MoePack, &MoeRoute, products]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gets_the_kernel_of_its_family() {
        let of = |device| MoeKernels::of(device).map(|kernels| kernels.product_kernel(kernels.default_format()));
        let devices = [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)];
        let expected = ["moe_sm90", "moe_sm100", "moe_sm100", "moe_sm120", "moe_sm120"].map(Some);
        assert_eq!(devices.map(of)[1..], expected);
        assert_eq!(of((8, 9)), None);
        let takes = |device| TokenFormat::ALL.map(|format| MoeKernels::of(device).unwrap().takes(format));
        assert_eq!(takes((9, 0)), [true, true, false]);
        assert_eq!([(10, 0), (12, 0)].map(takes), [[false, false, true], [true, false, false]]);
        let refusal =
            |device, format| MoeKernels::of(device).unwrap().check_takes(format, "it").unwrap_err().to_string();
        let text = refusal((10, 0), TokenFormat::Bits16);
        assert_eq!(text, "there is no MoE layer with 16-bit tokens for it yet; take NVFP4 tokens or the CPU");
        let text = refusal((12, 0), TokenFormat::Fp8);
        assert_eq!(text, "there is no MoE layer with FP8 tokens for it yet; take 16-bit tokens or the CPU");
    }
}
