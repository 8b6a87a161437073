//! A linear layer on Hopper, `kernels-gpu/src/linear_sm90/`: one launch, a function of sizes and addresses.
//!
//! Products are those of a warpgroup, or for few tokens those of a warp (`by_warp/` there). Every instance sums K in
//! the same order, so a token's numbers do not depend on which one is chosen.

#[cfg(all(test, feature = "cuda"))]
mod fake;
#[cfg(any(test, feature = "emulated"))]
pub(crate) mod panels;
pub(crate) mod weights;

use std::cmp::Reverse;

use kernels_gpu::linear_sm90::abi::{
    self as of_warpgroups, BOX_BYTES, Launch as Parameter, PACK_ENTRY, Pack, TokenMap,
};
use kernels_gpu::linear_sm90::by_warp::abi as of_warps;
use kernels_gpu::moe_route::abi::token_tiles;
use kernels_gpu::sm90::SHARED_BYTES;
use kernels_gpu::units::TokenType;

use super::group::Address;
use super::kernel::{Entry, Kernel};
use super::launch::{Grid, Launch, Parameter as LaunchParameter, output_code};
use super::moe::token_type;
use super::tensor_map::MapArguments;
use crate::error::Error;
use crate::linear::LinearSizes;
use crate::problem::Op;

/// The kernel.
pub(crate) struct LinearSm90;

impl Kernel for LinearSm90 {
    fn name(&self) -> &'static str {
        "linear_sm90"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let pack = Entry { name: PACK_ENTRY, op: None, threads: Pack::THREADS, shared_bytes: 0 };
        let product = |of: Instance| Entry {
            name: of.entry(),
            op: Some(Op::Plain),
            threads: of.threads(),
            shared_bytes: of.shared_bytes(),
        };
        Instance::all().map(product).chain([pack]).collect()
    }

    #[cfg(all(test, feature = "cuda"))]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

/// One way to compute a product.
#[derive(Clone, Copy, Debug)]
enum Instance {
    /// With the products of a warp. A block has one tile.
    OfWarps(&'static of_warps::Instance),
    /// With those of a warpgroup. As many blocks as the multiprocessors have room for take turns with tiles.
    OfWarpgroups(&'static of_warpgroups::Instance),
}

impl Instance {
    /// All of them, those with fewest tokens and columns first.
    fn all() -> impl Iterator<Item = Self> {
        let of_warps = of_warps::INSTANCES.iter().map(Self::OfWarps);
        of_warps.chain(of_warpgroups::INSTANCES.iter().map(Self::OfWarpgroups))
    }

    fn entry(self) -> &'static str {
        match self {
            Self::OfWarps(of) => of.entry,
            Self::OfWarpgroups(of) => of.entry,
        }
    }

    fn token_type(self) -> TokenType {
        match self {
            Self::OfWarps(of) => of.token_type,
            Self::OfWarpgroups(of) => of.token_type,
        }
    }

    /// The most tokens of a tile.
    fn tile_tokens(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.tile_tokens,
            Self::OfWarpgroups(of) => of.tile_tokens,
        }
    }

    fn columns(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.columns(),
            Self::OfWarpgroups(of) => of.columns(),
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.threads(),
            Self::OfWarpgroups(of) => of.threads(),
        }
    }

    fn shared_bytes(self) -> u32 {
        match self {
            Self::OfWarps(of) => of.shared_bytes(),
            Self::OfWarpgroups(of) => of.shared_bytes(),
        }
    }

    /// Tokens of a box of the token map.
    fn box_tokens(self, m: u32) -> u32 {
        match self {
            Self::OfWarps(of) => of.tile_tokens,
            Self::OfWarpgroups(of) => of.box_tokens(m, token_tiles(m, of.tile_tokens)),
        }
    }

    /// Tiles of C.
    fn tiles(self, m: u32, n: u32) -> u64 {
        u64::from(token_tiles(m, self.tile_tokens())) * u64::from(n.div_ceil(self.columns()))
    }

    /// Blocks of a grid with so many tiles.
    fn blocks(self, tiles: u32, sms: u32) -> u32 {
        match self {
            Self::OfWarps(_) => tiles,
            Self::OfWarpgroups(of) => tiles.min(sms.saturating_mul(of.shape().resident_blocks())),
        }
    }

    /// About how many cycles a multiprocessor takes for a k-block of all its tiles.
    fn k_block_cycles(self, m: u32, n: u32, sms: u32) -> u64 {
        let (tiles, sms) = (self.tiles(m, n), u64::from(sms));
        match self {
            Self::OfWarps(of) => warp_cycles(of, tiles, sms),
            Self::OfWarpgroups(of) => {
                let tokens = of.box_tokens(m, token_tiles(m, of.tile_tokens));
                let resident = tiles.div_ceil(sms).min(u64::from(of.shape().resident_blocks()));
                tiles.div_ceil(sms * resident) * warpgroup_cycles(of, u64::from(tokens), resident)
            }
        }
    }
}

/// A layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedLinear {
    pub sizes: LinearSizes,
    /// Its panels; with tokens in FP8 the units of an MoE layer's matrix.
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
    pub(super) fn check(&self, sizes: &LinearSizes) -> Result<(), Error> {
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
    let tiles = Grid::blocks(instance.tiles(m, n))?;
    let parameter = Parameter {
        token_map: TokenMap([0; 16]),
        tokens: arguments.tokens,
        token_pitch: arguments.token_pitch as u64,
        panels,
        c: arguments.output,
        alpha,
        bias,
        m,
        n,
        k: sizes.k as u32,
        token_tiles: token_tiles(m, instance.tile_tokens()),
    };
    let grid = Grid {
        shared_bytes: instance.shared_bytes(),
        overlaps: true,
        ..Grid::linear(instance.entry(), instance.blocks(tiles, sms), instance.threads())
    };
    let map = MapArguments {
        address: parameter.tokens,
        row_bytes: 2 * parameter.k,
        row_pitch: parameter.token_pitch,
        rows: m,
        box_bytes: BOX_BYTES,
        box_rows: instance.box_tokens(m),
        swizzled: true,
    };
    Ok(Launch::new(LinearSm90.name(), grid, 0, move |writer| {
        let token_map = TokenMap(bytemuck::cast(writer.encode(&map)?));
        Ok(LaunchParameter::new(Parameter { token_map, ..parameter }))
    }))
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

/// The instance that is expected to take least time for `m` tokens, not 0; of several the one with the largest tiles.
fn instance(sizes: &LinearSizes, m: u32, sms: u32) -> Instance {
    let token_type = token_type(sizes.dtype);
    let instances = Instance::all().filter(|instance| instance.token_type() == token_type);
    let cycles = |instance: &Instance| Reverse(instance.k_block_cycles(m, sizes.n as u32, sms));
    instances.max_by_key(cycles).expect("there are instances for both types")
}

/// About how many cycles a multiprocessor takes for a k-block of all its tiles, measured on an H200. A warp's products wait for one
/// another; what warps issue counts where a scheduler has several.
fn warp_cycles(instance: &of_warps::Instance, tiles: u64, sms: u64) -> u64 {
    /// Of a warp alone, and more for each further product of a word.
    const ALONE: u64 = 300;
    const ALONE_FOR_PRODUCT: u64 = 130;
    /// What a warp issues.
    const ISSUED: u64 = 220;
    const ISSUED_FOR_PRODUCT: u64 = 24;
    /// Threads of the warps that a multiprocessor's four schedulers issue at a time.
    const AT_A_TIME: u64 = 4 * 32;
    let resident = tiles.div_ceil(sms).min(u64::from(SHARED_BYTES / instance.shared_bytes()));
    let warps = (resident * u64::from(instance.threads())).div_ceil(AT_A_TIME);
    let further = instance.products() as u64 - 1;
    let alone = ALONE + ALONE_FOR_PRODUCT * further;
    tiles.div_ceil(sms * resident) * alone.max(warps * (ISSUED + ISSUED_FOR_PRODUCT * further))
}

/// About how many cycles `resident` blocks together take for a k-block of a tile of so many tokens each, measured on an H200: some for
/// the k-block, some for each token.
fn warpgroup_cycles(instance: &of_warpgroups::Instance, tokens: u64, resident: u64) -> u64 {
    match (instance.columns(), resident) {
        (64, 1) => 720 + 22 * tokens / 10,
        (64, _) => 870 + 6 * tokens,
        _ => 1190 + 9 * tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::TokenFormat;
    use crate::problem::OutDtype;

    fn sizes(n: usize, k: usize) -> LinearSizes {
        LinearSizes { n, k, dtype: OutDtype::Bf16, bias: false, token_format: TokenFormat::Bits16 }
    }

    #[test]
    fn few_tokens_get_tiles_of_few_columns_and_many_tokens_large_tiles() {
        for (n, m, entry) in [
            (4096, 1, "linear_mma8_bf16"),
            (7168, 16, "linear_mma16_bf16"),
            (4096, 32, "linear_mma32_bf16"),
            (4096, 128, "linear_bf16_t64"),
            (4096, 256, "linear_bf16_t128"),
            (4096, 512, "linear_bf16_t128"),
            (4096, 4096, "linear_bf16_t128_c256"),
        ] {
            assert_eq!(instance(&sizes(n, 7168), m, 132).entry(), entry, "{m} tokens, N = {n}");
        }
    }

    #[test]
    fn a_layer_of_592_columns_goes_to_every_instance() {
        // `tests/tests/linear.rs` compares the bits of these.
        let of = [(1, 132), (16, 19), (32, 19), (32, 5), (64, 10), (128, 3)];
        let of = of.map(|(m, sms)| instance(&sizes(592, 208), m, sms).entry());
        let expected = Instance::all().filter(|instance| instance.token_type() == token_type(OutDtype::Bf16));
        assert!(expected.map(Instance::entry).eq(of), "{of:?}");
    }

    #[test]
    fn few_tokens_make_as_many_blocks_as_there_are_32_columns() {
        let layer = |n| PlacedLinear { sizes: sizes(n, 2048), panels: 0x100, alpha: 0, bias: 0 };
        let arguments = LinearArguments { token_count: 16, tokens: 0x1000, token_pitch: 4096, output: 0x2000 };
        for n in [4096, 5120, 7168] {
            assert_eq!(launch(&layer(n), &arguments, 132).unwrap().grid.blocks, n as u32 / 32);
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
