//! This library's part of `benches/hopper/run.py`: times the library's kernels on GPU 0, on command.
//!
//! Commands come on standard input, one JSON object per line. Each answer is one JSON object on standard output.
//! Kernels are named as [`Variant`]s. A time is the device's time between an event before a run and an event after the
//! run. Tokens, weights and descriptors are in device memory. There are several copies of them, and every run takes the
//! next copy, so that the L2 cache has none of them. The runs of a round are queued without waiting, as in a model.

mod layer;
mod linear;
mod random;
mod times;

use std::io::{BufRead, Write};
use std::path::PathBuf;

use anyhow::Context;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use layer::{LayerBench, Model};
use linear::LinearBench;
use nvfp4::Output;
use nvfp4::backend::Layer;
use nvfp4::backend::cuda::{Cuda, CudaLayer, DeviceGroup};
use nvfp4::generate;
use nvfp4::plan::roofline::Roofline;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{Step, TokenDtype, TokenFormat, Weights};
use nvfp4::shape;
use nvfp4_benches::check_variant;
use random::SEED;
use serde::Deserialize;
use serde_json::{Value, json};
use times::device_times;

#[derive(Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
enum Command {
    /// Returns a shape's sizes, bytes and operations.
    Describe { shape: String },
    /// Uploads a shape for each kernel and checks the outputs. `rotate_bytes`: minimum size of all copies of the
    /// weights together.
    Prepare { shape: String, kernels: Vec<String>, rotate_bytes: usize },
    /// Makes the weights of an MoE layer and uploads `copies` copies per token format. The answer has their `bytes`.
    LayerWeights {
        #[serde(flatten)]
        model: Model,
        copies: usize,
        token_formats: Vec<TokenFormat>,
    },
    /// Uploads `copies` copies of tokens and their routing, which are files of `[T, k]` numbers. Checks some rows of
    /// the layer's output.
    LayerTokens { tokens: usize, ids: PathBuf, weights: PathBuf, copies: usize, check: Vec<usize> },
    /// Frees the layers.
    LayerDrop,
    /// Makes a linear layer `[n, k]` with `m` tokens for each token format.
    Linear { m: usize, n: usize, k: usize, token_formats: Vec<TokenFormat>, rotate_bytes: usize },
    /// Runs a kernel, a layer (see [`LAYERS`]) or a linear layer (see [`LINEAR`]) `runs` times in a row. `us`: device
    /// time of each run.
    Round { kernel: String, runs: usize },
    /// Runs it `runs` times and waits after each. `us`: host time to queue a run; `launches`: launches per run.
    Host { kernel: String, runs: usize },
}

fn main() -> anyhow::Result<()> {
    let gpu = Cuda::open(0)?;
    let mut contenders = Vec::new();
    let mut layers = Vec::new();
    let mut linear = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Command::Describe { shape } => describe(&shape)?,
            Command::Prepare { shape, kernels, rotate_bytes } => {
                contenders.clear();
                prepare(&gpu, &shape, &kernels, rotate_bytes, &mut contenders)?
            }
            Command::LayerWeights { model, copies, token_formats } => {
                // Frees the old layers before the new layers need their memory.
                layers.clear();
                for format in token_formats {
                    layers.push((format, LayerBench::new(&gpu, &model, format, copies)?));
                }
                json!({ "bytes": layers.iter().map(|(_, layer)| layer.weight_bytes()).collect::<Vec<_>>() })
            }
            Command::LayerTokens { tokens, ids, weights, copies, check } => {
                let prepare = |layer: &mut LayerBench| layer.prepare(tokens, &ids, &weights, copies, &check);
                let of_formats = layers.iter_mut().map(|(_, layer)| prepare(layer));
                json!(of_formats.collect::<anyhow::Result<Vec<_>>>()?)
            }
            Command::Linear { m, n, k, token_formats, rotate_bytes } => {
                linear.clear();
                for format in token_formats {
                    linear.push((format, LinearBench::new(&gpu, [m, n, k], format, rotate_bytes)?));
                }
                json!({})
            }
            Command::LayerDrop => {
                layers.clear();
                json!({})
            }
            Command::Round { kernel, runs } if is_layer(&kernel) => {
                let (layer, graph) = prepared(&mut layers, &kernel)?;
                json!({ "us": layer.round(runs, graph)? })
            }
            Command::Host { kernel, runs } if is_layer(&kernel) => {
                let (layer, graph) = prepared(&mut layers, &kernel)?;
                let (us, launches) = layer.host_times(runs, graph)?;
                json!({ "us": us, "launches": launches })
            }
            Command::Round { kernel, runs } if is_linear(&kernel) => {
                json!({ "us": prepared_linear(&mut linear, &kernel)?.round(runs)? })
            }
            Command::Host { kernel, runs } if is_linear(&kernel) => {
                let (us, launches) = prepared_linear(&mut linear, &kernel)?.host_times(runs)?;
                json!({ "us": us, "launches": launches })
            }
            Command::Round { kernel, runs } => json!({ "us": find(&mut contenders, &kernel)?.round(runs)? }),
            Command::Host { kernel, runs } => {
                let (us, launches) = find(&mut contenders, &kernel)?.host_times(runs)?;
                json!({ "us": us, "launches": launches })
            }
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

/// Names of the layers in `round` and `host`, their token formats, and whether they run as a graph.
const LAYERS: [(&str, TokenFormat, bool); 4] = [
    ("layer", TokenFormat::Bits16, false),
    ("layer-graph", TokenFormat::Bits16, true),
    ("layer-fp8", TokenFormat::Fp8, false),
    ("layer-fp8-graph", TokenFormat::Fp8, true),
];

fn is_layer(kernel: &str) -> bool {
    LAYERS.iter().any(|(name, ..)| *name == kernel)
}

/// Returns a layer, and whether `kernel` names its graph.
fn prepared<'l>(
    layers: &'l mut [(TokenFormat, LayerBench)],
    kernel: &str,
) -> anyhow::Result<(&'l mut LayerBench, bool)> {
    let &(_, format, graph) = LAYERS.iter().find(|(name, ..)| *name == kernel).context("not a layer")?;
    let layer = layers.iter_mut().find(|(of, _)| *of == format);
    let (_, layer) = layer.with_context(|| format!("`{kernel}` has no weights; send `layer_weights` first"))?;
    Ok((layer, graph))
}

/// Names of the linear layers in `round` and `host`, and their token formats.
const LINEAR: [(&str, TokenFormat); 2] = [("linear", TokenFormat::Bits16), ("linear-fp8", TokenFormat::Fp8)];

fn is_linear(kernel: &str) -> bool {
    LINEAR.iter().any(|(name, _)| *name == kernel)
}

fn prepared_linear<'l>(
    layers: &'l mut [(TokenFormat, LinearBench)],
    kernel: &str,
) -> anyhow::Result<&'l mut LinearBench> {
    let &(_, format) = LINEAR.iter().find(|(name, _)| *name == kernel).context("not a linear layer")?;
    let layer = layers.iter_mut().find(|(of, _)| *of == format);
    let (_, layer) = layer.with_context(|| format!("`{kernel}` does not exist; send `linear` first"))?;
    Ok(layer)
}

fn find<'c>(contenders: &'c mut [Contender], kernel: &str) -> anyhow::Result<&'c mut Contender> {
    let found = contenders.iter_mut().find(|contender| contender.kernel == kernel);
    found.with_context(|| format!("kernel `{kernel}` is not prepared; send `prepare` first"))
}

fn describe(shape: &str) -> anyhow::Result<Value> {
    let shape = shape::find(shape)?;
    let work = Roofline::new(&shape.problem(TokenDtype::F16)?);
    Ok(json!({
        "op": shape.op,
        "input": shape.input.name(),
        "groups": shape.groups.iter().map(|group| [group.m, group.n, group.k]).collect::<Vec<_>>(),
        "bytes": work.bytes(),
        "operations": work.operations,
    }))
}

fn prepare(
    gpu: &Cuda,
    shape: &str,
    kernels: &[String],
    rotate_bytes: usize,
    contenders: &mut Vec<Contender>,
) -> anyhow::Result<Value> {
    let shape = shape::find(shape)?;
    let weights = generate::weights(shape.input, shape.op, &shape.groups, SEED)?;
    let step = Step::new(&weights, generate::activations(shape.input, &shape.groups, SEED)?, TokenDtype::F16)?;
    // At least two, so that consecutive runs use different memory.
    let sets = rotate_bytes.div_ceil(Roofline::new(step.problem()).weight_bytes).max(2);
    for kernel in kernels {
        let variant: Variant = kernel.parse()?;
        let mut contender = Contender::new(kernel, &gpu.clone().with_variant(variant)?, &weights, &step, sets)?;
        contender.check(variant, &weights, &step)?;
        contenders.push(contender);
    }
    Ok(json!({ "sets": sets }))
}

/// A kernel and its copies of a shape's inputs.
struct Contender {
    kernel: String,
    sets: Vec<Set>,
    /// Index of the last used copy.
    next: usize,
    stream: Stream,
}

/// Weights, tokens and output of one copy.
struct Set {
    layer: CudaLayer,
    groups: Vec<DeviceGroup>,
    /// Memory that `groups` points to: values, scales and output of each group.
    memory: Vec<[DeviceBuffer<u8>; 3]>,
}

impl Set {
    fn new(gpu: &Cuda, weights: &Weights<'_>, step: &Step<'_>) -> anyhow::Result<Self> {
        let layer = gpu.prepare_layer(weights)?;
        let (mut groups, mut memory) = (Vec::new(), Vec::new());
        for (tokens, group) in step.activations().iter().zip(step.problem().groups()) {
            // NaN, so that an unwritten element is found.
            let poison = vec![0xFF; size_of::<u16>() * group.m * group.n];
            let values = DeviceBuffer::from_slice(tokens.values())?;
            let scales = DeviceBuffer::from_slice(tokens.blocked_scales().bytes())?;
            let output = DeviceBuffer::from_slice(&poison)?;
            groups.push(DeviceGroup {
                rows: tokens.rows(),
                values: values.as_device_ptr().as_raw(),
                scales: scales.as_device_ptr().as_raw(),
                global_scale: tokens.global_scale(),
                output: output.as_device_ptr().as_raw(),
            });
            memory.push([values, scales, output]);
        }
        Ok(Self { layer, groups, memory })
    }

    fn launch(&mut self, stream: &Stream) -> anyhow::Result<()> {
        // SAFETY: the stream belongs to the GPU's primary context. `memory` holds operands of these sizes, copied from
        // checked matrices. It lives as long as the layer, and the layer waits for its launches when it is dropped.
        Ok(unsafe { self.layer.launch(&self.groups, TokenDtype::F16, stream.as_inner()) }?)
    }
}

impl Contender {
    fn new(kernel: &str, gpu: &Cuda, weights: &Weights<'_>, step: &Step<'_>, sets: usize) -> anyhow::Result<Self> {
        Ok(Self {
            kernel: kernel.into(),
            sets: (0..sets).map(|_| Set::new(gpu, weights, step)).collect::<anyhow::Result<_>>()?,
            next: 0,
            stream: Stream::new(StreamFlags::NON_BLOCKING, None)?,
        })
    }

    /// Compares the output of every set with the exact reference. This also plans every set's step, so later runs only
    /// launch.
    fn check(&mut self, variant: Variant, weights: &Weights<'_>, step: &Step<'_>) -> anyhow::Result<()> {
        for set in &mut self.sets {
            set.launch(&self.stream)?;
            self.stream.synchronize()?;
            let mut output = Output::new(step.problem());
            for (bits, [.., on_device]) in output.groups_mut().zip(&set.memory) {
                let mut bytes = vec![0; on_device.len()];
                on_device.copy_to(&mut bytes)?;
                for (element, bytes) in bits.iter_mut().zip(bytes.as_chunks().0) {
                    *element = u16::from_le_bytes(*bytes);
                }
            }
            check_variant(variant, weights, step, &output);
        }
        Ok(())
    }

    /// Returns the index of the least recently used set.
    fn next_set(&mut self) -> usize {
        self.next = (self.next + 1) % self.sets.len();
        self.next
    }

    fn round(&mut self, runs: usize) -> anyhow::Result<Vec<f64>> {
        let Self { sets, next, stream, .. } = self;
        device_times(stream, None, runs, || {
            *next = (*next + 1) % sets.len();
            sets[*next].launch(stream)
        })
    }

    fn host_times(&mut self, runs: usize) -> anyhow::Result<(Vec<f64>, Option<usize>)> {
        let (mut times, mut launches) = (Vec::new(), None);
        for _ in 0..runs {
            let set = self.next_set();
            self.sets[set].launch(&self.stream)?;
            let layer = &self.sets[set].layer;
            times.extend(layer.host_time().map(|time| time.as_secs_f64() * 1e6));
            launches = layer.launches();
            self.stream.synchronize()?;
        }
        Ok((times, launches))
    }
}
