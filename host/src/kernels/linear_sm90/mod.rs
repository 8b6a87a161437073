//! A linear layer on Hopper, `kernels-gpu/src/linear_sm90/`: one launch, a function of sizes and addresses.
//!
//! Every instance sums K in the same order, so a token's numbers do not depend on which one is chosen.

#[cfg(all(test, feature = "cuda"))]
mod fake;
#[cfg(any(test, feature = "emulated"))]
pub(crate) mod panels;
pub(crate) mod weights;

use kernels_gpu::linear_sm90::abi::{self, INSTANCES, Instance, PACK_ENTRY, Pack};
use kernels_gpu::moe_route::abi::{tile_size, token_tiles};

use super::group::Address;
use super::kernel::{Entry, Kernel};
use super::launch::{Grid, Launch, output_code};
use super::moe::token_type;
use crate::error::Error;
use crate::linear::LinearSizes;
use crate::problem::Op;

/// The kernel.
pub(crate) struct LinearSm90;

impl Kernel for LinearSm90 {
    fn name(&self) -> &'static str {
        "linear_sm90"
    }

    fn entries(&self) -> Vec<Entry> {
        let pack = Entry { name: PACK_ENTRY, op: None, threads: Pack::THREADS, shared_bytes: 0 };
        let product = |of: &Instance| Entry {
            name: of.entry,
            op: Some(Op::Plain),
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
        };
        INSTANCES.iter().map(product).chain([pack]).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

/// A layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedLinear {
    pub sizes: LinearSizes,
    /// Its panels.
    pub panels: Address,
    /// N numbers of f32: the global scale of each row.
    pub alpha: Address,
    /// N numbers of f32; 0 if there is no bias.
    pub bias: Address,
}

/// What a call of a linear layer reads and writes: addresses in the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearArguments {
    /// M; may be 0.
    pub token_count: usize,
    /// Tokens X, at a multiple of 16: M rows of K numbers of the layer's type.
    pub tokens: Address,
    /// Bytes from one token to the next, a multiple of 16.
    pub token_pitch: usize,
    /// The output, at a multiple of 16: M rows of N numbers of the layer's type, without gaps.
    pub output: Address,
}

impl LinearArguments {
    /// Checks what can be seen without a device.
    fn check(&self, sizes: &LinearSizes) -> Result<(), Error> {
        let row_bytes = size_of::<u16>() * sizes.k;
        let Self { tokens, token_pitch, output, token_count } = *self;
        if !tokens.is_multiple_of(16) || !token_pitch.is_multiple_of(16) || token_pitch < row_bytes {
            return Err(Error::Invalid(format!(
                "tokens at {tokens:#x}, {token_pitch} bytes apart: both must be multiples of 16, and a token has {row_bytes} bytes"
            )));
        }
        if !output.is_multiple_of(16) {
            return Err(Error::Invalid(format!("the output at {output:#x} must be at a multiple of 16")));
        }
        u32::try_from(token_count).map(|_| ()).map_err(|_| Error::TooLarge)
    }
}

/// The launch of a call with tokens, on a device of so many multiprocessors.
///
/// # Errors
/// If the arguments are not aligned; [`Error::TooLarge`] if there are more tiles than a kernel can count.
pub(crate) fn launch(layer: &PlacedLinear, arguments: &LinearArguments, sms: u32) -> Result<Launch, Error> {
    let PlacedLinear { sizes, panels, alpha, bias } = *layer;
    arguments.check(&sizes)?;
    let (m, n) = (arguments.token_count as u32, sizes.n as u32);
    let instance = instance(&sizes, m, sms);
    let tiles = Grid::blocks(tiles(instance, m, n))?;
    let launch = abi::Launch {
        tokens: arguments.tokens,
        token_pitch: arguments.token_pitch as u64,
        panels,
        c: arguments.output,
        alpha,
        bias,
        m,
        n,
        k: sizes.k as u32,
        token_tiles: token_tiles(m, instance.tile_tokens),
    };
    let grid = Grid {
        shared_bytes: instance.shared_bytes(),
        overlaps: true,
        ..Grid::linear(instance.entry, tiles.min(sms), instance.threads())
    };
    Ok(Launch::of_parameter(LinearSm90.name(), grid, launch))
}

/// The launch that packs a matrix of these sizes.
///
/// # Errors
/// [`Error::TooLarge`] if that takes more blocks than a grid can have.
pub(crate) fn pack(
    sizes: &LinearSizes,
    [values, scales]: [Address; 2],
    panels: Address,
    invalid: Address,
) -> Result<Launch, Error> {
    let (n, k) = (sizes.n as u32, sizes.k as u32);
    let pack = Pack { values, scales, panels, invalid, n, k, token_type: output_code(sizes.dtype), unused: 0 };
    let blocks = Grid::blocks(Pack::blocks(n, k))?;
    Ok(Launch::of_parameter(LinearSm90.name(), Grid::linear(PACK_ENTRY, blocks, Pack::THREADS), pack))
}

/// Tiles of C.
fn tiles(instance: &Instance, m: u32, n: u32) -> u64 {
    u64::from(token_tiles(m, instance.tile_tokens)) * u64::from(n.div_ceil(instance.columns()))
}

/// The instance that is expected to take least time for `m` tokens, not 0.
fn instance(sizes: &LinearSizes, m: u32, sms: u32) -> &'static Instance {
    let token_type = token_type(sizes.dtype);
    let instances = INSTANCES.iter().filter(|instance| instance.token_type == token_type);
    let cycles = |instance: &&Instance| {
        let tokens = tile_size(m, token_tiles(m, instance.tile_tokens));
        let (tiles, sms) = (tiles(instance, m, sizes.n as u32), u64::from(sms));
        tiles.div_ceil(sms) * k_block_cycles(instance, tokens, tiles.min(sms))
    };
    instances.min_by_key(cycles).expect("there are instances for both types")
}

/// About how many cycles a block takes for a k-block of a tile of so many tokens, while so many blocks run. Measured on an H200: some
/// for the k-block, some for each token; and all blocks together copy about 1 KB of tokens a cycle from the cache.
fn k_block_cycles(instance: &Instance, tokens: u32, blocks: u64) -> u64 {
    const K_BLOCK: u64 = 700;
    const TOKEN: u64 = 15;
    /// More, where a warpgroup has 128 columns.
    const WIDE: u64 = 650;
    /// Blocks' tokens that are copied in a cycle, of 256 bytes in a k-block.
    const TOKENS_OF_CYCLE: u64 = 4;
    let tokens = u64::from(instance.shape().mma_n(tokens));
    let wide = if instance.narrow { 0 } else { WIDE };
    (K_BLOCK + TOKEN * tokens + wide).max(blocks * tokens / TOKENS_OF_CYCLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::OutDtype;

    fn sizes(n: usize, k: usize) -> LinearSizes {
        LinearSizes { n, k, dtype: OutDtype::Bf16, bias: false }
    }

    #[test]
    fn few_tokens_get_tiles_of_few_columns_and_many_tokens_large_tiles() {
        for (n, m, entry) in [
            (4096, 1, "linear_bf16_t16"),
            (7168, 16, "linear_bf16_t16"),
            (5120, 64, "linear_bf16_t64"),
            (4096, 256, "linear_bf16_t64_c128"),
            (4096, 512, "linear_bf16_t128_c256"),
            (4096, 4096, "linear_bf16_t128_c256"),
        ] {
            assert_eq!(instance(&sizes(n, 7168), m, 132).entry, entry, "{m} tokens, N = {n}");
        }
    }

    #[test]
    fn a_layer_of_592_columns_goes_to_every_instance() {
        // `tests/tests/linear.rs` compares the bits of these.
        let of =
            [(1, 132), (64, 10), (1, 5), (128, 5), (128, 3)].map(|(m, sms)| instance(&sizes(592, 208), m, sms).entry);
        let expected = INSTANCES.iter().filter(|instance| instance.token_type == token_type(OutDtype::Bf16));
        assert!(expected.map(|instance| instance.entry).eq(of), "{of:?}");
    }

    #[test]
    fn narrow_tiles_make_as_many_blocks_as_there_are_64_columns() {
        let layer = |n| PlacedLinear { sizes: sizes(n, 2048), panels: 0x100, alpha: 0x80, bias: 0 };
        let arguments = LinearArguments { token_count: 16, tokens: 0x1000, token_pitch: 4096, output: 0x2000 };
        for n in [4096, 5120, 7168] {
            assert_eq!(launch(&layer(n), &arguments, 132).unwrap().grid.blocks, n as u32 / 64);
        }
    }

    #[test]
    fn addresses_that_no_copy_takes_are_refused() {
        let layer = PlacedLinear { sizes: sizes(64, 48), panels: 0x100, alpha: 0x80, bias: 0 };
        let right = LinearArguments { token_count: 2, tokens: 0x1000, token_pitch: 96, output: 0x2000 };
        assert!(launch(&layer, &right, 132).is_ok());
        for wrong in [
            LinearArguments { tokens: 0x1008, ..right },
            LinearArguments { token_pitch: 104, ..right },
            LinearArguments { token_pitch: 80, ..right },
            LinearArguments { output: 0x2002, ..right },
        ] {
            let error = launch(&layer, &wrong, 132).err().unwrap().to_string();
            assert!(error.contains("of 16"), "{error}");
        }
        let many = LinearArguments { token_count: 1 << 32, ..right };
        assert!(matches!(launch(&layer, &many, 132), Err(Error::TooLarge)));
    }
}
