//! Linear layers with NVFP4 tokens. One launch quantizes the tokens (`moe_quantize_nvfp4`). A kernel of an MoE layer's
//! products then multiplies them as rows of the single expert. The weights are packed like an expert's (`moe_pack`).

use bytemuck::Zeroable;
use kernels_gpu::epilogue::Activation;
use kernels_gpu::layer::moe_pack::abi::PackNvfp4;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::Quantize;
use kernels_gpu::lists::token_tiles;
use kernels_gpu::nvfp4_rows::value_bytes;
use kernels_gpu::routed::QuantizedC;

use super::group::Address;
use super::kernel::{Kernel, none_left};
use super::launch::{Launch, output_code};
use super::layer::moe_pack::MoePack;
use super::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use super::linear::workspace::MAX_TOKENS;
use super::linear::{LinearArguments, PlacedLinear};
use super::moe::Nvfp4Rows;
use super::nvfp4_products::{FEW_ROWS, Nvfp4, has_room, tile_tokens};
use super::products::{ProductKind, ProductSizes, Products, tile_tokens_left};
use super::refused::Refused;
use nvfp4_core::Error;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::Op;

/// Kernels of a layer with NVFP4 tokens that multiplies with `products`.
pub fn kernels(products: &'static dyn Products<Nvfp4>) -> [&'static dyn Kernel; 3] {
    [&MoePack, &MoeQuantizeNvfp4, products]
}

/// Returns the launches of a call with at least one token, on a device with `sms` SMs.
///
/// # Errors
/// If the arguments are not aligned; [`Error::TooLarge`] if there are more tokens than a kernel can count;
/// [`Error::NotComputed`] if no instance is left.
pub fn launches(
    products: &dyn Products<Nvfp4>,
    layer: &PlacedLinear,
    arguments: &LinearArguments,
    rows: Nvfp4Rows,
    sms: u32,
    refused: &Refused,
) -> Result<[Launch; 2], Error> {
    let PlacedLinear { sizes, packed, alpha, bias, input_scale } = *layer;
    arguments.check(&sizes)?;
    if arguments.token_count > MAX_TOKENS {
        return Err(Error::TooLarge);
    }
    let (m, n, k) = (arguments.token_count as u32, sizes.n as u32, sizes.k as u32);
    let few = u64::from(m) <= FEW_ROWS;
    let kind = ProductKind { op: Op::Plain, operand_type: None, curves: false, early: few };
    let of = (kind, ProductSizes { experts: 1, n, k });
    let has_room = |tile| has_room(m.into(), 1, 1, tile);
    let tile_tokens = tile_tokens_left(products, tile_tokens(m.into(), 1), &[of], refused, has_room);
    let token_tiles = token_tiles(m, tile_tokens);
    let quantize = Quantize {
        input: arguments.tokens,
        input_pitch: arguments.token_pitch as u64,
        input_scales: input_scale,
        values: rows.values,
        scales: rows.scales,
        globals: rows.globals,
        token_count: m,
        token_tiles,
        top_k: 1,
        experts: 1,
        k,
        ..Quantize::zeroed()
    };
    // No lists: the single expert has all rows.
    let product = Nvfp4 {
        tokens: rows.values,
        rows: rows.rows,
        token_scales: rows.scales,
        globals: rows.globals,
        firsts: 0,
        tile_firsts: 0,
        weights: packed,
        weight_scales: packed + value_bytes(n.into(), k),
        alpha: [alpha, 0],
        bias: [bias, 0],
        c: arguments.output,
        quantized: QuantizedC::default(),
        n,
        k,
        experts: 1,
        output: output_code(sizes.dtype),
        activation: Activation::NONE,
    };
    let quantize = MoeQuantizeNvfp4.launch(quantize, sizes.dtype, few)?;
    let found = products.candidates(of.0, tile_tokens, token_tiles.into(), of.1, sms, refused);
    let (instance, _) = found.first().ok_or_else(|| none_left(products, refused))?;
    Ok([quantize, products.product(instance, product, m.into(), sms)])
}

/// Returns the launch that packs a matrix of these sizes.
///
/// # Errors
/// If the values are not aligned; [`Error::TooLarge`] if the grid would need too many CTAs.
pub fn pack(
    sizes: &LinearSizes,
    [values, scales]: [Address; 2],
    packed: Address,
    invalid: Address,
) -> Result<Launch, Error> {
    if !values.is_multiple_of(16) {
        let text = format!("the values are at {values:#x}; for NVFP4 tokens the address must be a multiple of 16");
        return Err(Error::Invalid(text));
    }
    let (rows, k) = (sizes.n as u32, sizes.k as u32);
    MoePack.launch_nvfp4(PackNvfp4 {
        values,
        scales,
        packed_values: packed,
        packed_scales: packed + value_bytes(rows.into(), k),
        invalid,
        matrices: 1,
        rows,
        k,
        ..PackNvfp4::zeroed()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::workspace::Workspace;
    use crate::tcgen05::moe_sm100::MoeSm100;
    use nvfp4_core::problem::{TokenDtype, TokenFormat};

    fn layer(n: usize, k: usize) -> PlacedLinear {
        let sizes = LinearSizes { n, k, dtype: TokenDtype::Bf16, bias: false, token_format: TokenFormat::Nvfp4 };
        PlacedLinear { sizes, packed: 0x100, alpha: 0x80, bias: 0, input_scale: 0x40 }
    }

    fn launched(layer: &PlacedLinear, tokens: usize, sms: u32) -> Result<[Launch; 2], Error> {
        let token_pitch = 2 * layer.sizes.k;
        let arguments = LinearArguments { token_count: tokens, tokens: 0x1000, token_pitch, output: 0x2000 };
        let (Workspace::Nvfp4(rows), _) = Workspace::at(&layer.sizes, tokens, 0x10_0000) else { unreachable!() };
        launches(&MoeSm100, layer, &arguments, rows, sms, &Refused::default())
    }

    #[test]
    fn tile_size_follows_the_number_of_tokens() {
        for (tokens, entry, blocks) in [
            (1, "moe_sm100_plain_t16_early", 32),
            (9, "moe_sm100_plain_t64_early", 32),
            (128, "moe_sm100_plain_t128", 32),
            (2048, "moe_sm100_plain_t128", 148),
        ] {
            let [quantize, product] = launched(&layer(4096, 7168), tokens, 148).unwrap();
            assert_eq!((product.grid.entry, product.grid.blocks), (entry, blocks), "{tokens} tokens");
            // Four CTAs per token with 128 blocks each, or one warp per token and eight warps per CTA.
            let ctas = if tokens <= 1024 { tokens * 4 } else { tokens.div_ceil(8) };
            assert_eq!(quantize.grid.blocks as usize, ctas);
        }
    }

    #[test]
    fn too_many_tokens_and_misaligned_values_are_refused() {
        assert!(matches!(launched(&layer(32, 64), MAX_TOKENS + 1, 148), Err(Error::TooLarge)));
        let sizes = layer(32, 64).sizes;
        assert!(pack(&sizes, [0x110, 0x201], 0x300, 0x400).is_ok());
        let error = pack(&sizes, [0x108, 0x201], 0x300, 0x400).err().unwrap().to_string();
        assert!(error.contains("0x108") && error.contains("multiple of 16"), "{error}");
    }
}
