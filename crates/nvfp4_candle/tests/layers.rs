//! Compares both layers of a checkpoint with candle's layers on the dequantized weights, on the CPU and on a GPU if
//! there is one.

use std::collections::HashMap;
use std::thread;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use float8::F8E4M3;
use nvfp4::moe::Activation;
use nvfp4::quantize::quantize;
use nvfp4_candle::{Nvfp4Linear, Nvfp4Moe};

const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 48;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;

/// Returns the devices of this machine.
fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if cfg!(feature = "cuda") {
        match Device::new_cuda(0) {
            Ok(gpu) => devices.push(gpu),
            Err(error) => eprintln!("skipped on a GPU: {error}"),
        }
    }
    eprintln!("on {:?}", devices.iter().map(Device::location).collect::<Vec<_>>());
    devices
}

/// A checkpoint and the dequantized numbers of its matrices.
#[derive(Default)]
struct Checkpoint {
    tensors: HashMap<String, Tensor>,
    numbers: HashMap<String, Tensor>,
}

impl Checkpoint {
    /// Makes `proj`, a square matrix, and `experts`.
    fn new() -> Result<Self> {
        let mut checkpoint = Self::default();
        checkpoint.add("proj", HIDDEN, HIDDEN, 0.2)?;
        for expert in 0..EXPERTS {
            checkpoint.add(&format!("experts.{expert}.gate_proj"), INTERMEDIATE, HIDDEN, 0.2)?;
            checkpoint.add(&format!("experts.{expert}.up_proj"), INTERMEDIATE, HIDDEN, 0.7)?;
            checkpoint.add(&format!("experts.{expert}.down_proj"), HIDDEN, INTERMEDIATE, 0.2)?;
        }
        Ok(checkpoint)
    }

    fn add(&mut self, name: &str, rows: usize, k: usize, size: f32) -> Result<()> {
        let random = Tensor::randn(0f32, size, (rows, k), &Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        let matrix = quantize(&random, rows, k).map_err(candle_core::Error::wrap)?;
        let scales = matrix.scales().iter().map(|&bits| F8E4M3::from_bits(bits)).collect::<Vec<_>>();
        let mut numbers = vec![0f32; rows * k];
        numbers.chunks_mut(k).enumerate().for_each(|(row, to)| matrix.dequantize_row(row, to));
        for (part, tensor) in [
            ("weight", Tensor::from_slice(matrix.values(), (rows, k / 2), &Device::Cpu)?),
            ("weight_scale", Tensor::from_vec(scales, (rows, k / 16), &Device::Cpu)?),
            ("weight_scale_2", Tensor::new(matrix.global_scale(), &Device::Cpu)?),
        ] {
            self.tensors.insert(format!("{name}.{part}"), tensor);
        }
        self.numbers.insert(name.into(), Tensor::from_vec(numbers, (rows, k), &Device::Cpu)?);
        Ok(())
    }

    /// Writes the checkpoint to a file and reads it again, like a model.
    fn reread(&self, device: &Device) -> Result<VarBuilder<'static>> {
        let file = tempfile::NamedTempFile::new()?;
        candle_core::safetensors::save(&self.tensors, file.path())?;
        VarBuilder::from_buffered_safetensors(std::fs::read(file.path())?, DType::F32, device)
    }

    fn linear(&self, device: &Device) -> Result<Nvfp4Linear> {
        Nvfp4Linear::new(HIDDEN, HIDDEN, DType::BF16, self.reread(device)?.pp("proj"))
    }

    fn moe(&self, activation: Activation, device: &Device) -> Result<Nvfp4Moe> {
        let vb = self.reread(device)?.pp("experts");
        Nvfp4Moe::new(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, activation, DType::BF16, vb)
    }
}

/// Returns random tokens on a device.
fn random(shape: impl Into<candle_core::Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1f32, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// Returns the experts of five tokens, and their weights.
fn choices(device: &Device) -> Result<(Tensor, Tensor)> {
    let ids = Tensor::new(&[[0u32, 3], [1, 2], [2, 0], [3, 1], [1, 0]], device)?;
    Ok((ids, Tensor::rand(0f32, 1f32, (5, TOP_K), &Device::Cpu)?.to_device(device)?))
}

/// Returns a tensor's numbers in host memory.
fn numbers(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}

/// Checks that a result is within a relative tolerance.
fn close(got: &Tensor, want: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (numbers(got)?, numbers(want)?);
    let error = (got - &want)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    let size = want.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    assert!(error <= tolerance * size, "{error} of {size}");
    assert!(size > 0.0);
    Ok(())
}

/// Checks that a call fails with a message that contains these words.
fn says<T>(result: Result<T>, words: &[&str]) {
    let text = result.err().expect("the call fails").to_string();
    words.iter().for_each(|words| assert!(text.contains(words), "{text}: {words}"));
}

#[test]
fn linear_layer_matches_candle_on_dequantized_weights() -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    checkpoint.add("proj", 32, HIDDEN, 0.5)?;
    checkpoint.tensors.insert("proj.bias".into(), Tensor::randn(0f32, 1f32, 32, &Device::Cpu)?);
    let theirs =
        candle_nn::Linear::new(checkpoint.numbers["proj"].clone(), Some(checkpoint.tensors["proj.bias"].clone()));
    for device in devices() {
        let vb = checkpoint.reread(&device)?;
        for (dtype, unit) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
            let layer = Nvfp4Linear::new(HIDDEN, 32, dtype, vb.pp("proj"))?;
            let x = random((2, 3, HIDDEN), dtype, &device)?;
            let got = layer.forward(&x)?;
            assert!(got.device().same_device(&device));
            close(&got, &theirs.forward(&x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)?, unit)?;
            // A view with gaps, a view at an offset, and a view at an address that is not a multiple of 16 bytes.
            close(&layer.forward(&Tensor::cat(&[&x, &x], 2)?.narrow(2, HIDDEN, HIDDEN)?)?, &got, 0.0)?;
            close(&layer.forward(&x.narrow(0, 1, 1)?)?, &got.narrow(0, 1, 1)?, 0.0)?;
            let flat = x.flatten_all()?;
            let shifted = Tensor::cat(&[&flat.narrow(0, 0, 1)?, &flat], 0)?.narrow(0, 1, flat.elem_count())?;
            close(&layer.forward(&shifted.reshape((2, 3, HIDDEN))?)?, &got, 0.0)?;
        }
    }
    Ok(())
}

#[test]
fn quantized_layers_agree_between_devices() -> Result<()> {
    let weights = Tensor::randn(0f32, 1f32, (48, HIDDEN), &Device::Cpu)?;
    let x = random((3, HIDDEN), DType::F16, &Device::Cpu)?;
    let on = |device: &Device| {
        let bias = Tensor::arange(0f32, 48f32, device)?;
        Nvfp4Linear::quantize(&weights.to_device(device)?, Some(&bias), DType::F16)?.forward(&x.to_device(device)?)
    };
    for device in devices() {
        close(&on(&device)?, &on(&Device::Cpu)?, 2f64.powi(-10))?;
    }
    Ok(())
}

#[test]
fn moe_layer_is_the_weighted_sum_of_its_experts() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    let linear = |expert: u32, name: &str, x: &Tensor| {
        candle_nn::Linear::new(checkpoint.numbers[&format!("experts.{expert}.{name}_proj")].clone(), None).forward(x)
    };
    for device in devices() {
        let layer = checkpoint.moe(Activation::Silu, &device)?;
        let (x, (ids, weights)) = (random((5, HIDDEN), DType::BF16, &device)?, choices(&device)?);
        let got = layer.forward(&x, &ids, &weights)?;
        assert!(got.device().same_device(&device));
        let (on_cpu, weights_on_cpu) = (x.to_device(&Device::Cpu)?, weights.to_device(&Device::Cpu)?);
        let chosen = ids.to_vec2::<u32>()?;
        let rows = chosen.iter().enumerate().map(|(token, chosen)| {
            let row = on_cpu.narrow(0, token, 1)?.to_dtype(DType::F32)?;
            let of = |(choice, &expert): (usize, &u32)| {
                let intermediate = (linear(expert, "gate", &row)?.silu()? * linear(expert, "up", &row)?)?;
                let weight = weights_on_cpu.narrow(0, token, 1)?.narrow(1, choice, 1)?;
                linear(expert, "down", &intermediate)?.broadcast_mul(&weight)
            };
            let parts = chosen.iter().enumerate().map(of).collect::<Result<Vec<_>>>()?;
            &parts[0] + &parts[1]
        });
        close(&got, &Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?, 2f64.powi(-7))?;
        // Views at offsets.
        let part = |tensor: &Tensor| tensor.narrow(0, 2, 3);
        close(&layer.forward(&part(&x)?, &part(&ids)?, &part(&weights)?)?, &part(&got)?, 0.0)?;
        // A layer without a gate gives another result.
        let ungated = checkpoint.moe(Activation::Relu2, &device)?.forward(&x, &ids, &weights)?;
        assert!(numbers(&ungated)?.to_vec2::<f64>()? != numbers(&got)?.to_vec2::<f64>()?);
    }
    Ok(())
}

#[test]
fn zero_tokens_give_an_empty_output() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    for device in devices() {
        let (x, (ids, weights)) = (random((5, HIDDEN), DType::BF16, &device)?, choices(&device)?);
        let none = |tensor: &Tensor| tensor.narrow(0, 0, 0);
        assert_eq!(checkpoint.linear(&device)?.forward(&none(&x)?)?.dims(), [0, HIDDEN]);
        let layer = checkpoint.moe(Activation::Silu, &device)?;
        assert_eq!(layer.forward(&none(&x)?, &none(&ids)?, &none(&weights)?)?.dims(), [0, HIDDEN]);
    }
    Ok(())
}

#[test]
fn consecutive_layers_need_no_synchronization() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    for device in devices() {
        let (linear, moe) = (checkpoint.linear(&device)?, checkpoint.moe(Activation::Silu, &device)?);
        let (x, (ids, weights)) = (random((5, HIDDEN), DType::BF16, &device)?, choices(&device)?);
        let run = |wait: bool| {
            let mut x = x.clone();
            for _ in 0..3 {
                x = linear.forward(&x)?;
                if wait {
                    device.synchronize()?;
                }
                x = moe.forward(&x, &ids, &weights)?;
                if wait {
                    device.synchronize()?;
                }
            }
            Ok::<_, candle_core::Error>(x)
        };
        let expected = run(true)?;
        let all = (0..20).map(|_| run(false)).collect::<Result<Vec<_>>>()?;
        all.iter().try_for_each(|got| close(got, &expected, 0.0))?;
    }
    Ok(())
}

#[test]
fn threads_share_layers() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    for device in devices() {
        let (linear, moe) = (checkpoint.linear(&device)?, checkpoint.moe(Activation::Silu, &device)?);
        let (x, (ids, weights)) = (random((5, HIDDEN), DType::BF16, &device)?, choices(&device)?);
        let run = || numbers(&moe.forward(&linear.forward(&x)?, &ids, &weights)?);
        let expected = run()?;
        // On a GPU each thread has its own stream.
        device.synchronize()?;
        thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(|| (0..10).map(|_| run()).collect::<Result<Vec<_>>>()));
            threads.into_iter().try_for_each(|thread| {
                thread.join().expect("the thread does not panic")?.iter().try_for_each(|got| close(got, &expected, 0.0))
            })
        })?;
    }
    Ok(())
}

#[test]
fn wrong_inputs_are_named() -> Result<()> {
    let mut checkpoint = Checkpoint::new()?;
    checkpoint.add("narrow", 32, HIDDEN, 0.5)?;
    checkpoint.add("negative", 32, HIDDEN, 0.5)?;
    let negative = Tensor::full(-1f32, (32, HIDDEN / 16), &Device::Cpu)?.to_dtype(DType::F8E4M3)?;
    checkpoint.tensors.insert("negative.weight_scale".into(), negative.clone());
    checkpoint.tensors.insert("experts.2.up_proj.weight_scale".into(), {
        Tensor::full(-1f32, (INTERMEDIATE, HIDDEN / 16), &Device::Cpu)?.to_dtype(DType::F8E4M3)?
    });
    for device in devices() {
        let vb = checkpoint.reread(&device)?;
        let load = |inputs, outputs, dtype, name: &str| Nvfp4Linear::new(inputs, outputs, dtype, vb.pp(name));
        let x = |columns, dtype| Tensor::zeros((2, columns), dtype, &device);
        says(load(HIDDEN, 32, DType::F32, "narrow"), &["BF16 or F16"]);
        says(load(HIDDEN, 32, DType::BF16, "other"), &["other.weight"]);
        says(load(24, 32, DType::BF16, "narrow"), &["narrow: rows have 24 numbers"]);
        says(load(HIDDEN, 48, DType::BF16, "narrow"), &["narrow.weight"]);
        says(load(HIDDEN, 32, DType::BF16, "negative"), &["negative", "row 0, block 0"]);
        says(checkpoint.moe(Activation::Silu, &device), &["experts", "2", "up", "row 0, block 0"]);
        let layer = load(HIDDEN, 32, DType::BF16, "narrow")?;
        says(layer.forward(&x(HIDDEN, DType::F16)?), &["F16", "BF16"]);
        says(layer.forward(&x(48, DType::BF16)?), &["64 numbers per token"]);
    }
    Ok(())
}

#[cfg(feature = "cuda")]
#[test]
fn tokens_on_another_device_are_refused() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    let devices = devices();
    let pairs = devices.iter().flat_map(|layer| devices.iter().map(move |tokens| (layer, tokens)));
    for (on, tokens) in pairs.filter(|(layer, tokens)| !layer.same_device(tokens)) {
        let names = [on, tokens].map(|device| format!("{:?}", device.location()));
        let names = [names[0].as_str(), names[1].as_str()];
        let (x, (ids, weights)) = (random((5, HIDDEN), DType::BF16, tokens)?, choices(tokens)?);
        says(checkpoint.linear(on)?.forward(&x), &names);
        let layer = checkpoint.moe(Activation::Silu, on)?;
        says(layer.forward(&x, &ids, &weights), &names);
        // Only `ids` is on the other device.
        says(layer.forward(&x.to_device(on)?, &ids, &weights.to_device(on)?), &names);
    }
    Ok(())
}

#[test]
fn unknown_expert_contributes_nothing() -> Result<()> {
    let checkpoint = Checkpoint::new()?;
    for device in devices() {
        let layer = checkpoint.moe(Activation::Silu, &device)?;
        let x = random((2, HIDDEN), DType::BF16, &device)?;
        let weights = |second: f32| Tensor::new(&[[0.5f32, second], [0.25, second]], &device);
        let ids = |second: u32| Tensor::new(&[[1u32, second], [2, second]], &device);
        for nobody in [EXPERTS as u32, u32::MAX] {
            let got = layer.forward(&x, &ids(nobody)?, &weights(0.5)?)?;
            close(&got, &layer.forward(&x, &ids(0)?, &weights(0.0)?)?, 0.0)?;
        }
    }
    Ok(())
}
