//! Linear layers with FP8 tokens. One launch quantizes the tokens (`moe_quantize`). `moe_fp8_sm90` then multiplies them
//! as rows of the single expert of an MoE layer. The weights are packed like an expert's (`moe_pack`).

use bytemuck::Zeroable;
use kernels_gpu::epilogue::Activation;
use kernels_gpu::layer::moe_pack::abi::Pack;
use kernels_gpu::layer::moe_quantize::abi::Quantize;
use kernels_gpu::units::OperandType;
use kernels_gpu::wgmma::moe_fp8_sm90::abi::Launch as Product;

use super::group::Address;
use super::kernel::{Kernel, none_left};
use super::launch::{Launch, output_code};
use super::layer::moe_pack::MoePack;
use super::layer::moe_quantize::MoeQuantize;
use super::linear::workspace::MAX_TOKENS;
use super::linear::{LinearArguments, PlacedLinear};
use super::moe::SortedRows;
use super::products::Products;
use super::refused::Refused;
use super::wgmma::moe_fp8_sm90::{self, MoeFp8Sm90};
use nvfp4_core::Error;
use nvfp4_core::linear::LinearSizes;

/// Kernels of a layer with FP8 tokens.
pub static KERNELS: [&dyn Kernel; 3] = [&MoePack, &MoeQuantize, &MoeFp8Sm90];

/// Kernel that multiplies.
pub static PRODUCT: &dyn Kernel = &MoeFp8Sm90;

/// Returns the launches of a call with at least one token, on a device with `sms` SMs.
///
/// # Errors
/// If the arguments are not aligned; [`Error::TooLarge`] if a grid would need too many CTAs; [`Error::NotComputed`] if every
/// instance is refused.
pub fn launches(
    layer: &PlacedLinear,
    arguments: &LinearArguments,
    rows: SortedRows,
    sms: u32,
    refused: &Refused,
) -> Result<[Launch; 2], Error> {
    let PlacedLinear { sizes, packed: units, alpha, bias, .. } = *layer;
    arguments.check(&sizes)?;
    if arguments.token_count > MAX_TOKENS {
        return Err(Error::TooLarge);
    }
    let (m, n, k) = (arguments.token_count as u32, sizes.n as u32, sizes.k as u32);
    let quantize = Quantize {
        input: arguments.tokens,
        input_pitch: arguments.token_pitch as u64,
        codes: rows.codes,
        scales: rows.scales,
        token_count: m,
        top_k: 1,
        experts: 1,
        row_capacity: rows.capacity,
        k,
        ..Quantize::zeroed()
    };
    let product = Product {
        tokens: rows.codes,
        scales: rows.scales,
        b: [units, 0],
        alpha: [alpha, 0],
        bias: [bias, 0],
        c: arguments.output,
        n,
        k,
        experts: 1,
        rows: m,
        row_capacity: rows.capacity,
        output: output_code(sizes.dtype),
        activation: Activation::NONE,
        ..Product::zeroed()
    };
    let instance =
        moe_fp8_sm90::for_linear(m.into(), n, sms, refused).ok_or_else(|| none_left(&MoeFp8Sm90, refused))?;
    Ok([MoeQuantize.launch(quantize, sizes.dtype)?, MoeFp8Sm90.product(&instance, product, m.into(), sms)])
}

/// Returns the launch that packs a matrix of these sizes.
///
/// # Errors
/// If the values are not aligned; [`Error::TooLarge`] if the grid would need too many CTAs.
pub fn pack(
    sizes: &LinearSizes,
    [values, scales]: [Address; 2],
    units: Address,
    invalid: Address,
) -> Result<Launch, Error> {
    if !values.is_multiple_of(16) {
        let text = format!("the values are at {values:#x}; for FP8 tokens the address must be a multiple of 16");
        return Err(Error::Invalid(text));
    }
    let (rows, k, operand_type) = (sizes.n as u32, sizes.k as u32, OperandType::E4m3 as u32);
    MoePack.launch(Pack { values, scales, units, invalid, matrices: 1, rows, k, operand_type, ..Pack::zeroed() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::workspace::Workspace;
    use nvfp4_core::problem::{TokenDtype, TokenFormat};

    fn rows_of(sizes: &LinearSizes, tokens: usize) -> SortedRows {
        let (Workspace::Fp8(rows), _) = Workspace::at(sizes, tokens, 0x10_0000) else { unreachable!() };
        rows
    }

    fn layer(n: usize, k: usize) -> PlacedLinear {
        let sizes = LinearSizes { n, k, dtype: TokenDtype::Bf16, bias: false, token_format: TokenFormat::Fp8 };
        PlacedLinear { sizes, packed: 0x100, alpha: 0x80, bias: 0, input_scale: 0 }
    }

    fn launched(layer: &PlacedLinear, tokens: usize, sms: u32) -> [Launch; 2] {
        let token_pitch = 2 * layer.sizes.k;
        let arguments = LinearArguments { token_count: tokens, tokens: 0x1000, token_pitch, output: 0x2000 };
        launches(layer, &arguments, rows_of(&layer.sizes, tokens), sms, &Refused::default()).unwrap()
    }

    #[test]
    fn blocks_are_limited_by_tiles_and_sms() {
        for (tokens, entry, blocks) in [
            (1, "moe_fp8_plain_t16_narrow", 32),
            (64, "moe_fp8_plain_t16_narrow", 128),
            (512, "moe_fp8_plain_t128_narrow", 128),
            (2048, "moe_fp8_plain_t256", 132),
        ] {
            let [quantize, product] = launched(&layer(4096, 7168), tokens, 132);
            assert_eq!((product.grid.entry, product.grid.blocks), (entry, blocks), "{tokens} tokens");
            // One warp per row and eight warps per CTA. The number of rows is rounded up to a multiple of eight.
            assert_eq!(quantize.grid.blocks as usize, tokens.div_ceil(8));
        }
    }

    #[test]
    fn too_many_tokens_are_refused() {
        let layer = layer(32, 64);
        let arguments = LinearArguments { token_count: MAX_TOKENS + 1, tokens: 16, token_pitch: 128, output: 16 };
        let rows = rows_of(&layer.sizes, usize::MAX);
        assert!(matches!(launches(&layer, &arguments, rows, 132, &Refused::default()), Err(Error::TooLarge)));
    }

    #[test]
    fn misaligned_values_are_refused() {
        let sizes = layer(32, 64).sizes;
        assert!(pack(&sizes, [0x110, 0x201], 0x300, 0x400).is_ok());
        let error = pack(&sizes, [0x108, 0x201], 0x300, 0x400).err().unwrap().to_string();
        assert!(error.contains("0x108") && error.contains("multiple of 16"), "{error}");
    }
}
