//! Times an MoE layer between two events: lists, products and sums, from the routing on the device to the layer's
//! output.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use nvfp4::backend::Layer;
use nvfp4::backend::cuda::{Cuda, CudaMoeLayer, MoeArguments, MoeGraph};
use nvfp4::generate::Generator;
use nvfp4::moe::compare::compare;
use nvfp4::moe::generate::{self, Routing};
use nvfp4::moe::{LayerShape, MoeExpert, MoeInputs, MoeOutput, MoeStep, MoeWeights, shape};
use nvfp4::problem::{TokenDtype, TokenFormat};
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use super::random::{SEED, random_matrix};
use super::times::{device_times, host_times};

/// A model's layer on one rank.
#[derive(Deserialize)]
pub struct Model {
    hidden: usize,
    intermediate: usize,
    /// Number of experts that tokens can name.
    experts: usize,
    /// First expert of this rank.
    first: usize,
    /// Number of experts of this rank.
    local: usize,
    k: usize,
    dtype: String,
}

impl Model {
    fn dtype(&self) -> anyhow::Result<TokenDtype> {
        let dtype = [TokenDtype::F16, TokenDtype::Bf16].into_iter().find(|dtype| dtype.name() == self.dtype);
        dtype.with_context(|| format!("unknown token type `{}`; expected f16 or bf16", self.dtype))
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

    /// Returns weights with random codes and scales, for outputs of order 1. Quantizing billions of numbers would take
    /// minutes.
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

/// Copies of a layer, and of the inputs of a step, on the device.
pub struct LayerBench {
    // The graphs use the memory of the other fields, so they are dropped first.
    sets: Vec<Set>,
    next: Cell<usize>,
    workspace: DeviceBuffer<u8>,
    layers: Vec<CudaMoeLayer>,
    weights: MoeWeights<'static>,
    shape: LayerShape,
    stream: Stream,
}

/// Tokens, routing and output of a call, and the call as a graph.
struct Set {
    graph: MoeGraph,
    arguments: MoeArguments,
    output: DeviceBuffer<u16>,
    _memory: (DeviceBuffer<u16>, DeviceBuffer<i32>, DeviceBuffer<f32>),
}

impl LayerBench {
    /// Makes weights and uploads `copies` copies of them.
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

    /// Number of bytes of a copy.
    pub fn weight_bytes(&self) -> usize {
        self.layers[0].weight_bytes()
    }

    /// Uploads `copies` copies of a step's inputs. Checks the rows `check` of the first and of the last copy, and that
    /// all numbers are finite. The routing comes from two files, `[T, k]` of i32 and f32.
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
            "{copies} copies of inputs need as many copies of the layer, but there are {}",
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

    /// Computes these rows of the output without the others, and compares them stage by stage. A token's bits do not
    /// depend on the batch.
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
            anyhow::bail!("{} of {} elements are wrong, first {first}", found.mismatches(), found.checked());
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
            ensure!(found == expected, "set {set}: token {row} has different bits in a batch of {}", rows.len());
        }
        Ok(())
    }

    /// Queues a call with a copy of the inputs. Returns the number of launches.
    fn launch(&self, set: usize) -> anyhow::Result<usize> {
        let (layer, workspace) = (&self.layers[set], self.workspace.as_device_ptr().as_raw());
        // SAFETY: the stream belongs to the GPU's primary context. The operands and the workspace have the sizes that
        // the layer needs, and live until the stream has completed the call.
        Ok(unsafe { layer.launch(&self.sets[set].arguments, workspace, self.stream.as_inner()) }?)
    }

    /// Like [`LayerBench::launch`]; launches the call's graph if `graph` is set.
    fn queue(&self, set: usize, graph: bool) -> anyhow::Result<usize> {
        if !graph {
            return self.launch(set);
        }
        // SAFETY: the stream belongs to the GPU's primary context, and the graph's operands live until the stream has
        // completed it.
        unsafe { self.sets[set].graph.launch(self.stream.as_inner()) }?;
        Ok(1)
    }

    /// Returns the least recently used set.
    fn next_set(&self) -> anyhow::Result<usize> {
        ensure!(!self.sets.is_empty(), "no inputs; send `layer_tokens` first");
        self.next.set((self.next.get() + 1) % self.sets.len());
        Ok(self.next.get())
    }

    /// Returns the device time of each of `runs` runs, in µs.
    pub fn round(&self, runs: usize, graph: bool) -> anyhow::Result<Vec<f64>> {
        device_times(&self.stream, Some(&self.workspace), runs, || self.queue(self.next_set()?, graph).map(|_| ()))
    }

    /// Returns the host time to queue each of `runs` runs, in µs, and the launches per run.
    pub fn host_times(&self, runs: usize, graph: bool) -> anyhow::Result<(Vec<f64>, usize)> {
        host_times(&self.stream, runs, || self.queue(self.next_set()?, graph))
    }
}

impl Set {
    fn new(layer: &CudaMoeLayer, inputs: &MoeInputs<'_>, workspace: &DeviceBuffer<u8>) -> anyhow::Result<Self> {
        let hidden = DeviceBuffer::from_slice(&inputs.hidden)?;
        let (ids, weights) = (DeviceBuffer::from_slice(&inputs.ids)?, DeviceBuffer::from_slice(&inputs.weights)?);
        // NaN, so that an unwritten element is found.
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
        // SAFETY: the operands have these sizes, and the workspace is large enough. Both live as long as the graph.
        let graph = unsafe { layer.capture(&arguments, workspace.as_device_ptr().as_raw()) }?;
        Ok(Self { graph, arguments, output, _memory: (hidden, ids, weights) })
    }
}

/// Reads a file of four-byte numbers.
fn read(path: &Path, count: usize) -> anyhow::Result<Vec<[u8; 4]>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    ensure!(bytes.len() == 4 * count, "{}: expected {count} numbers, found {} bytes", path.display(), bytes.len());
    Ok(bytes.as_chunks().0.to_vec())
}
