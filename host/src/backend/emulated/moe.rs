//! MoE layers in the emulator: the launches of `backend::cuda`. Each launch may start while the previous one still runs.

use std::time::{Duration, Instant};

use ptx_emulator::{Buffer, Device, Report as Counters};

use super::gpu::{Emulated, INTERMEDIATE, OUTPUT, TOKENS, WEIGHTS, upload};
use crate::Error;
use crate::backend::{Layer, Moe};
use crate::format::Matrix;
use crate::fp4::InputScales;
use crate::moe::{MoeExpert, MoeOutput, MoeSizes, MoeStep, MoeWeights};
use crate::problem::TokenFormat;
use nvfp4_kernels::group::Address;
use nvfp4_kernels::layer::moe_pack::nvfp4::pack_nvfp4;
use nvfp4_kernels::layer::moe_pack::units::pack;
use nvfp4_kernels::moe::{
    self, MoeArguments, MoeKernels, Packing, PlacedExperts, PlacedMoe, StageParts, Workspace, packing,
};

/// Name of the buffers with the experts that tokens name, with their weights and with the expert map, in faults and
/// counters.
pub const ROUTING: &str = "routing";

/// Byte that makes NaN as a number, and an invalid row, expert or ticket in lists.
const POISON: u8 = 0xFF;

/// A layer in an emulated device's memory, and the buffers of its steps.
pub(super) struct EmulatedMoeLayer {
    gpu: Emulated,
    kernels: MoeKernels,
    /// Name of the kernel that multiplies.
    kernel: &'static str,
    device: Device,
    layer: PlacedMoe,
    /// Tokens, routing and output of the last step. The next step frees them first, so no step can use the buffers of another.
    step: Vec<Buffer>,
    workspace: Option<PlacedWorkspace>,
    /// Number of launches of the last step, and their counters.
    done: Option<(usize, Counters)>,
}

/// A workspace with an allocation per part. Steps share it, as layers and steps do on a GPU.
pub(super) struct PlacedWorkspace {
    parts: Vec<Buffer>,
    /// Maximum number of tokens.
    tokens: usize,
}

impl PlacedWorkspace {
    fn new(device: &mut Device, sizes: &MoeSizes, tokens: usize) -> Self {
        let mut parts = Vec::new();
        Workspace::new(sizes, tokens, |bytes| {
            let part = device.allocate(bytes);
            device.name(part, INTERMEDIATE);
            parts.push(part);
            part.address
        });
        Self { parts, tokens }
    }

    /// Returns the workspace of a chunk. The addresses of the parts do not depend on the number of tokens.
    fn of(&self, sizes: &MoeSizes, tokens: usize) -> Workspace {
        let mut parts = self.parts.iter();
        Workspace::new(sizes, tokens, |_| parts.next().expect("as many parts, whatever the tokens").address)
    }

    fn poison(&self, device: &mut Device) {
        for &part in &self.parts {
            device.write(part, 0, &vec![POISON; part.bytes as usize]);
        }
    }
}

/// Copies experts to the device.
fn place_experts<'m>(
    device: &mut Device,
    experts: &'m [MoeExpert<'_>],
    input_scales: &[Option<InputScales>],
    sizes: &MoeSizes,
) -> PlacedExperts {
    let matrices = |expert: &'m MoeExpert<'_>| expert.gate.as_ref().into_iter().chain([&expert.up]);
    let gate_up = packed(sizes, 0, experts.iter().flat_map(matrices));
    let down = packed(sizes, 2, experts.iter().map(|expert| &expert.down));
    let [gate_up, down] = [gate_up, down].map(|bytes| upload(device, &bytes, WEIGHTS).address);
    let scale = |matrix: Option<&Matrix<'_>>| matrix.map_or(f32::NAN, Matrix::global_scale);
    let alpha = [
        experts.iter().map(|expert| scale(expert.gate.as_ref())).collect::<Vec<_>>(),
        experts.iter().map(|expert| scale(Some(&expert.up))).collect(),
        experts.iter().map(|expert| scale(Some(&expert.down))).collect(),
    ]
    .map(|scales| upload(device, &scales, WEIGHTS).address);
    let bias = [0, 1, 2].map(|projection| {
        let biases = biases(sizes, experts, projection);
        biases.map_or(0, |biases| upload(device, &biases, WEIGHTS).address)
    });
    let of: [fn(InputScales) -> f32; 2] = [|scales| scales.gate_up, |scales| scales.down];
    let input_scales = of.map(|of| {
        let scales: Vec<f32> = input_scales.iter().map(|scales| scales.map_or(0.0, of)).collect();
        if sizes.token_format == TokenFormat::Nvfp4 { upload(device, &scales, WEIGHTS).address } else { 0 }
    });
    PlacedExperts { gate_up, down, alpha, bias, input_scales }
}

/// Packs the matrices of gate and up (projection 0) or of down (2).
fn packed<'m>(sizes: &MoeSizes, projection: usize, matrices: impl Iterator<Item = &'m Matrix<'m>>) -> Vec<u8> {
    match packing(sizes, projection) {
        Packing::Units(operand_type, order) => matrices.flat_map(|matrix| pack(matrix, order, operand_type)).collect(),
        Packing::Nvfp4 => pack_nvfp4(matrices),
    }
}

/// Copies a layer to the device.
pub(super) fn place(device: &mut Device, weights: &MoeWeights<'_>) -> PlacedMoe {
    let sizes = weights.sizes();
    let input_scales: Vec<_> = (0..=sizes.experts).map(|expert| weights.input_scales(expert)).collect();
    let (of_shared, input_scales) = input_scales.split_last().expect("one more than there are experts");
    let of_shared = std::slice::from_ref(of_shared);
    PlacedMoe {
        sizes,
        experts: place_experts(device, weights.experts(), input_scales, &sizes),
        shared: weights.shared().map(|shared| place_experts(device, std::slice::from_ref(shared), of_shared, &sizes)),
        map: weights.expert_map().map_or(0, |map| upload(device, map, ROUTING).address),
        keeps_stages: false,
    }
}

/// Operands of a step in the device's memory.
struct PlacedStep {
    arguments: MoeArguments,
    output: Buffer,
}

impl PlacedStep {
    /// Copies a step to the device, with an allocation per operand, which is added to `keep`. The bytes between tokens are NaN as
    /// numbers. The poisoned output is copied too, so that elements that a kernel does not write stay poisoned.
    fn new(device: &mut Device, step: &MoeStep<'_>, output: &MoeOutput, keep: &mut Vec<Buffer>) -> Self {
        let (inputs, hidden) = (step.inputs(), step.sizes().hidden);
        // The stride of a single token has no meaning.
        let stride = if inputs.tokens == 1 { hidden } else { inputs.stride }.next_multiple_of(8);
        let mut tokens = vec![u16::from_ne_bytes([POISON; 2]); inputs.tokens.saturating_sub(1) * stride + hidden];
        for (token, to) in tokens.chunks_mut(stride).enumerate() {
            to[..hidden].copy_from_slice(step.token(token));
        }
        let mut place = |buffer: Buffer| {
            keep.push(buffer);
            buffer
        };
        let output = place(upload(device, &output.hidden, OUTPUT));
        let shared_weights = inputs.shared_weights.as_deref();
        let arguments = MoeArguments {
            token_count: step.tokens(),
            tokens: place(upload(device, &tokens, TOKENS)).address,
            token_pitch: size_of::<u16>() * stride,
            topk_ids: place(upload(device, &inputs.ids, ROUTING)).address,
            topk_weights: place(upload(device, &inputs.weights, ROUTING)).address,
            weights_on_input: inputs.weights_on_input,
            shared_weights: shared_weights.map_or(0, |weights| place(upload(device, weights, ROUTING)).address),
            output: output.address,
            output_pitch: size_of::<u16>() * hidden,
        };
        Self { arguments, output }
    }
}

impl EmulatedMoeLayer {
    /// Creates a layer on an empty device.
    pub fn new(gpu: Emulated, weights: &MoeWeights<'_>) -> Result<Self, Error> {
        weights.check_no_transforms("a GPU")?;
        let kernels = gpu.moe_kernels();
        let kernel = kernels.check(weights.sizes().token_format, &gpu.arch)?.product.name();
        let mut device = gpu.memory();
        let layer = place(&mut device, weights);
        Ok(Self { gpu, kernels, kernel, device, layer, step: Vec::new(), workspace: None, done: None })
    }

    /// Runs a step with operands in memory. Returns the number of launches and their counters.
    fn run(
        &mut self,
        step: &MoeStep<'_>,
        arguments: &MoeArguments,
        output: &mut MoeOutput,
    ) -> Result<(usize, Counters), Error> {
        let sizes = self.layer.sizes;
        let layer = PlacedMoe { keeps_stages: output.stages.is_some(), ..self.layer };
        self.gpu.clock.iter().for_each(|clock| clock.begin());
        let (mut launched, mut counters) = (0, None::<Counters>);
        for (first, chunk) in moe::chunks(&sizes, arguments)? {
            if self.workspace.as_ref().is_none_or(|workspace| workspace.tokens < chunk.token_count) {
                for part in self.workspace.take().into_iter().flat_map(|workspace| workspace.parts) {
                    self.device.free(part);
                }
                self.workspace = Some(PlacedWorkspace::new(&mut self.device, &sizes, chunk.token_count));
            }
            let workspace = self.workspace.as_ref().expect("made above");
            workspace.poison(&mut self.device);
            let workspace = workspace.of(&sizes, chunk.token_count);
            for launch in &moe::launches(&layer, &chunk, &workspace, &self.kernels, self.gpu.sms)? {
                let done = self.gpu.launch(&mut self.device, launch, &mut self.step)?;
                launched += 1;
                match &mut counters {
                    None => counters = Some(done),
                    Some(before) => before.add(&done),
                }
            }
            if let Some(stages) = &mut output.stages {
                let read = |address, bytes| Ok(read(&self.device, address, bytes));
                StageParts::read(&sizes, &chunk, &workspace, &self.kernels, read)?.write(step, first, stages);
            }
        }
        Ok((launched, counters.expect("a step with tokens launches something")))
    }
}

/// Reads bytes of the device's memory.
fn read(device: &Device, address: Address, bytes: usize) -> Vec<u8> {
    device.download(Buffer { address, bytes: bytes as u64 })
}

impl Layer<Moe> for EmulatedMoeLayer {
    fn kernel(&self) -> &str {
        self.kernel
    }

    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        step.check_fits(self.layer.sizes)?;
        self.done = None;
        for buffer in self.step.drain(..) {
            self.device.free(buffer);
        }
        if step.tokens() == 0 {
            return Ok(Duration::ZERO);
        }
        let placed = PlacedStep::new(&mut self.device, step, output, &mut self.step);
        let start = Instant::now();
        let result = self.run(step, &placed.arguments, output);
        let time = start.elapsed();
        output.hidden.copy_from_slice(&self.device.download(placed.output));
        self.done = Some(result?);
        Ok(time)
    }

    fn launches(&self) -> Option<usize> {
        self.done.as_ref().map(|(launches, _)| *launches)
    }

    fn counters(&self) -> Option<&Counters> {
        self.done.as_ref().map(|(_, counters)| counters)
    }
}

/// Returns the biases of a projection (0: gate, 1: up, 2: down) of all experts as kernels read them: f32, in the order of the
/// packed rows, zeros for an expert without biases. `None`: the layer has no biases.
fn biases(sizes: &MoeSizes, experts: &[MoeExpert<'_>], projection: usize) -> Option<Vec<f32>> {
    if !sizes.biases || projection == 0 && !sizes.activation.has_gate() {
        return None;
    }
    let of_expert = |expert: &MoeExpert<'_>| {
        let (bias, rows) = match projection {
            0 => (&expert.biases.gate, expert.up.rows()),
            1 => (&expert.biases.up, expert.up.rows()),
            _ => (&expert.biases.down, expert.down.rows()),
        };
        let numbers = bias.as_ref().map(|bias| bias.numbers(sizes.dtype));
        packing(sizes, projection).row_order().biases(numbers.as_deref(), 1, rows)
    };
    Some(experts.iter().flat_map(of_expert).collect())
}

#[cfg(test)]
mod tests;
