//! This library's side of `benches/hopper/run.py`: times its kernels on GPU 0, when told to.
//!
//! Commands come on standard input, a JSON object on a line; each is answered by one on standard output.
//! What a time is: the device's, from the arrival of a step's descriptors to the end of the kernel. Tokens and weights are
//! in device memory, and every run takes the next of several copies of both, so that it finds none of them in the L2 cache.
//! The runs of a round are queued without waiting, as in a model.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::Context;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use nvfp4::Output;
use nvfp4::backend::Layer;
use nvfp4::backend::cuda::{Cuda, CudaLayer, DeviceGroup, Options, Timer};
use nvfp4::generate;
use nvfp4::plan::roofline::Roofline;
use nvfp4::problem::{OutDtype, Step, Weights};
use nvfp4::shape;
use nvfp4_benches::check_sample;
use serde::Deserialize;
use serde_json::{Value, json};

const SEED: u64 = 0;

#[derive(Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
enum Command {
    /// Says what a shape is: its sizes, bytes and operations.
    Describe { shape: String },
    /// Brings a shape to the device, for each of the kernels, and checks what they compute. `rotate_bytes`: how much all
    /// copies of weights together hold at least.
    Prepare { shape: String, kernels: Vec<String>, rotate_bytes: usize },
    /// Runs a kernel so many times, one run behind the other: `us`, the device's time of each.
    Round { kernel: String, runs: usize },
    /// Runs a kernel so many times, waiting after each: `us`, the host's time for queueing one.
    Host { kernel: String, runs: usize },
}

fn main() -> anyhow::Result<()> {
    let (mut gpus, mut contenders) = (HashMap::new(), Vec::new());
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Command::Describe { shape } => describe(&shape)?,
            Command::Prepare { shape, kernels, rotate_bytes } => {
                contenders.clear();
                prepare(&shape, &kernels, rotate_bytes, &mut gpus, &mut contenders)?
            }
            Command::Round { kernel, runs } => json!({ "us": find(&mut contenders, &kernel)?.round(runs)? }),
            Command::Host { kernel, runs } => json!({ "us": find(&mut contenders, &kernel)?.host_times(runs)? }),
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn find<'c>(contenders: &'c mut [Contender], kernel: &str) -> anyhow::Result<&'c mut Contender> {
    let found = contenders.iter_mut().find(|contender| contender.kernel == kernel);
    found.with_context(|| format!("kernel `{kernel}` was not prepared"))
}

fn describe(shape: &str) -> anyhow::Result<Value> {
    let shape = shape::find(shape)?;
    let work = Roofline::new(&shape.problem(OutDtype::F16)?);
    Ok(json!({
        "op": shape.op,
        "input": shape.input.name(),
        "groups": shape.groups.iter().map(|group| [group.m, group.n, group.k]).collect::<Vec<_>>(),
        "bytes": work.bytes(),
        "operations": work.operations,
    }))
}

fn prepare(
    shape: &str,
    kernels: &[String],
    rotate_bytes: usize,
    gpus: &mut HashMap<String, Cuda>,
    contenders: &mut Vec<Contender>,
) -> anyhow::Result<Value> {
    let shape = shape::find(shape)?;
    let weights = generate::weights(shape.input, shape.op, &shape.groups, SEED)?;
    let step = Step::new(&weights, generate::activations(shape.input, &shape.groups, SEED)?, OutDtype::F16)?;
    let weight_bytes = Roofline::new(step.problem()).weight_bytes;
    // At least two, so that no run follows one on the same memory.
    let sets = rotate_bytes.div_ceil(weight_bytes).max(2);
    for kernel in kernels {
        let gpu = match gpus.entry(kernel.clone()) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => {
                let options = Options { kernel: Some(kernel.clone()), ..Options::default() };
                place.insert(Cuda::open_with(0, options)?)
            }
        };
        let mut contender = Contender::new(kernel, gpu.clone(), &weights, &step, sets)?;
        contender.check(&weights, &step)?;
        contenders.push(contender);
    }
    Ok(json!({ "sets": sets }))
}

/// A kernel with copies of a shape's inputs.
struct Contender {
    kernel: String,
    sets: Vec<Set>,
    /// Which of them is next.
    next: usize,
    timers: Vec<Timer>,
    gpu: Cuda,
}

/// Weights, tokens and room for the output.
struct Set {
    layer: CudaLayer,
    groups: Vec<DeviceGroup>,
    /// What `groups` points into: of each group values, scales and output.
    memory: Vec<[DeviceBuffer<u8>; 3]>,
}

impl Set {
    fn new(gpu: &Cuda, weights: &Weights<'_>, step: &Step<'_>) -> anyhow::Result<Self> {
        let layer = gpu.prepare_layer(weights)?;
        let (mut groups, mut memory) = (Vec::new(), Vec::new());
        for (tokens, group) in step.activations().iter().zip(step.problem().groups()) {
            let buffers = [
                DeviceBuffer::from_slice(tokens.values())?,
                DeviceBuffer::from_slice(tokens.blocked_scales().bytes())?,
                DeviceBuffer::from_slice(&poison(group.m * group.n))?,
            ];
            let [values, scales, output] = buffers.each_ref().map(|buffer| buffer.as_device_ptr().as_raw());
            groups.push(DeviceGroup {
                rows: tokens.rows(),
                values,
                scales,
                global_scale: tokens.global_scale(),
                output,
            });
            memory.push(buffers);
        }
        Ok(Self { layer, groups, memory })
    }

    fn launch(&mut self, timer: &Timer) -> anyhow::Result<()> {
        let stream = std::ptr::null_mut();
        // SAFETY: the null stream is the context's own; `memory` holds operands of these sizes for as long as the layer
        // lives, which waits for its launches when it is dropped; they were copied from checked matrices.
        Ok(unsafe { self.layer.launch_timed(&self.groups, OutDtype::F16, stream, timer) }?)
    }
}

/// Bytes of so many f16 NaN.
fn poison(elements: usize) -> Vec<u8> {
    vec![0xFF; elements * size_of::<u16>()]
}

impl Contender {
    fn new(kernel: &str, gpu: Cuda, weights: &Weights<'_>, step: &Step<'_>, sets: usize) -> anyhow::Result<Self> {
        let sets = (0..sets).map(|_| Set::new(&gpu, weights, step)).collect::<anyhow::Result<_>>()?;
        Ok(Self { kernel: kernel.into(), sets, next: 0, timers: Vec::new(), gpu })
    }

    /// Compares what every set computes with the exact reference.
    fn check(&mut self, weights: &Weights<'_>, step: &Step<'_>) -> anyhow::Result<()> {
        let timer = self.gpu.timer()?;
        for set in &mut self.sets {
            set.launch(&timer)?;
            timer.elapsed()?;
            let mut output = Output::new(step.problem());
            for (bits, [.., on_device]) in output.groups_mut().zip(&set.memory) {
                let mut bytes = vec![0; on_device.len()];
                on_device.copy_to(&mut bytes)?;
                for (element, bytes) in bits.iter_mut().zip(bytes.as_chunks().0) {
                    *element = u16::from_le_bytes(*bytes);
                }
            }
            check_sample(set.layer.kernel(), weights, step, &output);
        }
        Ok(())
    }

    /// The set that was used longest ago.
    fn next_set(&mut self) -> usize {
        self.next = (self.next + 1) % self.sets.len();
        self.next
    }

    fn round(&mut self, runs: usize) -> anyhow::Result<Vec<f64>> {
        while self.timers.len() < runs {
            self.timers.push(self.gpu.timer()?);
        }
        for run in 0..runs {
            let set = self.next_set();
            self.sets[set].launch(&self.timers[run])?;
        }
        self.timers[..runs].iter().map(|timer| Ok(timer.elapsed()?.as_secs_f64() * 1e6)).collect()
    }

    fn host_times(&mut self, runs: usize) -> anyhow::Result<Vec<f64>> {
        let timer = self.gpu.timer()?;
        let time = |_| {
            let set = self.next_set();
            let start = Instant::now();
            self.sets[set].launch(&timer)?;
            let elapsed = start.elapsed();
            timer.elapsed()?;
            Ok(elapsed.as_secs_f64() * 1e6)
        };
        (0..runs).map(time).collect()
    }
}
