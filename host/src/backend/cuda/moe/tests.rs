//! Tests of MoE layers with a fake driver. It records its calls, and its kernels are Rust functions that read the launch
//! parameters.

use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use fake_cuda::FakeCuda;

use super::*;
use crate::backend::Backend;
use crate::backend::cuda::{Cuda, Options, Verdicts};
use crate::fp4::InputScales;
use crate::moe::{Activation, Biases, MoeInputs};
use crate::problem::{TokenDtype, TokenFormat};
use nvfp4_kernels::fake::kernel;

const HIDDEN: usize = 80;

fn hopper() -> FakeCuda {
    let fake = fake_cuda::install();
    fake.set_device(9, 0, 4);
    fake.on_launch(kernel);
    fake
}

/// Returns a matrix of different numbers with magnitudes near 1/√K.
fn matrix(rows: usize, k: usize, seed: usize) -> Matrix<'static> {
    let values: Vec<u8> = (0..rows * k / 2).map(|i| (((i + seed) * 0x9E37_79B9) >> 13) as u8).collect();
    let scales: Vec<u8> = (0..rows * k / 16).map(|i| 0x28 + (i * 7 + seed) as u8 % 16).collect();
    Matrix::new(rows, k, values, scales, (1.0 + seed as f32 / 8.0) / (2.0 * (k as f32).sqrt())).unwrap()
}

fn expert(intermediate: usize, seed: usize) -> MoeExpert<'static> {
    let inner = |seed| matrix(intermediate, HIDDEN, seed);
    MoeExpert::gated(inner(seed), inner(seed + 1), matrix(HIDDEN, intermediate, seed + 2))
}

/// Adds biases of both types to an expert: to gate and down, but not to up.
fn biased(expert: MoeExpert<'static>) -> MoeExpert<'static> {
    let number = |i: usize| (i * 29 % 23) as f32 / 8.0 - 1.0;
    let gate = expert.gate.as_ref().map(|gate| Bias::Token((0..gate.rows()).map(|i| 0x3C00 + i as u16 % 64).collect()));
    let down = Some(Bias::F32((0..HIDDEN).map(number).collect()));
    expert.with_biases(Biases { gate, up: None, down })
}

fn weights(dtype: TokenDtype) -> MoeWeights<'static> {
    MoeWeights::new(dtype, 2, vec![expert(48, 0), expert(48, 3), expert(48, 6)]).unwrap()
}

/// Returns tokens that name experts of the layer and other experts. Some tokens name one expert twice.
fn inputs(dtype: TokenDtype, tokens: usize) -> MoeInputs<'static> {
    let number = |i: usize| dtype.round(((i * 37 % 101) as f64 - 50.0) / 25.0);
    let ids: Vec<i32> = (0..2 * tokens).map(|i| [0, 1, 2, 2, -1, 5, 1, 0][i % 8]).collect();
    MoeInputs {
        tokens,
        hidden: (0..tokens * (HIDDEN + 8)).map(number).collect(),
        stride: HIDDEN + 8,
        weights: (0..2 * tokens).map(|i| 0.25 + i as f32 / 16.0).collect(),
        ids: ids.into(),
        ..Default::default()
    }
}

/// Compares the output with the reference in stages. Each stage starts from the device's results of the previous stage.
fn check(weights: &MoeWeights<'_>, step: &MoeStep<'_>, output: &MoeOutput) {
    let found = crate::moe::compare::compare(weights, step, output);
    assert!(found.passed(), "{:?}", found.first());
}

fn execute(layer: &mut dyn Layer<Moe>, step: &MoeStep<'_>) -> MoeOutput {
    let mut output = MoeOutput::with_stages(step);
    layer.execute(step, &mut output).unwrap();
    output
}

#[test]
fn layers_with_all_options_match_the_reference() {
    let _fake = hopper();
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let plain = weights(dtype);
        let shared = weights(dtype).with_shared(expert(96, 9)).unwrap();
        let mapped = weights(dtype).with_expert_map(vec![2, -1, 0, 1, -1, 1]).unwrap();
        let [relu2, gpt_oss] = [Activation::Relu2, Activation::GPT_OSS].map(|activation| {
            let with_gate = |expert: MoeExpert<'static>| {
                if activation.has_gate() { expert } else { MoeExpert { gate: None, ..expert } }
            };
            let experts = [0, 3, 6].map(|seed| with_gate(expert(48, seed)));
            let [first, second, third] = experts;
            let experts = vec![biased(first), second, biased(third)];
            let layer = MoeWeights::with_activation(dtype, 2, activation, experts).unwrap();
            layer.with_shared(biased(with_gate(expert(96, 9)))).unwrap()
        });
        for weights in [plain, shared, mapped, relu2, gpt_oss] {
            let mut layer = Cuda::open(0).unwrap().prepare_moe_layer(&weights).unwrap();
            for tokens in [1, 7, 0, 200] {
                let mut inputs = inputs(dtype, tokens);
                inputs.shared_weights = weights.shared().map(|_| vec![0.5; tokens].into());
                let step = MoeStep::new(&weights, inputs).unwrap();
                let output = execute(&mut layer, &step);
                check(&weights, &step, &output);
                // A step of 200 tokens has a separate launch that writes tokens to their rows. One token takes two launches.
                let launches = match (weights.shared(), tokens) {
                    (Some(_), _) => 6,
                    (None, 1) => 2,
                    _ => 4,
                } + usize::from(tokens == 200);
                assert_eq!(layer.launches(), (tokens > 0).then_some(launches));
            }
        }
    }
}

#[test]
fn blackwell_uses_input_scales_or_scales_per_token() {
    let fake = hopper();
    fake.set_device(10, 0, 4);
    // These kernels were not verified on any GPU.
    let of_f16 = weights(TokenDtype::F16).with_token_format(TokenFormat::Nvfp4);
    let error = Cuda::open(0).unwrap().prepare_moe(&of_f16).err().unwrap().to_string();
    assert!(error.contains("nvfp4 selftest"), "{error}");
    let options = Options { verdicts: Verdicts::Ignored, ..Options::default() };
    let gpu = Cuda::open_with(0, options).unwrap();
    assert_eq!(gpu.moe_token_format(), TokenFormat::Nvfp4);
    let of_fp8 = weights(TokenDtype::F16).with_token_format(TokenFormat::Fp8);
    let error = gpu.prepare_moe(&of_fp8).err().unwrap().to_string();
    assert!(error.contains("no MoE layer with FP8 tokens for this card yet; take NVFP4 tokens"), "{error}");
    let scales = |count: usize| (1..=count).map(|i| InputScales { gate_up: i as f32 / 4e3, down: i as f32 / 3e4 });
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let own = weights(dtype).with_token_format(TokenFormat::Nvfp4);
        let given = own.clone().with_shared(biased(expert(96, 9))).unwrap();
        let given = given.with_input_scales(scales(4).collect()).unwrap();
        for weights in [own, given] {
            let mut layer = gpu.prepare_moe_layer(&weights).unwrap();
            for tokens in [1, 7, 0, 200] {
                let step = MoeStep::new(&weights, inputs(dtype, tokens)).unwrap();
                check(&weights, &step, &execute(&mut layer, &step));
                // With input scales, the epilogue of gate and up quantizes the input of down. Without a shared expert, the
                // first launch also makes the lists.
                let launches = if weights.shared().is_some() { 8 } else { 5 };
                assert_eq!(layer.launches(), (tokens > 0).then_some(launches));
            }
        }
    }
}

#[test]
fn weights_on_the_input_are_applied_before_rounding() {
    let _fake = hopper();
    let weights = MoeWeights::new(TokenDtype::Bf16, 1, vec![expert(48, 0), expert(48, 3)]).unwrap();
    let mut inputs = inputs(TokenDtype::Bf16, 9);
    (inputs.weights, inputs.ids) = (vec![0.3; 9].into(), vec![1; 9].into());
    inputs.weights_on_input = true;
    let step = MoeStep::new(&weights, inputs).unwrap();
    let mut layer = Cuda::open(0).unwrap().prepare_moe_layer(&weights).unwrap();
    check(&weights, &step, &execute(&mut layer, &step));
}

/// Operands of a step, each in a separate buffer.
struct OnDevice {
    arguments: MoeArguments,
    ids: DeviceBuffer<i32>,
    output: DeviceBuffer<u16>,
    _memory: Vec<DeviceBuffer<u8>>,
}

impl OnDevice {
    fn new(step: &MoeStep<'_>) -> Self {
        let inputs = step.inputs();
        let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
        let memory = vec![upload(bytemuck::cast_slice(&inputs.hidden)), upload(bytemuck::cast_slice(&inputs.weights))];
        let ids = DeviceBuffer::from_slice(&inputs.ids).unwrap();
        let output = DeviceBuffer::from_slice(&vec![0xFFFF; step.tokens() * HIDDEN]).unwrap();
        let arguments = MoeArguments {
            token_count: step.tokens(),
            tokens: memory[0].as_device_ptr().as_raw(),
            token_pitch: 2 * inputs.stride,
            topk_ids: ids.as_device_ptr().as_raw(),
            topk_weights: memory[1].as_device_ptr().as_raw(),
            output: output.as_device_ptr().as_raw(),
            output_pitch: 2 * HIDDEN,
            ..MoeArguments::default()
        };
        Self { arguments, ids, output, _memory: memory }
    }

    fn output(&self) -> Vec<u16> {
        let mut bits = vec![0; self.output.len()];
        self.output.copy_to(&mut bits).unwrap();
        bits
    }
}

fn workspace(layer: &CudaMoeLayer, tokens: usize) -> DeviceBuffer<u8> {
    DeviceBuffer::from_slice(&vec![0xFF; layer.workspace_bytes(tokens)]).unwrap()
}

#[test]
fn call_on_the_callers_stream_only_launches() {
    let fake = hopper();
    let weights = weights(TokenDtype::Bf16);
    let mut layer = Cuda::open(0).unwrap().prepare_moe_layer(&weights).unwrap();
    let step = MoeStep::new(&weights, inputs(TokenDtype::Bf16, 12)).unwrap();
    let expected = execute(&mut layer, &step).hidden;
    let (operands, stream) = (OnDevice::new(&step), Stream::new(StreamFlags::NON_BLOCKING, None).unwrap());
    let workspace = workspace(&layer, 12);
    fake.take_calls();
    // SAFETY: the buffers have the operands' sizes and live until the stream of this context is synchronized.
    let launches =
        unsafe { layer.launch(&operands.arguments, workspace.as_device_ptr().as_raw(), stream.as_inner()) }.unwrap();
    assert_eq!(launches, 4);
    let mut calls = vec!["cuCtxSetCurrent"];
    calls.extend(["cuLaunchKernelEx"; 4]);
    assert_eq!(fake.take_calls(), calls);
    stream.synchronize().unwrap();
    assert_eq!(operands.output(), expected);
}

#[test]
fn graph_reads_the_ids_when_it_runs() {
    let fake = hopper();
    let weights = weights(TokenDtype::F16);
    let mut layer = Cuda::open(0).unwrap().prepare_moe_layer(&weights).unwrap();
    let steps = [[0, 1], [2, 2], [-1, 0], [-1, 9]].map(|ids| {
        let mut inputs = inputs(TokenDtype::F16, 12);
        inputs.ids = ids.repeat(12).into();
        MoeStep::new(&weights, inputs).unwrap()
    });
    let expected: Vec<_> = steps.iter().map(|step| execute(&mut layer, step).hidden).collect();
    let (mut operands, stream) = (OnDevice::new(&steps[0]), Stream::new(StreamFlags::NON_BLOCKING, None).unwrap());
    let workspace = workspace(&layer, 12);
    // SAFETY: the buffers have the operands' sizes and live until the graph is destroyed.
    let graph = unsafe { layer.capture(&operands.arguments, workspace.as_device_ptr().as_raw()) }.unwrap();
    for (step, expected) in steps.iter().zip(expected) {
        operands.ids.copy_from(&*step.inputs().ids).unwrap();
        fake.take_calls();
        // SAFETY: the stream belongs to the current context.
        unsafe { graph.launch(stream.as_inner()) }.unwrap();
        assert_eq!(fake.take_calls(), ["cuCtxSetCurrent", "cuGraphLaunch"]);
        stream.synchronize().unwrap();
        assert_eq!(operands.output(), expected);
    }
}

#[test]
fn layers_share_a_workspace() {
    let _fake = hopper();
    let dtype = TokenDtype::Bf16;
    let of = |seed| MoeWeights::new(dtype, 2, vec![expert(48, seed), expert(48, seed + 3)]).unwrap();
    let weights = [of(0), of(20)];
    let gpu = Cuda::open(0).unwrap();
    let mut layers = weights.each_ref().map(|weights| gpu.prepare_moe_layer(weights).unwrap());
    let steps: Vec<_> = weights.iter().map(|weights| MoeStep::new(weights, inputs(dtype, 12)).unwrap()).collect();
    let expected: Vec<_> = layers.iter_mut().zip(&steps).map(|(layer, step)| execute(layer, step).hidden).collect();
    let workspace = workspace(&layers[0], 12);
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    let operands: Vec<_> = steps.iter().map(OnDevice::new).collect();
    for (layer, operands) in layers.iter().zip(&operands) {
        let workspace = workspace.as_device_ptr().as_raw();
        // SAFETY: the buffers have the operands' sizes and live until the stream of this context is synchronized.
        unsafe { layer.launch(&operands.arguments, workspace, stream.as_inner()) }.unwrap();
    }
    stream.synchronize().unwrap();
    let found: Vec<_> = operands.iter().map(OnDevice::output).collect();
    assert_eq!(found, expected);
}

#[test]
fn launcher_uses_the_callers_memory_and_restores_the_context() {
    let fake = hopper();
    let dtype = TokenDtype::Bf16;
    let experts = [0, 3, 6].map(|seed| biased(expert(48, seed))).into();
    let weights = MoeWeights::with_activation(dtype, 2, Activation::GeluTanh, experts).unwrap();
    let weights = weights.with_shared(biased(expert(96, 9))).unwrap();
    let weights = weights.with_expert_map(vec![2, -1, 0, 1, -1, 1]).unwrap();
    let sizes = weights.sizes();
    let step = MoeStep::new(&weights, inputs(dtype, 20)).unwrap();
    let gpu = Cuda::open(0).unwrap();
    let expected = execute(&mut gpu.prepare_moe_layer(&weights).unwrap(), &step).hidden;

    let launcher = gpu.moe_launcher().unwrap();
    let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
    let shared = std::slice::from_ref(weights.shared().unwrap());
    // Values and scales of each projection, for the routed experts and for the shared expert.
    let raw = [weights.experts(), shared].map(|experts| {
        [0, 1, 2].map(|projection| {
            let of = |expert: &MoeExpert<'static>| expert.projections().nth(projection).unwrap().1.clone();
            let concat = |bytes: for<'m> fn(&'m Matrix<'static>) -> &'m [u8]| -> Vec<u8> {
                experts.iter().flat_map(|expert| bytes(&of(expert)).to_vec()).collect()
            };
            let scales: Vec<f32> = experts.iter().map(|expert| of(expert).global_scale()).collect();
            let (values, blocks) = (concat(|matrix| matrix.values()), concat(|matrix| matrix.scales()));
            let bias =
                |expert: &MoeExpert<'static>| Some(expert.projections().nth(projection)?.2?.numbers(dtype).to_vec());
            let biases: Option<Vec<Vec<f32>>> = experts.iter().map(bias).collect();
            let biases = biases.map(|biases| Bias::F32(biases.concat().into()));
            let (of_values, of_blocks) = (values.len() / experts.len(), blocks.len() / experts.len());
            (of_values, upload(&values), of_blocks, upload(&blocks), scales, biases)
        })
    });
    let [routed, shared] = raw.each_ref().map(|projections| {
        let [gate, up, down] =
            projections.each_ref().map(|(values_stride, values, scales_stride, scales, global, bias)| {
                let (values, scales) = (values.as_device_ptr().as_raw(), scales.as_device_ptr().as_raw());
                let (values_stride, scales_stride) = (*values_stride, *scales_stride);
                MoeTensor { values, values_stride, scales, scales_stride, global_scales: global, bias: bias.as_ref() }
            });
        MoeTensors { gate: Some(gate), up, down, input_scales: &[] }
    });
    let packed = upload(&vec![0xAA; weight_bytes(&sizes)]);
    let map = DeviceBuffer::from_slice(weights.expert_map().unwrap()).unwrap();
    let workspace = upload(&vec![0xFF; launcher.workspace_bytes(&sizes, 20)]);
    let (operands, stream) = (OnDevice::new(&step), Stream::new(StreamFlags::NON_BLOCKING, None).unwrap());
    let layer = PackedMoe { sizes, weights: packed.as_device_ptr().as_raw(), expert_map: map.as_device_ptr().as_raw() };
    let (stream_of, workspace) = (stream.as_inner(), workspace.as_device_ptr().as_raw());
    // When an engine's thread calls, another library's context or no context is current.
    // SAFETY: null means that no context is current.
    unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    fake.take_calls();
    // SAFETY: all buffers have the sizes of the tensors and operands, and live until the stream is synchronized below.
    unsafe { launcher.pack(&sizes, &routed, Some(&shared), layer.weights, stream_of) }.unwrap();
    // SAFETY: the packed weights, the operands and the workspace live until the stream is synchronized below.
    let launches = unsafe { launcher.launch(&layer, &operands.arguments, workspace, stream_of) }.unwrap();
    assert_eq!(launches, 7, "one launch writes tokens to the rows of the shared expert");
    let calls = fake.take_calls();
    let is_slow = |call: &&String| ["Alloc", "Free", "Synchronize", "Module"].iter().any(|part| call.contains(part));
    assert_eq!(calls.iter().find(is_slow), None, "{calls:?}");
    assert_eq!(calls[calls.len() - 2..], ["cuLaunchKernelEx", "cuCtxSetCurrent"]);
    let mut current = std::ptr::dangling_mut();
    // SAFETY: `current` outlives the call.
    unsafe { sys::cuCtxGetCurrent(&mut current) };
    assert!(current.is_null());

    gpu.prepare_moe_layer(&weights).unwrap(); // makes the context current
    stream.synchronize().unwrap();
    let mut head = [0; MoeLauncher::HEAD_BYTES];
    packed.index(..head.len()).copy_to(&mut head).unwrap();
    MoeLauncher::check_packed(&sizes, &head).unwrap();
    assert_eq!(operands.output(), expected);

    // The shared expert's down, row 1, block 2 of 6.
    head[40..].copy_from_slice(&8_u64.to_ne_bytes());
    let error = MoeLauncher::check_packed(&sizes, &head).unwrap_err().to_string();
    assert_eq!(error, "shared expert: down: the scale of row 1, block 2 is negative or NaN");
    // SAFETY: nothing is launched.
    let error =
        unsafe { launcher.launch(&PackedMoe { weights: 16, ..layer }, &operands.arguments, workspace, stream_of) };
    assert!(error.unwrap_err().to_string().contains("packed weights at 0x10"));
}

#[test]
fn device_tensors_are_packed_and_bad_scales_are_named() {
    let _fake = hopper();
    let weights = weights(TokenDtype::F16);
    let step = MoeStep::new(&weights, inputs(TokenDtype::F16, 12)).unwrap();
    let gpu = Cuda::open(0).unwrap();
    let expected = execute(&mut gpu.prepare_moe_layer(&weights).unwrap(), &step).hidden;

    // Each expert's gate is followed by its up, as in engines.
    let experts = weights.experts();
    let mut bytes = [const { Vec::new() }; 4];
    for expert in experts {
        for matrix in [expert.gate.as_ref().unwrap(), &expert.up] {
            bytes[0].extend_from_slice(matrix.values());
            bytes[1].extend_from_slice(matrix.scales());
        }
        bytes[2].extend_from_slice(expert.down.values());
        bytes[3].extend_from_slice(expert.down.scales());
    }
    let (values, scales) = (48 * HIDDEN / 2, 48 * HIDDEN / 16);
    let globals =
        [0, 1, 2].map(|i| experts.iter().map(|e| e.projections().nth(i).unwrap().1.global_scale()).collect::<Vec<_>>());
    let pack = |bytes: &[Vec<u8>; 4]| -> Result<CudaMoeLayer, Error> {
        let memory = bytes.each_ref().map(|bytes| DeviceBuffer::from_slice(bytes).unwrap());
        let [at, at_scales, of_down, of_down_scales] = memory.each_ref().map(|memory| memory.as_device_ptr().as_raw());
        let tensor = |index: usize| MoeTensor {
            values: at + (index * values) as u64,
            values_stride: 2 * values,
            scales: at_scales + (index * scales) as u64,
            scales_stride: 2 * scales,
            global_scales: &globals[index],
            bias: None,
        };
        let (values, scales) = (of_down, of_down_scales);
        let down = MoeTensor {
            values,
            scales,
            values_stride: HIDDEN * 48 / 2,
            scales_stride: HIDDEN * 48 / 16,
            global_scales: &globals[2],
            bias: None,
        };
        let tensors = MoeTensors { gate: Some(tensor(0)), up: tensor(1), down, input_scales: &[] };
        // SAFETY: the buffers have the sizes of the tensors and live until packing has ended.
        unsafe { gpu.pack_moe_layer(weights.sizes(), &tensors, None, None) }
    };
    assert_eq!(execute(&mut pack(&bytes).unwrap(), &step).hidden, expected);

    // Up of the second expert, row 1, block 2.
    bytes[1][3 * scales + HIDDEN / 16 + 2] = 0x80;
    let error = pack(&bytes).err().unwrap().to_string();
    assert_eq!(error, "expert 1: up: the scale of row 1, block 2 is negative or NaN");
}

#[test]
fn other_gpus_use_tested_portable_kernels() {
    let fake = hopper();
    for (major, minor) in [(8, 0), (8, 9), (10, 0)] {
        fake.set_device(major, minor, 4);
        let error = Cuda::open(0).unwrap().prepare_moe(&weights(TokenDtype::F16)).err().unwrap();
        assert!(error.to_string().starts_with("moe was not tested on Fake GPU"), "{error}");
        assert_eq!(error.code(), "not-computed");
        let gpu = Cuda::open_with(0, Options { verdicts: Verdicts::Ignored, ..Options::default() }).unwrap();
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let weights = weights(dtype).with_shared(expert(96, 9)).unwrap();
            let mut layer = gpu.prepare_moe_layer(&weights).unwrap();
            assert_eq!(layer.kernel(), "moe_sm80");
            for tokens in [1, 7, 300] {
                let step = MoeStep::new(&weights, inputs(dtype, tokens)).unwrap();
                check(&weights, &step, &execute(&mut layer, &step));
            }
        }
    }
}

#[test]
fn all_driver_objects_are_released() {
    let fake = hopper();
    {
        let weights = weights(TokenDtype::F16);
        let gpu = Cuda::open(0).unwrap().with_variant("graph".parse().unwrap()).unwrap();
        let mut layer = gpu.prepare_moe_layer(&weights).unwrap();
        let step = MoeStep::new(&weights, inputs(TokenDtype::F16, 12)).unwrap();
        check(&weights, &step, &execute(&mut layer, &step));
        assert_eq!(layer.launches(), Some(1), "a graph");
    }
    assert_eq!(fake.live_objects(), 0);
}
