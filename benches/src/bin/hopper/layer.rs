//! An MoE layer between two events: lists, products and sums, from the routing on the device to the layer's output.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use nvfp4::backend::MoeLayer;
use nvfp4::backend::cuda::{Cuda, CudaMoeLayer, MoeArguments, MoeGraph};
use nvfp4::format::Matrix;
use nvfp4::generate::Generator;
use nvfp4::moe::compare::compare;
use nvfp4::moe::generate::{self, Routing};
use nvfp4::moe::{LayerShape, MoeExpert, MoeInputs, MoeOutput, MoeStep, MoeWeights, shape};
use nvfp4::problem::{TokenDtype, TokenFormat};
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{SEED, device_times, host_times};

/// The layer of a model, as one of its ranks has it.
#[derive(Deserialize)]
pub struct Model {
    hidden: usize,
    intermediate: usize,
    /// Experts that tokens name.
    experts: usize,
    /// The first one that this rank holds.
    first: usize,
    /// How many it holds.
    local: usize,
    k: usize,
    dtype: String,
}

impl Model {
    fn dtype(&self) -> anyhow::Result<TokenDtype> {
        let dtype = [TokenDtype::F16, TokenDtype::Bf16].into_iter().find(|dtype| dtype.name() == self.dtype);
        dtype.with_context(|| format!("`{}` is no type of tokens", self.dtype))
    }

    fn shape(&self) -> anyhow::Result<LayerShape> {
        let shape = json!({
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "experts": self.local,
            "named_experts": self.experts,
            "top_k": self.k,
            "tokens": 0,
        });
        Ok(shape::parse(&shape.to_string())?.remove(0))
    }

    /// Weights of random codes and scales, for outputs of order 1: quantizing billions of numbers would take minutes.
    fn weights(&self) -> anyhow::Result<MoeWeights<'static>> {
        let expert = |expert: usize| -> anyhow::Result<_> {
            let matrix = |role: u64, rows, k| random_matrix(rows, k, 3 * expert as u64 + role);
            Ok(MoeExpert::gated(
                matrix(0, self.intermediate, self.hidden)?,
                matrix(1, self.intermediate, self.hidden)?,
                matrix(2, self.hidden, self.intermediate)?,
            ))
        };
        let experts = (0..self.local).map(expert).collect::<anyhow::Result<_>>()?;
        let weights = MoeWeights::new(self.dtype()?, self.k, experts)?;
        let number =
            |id: usize| if (self.first..self.first + self.local).contains(&id) { (id - self.first) as i32 } else { -1 };
        Ok(weights.with_expert_map((0..self.experts).map(number).collect())?)
    }
}

/// A matrix of every code, and of scales from 1/4 to 1, times about 1/√K.
pub(super) fn random_matrix(rows: usize, k: usize, seed: u64) -> anyhow::Result<Matrix<'static>> {
    /// The root mean square of all codes, and of those scales.
    const RMS: f32 = 2.9 * 0.6;
    let (mut values, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / 16]);
    fill_random(&mut values, 2 * seed + 1);
    fill_random(&mut scales, 2 * seed + 2);
    scales.par_iter_mut().for_each(|scale| *scale = 0x28 + *scale % 0x11);
    // Every matrix has a global scale of its own.
    let factor = 1.0 + (seed % 7) as f32 / 16.0;
    Ok(Matrix::new(rows, k, values, scales, factor / (RMS * (k as f32).sqrt()))?)
}

/// Random bytes: xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled"), a state for
/// each piece.
fn fill_random(bytes: &mut [u8], seed: u64) {
    const PIECE: usize = 1 << 16;
    bytes.par_chunks_mut(PIECE).enumerate().for_each(|(piece, bytes)| {
        let mut state = ((seed << 32) | (piece as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for word in bytes.chunks_mut(8) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let random = state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes();
            word.copy_from_slice(&random[..word.len()]);
        }
    });
}

/// Copies of a layer on the device, and of the inputs of a step.
pub struct LayerBench {
    // The graphs launch what the rest holds, so they go first.
    sets: Vec<Set>,
    next: Cell<usize>,
    workspace: DeviceBuffer<u8>,
    layers: Vec<CudaMoeLayer>,
    weights: MoeWeights<'static>,
    shape: LayerShape,
    stream: Stream,
}

/// Tokens, routing, room for the output, and the call as a graph.
struct Set {
    graph: MoeGraph,
    arguments: MoeArguments,
    output: DeviceBuffer<u16>,
    _memory: (DeviceBuffer<u16>, DeviceBuffer<i32>, DeviceBuffer<f32>),
}

impl LayerBench {
    /// Makes weights, and brings so many copies of them to the device.
    pub fn new(gpu: &Cuda, model: &Model, format: TokenFormat, copies: usize) -> anyhow::Result<Self> {
        let (weights, shape) = (model.weights()?.with_token_format(format), model.shape()?.with_token_format(format));
        let mut layers = vec![gpu.prepare_moe_layer(&weights)?];
        for _ in 1..copies {
            layers.push(layers[0].try_clone()?);
        }
        let workspace = DeviceBuffer::zeroed(1)?;
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
        Ok(Self { sets: Vec::new(), next: Cell::new(0), workspace, layers, weights, shape, stream })
    }

    /// Bytes of a copy.
    pub fn weight_bytes(&self) -> usize {
        self.layers[0].weight_bytes()
    }

    /// Brings the inputs of a step to the device, so many copies of them, and checks what is computed: these rows of the first
    /// and the last copy, and all rows for numbers that are none. Routing comes from two files, `[T, k]` of i32 and f32.
    pub fn prepare(
        &mut self,
        tokens: usize,
        ids: &Path,
        weights: &Path,
        copies: usize,
        check: &[usize],
    ) -> anyhow::Result<Value> {
        ensure!(
            (1..=self.layers.len()).contains(&copies),
            "{copies} copies of inputs, {} of the layer",
            self.layers.len()
        );
        self.sets.clear();
        let choices = tokens * self.shape.top_k;
        let ids: Vec<i32> = read(ids, choices)?.into_iter().map(i32::from_le_bytes).collect();
        let factors: Vec<f32> = read(weights, choices)?.into_iter().map(f32::from_le_bytes).collect();
        let dtype = self.weights.sizes().dtype;
        let inputs = generate::inputs(&self.shape, Generator::Gaussian, Routing::Uniform, dtype, tokens, SEED)?;
        let inputs = MoeInputs { ids: ids.into(), weights: factors.into(), ..inputs };

        let bytes = self.layers[0].workspace_bytes(tokens);
        self.workspace = DeviceBuffer::zeroed(bytes)?;
        for layer in &self.layers[..copies] {
            self.sets.push(Set::new(layer, &inputs, &self.workspace)?);
        }
        let expected = self.expected_rows(&inputs, check)?;
        for index in [0, copies - 1] {
            self.launch(index)?;
            self.stream.synchronize()?;
            self.check(index, check, &expected)?;
        }
        Ok(json!({ "checked": check.len(), "workspace_bytes": bytes }))
    }

    /// These rows of the output, computed without the others, and compared stage by stage. A token's bits do not depend on the
    /// batch.
    fn expected_rows(&mut self, inputs: &MoeInputs<'_>, rows: &[usize]) -> anyhow::Result<Vec<u16>> {
        fn pick<T: Copy>(of: &[T], width: usize, rows: &[usize]) -> Vec<T> {
            rows.iter().flat_map(|&row| of[row * width..][..width].to_vec()).collect()
        }
        let inputs = MoeInputs {
            tokens: rows.len(),
            hidden: pick(&inputs.hidden, inputs.stride, rows).into(),
            stride: inputs.stride,
            ids: pick(&inputs.ids, self.shape.top_k, rows).into(),
            weights: pick(&inputs.weights, self.shape.top_k, rows).into(),
            ..Default::default()
        };
        let step = MoeStep::new(&self.weights, inputs)?;
        let mut output = MoeOutput::with_stages(&step);
        self.layers[0].execute(&step, &mut output)?;
        let found = compare(&self.weights, &step, &output);
        if let Some(first) = found.first() {
            anyhow::bail!("{} of {} elements are wrong, the first {first}", found.mismatches(), found.checked());
        }
        Ok(output.hidden)
    }

    fn check(&self, set: usize, rows: &[usize], expected: &[u16]) -> anyhow::Result<()> {
        let (sizes, output) = (self.weights.sizes(), &self.sets[set].output);
        let mut bits = vec![0; output.len()];
        output.copy_to(&mut bits)?;
        let not_finite = bits.par_iter().position_first(|&bits| !sizes.dtype.decode(bits).is_finite());
        if let Some(at) = not_finite {
            anyhow::bail!("set {set}: token {}, column {} is not finite", at / sizes.hidden, at % sizes.hidden);
        }
        for (row, expected) in rows.iter().zip(expected.chunks(sizes.hidden)) {
            let found = &bits[row * sizes.hidden..][..sizes.hidden];
            ensure!(found == expected, "set {set}: token {row} has other bits than in a batch of {}", rows.len());
        }
        Ok(())
    }

    /// Queues a call with a copy of the inputs; returns how many launches there were.
    fn launch(&self, set: usize) -> anyhow::Result<usize> {
        let (layer, workspace) = (&self.layers[set], self.workspace.as_device_ptr().as_raw());
        // SAFETY: the stream is of the primary context, which is the GPU's; operands and workspace are as large as the layer asks,
        // and live until the stream was waited for.
        Ok(unsafe { layer.launch(&self.sets[set].arguments, workspace, self.stream.as_inner()) }?)
    }

    /// As [`LayerBench::launch`], or of the call's graph.
    fn queue(&self, set: usize, graph: bool) -> anyhow::Result<usize> {
        if !graph {
            return self.launch(set);
        }
        // SAFETY: as above.
        unsafe { self.sets[set].graph.launch(self.stream.as_inner()) }?;
        Ok(1)
    }

    /// The set that was used longest ago.
    fn next_set(&self) -> anyhow::Result<usize> {
        ensure!(!self.sets.is_empty(), "no `layer_tokens` yet");
        self.next.set((self.next.get() + 1) % self.sets.len());
        Ok(self.next.get())
    }

    /// The device's time of so many runs, in µs.
    pub fn round(&self, runs: usize, graph: bool) -> anyhow::Result<Vec<f64>> {
        device_times(&self.stream, Some(&self.workspace), runs, || self.queue(self.next_set()?, graph).map(|_| ()))
    }

    /// The host's time for queueing each of so many runs, in µs, and the launches of one.
    pub fn host_times(&self, runs: usize, graph: bool) -> anyhow::Result<(Vec<f64>, usize)> {
        host_times(&self.stream, runs, || self.queue(self.next_set()?, graph))
    }
}

impl Set {
    fn new(layer: &CudaMoeLayer, inputs: &MoeInputs<'_>, workspace: &DeviceBuffer<u8>) -> anyhow::Result<Self> {
        let hidden = DeviceBuffer::from_slice(&inputs.hidden)?;
        let (ids, weights) = (DeviceBuffer::from_slice(&inputs.ids)?, DeviceBuffer::from_slice(&inputs.weights)?);
        // The output is NaN until a kernel writes it.
        let output = DeviceBuffer::from_slice(&vec![0xFFFF; inputs.tokens * layer.sizes().hidden])?;
        let row_bytes = size_of::<u16>() * layer.sizes().hidden;
        let arguments = MoeArguments {
            token_count: inputs.tokens,
            tokens: hidden.as_device_ptr().as_raw(),
            token_pitch: row_bytes,
            topk_ids: ids.as_device_ptr().as_raw(),
            topk_weights: weights.as_device_ptr().as_raw(),
            output: output.as_device_ptr().as_raw(),
            output_pitch: row_bytes,
            ..MoeArguments::default()
        };
        // SAFETY: operands of these sizes lie there, and the workspace is large enough; both live as long as the graph is launched.
        let graph = unsafe { layer.capture(&arguments, workspace.as_device_ptr().as_raw()) }?;
        Ok(Self { graph, arguments, output, _memory: (hidden, ids, weights) })
    }
}

/// A file of numbers of four bytes.
fn read(path: &Path, count: usize) -> anyhow::Result<Vec<[u8; 4]>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    ensure!(bytes.len() == 4 * count, "{}: {} bytes, not {count} numbers", path.display(), bytes.len());
    Ok(bytes.as_chunks().0.to_vec())
}
