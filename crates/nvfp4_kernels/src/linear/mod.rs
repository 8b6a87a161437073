//! Launches of a linear layer: functions of sizes and addresses, which know no device.
//!
//! A call with 16-bit tokens takes one launch. There is a kernel per family of GPUs, and all take the same parameter
//! and the same packed weights. A kernel sums K in one or two parts ([`LinearKernel::parts`]). All instances with the same
//! number of parts sum K in the same order, so a token's output depends neither on the chosen instance nor on other
//! tokens. A call with FP8 or NVFP4 tokens takes two launches, of kernels of MoE layers (`kernels.rs`).

mod explain;
#[cfg(feature = "fake")]
pub(super) mod fake;
mod instance;
mod kernels;
pub mod panels;
pub mod weights;
pub mod workspace;

use std::cmp::Reverse;

use kernels_gpu::linear::{BOX_BYTES, Launch as Parameter, PACK_ENTRY, Pack, TokenMap};

pub use explain::{check_left, explain, multiplying_entry};
pub(super) use instance::{Cut, Instance, cycles_of_warps_alone};
pub use kernels::{LinearKernels, kernel_named};

use super::group::Address;
use super::kernel::{Entry, Kernel, none_left};
use super::launch::{Grid, Launch, Parameter as LaunchParameter, output_code};
use super::moe::operand_type;
use super::refused::Refused;
use super::tensor_map::MapArguments;
use nvfp4_core::Error;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::Op;

/// A kernel of linear layers.
pub trait LinearKernel: Kernel {
    /// Returns every instance, sorted by tokens and columns per tile, fewest first.
    fn instances(&self) -> Vec<Instance>;

    /// Estimates the cycles that an SM takes for one k-block of all its CTAs, for C with `n` columns.
    fn k_block_cycles(&self, cut: Cut, n: u32, sms: u32) -> u64;

    /// Returns the number of parts in which K is summed. It depends neither on the number of tokens nor on the GPU,
    /// because the bits of the output depend on it.
    fn parts(&self, _n: u32, _k: u32) -> u32 {
        1
    }

    /// Returns the instance and tiling with the least estimated time for `m` tokens, not 0. Of several, the one with
    /// the largest tiles. `None`: every instance for the layer is refused.
    fn cut(&self, sizes: &LinearSizes, m: u32, sms: u32, refused: &Refused) -> Option<Cut> {
        let (n, k) = (sizes.n as u32, sizes.k as u32);
        let cycles = |cut: &Cut| Reverse(self.k_block_cycles(*cut, n, sms) * cut.k_blocks(k));
        self.fitting(sizes, refused).flat_map(|instance| instance.cuts(m)).max_by_key(cycles)
    }

    /// Returns the instances for a layer's type and number of parts of K that are not refused. Instances with another
    /// number of parts give other bits, so they never replace these.
    fn fitting(&self, sizes: &LinearSizes, refused: &Refused) -> std::vec::IntoIter<Instance> {
        let (parts, operand_type) = (self.parts(sizes.n as u32, sizes.k as u32), operand_type(sizes.dtype));
        let is_it = |of: &Instance| of.operand_type() == operand_type && of.parts() == parts;
        let is_left = |of: &Instance| is_it(of) && !refused.contains(of.entry());
        self.instances().into_iter().filter(is_left).collect::<Vec<_>>().into_iter()
    }

    /// Returns the launch of a call with at least one token, on a device with `sms` SMs.
    ///
    /// # Errors
    /// If the arguments are not aligned; [`Error::TooLarge`] if there are more tiles than a kernel can count;
    /// [`Error::NotComputed`] if every instance for the layer is refused.
    fn launch(
        &self,
        layer: &PlacedLinear,
        arguments: &LinearArguments,
        sms: u32,
        refused: &Refused,
    ) -> Result<Launch, Error> {
        let PlacedLinear { sizes, packed: panels, alpha, bias, .. } = *layer;
        arguments.check(&sizes)?;
        let (m, n) = (arguments.token_count as u32, sizes.n as u32);
        let cut = self.cut(&sizes, m, sms, refused).ok_or_else(|| none_left(self, refused))?;
        let Cut { instance, token_tiles, .. } = cut;
        let ctas = Grid::blocks(cut.ctas(n))?;
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
            cluster: instance.cluster(),
            ..Grid::linear(instance.entry(), instance.blocks(ctas, sms), instance.threads())
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

    /// Returns the launch that packs a matrix of these sizes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
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

/// Returns the entries of a kernel: one per instance, and the entry that packs.
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

/// A linear layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedLinear {
    /// N, K and the formats of the layer.
    pub sizes: LinearSizes,
    /// Address of the packed weights: panels for 16-bit tokens, units (as in an MoE layer) for FP8 tokens, values and
    /// then scales for NVFP4 tokens.
    pub packed: Address,
    /// Address of the global scale of each row, `[N]`, f32.
    pub alpha: Address,
    /// Address of the biases, `[N]`, f32. 0: the layer has no bias.
    pub bias: Address,
    /// Address of the input scale for NVFP4 tokens, f32. The value 0.0 gives each token its own global scale. The
    /// address is 0 for other token formats.
    pub input_scale: Address,
}

/// Inputs and outputs of a call of a linear layer: addresses in the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearArguments {
    /// Number of tokens, M; may be 0.
    pub token_count: usize,
    /// Address of the tokens X, a multiple of 16: M rows of K numbers of the layer's token type.
    pub tokens: Address,
    /// Bytes from one token to the next, a multiple of 16.
    pub token_pitch: usize,
    /// Address of the output, a multiple of 16: M rows of N numbers of the layer's token type, without gaps.
    pub output: Address,
}

impl LinearArguments {
    /// Checks alignment, pitch and the number of tokens.
    pub(super) fn check(&self, sizes: &LinearSizes) -> Result<(), Error> {
        let row_bytes = size_of::<u16>() * sizes.k;
        let Self { tokens, token_pitch, output, token_count } = *self;
        if !tokens.is_multiple_of(16) || !token_pitch.is_multiple_of(16) || token_pitch < row_bytes {
            return Err(Error::Invalid(format!(
                "tokens at {tokens:#x}, {token_pitch} bytes apart; \
                 both must be multiples of 16, and a token has {row_bytes} bytes"
            )));
        }
        if !output.is_multiple_of(16) {
            return Err(Error::Invalid(format!("output at {output:#x}; the address must be a multiple of 16")));
        }
        u32::try_from(token_count).map(|_| ()).map_err(|_| Error::TooLarge)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use super::kernels::{KERNELS, kernel_of};
    use super::*;
    use crate::wgmma::linear_sm90::LinearSm90;
    use nvfp4_core::problem::{TokenDtype, TokenFormat};

    /// Returns a layer's sizes, with bf16 tokens.
    pub fn sizes(n: usize, k: usize) -> LinearSizes {
        LinearSizes { n, k, dtype: TokenDtype::Bf16, bias: false, token_format: TokenFormat::Bits16 }
    }

    /// Returns the entry that a kernel chooses for `m` tokens.
    pub fn entry(kernel: &dyn LinearKernel, n: usize, k: usize, m: u32, sms: u32) -> &'static str {
        kernel.cut(&sizes(n, k), m, sms, &Refused::default()).unwrap().instance.entry()
    }

    /// Returns the launch of a call with `m` tokens and aligned addresses.
    pub fn launch(kernel: &dyn LinearKernel, n: usize, m: usize, sms: u32) -> Launch {
        let layer = PlacedLinear { sizes: sizes(n, 2048), packed: 0x100, alpha: 0, bias: 0, input_scale: 0 };
        let arguments = LinearArguments { token_count: m, tokens: 0x1000, token_pitch: 4096, output: 0x2000 };
        kernel.launch(&layer, &arguments, sms, &Refused::default()).unwrap()
    }

    #[test]
    fn devices_get_the_kernel_of_their_family() {
        let name = |device| kernel_of(device).map(|kernel| kernel.name());
        let devices = [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)];
        let [portable, hopper, consumer] = ["linear_sm80", "linear_sm90", "linear_sm120"].map(Some);
        assert_eq!(devices.map(name), [None, portable, hopper, portable, consumer, consumer]);
    }

    #[test]
    fn layer_of_592_columns_reaches_every_instance() {
        // `tests/tests/suite/linear.rs` compares the bits of these calls, and a self-test computes them.
        for kernel in KERNELS {
            let few = [(1, 132), (16, 19), (16, 5), (32, 19), (32, 10), (32, 5), (64, 10)];
            let of = few.into_iter().chain([14, 7, 3, 1].map(|sms| (128, sms))).chain([(200, 1)]);
            let of: BTreeSet<_> = of.map(|(m, sms)| entry(kernel, 592, 208, m, sms)).collect();
            assert_eq!(entries_of(kernel, 1), of);
        }
    }

    /// Returns the entries of a kernel for bf16 tokens and this number of parts of K.
    fn entries_of(kernel: &dyn LinearKernel, parts: u32) -> BTreeSet<&'static str> {
        let is_it = |of: &Instance| of.operand_type() == operand_type(TokenDtype::Bf16) && of.parts() == parts;
        kernel.instances().into_iter().filter(is_it).map(Instance::entry).collect()
    }

    #[test]
    fn layer_of_208_columns_and_long_k_reaches_every_instance_with_two_parts() {
        // `tests/tests/suite/linear.rs` compares the bits of these calls, and a self-test computes them.
        let calls = [(1, 132), (16, 12), (32, 12), (64, 12), (96, 12), (128, 1), (200, 1)];
        let of: BTreeSet<_> = calls.map(|(m, sms)| entry(&LinearSm90, 208, 12304, m, sms)).into();
        assert_eq!(entries_of(&LinearSm90, 2), of);
    }

    #[test]
    fn misaligned_addresses_and_pitches_are_refused() {
        let layer = PlacedLinear { sizes: sizes(64, 48), packed: 0x100, alpha: 0x80, bias: 0, input_scale: 0 };
        let right = LinearArguments { token_count: 2, tokens: 0x1000, token_pitch: 96, output: 0x2000 };
        assert!(LinearSm90.launch(&layer, &right, 132, &Refused::default()).is_ok());
        for wrong in [
            LinearArguments { tokens: 0x1008, ..right },
            LinearArguments { token_pitch: 104, ..right },
            LinearArguments { token_pitch: 80, ..right },
            LinearArguments { output: 0x2002, ..right },
        ] {
            let error = LinearSm90.launch(&layer, &wrong, 132, &Refused::default()).err().unwrap().to_string();
            assert!(error.contains("of 16"), "{error}");
        }
        let many = LinearArguments { token_count: 1 << 32, ..right };
        assert!(matches!(LinearSm90.launch(&layer, &many, 132, &Refused::default()), Err(Error::TooLarge)));
    }
}
