//! Both layers from a checkpoint, beside candle's own layers on the dequantised weights.

use std::collections::HashMap;

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

/// A checkpoint, and the numbers of its matrices.
#[derive(Default)]
struct Checkpoint {
    tensors: HashMap<String, Tensor>,
    numbers: HashMap<String, Tensor>,
}

impl Checkpoint {
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

    /// Written to a file and read again, as a model is.
    fn reread(&self) -> Result<VarBuilder<'static>> {
        let file = tempfile::NamedTempFile::new()?;
        candle_core::safetensors::save(&self.tensors, file.path())?;
        VarBuilder::from_buffered_safetensors(std::fs::read(file.path())?, DType::F32, &Device::Cpu)
    }
}

/// Asks that a result is as near as rounding to the tokens' type allows.
fn close(got: &Tensor, want: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(got.dims(), want.dims());
    let got = got.to_dtype(DType::F64)?;
    let want = want.to_dtype(DType::F64)?;
    let error = (got - &want)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    let size = want.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    assert!(error <= tolerance * size, "{error} of {size}");
    assert!(size > 0.0);
    Ok(())
}

#[test]
fn a_linear_layer_of_a_checkpoint_is_candles_on_the_dequantised_weights() -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    checkpoint.add("proj", 32, HIDDEN, 0.5)?;
    checkpoint.tensors.insert("proj.bias".into(), Tensor::randn(0f32, 1f32, 32, &Device::Cpu)?);
    let vb = checkpoint.reread()?;
    for (dtype, unit) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        let layer = Nvfp4Linear::new(HIDDEN, 32, dtype, vb.pp("proj"))?;
        let x = Tensor::randn(0f32, 1f32, (2, 3, HIDDEN), &Device::Cpu)?.to_dtype(dtype)?;
        let theirs =
            candle_nn::Linear::new(checkpoint.numbers["proj"].clone(), Some(checkpoint.tensors["proj.bias"].clone()));
        close(&layer.forward(&x)?, &theirs.forward(&x.to_dtype(DType::F32)?)?, unit)?;
        // A view with gaps.
        let narrow = Tensor::cat(&[&x, &x], 2)?.narrow(2, HIDDEN, HIDDEN)?;
        close(&layer.forward(&narrow)?, &layer.forward(&x)?, 0.0)?;
    }
    Ok(())
}

#[test]
fn a_moe_layer_of_a_checkpoint_is_the_weighted_sum_of_its_experts() -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    for expert in 0..EXPERTS {
        checkpoint.add(&format!("experts.{expert}.gate_proj"), INTERMEDIATE, HIDDEN, 0.2)?;
        checkpoint.add(&format!("experts.{expert}.up_proj"), INTERMEDIATE, HIDDEN, 0.7)?;
        checkpoint.add(&format!("experts.{expert}.down_proj"), HIDDEN, INTERMEDIATE, 0.2)?;
    }
    let vb = checkpoint.reread()?;
    let load =
        |activation| Nvfp4Moe::new(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, activation, DType::BF16, vb.pp("experts"));
    let layer = load(Activation::Silu)?;
    let x = Tensor::randn(0f32, 1f32, (5, HIDDEN), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let ids = [[0u32, 3], [1, 2], [2, 0], [3, 1], [1, 0]];
    let weights = Tensor::rand(0f32, 1f32, (5, TOP_K), &Device::Cpu)?;
    let got = layer.forward(&x, &Tensor::new(&ids, &Device::Cpu)?, &weights)?;
    let linear = |expert: u32, name: &str, x: &Tensor| {
        candle_nn::Linear::new(checkpoint.numbers[&format!("experts.{expert}.{name}_proj")].clone(), None).forward(x)
    };
    let rows = ids.iter().enumerate().map(|(token, chosen)| {
        let row = x.narrow(0, token, 1)?.to_dtype(DType::F32)?;
        let of = |(choice, &expert): (usize, &u32)| {
            let intermediate = (linear(expert, "gate", &row)?.silu()? * linear(expert, "up", &row)?)?;
            let weight = weights.narrow(0, token, 1)?.narrow(1, choice, 1)?;
            linear(expert, "down", &intermediate)?.broadcast_mul(&weight)
        };
        let parts = chosen.iter().enumerate().map(of).collect::<Result<Vec<_>>>()?;
        &parts[0] + &parts[1]
    });
    close(&got, &Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?, 2f64.powi(-7))?;
    // Without a gate it is another layer.
    let ungated = load(Activation::Relu2)?.forward(&x, &Tensor::new(&ids, &Device::Cpu)?, &weights)?;
    assert!(ungated.to_dtype(DType::F32)?.to_vec2::<f32>()? != got.to_dtype(DType::F32)?.to_vec2::<f32>()?);
    Ok(())
}

#[test]
fn what_is_wrong_is_refused_with_its_name() -> Result<()> {
    let mut checkpoint = Checkpoint::default();
    checkpoint.add("proj", 32, HIDDEN, 0.5)?;
    let vb = checkpoint.reread()?;
    let says = |result: Result<Tensor>, words: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    };
    let load = |inputs, outputs, dtype, name: &str| Nvfp4Linear::new(inputs, outputs, dtype, vb.pp(name));
    let forward = |layer: Result<Nvfp4Linear>, x: Tensor| layer.and_then(|layer| layer.forward(&x));
    let x = |dtype| Tensor::zeros((2, HIDDEN), dtype, &Device::Cpu);
    says(forward(load(HIDDEN, 32, DType::F32, "proj"), x(DType::BF16)?), "BF16 and F16");
    says(forward(load(HIDDEN, 32, DType::BF16, "other"), x(DType::BF16)?), "other.weight");
    says(forward(load(24, 32, DType::BF16, "proj"), x(DType::BF16)?), "proj: a row has 24 numbers");
    says(forward(load(HIDDEN, 48, DType::BF16, "proj"), x(DType::BF16)?), "proj.weight");
    says(forward(load(HIDDEN, 32, DType::BF16, "proj"), x(DType::F16)?), "not of the type");
    says(
        forward(load(HIDDEN, 32, DType::BF16, "proj"), Tensor::zeros((2, 48), DType::BF16, &Device::Cpu)?),
        "64 numbers a token",
    );
    Ok(())
}
