//! Linear layers whose tokens are in FP8: a launch rounds them (`moe_quantize`), and `moe_fp8_sm90` multiplies them as an MoE layer's
//! whose only expert has all rows. Weights are packed as those of an expert (`moe_pack`).

use bytemuck::Zeroable;
use gpu_arch::Capability;
use kernels_gpu::epilogue::Activation;
use kernels_gpu::moe_fp8_sm90::abi::Launch as Product;
use kernels_gpu::moe_pack::abi::Pack;
use kernels_gpu::moe_quantize::abi::Quantize;
use kernels_gpu::sorted::{LINE_BYTES, ROW_MULTIPLE};
use kernels_gpu::units::{TokenType, k_blocks};

use super::builds;
use super::group::Address;
use super::kernel::Kernel;
use super::launch::{ALIGNMENT, Launch, output_code};
use super::linear::{LinearArguments, PlacedLinear};
use super::moe::SortedRows;
use super::moe_fp8_sm90::{self, MoeFp8Sm90};
use super::moe_pack::MoePack;
use super::moe_quantize::MoeQuantize;
use crate::error::Error;
use crate::fp8::TokenFormat;
use crate::linear::LinearSizes;

/// The kernels that a layer needs whose tokens are in FP8.
pub(crate) static KERNELS: [&dyn Kernel; 3] = [&MoePack, &MoeQuantize, &MoeFp8Sm90];

/// The name of the one that multiplies.
pub(crate) fn product_kernel() -> &'static str {
    MoeFp8Sm90.name()
}

/// Refuses tokens of a format that linear layers do not multiply on a device.
///
/// # Errors
/// [`Error::NotComputed`] with the remedy.
pub(crate) fn check_takes(format: TokenFormat, capability: Capability, device: &str) -> Result<(), Error> {
    let runs = |kernel: &dyn Kernel| builds::find(kernel.name(), capability).is_some();
    let tokens = match format {
        TokenFormat::Bits16 => return Ok(()),
        TokenFormat::Fp8 if KERNELS.into_iter().all(runs) => return Ok(()),
        TokenFormat::Fp8 => "FP8",
        TokenFormat::Nvfp4 => "NVFP4",
    };
    Err(Error::NotComputed(format!(
        "there is no linear layer with {tokens} tokens for {device} yet; take 16-bit tokens or the CPU"
    )))
}

/// The most tokens of a call: their rows, filled up to a multiple, are counted in 32 bits.
const MAX_TOKENS: usize = (u32::MAX - ROW_MULTIPLE) as usize;

/// What the first launch of a call with so many tokens leaves to the second: its parts, for which `place` finds room, a multiple of
/// [`ALIGNMENT`]. It is given the bytes of each. For more tokens than a call may have it is that of the most.
pub(crate) fn workspace(sizes: &LinearSizes, tokens: usize, mut place: impl FnMut(u64) -> Address) -> SortedRows {
    let capacity = (tokens.min(MAX_TOKENS) as u64).next_multiple_of(ROW_MULTIPLE.into());
    SortedRows {
        codes: place(capacity * u64::from(k_blocks(sizes.k as u32) * LINE_BYTES)),
        scales: place(capacity * size_of::<f32>() as u64),
        capacity: capacity as u32,
    }
}

/// As [`workspace`], one part behind the other from an address on; with where they end.
pub(crate) fn workspace_at(sizes: &LinearSizes, tokens: usize, address: Address) -> (SortedRows, Address) {
    let mut end = address;
    let rows = workspace(sizes, tokens, |bytes| {
        let at = end;
        end = (at + bytes).next_multiple_of(ALIGNMENT);
        at
    });
    (rows, end)
}

/// The launches of a call with tokens, on a device of so many multiprocessors.
///
/// # Errors
/// If the arguments are not aligned; [`Error::TooLarge`] if a grid cannot have as many blocks as it takes.
pub(crate) fn launches(
    layer: &PlacedLinear,
    arguments: &LinearArguments,
    rows: SortedRows,
    sms: u32,
) -> Result<[Launch; 2], Error> {
    let PlacedLinear { sizes, panels: units, alpha, bias } = *layer;
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
    let instance = moe_fp8_sm90::for_linear(m.into(), n, sms);
    Ok([MoeQuantize.launch(quantize, sizes.dtype)?, MoeFp8Sm90.product(instance, product, m.into(), sms)])
}

/// The launch that packs a matrix of these sizes.
///
/// # Errors
/// If the values are not aligned; [`Error::TooLarge`] if that takes more blocks than a grid can have.
pub(crate) fn pack(
    sizes: &LinearSizes,
    [values, scales]: [Address; 2],
    units: Address,
    invalid: Address,
) -> Result<Launch, Error> {
    if !values.is_multiple_of(16) {
        let text = format!("values at {values:#x}; for tokens in FP8 they must be at a multiple of 16");
        return Err(Error::Invalid(text));
    }
    let (rows, k, token_type) = (sizes.n as u32, sizes.k as u32, TokenType::E4m3 as u32);
    MoePack.launch(Pack { values, scales, units, invalid, matrices: 1, rows, k, token_type, ..Pack::zeroed() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::TokenFormat;
    use crate::problem::OutDtype;

    fn layer(n: usize, k: usize) -> PlacedLinear {
        let sizes = LinearSizes { n, k, dtype: OutDtype::Bf16, bias: false, token_format: TokenFormat::Fp8 };
        PlacedLinear { sizes, panels: 0x100, alpha: 0x80, bias: 0 }
    }

    fn launched(layer: &PlacedLinear, tokens: usize, sms: u32) -> [Launch; 2] {
        let token_pitch = 2 * layer.sizes.k;
        let arguments = LinearArguments { token_count: tokens, tokens: 0x1000, token_pitch, output: 0x2000 };
        let (rows, _) = workspace_at(&layer.sizes, tokens, 0x10_0000);
        launches(layer, &arguments, rows, sms).unwrap()
    }

    #[test]
    fn blocks_are_no_more_than_tiles_or_multiprocessors() {
        for (tokens, entry, blocks) in [
            (1, "moe_fp8_plain_t16_narrow", 32),
            (64, "moe_fp8_plain_t64_narrow", 32),
            (512, "moe_fp8_plain_t128_narrow", 128),
            (2048, "moe_fp8_plain_t256", 132),
        ] {
            let [quantize, product] = launched(&layer(4096, 7168), tokens, 132);
            assert_eq!((product.grid.entry, product.grid.blocks), (entry, blocks), "{tokens} tokens");
            // A warp a row, and rows to a multiple of eight.
            assert_eq!(quantize.grid.blocks as usize, tokens.div_ceil(8));
        }
    }

    #[test]
    fn parts_of_the_workspace_do_not_overlap_and_end_with_it() {
        for (tokens, k) in [(1, 16), (9, 176), (300, 7168)] {
            let sizes = layer(32, k).sizes;
            let mut parts = Vec::new();
            let mut end = 0x1000;
            let placed = workspace(&sizes, tokens, |bytes| {
                parts.push((end, bytes));
                end = (end + bytes).next_multiple_of(ALIGNMENT);
                parts.last().unwrap().0
            });
            assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0) && parts.len() == 2);
            assert_eq!((placed, end), workspace_at(&sizes, tokens, 0x1000));
        }
    }

    #[test]
    fn more_tokens_than_are_counted_are_refused_before_anything_is_launched() {
        let layer = layer(32, 64);
        let arguments = LinearArguments { token_count: MAX_TOKENS + 1, tokens: 16, token_pitch: 128, output: 16 };
        let (rows, end) = workspace_at(&layer.sizes, usize::MAX, 0);
        assert_eq!((rows, end), workspace_at(&layer.sizes, MAX_TOKENS, 0));
        assert!(matches!(launches(&layer, &arguments, rows, 132), Err(Error::TooLarge)));
    }

    #[test]
    fn values_that_the_kernel_cannot_read_are_refused() {
        let sizes = layer(32, 64).sizes;
        assert!(pack(&sizes, [0x110, 0x201], 0x300, 0x400).is_ok());
        let error = pack(&sizes, [0x108, 0x201], 0x300, 0x400).err().unwrap().to_string();
        assert!(error.contains("0x108") && error.contains("multiple of 16"), "{error}");
    }
}
