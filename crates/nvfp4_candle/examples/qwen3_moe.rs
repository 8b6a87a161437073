//! The MoE block of a small Qwen3 model in two ways: NVFP4 experts, and candle's layers with the dequantized weights.
//!
//! ```sh
//! cargo run --release --manifest-path crates/nvfp4_candle/Cargo.toml --example qwen3_moe
//! ```
//!
//! With `--features cuda` both ways run on the first GPU.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, ops::softmax_last_dim};
use nvfp4::moe::Activation;
use nvfp4::quantize::quantize;
use nvfp4_candle::Nvfp4Moe;

const HIDDEN: usize = 256;
const INTERMEDIATE: usize = 96;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const TOKENS: usize = 10;

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    // A real program would read a checkpoint with `VarBuilder::from_mmaped_safetensors`. This one makes random weights.
    let (mut tensors, mut plain) = (HashMap::new(), HashMap::new());
    for expert in 0..EXPERTS {
        for (name, rows, k) in
            [("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)]
        {
            let numbers = Tensor::randn(0f32, 0.08, (rows, k), &device)?.flatten_all()?.to_vec1::<f32>()?;
            let matrix = quantize(&numbers, rows, k).map_err(candle_core::Error::wrap)?;
            let mut dequantized = vec![0f32; rows * k];
            dequantized.chunks_mut(k).enumerate().for_each(|(row, to)| matrix.dequantize_row(row, to));
            plain.insert((expert, name), Linear::new(Tensor::from_vec(dequantized, (rows, k), &device)?, None));
            let scales = matrix.scales().iter().map(|&bits| float8::F8E4M3::from_bits(bits)).collect();
            let prefix = format!("mlp.experts.{expert}.{name}_proj");
            tensors.insert(format!("{prefix}.weight"), Tensor::from_slice(matrix.values(), (rows, k / 2), &device)?);
            tensors.insert(format!("{prefix}.weight_scale"), Tensor::from_vec(scales, (rows, k / 16), &device)?);
            tensors.insert(format!("{prefix}.weight_scale_2"), Tensor::new(matrix.global_scale(), &device)?);
        }
    }
    let router = Linear::new(Tensor::randn(0f32, 0.1, (EXPERTS, HIDDEN), &device)?, None);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &device);
    let experts =
        Nvfp4Moe::new(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, Activation::Silu, DType::BF16, vb.pp("mlp").pp("experts"))?;

    // The router: softmax over all experts, the k largest, renormalized.
    let x = Tensor::randn(0f32, 1f32, (TOKENS, HIDDEN), &device)?.to_dtype(DType::BF16)?;
    let probabilities = softmax_last_dim(&router.forward(&x.to_dtype(DType::F32)?)?)?;
    let ids = probabilities.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, TOP_K)?.contiguous()?;
    let weights = probabilities.gather(&ids, D::Minus1)?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;

    let nvfp4 = experts.forward(&x, &ids, &weights)?.to_dtype(DType::F32)?;

    let mut rows = Vec::new();
    for (token, chosen) in ids.to_vec2::<u32>()?.into_iter().enumerate() {
        let row = x.narrow(0, token, 1)?.to_dtype(DType::F32)?;
        let mut sum = Tensor::zeros((1, HIDDEN), DType::F32, &device)?;
        for (choice, expert) in chosen.into_iter().enumerate() {
            let layer = |name| &plain[&(expert as usize, name)];
            let intermediate = (layer("gate").forward(&row)?.silu()? * layer("up").forward(&row)?)?;
            let weight = weights.narrow(0, token, 1)?.narrow(1, choice, 1)?;
            sum = (sum + layer("down").forward(&intermediate)?.broadcast_mul(&weight)?)?;
        }
        rows.push(sum);
    }
    let candle = Tensor::cat(&rows, 0)?;

    let norm = |tensor: &Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f32>();
    let relative = (norm(&(&nvfp4 - &candle)?)? / norm(&candle)?).sqrt();
    println!("{TOKENS} tokens, {EXPERTS} experts on {:?}: relative difference {relative:.5}", device.location());
    if relative > 0.01 {
        candle_core::bail!("NVFP4 experts and candle's layers differ by more than the rounding of bf16");
    }
    Ok(())
}
