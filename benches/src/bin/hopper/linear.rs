//! Times linear layers between two events, from tokens in device memory to the output there.

use std::cell::Cell;

use anyhow::{Context, bail, ensure};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use nvfp4::backend::Layer;
use nvfp4::backend::cuda::{Cuda, CudaLinear, LinearArguments};
use nvfp4::generate::Generator;
use nvfp4::linear::compare::compare_sample;
use nvfp4::linear::{LinearOutput, LinearStep, LinearWeights, generate};
use nvfp4::problem::{TokenDtype, TokenFormat};

use super::random::{SEED, random_matrix};
use super::times::{device_times, host_times};

/// Number of elements compared with the reference.
const COMPARED: usize = 4096;

/// A layer with one token format, and copies of all memory that a call uses.
pub struct LinearBench {
    sets: Vec<Set>,
    next: Cell<usize>,
    stream: Stream,
    /// Memory that no call uses.
    idle: DeviceBuffer<u8>,
}

struct Set {
    layer: CudaLinear,
    arguments: LinearArguments,
    output: DeviceBuffer<u16>,
    _tokens: DeviceBuffer<u16>,
    /// 256 bytes larger than needed, for the alignment.
    workspace: DeviceBuffer<u8>,
}

impl LinearBench {
    /// Makes a layer `[n, k]` with random weights and `tokens` bf16 tokens, and checks it. There are at least two
    /// copies, and their weights have at least `rotate_bytes` bytes together.
    pub fn new(
        gpu: &Cuda,
        [tokens, n, k]: [usize; 3],
        format: TokenFormat,
        rotate_bytes: usize,
    ) -> anyhow::Result<Self> {
        let dtype = TokenDtype::Bf16;
        let weights = LinearWeights::new(dtype, random_matrix(n, k, 0)?)?.with_token_format(format);
        let step = LinearStep::new(&weights, generate::inputs(Generator::Gaussian, tokens, k, dtype, SEED)?)?;
        let mut layer = gpu.prepare_linear_layer(&weights)?;
        let mut expected = LinearOutput::new(&step);
        layer.execute(&step, &mut expected)?;
        let found = compare_sample(&weights, &step, &expected, COMPARED, SEED);
        if let Some(first) = found.first {
            bail!("{} of {} elements are wrong, first {first}", found.mismatches, found.checked);
        }
        let (stream, idle) = (Stream::new(StreamFlags::NON_BLOCKING, None)?, DeviceBuffer::zeroed(64 << 20)?);
        let mut this = Self { sets: Vec::new(), next: Cell::new(0), stream, idle };
        for _ in 0..rotate_bytes.div_ceil(layer.weight_bytes()).max(2) {
            let set = Set::new(gpu.prepare_linear_layer(&weights)?, &step)?;
            set.launch(&this.stream)?;
            this.stream.synchronize()?;
            let mut bits = vec![0; expected.out.len()];
            set.output.copy_to(&mut bits)?;
            ensure!(bits == expected.out, "a copy's output has different bits");
            this.sets.push(set);
        }
        Ok(this)
    }

    /// Queues a call with the least recently used set. Returns the number of launches.
    fn queue(&self) -> anyhow::Result<usize> {
        self.next.set((self.next.get() + 1) % self.sets.len());
        self.sets[self.next.get()].launch(&self.stream)
    }

    /// Returns the device time of each of `runs` runs, in µs.
    pub fn round(&self, runs: usize) -> anyhow::Result<Vec<f64>> {
        device_times(&self.stream, Some(&self.idle), runs, || self.queue().map(|_| ()))
    }

    /// Returns the host time to queue each of `runs` runs, in µs, and the launches per run.
    pub fn host_times(&self, runs: usize) -> anyhow::Result<(Vec<f64>, usize)> {
        host_times(&self.stream, runs, || self.queue())
    }
}

impl Set {
    fn new(layer: CudaLinear, step: &LinearStep<'_>) -> anyhow::Result<Self> {
        let k = layer.sizes().k;
        let numbers: Vec<u16> = (0..step.tokens()).flat_map(|token| step.token(token).to_vec()).collect();
        let tokens = DeviceBuffer::from_slice(&numbers)?;
        // NaN, so that an unwritten element is found.
        let output = DeviceBuffer::from_slice(&vec![0xFFFF; step.tokens() * layer.sizes().n])?;
        let workspace = DeviceBuffer::zeroed(layer.workspace_bytes(step.tokens()) + 256)?;
        let arguments = LinearArguments {
            token_count: step.tokens(),
            tokens: tokens.as_device_ptr().as_raw(),
            token_pitch: size_of::<u16>() * k,
            output: output.as_device_ptr().as_raw(),
        };
        Ok(Self { layer, arguments, output, _tokens: tokens, workspace })
    }

    fn launch(&self, stream: &Stream) -> anyhow::Result<usize> {
        let workspace = self.workspace.as_device_ptr().as_raw().next_multiple_of(256);
        // SAFETY: the stream belongs to the GPU's primary context. The operands and the workspace have the sizes that
        // the layer needs, and live until the stream has completed the call.
        unsafe { self.layer.launch(&self.arguments, workspace, stream.as_inner()) }.context("a linear layer")
    }
}
