//! Forms of NVFP4 beside ModelOpt's and compressed-tensors' plain ones.

use std::path::Path;

use model_files::{Tensors, f32s};
use nvfp4_checkpoint::{Checkpoint, Format};
use nvfp4_core::problem::TokenDtype;

const MODULE: &str = "model.layers.0.self_attn.q_proj";

/// A file with one weight `[16, 32]` and a further part.
fn with_part(folder: &Path, part: &str, numbers: &[f32]) -> Checkpoint {
    let mut tensors = Tensors::default();
    tensors.set_nvfp4(MODULE, Format::ModelOpt, [16, 32], 1);
    let shape = if numbers.len() == 1 { vec![] } else { vec![numbers.len()] };
    tensors.set(format!("{MODULE}{part}"), f32s(&shape, numbers));
    Checkpoint::open(&tensors.write(&folder.join("m.safetensors"))).unwrap()
}

#[test]
fn factors_of_awq_multiply_the_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let factors: Vec<f32> = (0..32).map(|column| column as f32 / 4.0).collect();
    let checkpoint = with_part(folder.path(), ".pre_quant_scale", &factors);
    let dtype = TokenDtype::Bf16;
    let layer = checkpoint.scaled_linear(MODULE, dtype).unwrap();
    let mut tokens = [dtype.round_f32(3.0); 64];
    layer.scale(&mut tokens).unwrap();
    for (index, bits) in tokens.into_iter().enumerate() {
        assert_eq!(dtype.decode(bits), 0.75 * (index % 32) as f64, "{index}");
    }
    // Callers who do not multiply the tokens get no layer.
    let message = checkpoint.linear(MODULE, dtype).unwrap_err().to_string();
    assert!(message.contains("q_proj.pre_quant_scale: ") && message.contains("NVFP4_AWQ"), "{message}");
    let dtype = TokenDtype::F16;
    let mut large = [dtype.round_f32(30_000.0); 32];
    let message = checkpoint.scaled_linear(MODULE, dtype).unwrap().scale(&mut large).unwrap_err().to_string();
    assert!(message.contains("element 9 of token 0") && message.contains("not a finite f16"), "{message}");
    let checkpoint = with_part(folder.path(), ".pre_quant_scale", &factors[..16]);
    let message = checkpoint.scaled_linear(MODULE, dtype).unwrap_err().to_string();
    assert!(message.contains("its shape is [16]"), "{message}");
}

#[test]
fn global_input_scale_of_quark_counts() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = with_part(folder.path(), ".input_scale_2", &[0.125]);
    assert_eq!(checkpoint.input_scale(MODULE).unwrap(), Some(0.125));
    let weights = checkpoint.linear(MODULE, TokenDtype::Bf16).unwrap();
    assert_eq!(weights.input_scale(), Some(0.125));
}
