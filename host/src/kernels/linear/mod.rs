//! How a linear layer is launched: a function of sizes and addresses, which knows no device.
//!
//! Tokens of 16 bits take one launch, and there is a kernel for each family of cards. All of them take the same parameter and the same packed
//! weights, and each sums K in the same order in every instance, so a token's numbers do not depend on which one is chosen. Tokens of other
//! formats take two, and kernels of an MoE layer (`kernels.rs`).

#[cfg(all(test, feature = "cuda"))]
pub(super) mod fake;
mod instance;
mod kernels;
#[cfg(any(test, feature = "emulated"))]
pub(crate) mod panels;
pub(crate) mod weights;
pub(crate) mod workspace;

use std::cmp::Reverse;

use kernels_gpu::linear::{BOX_BYTES, Launch as Parameter, PACK_ENTRY, Pack, TokenMap};

pub(super) use instance::{Cut, Instance, cycles_of_warps_alone};
pub(crate) use kernels::{LinearKernels, kernel_named};

use super::group::Address;
use super::kernel::{Entry, Kernel};
use super::launch::{Grid, Launch, Parameter as LaunchParameter, output_code};
use super::moe::operand_type;
use super::tensor_map::MapArguments;
use crate::error::Error;
use crate::linear::LinearSizes;
use crate::problem::Op;

/// A kernel of linear layers.
pub(crate) trait LinearKernel: Kernel {
    /// Every instance, those with fewest tokens and columns first.
    fn instances(&self) -> Vec<Instance>;

    /// About how many cycles a multiprocessor takes for a k-block of all its tiles of C with n columns.
    fn k_block_cycles(&self, cut: Cut, n: u32, sms: u32) -> u64;

    /// What is expected to take least time for `m` tokens, not 0; of several the one with the largest tiles.
    fn cut(&self, sizes: &LinearSizes, m: u32, sms: u32) -> Cut {
        let operand_type = operand_type(sizes.dtype);
        let instances = self.instances().into_iter().filter(|instance| instance.operand_type() == operand_type);
        let cycles = |cut: &Cut| Reverse(self.k_block_cycles(*cut, sizes.n as u32, sms));
        instances.flat_map(|instance| instance.cuts(m)).max_by_key(cycles).expect("there are instances for both types")
    }

    /// The launch of a call with tokens, on a device of so many multiprocessors.
    ///
    /// # Errors
    /// If the arguments are not aligned; [`Error::TooLarge`] if there are more tiles than a kernel can count.
    fn launch(&self, layer: &PlacedLinear, arguments: &LinearArguments, sms: u32) -> Result<Launch, Error> {
        let PlacedLinear { sizes, packed: panels, alpha, bias, .. } = *layer;
        arguments.check(&sizes)?;
        let (m, n) = (arguments.token_count as u32, sizes.n as u32);
        let cut @ Cut { instance, token_tiles, .. } = self.cut(&sizes, m, sms);
        let tiles = Grid::blocks(cut.tiles(n))?;
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
            token_tiles,
        };
        let grid = Grid {
            shared_bytes: instance.shared_bytes(),
            overlaps: !instance.by_pieces(),
            ..Grid::linear(instance.entry(), instance.blocks(tiles, sms), instance.threads())
        };
        if instance.by_pieces() {
            return Ok(Launch::of_parameter(self.name(), grid, parameter));
        }
        let map = MapArguments {
            address: parameter.tokens,
            row_bytes: 2 * parameter.k,
            row_pitch: parameter.token_pitch,
            rows: m,
            box_bytes: BOX_BYTES,
            box_rows: cut.box_tokens(),
            swizzled: true,
        };
        Ok(Launch::new(self.name(), grid, 0, move |writer| {
            let token_map = TokenMap(bytemuck::cast(writer.encode(&map)?));
            Ok(LaunchParameter::new(Parameter { token_map, ..parameter }))
        }))
    }

    /// The launch that packs a matrix of these sizes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if that takes more blocks than a grid can have.
    fn pack(
        &self,
        sizes: &LinearSizes,
        [values, scales]: [Address; 2],
        panels: Address,
        invalid: Address,
    ) -> Result<Launch, Error> {
        let (n, k) = (sizes.n as u32, sizes.k as u32);
        let pack = Pack { values, scales, panels, invalid, n, k, operand_type: output_code(sizes.dtype), unused: 0 };
        let blocks = Grid::blocks(Pack::blocks(n, k))?;
        Ok(Launch::of_parameter(self.name(), Grid::linear(PACK_ENTRY, blocks, Pack::THREADS), pack))
    }
}

/// The entries of a kernel with these instances: theirs, and the one that packs.
pub(super) fn entries(instances: Vec<Instance>) -> Vec<Entry> {
    let pack = Entry { name: PACK_ENTRY, op: None, threads: Pack::THREADS, shared_bytes: 0 };
    let product = |of: Instance| Entry {
        name: of.entry(),
        op: Some(Op::Plain),
        threads: of.threads(),
        shared_bytes: of.shared_bytes(),
    };
    instances.into_iter().map(product).chain([pack]).collect()
}

/// A layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedLinear {
    pub sizes: LinearSizes,
    /// Its panels; with tokens in FP8 the units of an MoE layer's matrix, with tokens in NVFP4 its values and then its scales.
    pub packed: Address,
    /// N numbers of f32: the global scale of each row.
    pub alpha: Address,
    /// N numbers of f32; 0 if there is no bias.
    pub bias: Address,
    /// For tokens in NVFP4: their global scale, f32, or 0.0 if each is to have one of its own.
    pub input_scale: Address,
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

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use super::kernels::{KERNELS, kernel_of};
    use super::*;
    use crate::kernels::wgmma::linear_sm90::LinearSm90;
    use crate::problem::{TokenDtype, TokenFormat};

    /// A layer of these sizes, whose tokens are bf16.
    pub fn sizes(n: usize, k: usize) -> LinearSizes {
        LinearSizes { n, k, dtype: TokenDtype::Bf16, bias: false, token_format: TokenFormat::Bits16 }
    }

    /// The entry that a kernel takes for `m` tokens.
    pub fn entry(kernel: &dyn LinearKernel, n: usize, k: usize, m: u32, sms: u32) -> &'static str {
        kernel.cut(&sizes(n, k), m, sms).instance.entry()
    }

    /// A call with so many tokens, all addresses aligned.
    pub fn launch(kernel: &dyn LinearKernel, n: usize, m: usize, sms: u32) -> Launch {
        let layer = PlacedLinear { sizes: sizes(n, 2048), packed: 0x100, alpha: 0, bias: 0, input_scale: 0 };
        let arguments = LinearArguments { token_count: m, tokens: 0x1000, token_pitch: 4096, output: 0x2000 };
        kernel.launch(&layer, &arguments, sms).unwrap()
    }

    #[test]
    fn a_device_gets_the_kernel_of_its_family() {
        let name = |device| kernel_of(device).map(|kernel| kernel.name());
        let devices = [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)];
        let [portable, hopper, consumer] = ["linear_sm80", "linear_sm90", "linear_sm120"].map(Some);
        assert_eq!(devices.map(name), [None, portable, hopper, portable, consumer, consumer]);
    }

    #[test]
    fn a_layer_of_592_columns_goes_to_every_instance() {
        // `tests/tests/linear.rs` compares the bits of these, and a self-test computes them.
        for kernel in KERNELS {
            let few = [(1, 132), (16, 19), (16, 5), (32, 19), (32, 10), (32, 5), (64, 10)];
            let of = few.into_iter().chain([14, 7, 3, 1].map(|sms| (128, sms))).chain([(200, 1)]);
            let of: BTreeSet<_> = of.map(|(m, sms)| entry(kernel, 592, 208, m, sms)).collect();
            let instances = kernel.instances();
            let expected =
                instances.iter().filter(|instance| instance.operand_type() == operand_type(TokenDtype::Bf16));
            assert_eq!(expected.map(|instance| instance.entry()).collect::<BTreeSet<_>>(), of);
        }
    }

    #[test]
    fn addresses_that_no_copy_takes_are_refused() {
        let layer = PlacedLinear { sizes: sizes(64, 48), packed: 0x100, alpha: 0x80, bias: 0, input_scale: 0 };
        let right = LinearArguments { token_count: 2, tokens: 0x1000, token_pitch: 96, output: 0x2000 };
        assert!(LinearSm90.launch(&layer, &right, 132).is_ok());
        for wrong in [
            LinearArguments { tokens: 0x1008, ..right },
            LinearArguments { token_pitch: 104, ..right },
            LinearArguments { token_pitch: 80, ..right },
            LinearArguments { output: 0x2002, ..right },
        ] {
            let error = LinearSm90.launch(&layer, &wrong, 132).err().unwrap().to_string();
            assert!(error.contains("of 16"), "{error}");
        }
        let many = LinearArguments { token_count: 1 << 32, ..right };
        assert!(matches!(LinearSm90.launch(&layer, &many, 132), Err(Error::TooLarge)));
    }
}
