//! The choice of a linear layer's kernels for a device, and the launches of a call.

use gpu_arch::Capability;

use super::workspace::Workspace;
use super::{LinearArguments, LinearKernel, PlacedLinear};
use crate::builds;
use crate::group::Address;
use crate::launch::Launch;
use crate::mma_sync::linear_sm80::LinearSm80;
use crate::mma_sync::linear_sm120::LinearSm120;
use crate::moe::{FormatKernels, MoeKernels};
use crate::nvfp4_products::Nvfp4;
use crate::products::Products;
use crate::refused::Refused;
use crate::wgmma::linear_sm90::LinearSm90;
use crate::{linear_fp8, linear_nvfp4};
use nvfp4_core::Error;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::TokenFormat;

/// Every kernel of linear layers with 16-bit tokens. The last kernel runs on every supported GPU.
pub(super) static KERNELS: [&dyn LinearKernel; 3] = [&LinearSm120, &LinearSm90, &LinearSm80];

/// Returns the kernel with this name.
pub fn kernel_named(name: &str) -> Option<&'static dyn LinearKernel> {
    KERNELS.into_iter().find(|kernel| kernel.name() == name)
}

/// Returns the preferred kernel for a device. `None`: no kernel runs there.
pub(super) fn kernel_of(device: Capability) -> Option<&'static dyn LinearKernel> {
    KERNELS.into_iter().find(|kernel| builds::find(kernel.name(), device).is_some())
}

/// Kernels of linear layers on a device.
#[derive(Clone)]
pub struct LinearKernels {
    /// Kernel that multiplies 16-bit tokens.
    pub bits16: &'static dyn LinearKernel,
    /// Whether the kernels for FP8 tokens run on the device.
    fp8: bool,
    /// Kernel that multiplies NVFP4 tokens. `None`: no such kernel runs on the device.
    nvfp4: Option<&'static dyn Products<Nvfp4>>,
    /// Instances that the plan must not choose.
    pub refused: Refused,
}

impl LinearKernels {
    /// Returns the kernels that run on a device. `None`: none do.
    pub fn of(device: Capability) -> Option<Self> {
        // Layers with FP8 and NVFP4 tokens use kernels of MoE layers.
        let MoeKernels { fp8, nvfp4, .. } = MoeKernels::of(device)?;
        Some(Self { bits16: kernel_of(device)?, fp8: fp8.is_some(), nvfp4, refused: Refused::default() })
    }

    /// Returns the same kernels without these instances.
    pub fn without(self, refused: Refused) -> Self {
        Self { refused, ..self }
    }

    /// Takes `given` as the kernel for 16-bit tokens if it is the name of one. A caller that provides code of a kernel
    /// selects it this way, even if the device prefers another.
    pub fn with_code_of(self, given: &str) -> Self {
        let bits16 = kernel_named(given).unwrap_or(self.bits16);
        Self { bits16, ..self }
    }

    /// Returns the kernels that a layer with this token format needs. `None`: the device does not multiply this format.
    pub fn of_format(&self, format: TokenFormat) -> Option<FormatKernels> {
        match format {
            TokenFormat::Bits16 => Some(FormatKernels { product: self.bits16, all: vec![self.bits16] }),
            TokenFormat::Fp8 => {
                self.fp8.then(|| FormatKernels { product: linear_fp8::PRODUCT, all: linear_fp8::KERNELS.into() })
            }
            TokenFormat::Nvfp4 => {
                self.nvfp4.map(|product| FormatKernels { product, all: linear_nvfp4::kernels(product).into() })
            }
        }
    }

    /// Returns the kernels that a layer with this token format needs. `device` is its name in the message.
    ///
    /// # Errors
    /// [`Error::NotComputed`] with the remedy, if the device does not multiply this format.
    pub fn check(&self, format: TokenFormat, device: &str) -> Result<FormatKernels, Error> {
        self.of_format(format).ok_or_else(|| Self::refusal(format, device))
    }

    /// Returns the error for a format that the device has no kernel for.
    fn refusal(format: TokenFormat, device: &str) -> Error {
        let tokens = if format == TokenFormat::Fp8 { "FP8" } else { "NVFP4" };
        Error::NotComputed(format!(
            "there is no linear layer with {tokens} tokens for {device} yet; take 16-bit tokens or the CPU"
        ))
    }

    /// Returns the launch that packs a matrix of these sizes.
    ///
    /// # Errors
    /// If the values are not aligned; [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn pack(
        &self,
        sizes: &LinearSizes,
        tensor: [Address; 2],
        packed: Address,
        invalid: Address,
    ) -> Result<Launch, Error> {
        match sizes.token_format {
            TokenFormat::Bits16 => self.bits16.pack(sizes, tensor, packed, invalid),
            TokenFormat::Fp8 => linear_fp8::pack(sizes, tensor, packed, invalid),
            TokenFormat::Nvfp4 => linear_nvfp4::pack(sizes, tensor, packed, invalid),
        }
    }

    /// Returns the launches of a call with at least one token, on a device with `sms` SMs. The workspace has the
    /// layer's token format and room for these tokens.
    ///
    /// # Errors
    /// If the arguments are not aligned; [`Error::TooLarge`] if there are more tokens or tiles than a kernel can count;
    /// [`Error::NotComputed`] if there is no kernel for the format of the tokens, or no instance is left.
    pub fn launches(
        &self,
        layer: &PlacedLinear,
        arguments: &LinearArguments,
        workspace: Workspace,
        sms: u32,
    ) -> Result<Vec<Launch>, Error> {
        match workspace {
            Workspace::None => Ok(vec![self.bits16.launch(layer, arguments, sms, &self.refused)?]),
            Workspace::Fp8(rows) => Ok(linear_fp8::launches(layer, arguments, rows, sms, &self.refused)?.into()),
            Workspace::Nvfp4(rows) => {
                let products = self.nvfp4.ok_or_else(|| Self::refusal(TokenFormat::Nvfp4, "this device"))?;
                Ok(linear_nvfp4::launches(products, layer, arguments, rows, sms, &self.refused)?.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_take_the_formats_that_their_kernels_multiply() {
        let takes = |device| {
            let kernels = LinearKernels::of(device).unwrap();
            TokenFormat::ALL.map(|format| kernels.of_format(format).map(|kernels| kernels.product.name()))
        };
        assert_eq!(takes((8, 0)), [Some("linear_sm80"), None, None]);
        assert_eq!(takes((9, 0)), [Some("linear_sm90"), Some("moe_fp8_sm90"), None]);
        assert_eq!(takes((10, 3)), [Some("linear_sm80"), None, Some("moe_sm100")]);
        assert_eq!(takes((12, 1)), [Some("linear_sm120"), None, Some("moe_nvfp4_sm120")]);
        assert!(LinearKernels::of((7, 5)).is_none());
        let given = LinearKernels::of((9, 0)).unwrap().with_code_of("linear_sm80");
        assert_eq!(given.bits16.name(), "linear_sm80");
        assert_eq!(given.with_code_of("moe_sm80").bits16.name(), "linear_sm80");
        let refusal = LinearKernels::of((10, 0)).unwrap().check(TokenFormat::Fp8, "it").err().unwrap().to_string();
        assert_eq!(refusal, "there is no linear layer with FP8 tokens for it yet; take 16-bit tokens or the CPU");
    }
}
