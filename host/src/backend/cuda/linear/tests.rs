//! Tests of linear layers with a fake driver, whose kernels are Rust functions that read the launch parameters.

use fake_cuda::{FakeCuda, Launch as FakeLaunch};

use super::*;
use crate::backend::Backend;
use crate::backend::cuda::{Cuda, Options, Verdicts};
use crate::bias::Bias;
use crate::generate::Generator;
use crate::linear::compare::compare;
use crate::linear::{LinearInputs, generate};
use crate::problem::{TokenDtype, TokenFormat};
use nvfp4_kernels::KERNELS;
use nvfp4_kernels::kernel::Kernel;
use nvfp4_kernels::variant::Variant;

const K: usize = 80;
const N: usize = 48;

fn kernel(launch: &FakeLaunch) {
    let is_of = |kernel: &&&dyn Kernel| kernel.entries().iter().any(|entry| entry.name == launch.kernel);
    KERNELS.iter().find(is_of).expect("an entry of a kernel").fake(launch);
}

fn hopper() -> FakeCuda {
    let fake = fake_cuda::install();
    fake.set_device(9, 0, 4);
    fake.on_launch(kernel);
    fake
}

fn weights(dtype: TokenDtype) -> LinearWeights<'static> {
    generate::weights(Generator::Gaussian, N, K, dtype, 1).unwrap()
}

fn inputs(dtype: TokenDtype, tokens: usize) -> LinearInputs<'static> {
    generate::inputs(Generator::Gaussian, tokens, K, dtype, 2).unwrap()
}

fn check(layer: &mut dyn Layer<Linear>, weights: &LinearWeights<'_>, inputs: LinearInputs<'_>) -> LinearOutput {
    let step = LinearStep::new(weights, inputs).unwrap();
    let mut output = LinearOutput::new(&step);
    layer.execute(&step, &mut output).unwrap();
    let found = compare(weights, &step, &output);
    assert_eq!((found.checked, found.mismatches), (step.tokens() * N, 0), "{:?}", found.first);
    output
}

#[test]
fn layer_is_one_launch_with_any_bias_or_graph() {
    let _fake = hopper();
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let bits = (0..N).map(|i| dtype.round(i as f64 / 4.0 - 3.0)).collect();
        let biases = [None, Some(Bias::F32((0..N).map(|i| i as f32 / 3.0).collect())), Some(Bias::Token(bits))];
        for (bias, graph) in biases.into_iter().zip([false, true, false]) {
            let weights = match bias {
                Some(bias) => weights(dtype).with_bias(bias).unwrap(),
                None => weights(dtype),
            };
            let gpu = Cuda::open(0).unwrap().with_variant(Variant { graph, ..Default::default() }).unwrap();
            let mut layer = gpu.prepare_linear(&weights).unwrap();
            for tokens in [1, 7, 0, 200] {
                check(layer.as_mut(), &weights, inputs(dtype, tokens));
                assert_eq!(layer.launches(), (tokens > 0).then_some(1));
            }
        }
    }
}

#[test]
fn tokens_can_have_any_stride() {
    let _fake = hopper();
    let weights = weights(TokenDtype::Bf16);
    let mut layer = Cuda::open(0).unwrap().prepare_linear(&weights).unwrap();
    let near = inputs(TokenDtype::Bf16, 5);
    let expected = check(layer.as_mut(), &weights, near.clone());
    for stride in [81, 88] {
        let far = near.x.chunks(K).flat_map(|token| [token, &vec![0x7FC0; stride - K]].concat());
        let far = LinearInputs { x: far.collect::<Vec<_>>().into(), stride, ..near };
        assert_eq!(check(layer.as_mut(), &weights, far), expected);
    }
}

#[test]
fn device_tensors_are_packed_and_computed_on_the_callers_stream() {
    let _fake = hopper();
    let (weights, gpu) = (weights(TokenDtype::F16), Cuda::open(0).unwrap());
    let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
    let (values, mut scales) = (upload(weights.matrix().values()), upload(weights.matrix().scales()));
    let global_scales = [(N, weights.matrix().global_scale())];
    let tensor = |scales: &DeviceBuffer<u8>| LinearTensor {
        values: values.as_device_ptr().as_raw(),
        scales: scales.as_device_ptr().as_raw(),
        global_scales: &global_scales,
        bias: None,
        input_scale: None,
    };
    // SAFETY: `values` and `scales` have the sizes of the tensor and live until packing has ended.
    let mut layer = unsafe { gpu.pack_linear_layer(weights.sizes(), &tensor(&scales)).unwrap() };
    let expected = check(&mut layer, &weights, inputs(TokenDtype::F16, 9));

    let (tokens, out) = (inputs(TokenDtype::F16, 9).x, DeviceBuffer::from_slice(&vec![0xFFFF_u16; 9 * N]).unwrap());
    let tokens = upload(bytemuck::cast_slice(&tokens));
    let arguments = LinearArguments {
        token_count: 9,
        tokens: tokens.as_device_ptr().as_raw(),
        token_pitch: 2 * K,
        output: out.as_device_ptr().as_raw(),
    };
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    // SAFETY: the buffers have the operands' sizes and live until the stream is synchronized below.
    assert_eq!(unsafe { layer.launch(&arguments, 0, stream.as_inner()).unwrap() }, 1);
    stream.synchronize().unwrap();
    let mut found = vec![0; 9 * N];
    out.copy_to(&mut found).unwrap();
    assert_eq!(found, expected.out);

    let mut spoilt = weights.matrix().scales().to_vec();
    spoilt[2 * K / 16 + 3] = 0x7f;
    scales.copy_from(&spoilt).unwrap();
    // SAFETY: `values` and `scales` have the sizes of the tensor and live until packing has ended.
    let error = unsafe { gpu.pack_linear_layer(weights.sizes(), &tensor(&scales)).err().unwrap() };
    assert_eq!(error.to_string(), "the scale of row 2, block 3 is negative or NaN");
}

#[test]
fn stacked_projections_keep_their_global_scales() {
    let _fake = hopper();
    let (weights, gpu) = (weights(TokenDtype::Bf16), Cuda::open(0).unwrap());
    let matrix = weights.matrix();
    let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
    let (values, scales) = (upload(matrix.values()), upload(matrix.scales()));
    let pack = |global_scales: &[(usize, f32)]| {
        let (values, scales) = (values.as_device_ptr().as_raw(), scales.as_device_ptr().as_raw());
        let tensor = LinearTensor { values, scales, global_scales, bias: None, input_scale: None };
        // SAFETY: `values` and `scales` have the sizes of the tensor and live until packing has ended.
        unsafe { gpu.pack_linear_layer(weights.sizes(), &tensor) }
    };
    let run = |layer: &mut CudaLinear| {
        let step = LinearStep::new(&weights, inputs(TokenDtype::Bf16, 3)).unwrap();
        let mut output = LinearOutput::new(&step);
        layer.execute(&step, &mut output).unwrap();
        output.out
    };
    let global = matrix.global_scale();
    let [first, second] = [global, 3.0 * global].map(|scale| run(&mut pack(&[(N, scale)]).unwrap()));
    let both = run(&mut pack(&[(N / 3, global), (N - N / 3, 3.0 * global)]).unwrap());
    for (token, row) in both.chunks(N).enumerate() {
        assert_eq!(row[..N / 3], first[token * N..][..N / 3]);
        assert_eq!(row[N / 3..], second[token * N..][N / 3..N]);
    }
    for (wrong, says) in [
        (&[(N - 1, 1.0)][..], "rows that have global scales: got 47, expected 48"),
        (&[(usize::MAX, 1.0), (N + 1, 1.0)], "rows that have global scales"),
        (&[(16, 1.0), (N - 16, f32::NAN)], "global scale"),
    ] {
        let error = pack(wrong).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn fp8_tokens_take_two_launches_and_a_workspace() {
    let _fake = hopper();
    for (dtype, graph) in [(TokenDtype::F16, false), (TokenDtype::Bf16, true)] {
        let bias = Bias::F32((0..N).map(|i| i as f32 / 3.0).collect());
        let weights = weights(dtype).with_bias(bias).unwrap().with_token_format(TokenFormat::Fp8);
        let gpu = Cuda::open(0).unwrap().with_variant(Variant { graph, ..Default::default() }).unwrap();
        let mut layer = gpu.prepare_linear(&weights).unwrap();
        assert_eq!(layer.kernel(), "moe_fp8_sm90");
        for tokens in [1, 9, 0, 200] {
            check(layer.as_mut(), &weights, inputs(dtype, tokens));
            let launches = if graph { 1 } else { 2 };
            assert_eq!(layer.launches(), (tokens > 0).then_some(launches));
        }
    }
    let weights = weights(TokenDtype::Bf16).with_token_format(TokenFormat::Fp8);
    let gpu = Cuda::open(0).unwrap();
    let layer = gpu.prepare_linear_layer(&weights).unwrap();
    assert_eq!(layer.workspace_bytes(9), 16 * 128 + 256);
    let arguments = LinearArguments { token_count: 1, tokens: 16, token_pitch: 2 * K, output: 16 };
    // SAFETY: nothing is launched.
    let error = unsafe { layer.launch(&arguments, 0x180, std::ptr::null_mut()) }.unwrap_err().to_string();
    assert_eq!(error, "the workspace at 0x180: the address must be a multiple of 256");
}

#[test]
fn fp8_projections_keep_global_scales_and_check_alignment() {
    let _fake = hopper();
    let (weights, gpu) = (weights(TokenDtype::Bf16).with_token_format(TokenFormat::Fp8), Cuda::open(0).unwrap());
    let matrix = weights.matrix();
    let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
    let (values, scales) = (upload(matrix.values()), upload(matrix.scales()));
    let address = values.as_device_ptr().as_raw();
    let pack = |values: u64, global_scales: &[(usize, f32)]| {
        let scales = scales.as_device_ptr().as_raw();
        let tensor = LinearTensor { values, scales, global_scales, bias: None, input_scale: None };
        // SAFETY: `values` and `scales` have the sizes of the tensor; another address is refused before it is read.
        unsafe { gpu.pack_linear_layer(weights.sizes(), &tensor) }
    };
    let run = |layer: &mut CudaLinear| {
        let step = LinearStep::new(&weights, inputs(TokenDtype::Bf16, 3)).unwrap();
        let mut output = LinearOutput::new(&step);
        layer.execute(&step, &mut output).unwrap();
        output.out
    };
    let global = matrix.global_scale();
    let [first, second] = [global, 3.0 * global].map(|scale| run(&mut pack(address, &[(N, scale)]).unwrap()));
    let both = run(&mut pack(address, &[(N / 3, global), (N - N / 3, 3.0 * global)]).unwrap());
    for (token, row) in both.chunks(N).enumerate() {
        assert_eq!(row[..N / 3], first[token * N..][..N / 3]);
        assert_eq!(row[N / 3..], second[token * N..][N / 3..N]);
    }
    let error = pack(address + 8, &[(N, global)]).err().unwrap().to_string();
    assert!(error.contains("for FP8 tokens the address must be a multiple of 16"), "{error}");
}

/// Opens a B200, for which no kernel was verified, and ignores verdicts.
fn blackwell(fake: &FakeCuda) -> Cuda {
    fake.set_device(10, 0, 4);
    Cuda::open_with(0, Options { verdicts: Verdicts::Ignored, ..Options::default() }).unwrap()
}

#[test]
fn blackwell_uses_the_input_scale_or_scales_per_token() {
    let fake = hopper();
    let gpu = blackwell(&fake);
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let bias = Bias::F32((0..N).map(|i| i as f32 / 3.0).collect());
        let own = weights(dtype).with_bias(bias).unwrap().with_token_format(TokenFormat::Nvfp4);
        let given = own.clone().with_input_scale(1.0 / 2048.0).unwrap();
        let mut outputs = Vec::new();
        for weights in [own, given] {
            let mut layer = gpu.prepare_linear(&weights).unwrap();
            assert_eq!(layer.kernel(), "moe_sm100");
            for tokens in [1, 9, 0, 200] {
                outputs.push(check(layer.as_mut(), &weights, inputs(dtype, tokens)));
                assert_eq!(layer.launches(), (tokens > 0).then_some(2));
            }
        }
        assert!(outputs[3] != outputs[7], "an input scale changes the rounding of tokens");
    }
}

#[test]
fn nvfp4_projections_keep_global_scales_and_check_input_scales() {
    let fake = hopper();
    let (weights, gpu) = (weights(TokenDtype::Bf16).with_token_format(TokenFormat::Nvfp4), blackwell(&fake));
    let matrix = weights.matrix();
    let upload = |bytes: &[u8]| DeviceBuffer::from_slice(bytes).unwrap();
    let (values, scales) = (upload(matrix.values()), upload(matrix.scales()));
    let address = values.as_device_ptr().as_raw();
    let pack = |values: u64, global_scales: &[(usize, f32)], input_scale| {
        let scales = scales.as_device_ptr().as_raw();
        let tensor = LinearTensor { values, scales, global_scales, bias: None, input_scale };
        // SAFETY: `values` and `scales` have the sizes of the tensor; another address is refused before it is read.
        unsafe { gpu.pack_linear_layer(weights.sizes(), &tensor) }
    };
    let run = |layer: &mut CudaLinear| {
        let step = LinearStep::new(&weights, inputs(TokenDtype::Bf16, 3)).unwrap();
        let mut output = LinearOutput::new(&step);
        layer.execute(&step, &mut output).unwrap();
        output.out
    };
    let global = matrix.global_scale();
    let [first, second] = [global, 3.0 * global].map(|scale| run(&mut pack(address, &[(N, scale)], None).unwrap()));
    let both = run(&mut pack(address, &[(N / 3, global), (N - N / 3, 3.0 * global)], None).unwrap());
    for (token, row) in both.chunks(N).enumerate() {
        assert_eq!(row[..N / 3], first[token * N..][..N / 3]);
        assert_eq!(row[N / 3..], second[token * N..][N / 3..N]);
    }
    for (values, input_scale, says) in [
        (address + 8, None, "for NVFP4 tokens the address must be a multiple of 16"),
        (address, Some(f32::NAN), "input scale NaN"),
    ] {
        let error = pack(values, &[(N, global)], input_scale).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn unsupported_or_untested_layers_are_refused_with_a_remedy() {
    let fake = fake_cuda::install();
    fake.set_device(8, 0, 4);
    let error = Cuda::open(0).unwrap().prepare_linear(&weights(TokenDtype::F16)).err().unwrap().to_string();
    assert!(error.contains("linear was not tested on") && error.contains("nvfp4 selftest"), "{error}");
    for (format, tokens) in [(TokenFormat::Fp8, "FP8"), (TokenFormat::Nvfp4, "NVFP4")] {
        let weights = weights(TokenDtype::F16).with_token_format(format);
        let error = Cuda::open(0).unwrap().prepare_linear(&weights).err().unwrap().to_string();
        let says = format!("no linear layer with {tokens} tokens for this card yet; take 16-bit tokens or the CPU");
        assert!(error.contains(&says), "{error}");
    }
}
