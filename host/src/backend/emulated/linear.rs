//! Linear layers in the emulator.

use std::time::{Duration, Instant};

use kernels_gpu::units::OperandType;
use ptx_emulator::{Buffer, Device, Report as Counters};

use super::gpu::{Emulated, INTERMEDIATE, OUTPUT, TOKENS, WEIGHTS, upload};
use crate::Error;
use crate::backend::{Layer, Linear};
use crate::linear::{LinearOutput, LinearStep, LinearWeights};
use crate::problem::TokenFormat;
use nvfp4_kernels::launch::Launch;
use nvfp4_kernels::layer::moe_pack::row_order::RowOrder;
use nvfp4_kernels::layer::moe_pack::{nvfp4, units};
use nvfp4_kernels::linear::workspace::Workspace;
use nvfp4_kernels::linear::{LinearArguments, LinearKernels, PlacedLinear, panels};
use nvfp4_kernels::moe::operand_type;

/// NaN as a number.
const POISON: u16 = 0xFFFF;

/// A layer in an emulated device's memory.
pub(super) struct EmulatedLinear {
    gpu: Emulated,
    kernels: LinearKernels,
    /// Name of the kernel that multiplies.
    kernel: &'static str,
    device: Device,
    layer: PlacedLinear,
    /// Tokens and output of the last step. The next step frees them first, so no step can use the buffers of another.
    step: Vec<Buffer>,
    /// Number of launches of the last step, and their counters.
    done: Option<(usize, Counters)>,
}

impl EmulatedLinear {
    /// Creates a layer on an empty device.
    pub fn new(gpu: Emulated, weights: &LinearWeights<'_>) -> Result<Self, Error> {
        let (kernels, sizes) = (gpu.linear_kernels(), weights.sizes());
        let kernel = kernels.check(sizes.token_format, &gpu.arch)?.product.name();
        let mut device = gpu.memory();
        let packed = match sizes.token_format {
            TokenFormat::Bits16 => panels::pack(weights.matrix(), operand_type(sizes.dtype)),
            TokenFormat::Fp8 => units::pack(weights.matrix(), RowOrder::Kept, OperandType::E4m3),
            TokenFormat::Nvfp4 => nvfp4::pack_nvfp4(std::iter::once(weights.matrix())),
        };
        let input_scale = match sizes.token_format {
            TokenFormat::Nvfp4 => upload(&mut device, &[weights.input_scale().unwrap_or(0.0)], WEIGHTS).address,
            _ => 0,
        };
        let layer = PlacedLinear {
            sizes,
            packed: upload(&mut device, &packed, WEIGHTS).address,
            alpha: upload(&mut device, &vec![weights.matrix().global_scale(); sizes.n], WEIGHTS).address,
            bias: weights.bias().map_or(0, |bias| upload(&mut device, &bias, WEIGHTS).address),
            input_scale,
        };
        Ok(Self { gpu, kernels, kernel, device, layer, step: Vec::new(), done: None })
    }

    /// Returns the launches of a call. Each part of its workspace is a separate allocation, filled with NaN.
    fn launches_of(&mut self, arguments: &LinearArguments) -> Result<Vec<Launch>, Error> {
        let workspace = Workspace::new(&self.layer.sizes, arguments.token_count, |bytes| {
            let poison = vec![POISON; bytes as usize / size_of_val(&POISON)];
            let part = upload(&mut self.device, &poison, INTERMEDIATE);
            self.step.push(part);
            part.address
        });
        self.kernels.launches(&self.layer, arguments, workspace, self.gpu.sms)
    }
}

impl Layer<Linear> for EmulatedLinear {
    fn kernel(&self) -> &str {
        self.kernel
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        step.check_fits(self.layer.sizes)?;
        output.check_fits(step)?;
        self.done = None;
        for buffer in self.step.drain(..) {
            self.device.free(buffer);
        }
        if step.tokens() == 0 {
            return Ok(Duration::ZERO);
        }
        let k = self.layer.sizes.k;
        let stride = step.stride().next_multiple_of(8);
        // The bytes between tokens are NaN as numbers. Nothing follows the last token.
        let mut tokens = vec![POISON; (step.tokens() - 1) * stride + k];
        for (token, to) in tokens.chunks_mut(stride).enumerate() {
            to[..k].copy_from_slice(step.token(token));
        }
        // The poisoned output is copied too, so that elements that the kernel does not write stay poisoned.
        let [tokens, out] =
            [(&tokens, TOKENS), (&output.out, OUTPUT)].map(|(array, name)| upload(&mut self.device, array, name));
        self.step.extend([tokens, out]);
        let arguments = LinearArguments {
            token_count: step.tokens(),
            tokens: tokens.address,
            token_pitch: size_of::<u16>() * stride,
            output: out.address,
        };
        let launches = self.launches_of(&arguments)?;
        self.gpu.clock.iter().for_each(|clock| clock.begin());
        let start = Instant::now();
        let done = launches.iter().map(|launch| self.gpu.launch(&mut self.device, launch, &mut self.step));
        let done = done.collect::<Result<Vec<_>, _>>();
        let time = start.elapsed();
        output.out.copy_from_slice(&self.device.download(out));
        self.done = done?.into_iter().reduce(add).map(|counters| (launches.len(), counters));
        Ok(time)
    }

    fn launches(&self) -> Option<usize> {
        self.done.as_ref().map(|(launches, _)| *launches)
    }

    fn counters(&self) -> Option<&Counters> {
        self.done.as_ref().map(|(_, counters)| counters)
    }
}

/// Adds the counters of two launches.
fn add(mut first: Counters, second: Counters) -> Counters {
    first.add(&second);
    first
}

#[cfg(test)]
mod tests {
    use kernels_gpu::linear::matrix_bytes;

    use super::*;
    use crate::backend::emulated::{Options, arches};
    use crate::format::Matrix;
    use crate::linear::LinearSizes;
    use crate::problem::TokenDtype;

    #[test]
    fn device_packs_like_the_host_and_finds_invalid_scales() {
        const SIZES: [(usize, usize); 4] = [(16, 16), (80, 144), (64, 128), (144, 272)];
        for (arch, (n, k)) in arches().into_iter().flat_map(|arch| SIZES.map(|size| (arch, size))) {
            let gpu = Emulated::new(arch, Options::default()).unwrap();
            let kernels = gpu.linear_kernels();
            let values: Vec<u8> = (0..n * k / 2).map(|i| (i * 97 + i / 251) as u8).collect();
            let mut scales: Vec<u8> = (0..n * k / 16).map(|i| (i * 31 % 127) as u8).collect();
            let matrix = Matrix::new(n, k, values.clone(), scales.clone(), 1.0).unwrap();
            let is_invalid = scales.len() > 5;
            for (dtype, spoil) in [(TokenDtype::F16, false), (TokenDtype::Bf16, false), (TokenDtype::Bf16, true)] {
                if spoil && is_invalid {
                    (scales[3], scales[5]) = (0x80, 0x7f);
                }
                let mut device = gpu.memory();
                let to = device.allocate(matrix_bytes(n as u32, k as u32));
                let operands = [device.upload(&values).address, device.upload(&scales).address];
                let invalid = device.upload(&[u64::MAX]);
                let sizes = LinearSizes { n, k, dtype, bias: false, token_format: TokenFormat::Bits16 };
                let launch = kernels.pack(&sizes, operands, to.address, invalid.address).unwrap();
                gpu.launch(&mut device, &launch, &mut Vec::new()).unwrap();
                let found = device.download::<u64>(invalid)[0];
                if spoil && is_invalid {
                    assert_eq!(found, 3, "{n}×{k}");
                } else {
                    assert_eq!(found, u64::MAX);
                    let of_host = panels::pack(&matrix, operand_type(dtype));
                    assert!(device.download::<u8>(to) == of_host, "{n}×{k} {dtype:?}");
                }
            }
        }
    }
}
