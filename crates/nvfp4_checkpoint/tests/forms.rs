//! Forms of NVFP4 beside ModelOpt's and compressed-tensors' plain ones.

use std::path::Path;

use model_files::{Tensors, f32s, raw};
use nvfp4_checkpoint::{Checkpoint, Dtype, Format, Inspection};
use nvfp4_core::moe::ExpertTransforms;
use nvfp4_core::problem::{Op, TokenDtype};
use nvfp4_core::transform::TokenTransform;

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

/// A model of two experts with a router, and this part in every projection of `roles`.
fn with_factors(folder: &Path, roles: &[&str], factors: impl Fn(usize) -> Vec<f32>) -> Checkpoint {
    let mut tensors = Tensors::default();
    let block = "model.layers.0.mlp";
    tensors.set_experts(block, ["gate_proj", "up_proj", "down_proj"], Format::ModelOpt, 2);
    tensors.set(format!("{block}.gate.weight"), f32s(&[2, 32], &std::array::from_fn::<_, 64, _>(|i| i as f32 / 64.0)));
    for (expert, role) in (0..2).flat_map(|expert| roles.iter().map(move |role| (expert, role))) {
        let factors = factors(expert);
        tensors.set(format!("{block}.experts.{expert}.{role}.pre_quant_scale"), f32s(&[factors.len()], &factors));
    }
    tensors.write(&folder.join("model.safetensors"));
    let config =
        r#"{"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": true, "hidden_act": "silu"}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    Checkpoint::open(folder).unwrap()
}

#[test]
fn shared_factors_multiply_the_tokens_after_routing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (dtype, gate_up) = (TokenDtype::Bf16, ["gate_proj", "up_proj"]);
    let halves = |_| vec![0.5; 32];
    let tokens: Vec<u16> = (0..64).map(|i| dtype.round_f32((i % 7) as f32 - 3.0)).collect();
    let inputs = |checkpoint: &Checkpoint| {
        let layer = checkpoint.moe_layer(0, dtype).unwrap();
        let used = layer.tensors.used.iter().filter(|name| name.contains("pre_quant_scale")).count();
        (layer.router.inputs(layer.weights.sizes(), tokens.clone()).unwrap(), used)
    };
    let (plain, _) = inputs(&with_factors(folder, &[], halves));
    let (scaled, used) = inputs(&with_factors(folder, &gate_up, halves));
    assert_eq!(
        (&plain.ids, &plain.weights, used),
        (&scaled.ids, &scaled.weights, 2),
        "the router reads the tokens as they are"
    );
    let numbers = |bits: &[u16], factor: f64| bits.iter().map(|&bits| factor * dtype.decode(bits)).collect::<Vec<_>>();
    assert_eq!(numbers(&plain.hidden, 0.5), numbers(&scaled.hidden, 1.0));
    // Factors of 1 change nothing, also between the products.
    with_factors(folder, &["down_proj"], |_| vec![1.0; 16]).moe_layer(0, dtype).unwrap();
    let refusal = |roles: &[&str], factors: fn(usize) -> Vec<f32>| {
        with_factors(folder, roles, factors).moe_layer(0, dtype).map(|_| ()).unwrap_err().to_string()
    };
    for (message, words) in [
        (
            refusal(&["gate_proj"], |_| vec![0.5; 32]),
            "experts.0.up_proj: the tokens of this projection and the tokens of \
             model.layers.0.mlp.experts.0.gate_proj are transformed differently",
        ),
        (refusal(&gate_up, |_| vec![0.5; 16]), "its shape is [16]"),
        (refusal(&gate_up, |_| vec![f32::NAN; 32]), "factor 0 of the tokens is NaN"),
    ] {
        assert!(message.contains(words), "{message}");
    }
    // Single operations do not read the tokens' factors.
    let checkpoint = with_factors(folder, &gate_up, halves);
    let message = checkpoint.layer(0, Op::Gated).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("NVFP4_AWQ"), "{message}");
}

#[test]
fn other_factors_belong_to_single_experts() {
    let folder = tempfile::tempdir().unwrap();
    let of_layer = |roles: &[&str], length: usize, factor: fn(usize) -> f32| {
        let checkpoint = with_factors(folder.path(), roles, |expert| vec![factor(expert); length]);
        let layer = checkpoint.moe_layer(0, TokenDtype::Bf16).unwrap();
        assert_eq!(layer.router.transform, None);
        [0, 1].map(|expert| layer.weights.transforms(expert).cloned().unwrap())
    };
    let factors = |factor: f32, length: usize| Some(TokenTransform::of_factors(&vec![factor; length]));
    assert_eq!(
        of_layer(&["down_proj"], 16, |_| 0.5),
        [(); 2].map(|()| ExpertTransforms { gate_up: None, down: factors(0.5, 16) })
    );
    assert_eq!(
        of_layer(&["gate_proj", "up_proj"], 32, |expert| 1.0 + expert as f32),
        [
            // Factors of 1 change nothing.
            ExpertTransforms::default(),
            ExpertTransforms { gate_up: factors(2.0, 32), down: None }
        ]
    );
}

#[test]
fn hadamard_transforms_of_experts_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (dtype, block) = (TokenDtype::Bf16, "model.layers.0.mlp");
    let read = |change: &dyn Fn(&mut Tensors), targets: serde_json::Value| {
        let mut tensors = Tensors::default();
        tensors.set_experts(block, ["gate_proj", "up_proj", "down_proj"], Format::CompressedTensors, 2);
        tensors.set(format!("{block}.gate.weight"), f32s(&[2, 32], &[0.5; 64]));
        change(&mut tensors);
        tensors.write(&folder.join("model.safetensors"));
        let ignore = if targets == serde_json::json!(["Linear"]) { "re:.*mlp.gate$" } else { "lm_head" };
        let apply = serde_json::json!([{"targets": targets, "location": "input", "ignore": [ignore]}]);
        let config = serde_json::json!({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": true,
            "hidden_act": "silu", "quantization_config": {"quant_method": "compressed-tensors", "transform_config":
            {"config_groups": {"u": {"type": "hadamard", "head_dim": 16, "apply": apply}}}}});
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder).unwrap();
        let layer = checkpoint.moe_layer(0, dtype).map_err(|error| error.to_string())?;
        assert_eq!(layer.router.transform.is_some(), layer.weights.transforms(0).is_none());
        let transforms = [0, 1].map(|expert| layer.weights.transforms(expert).cloned().unwrap_or_default());
        Ok::<_, String>((transforms, layer.tensors.used))
    };
    let sylvester = || Some(TokenTransform::sylvester(16));
    let both = ExpertTransforms { gate_up: sylvester(), down: sylvester() };
    let (found, _) = read(&|_| (), serde_json::json!(["Linear"])).unwrap();
    assert_eq!(found, [both.clone(), both]);
    let (found, _) = read(&|_| (), serde_json::json!(["re:.*experts.1.down_proj"])).unwrap();
    assert_eq!(found, [ExpertTransforms::default(), ExpertTransforms { gate_up: None, down: sylvester() }]);
    let shared = read(&|_| (), serde_json::json!(["re:.*(gate|up)_proj"])).unwrap();
    assert_eq!(shared.0, [(); 2].map(|()| ExpertTransforms::default()), "the router transforms tokens of all experts");
    // The matrix of a module is a part of the module.
    let elements: Vec<f32> =
        (0..256u32).map(|i| if ((i / 16) & (i % 16)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }).collect();
    let name = format!("{block}.experts.0.down_proj.u_input.weight");
    let with_matrix = |tensors: &mut Tensors| _ = tensors.set(&name, f32s(&[16, 16], &elements));
    let (_, used) = read(&with_matrix, serde_json::json!(["Linear"])).unwrap();
    assert!(used.contains(&format!("{block}.experts.*.down_proj.u_input.weight")), "{used:?}");
    for (error, words) in [
        (read(&with_matrix, serde_json::json!(["lm_head"])), "u_input.weight: this tensor is unknown"),
        (read(&|_| (), serde_json::json!(["re:.*up_proj"])), "experts.0.up_proj: the tokens of this projection"),
        (read(&|_| (), serde_json::json!(["re:.*mlp.gate$"])), "mlp.gate.weight: transform u of the router's tokens"),
    ] {
        let error = error.unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

/// Writes a file with one weight `[16, 32]`, these further tensors, and a transform of its tokens.
fn with_transform(folder: &Path, scheme: serde_json::Value, matrix: Option<(&str, &[f32])>) -> Checkpoint {
    let mut tensors = Tensors::default();
    tensors.set_nvfp4(MODULE, Format::CompressedTensors, [16, 32], 1);
    if let Some((module, matrix)) = matrix {
        let size = matrix.len().isqrt();
        tensors.set(format!("{module}.u_input.weight"), f32s(&[size, size], matrix));
    }
    tensors.write(&folder.join("model.safetensors"));
    let config = serde_json::json!({"quantization_config": {"quant_method": "compressed-tensors",
        "transform_config": {"config_groups": {"u": scheme}}}});
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(folder).unwrap()
}

#[test]
fn hadamard_transforms_of_the_tokens_are_computed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let dtype = TokenDtype::F16;
    let scheme = |kind: &str, head_dim: usize, inverse: bool| {
        serde_json::json!({"type": kind, "head_dim": head_dim,
            "apply": [{"targets": ["Linear"], "location": "input", "inverse": inverse}]})
    };
    let tokens: Vec<u16> = (0..64).map(|i| dtype.round_f32(((i * 5) % 17) as f32 - 8.0)).collect();
    let numbers: Vec<f64> = tokens.iter().map(|&bits| dtype.decode(bits)).collect();
    let transformed = |checkpoint: &Checkpoint| -> Vec<f64> {
        let mut tokens = tokens.clone();
        checkpoint.scaled_linear(MODULE, dtype).unwrap().scale(&mut tokens).unwrap();
        tokens.iter().map(|&bits| dtype.decode(bits)).collect()
    };
    // A matrix that is not symmetric, so that its inverse differs.
    let mut matrix: Vec<f32> = (0..16 * 16)
        .map(|i: u32| if ((i / 16) & (i % 16)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 })
        .collect();
    let sylvester = matrix.clone();
    (0..16).for_each(|column| matrix[3 * 16 + column] *= -1.0);
    let product = |matrix: &[f32], inverse: bool| -> Vec<f64> {
        let element = |line: usize, column: usize| {
            f64::from(if inverse { matrix[column * 16 + line] } else { matrix[line * 16 + column] })
        };
        let blocks = numbers.chunks(16).flat_map(|block| {
            (0..16).map(move |column| (0..16).map(|line| block[line] * element(line, column)).sum::<f64>() / 4.0)
        });
        blocks.map(|number| dtype.decode(dtype.round_f32(number as f32))).collect()
    };
    assert_eq!(transformed(&with_transform(folder, scheme("hadamard", 16, true), None)), product(&sylvester, false));
    for (module, inverse) in [(MODULE, false), (MODULE, true), ("model.layers.0.self_attn.k_proj", false)] {
        let checkpoint = with_transform(folder, scheme("random-hadamard", 16, inverse), Some((module, &matrix)));
        assert_eq!(transformed(&checkpoint), product(&matrix, inverse), "{module} {inverse}");
        let message = checkpoint.linear(MODULE, dtype).unwrap_err().to_string();
        assert!(message.contains("transform_config"), "{message}");
    }
    let refusal = |checkpoint: Checkpoint| checkpoint.scaled_linear(MODULE, dtype).unwrap_err().to_string();
    for (message, words) in [
        (
            refusal(with_transform(folder, scheme("random-hadamard", 16, false), None)),
            "random-hadamard transform of size 16",
        ),
        (refusal(with_transform(folder, scheme("hadamard", 12, false), None)), "is 12, which does not divide K 32"),
        (refusal(with_transform(folder, scheme("hadamard", 16, false), Some((MODULE, &matrix)))), "is not Sylvester's"),
        (
            refusal(with_transform(folder, scheme("random-hadamard", 16, false), Some((MODULE, &[0.5; 256])))),
            "is 0.5, not 1 or -1",
        ),
    ] {
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn global_input_scale_of_quark_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = with_part(folder.path(), ".input_scale_2", &[0.125]);
    assert_eq!(checkpoint.input_scale(MODULE).unwrap(), Some(0.125));
    let weights = checkpoint.linear(MODULE, TokenDtype::Bf16).unwrap();
    assert_eq!(weights.input_scale(), Some(0.125));
}

#[test]
fn experts_in_floats_do_not_run_but_shared_experts_do() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (block, names) = ("model.layers.0.mlp", ["gate_proj", "up_proj", "down_proj"]);
    let runs = |tensors: &Tensors, role: &str| {
        tensors.write(&folder.join("model.safetensors"));
        let found = Inspection::of(folder);
        let weight = found.weights.iter().find(|weight| weight.module.ends_with(role)).unwrap();
        (weight.runs.clone(), weight.why_not.clone().unwrap_or_default())
    };
    let config =
        r#"{"model_type": "glm4_moe", "num_experts_per_tok": 1, "norm_topk_prob": true, "use_routing_bias": false}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let mut tensors = Tensors::default();
    tensors
        .set_experts(block, names, Format::ModelOpt, 2)
        .set(format!("{block}.gate.weight"), f32s(&[2, 32], &[0.5; 64]));
    assert_eq!(runs(&tensors, "experts.*.up_proj"), (vec!["moe", "gated", "linear"], String::new()));
    // The host computes a shared expert in bf16 and FP8.
    for (name, shape) in names.into_iter().zip([[16, 32], [16, 32], [32, 16]]) {
        tensors.set(format!("{block}.shared_experts.{name}.weight"), raw(Dtype::BF16, &shape, &[0x3F; 1024]));
    }
    let down = format!("{block}.shared_experts.down_proj");
    tensors.set(format!("{down}.weight"), raw(Dtype::F8_E4M3, &[32, 16], &[0x38; 512]));
    tensors.set(format!("{down}.weight_scale_inv"), f32s(&[1, 1], &[0.5]));
    assert_eq!(runs(&tensors, "experts.*.up_proj"), (vec!["moe", "gated", "linear"], String::new()));
    let found = Inspection::of(folder);
    let others = found.others.iter().map(|other| (&other.kind[..], &other.runs[..], other.why));
    let runs_moe = |kind| (kind, &["moe"][..], None);
    assert_eq!(others.collect::<Vec<_>>(), [runs_moe("FP8 in blocks"), runs_moe("BF16"), runs_moe("BF16")]);
    let layer = Checkpoint::open(folder).unwrap();
    let layer = layer.moe_layer(0, TokenDtype::Bf16).unwrap();
    let shared = layer.around.as_ref().unwrap().host_branch().unwrap();
    let forms: Vec<_> = shared.projections().map(|part| (&part.form[..], part.rows(), part.k)).collect();
    assert_eq!(forms, [("BF16", 16, 32), ("BF16", 16, 32), ("FP8", 32, 16)]);
    // A tensor that would change the result is not left out.
    for part in ["weight_scale", "pre_quant_scale", "lora_A"] {
        let mut tensors = tensors.clone();
        tensors.set(format!("{block}.shared_experts.gate_proj.{part}"), f32s(&[1], &[2.0]));
        let (of_shared, why) = runs(&tensors, "experts.*.up_proj");
        assert_eq!(of_shared, ["gated", "linear"], "{part}");
        assert!(why.contains(&format!("shared_experts.gate_proj.{part}: this ")), "{why}");
    }
    // Gate in FP8 beside up in NVFP4.
    for expert in 0..2 {
        let module = format!("{block}.experts.{expert}.gate_proj");
        for part in ["weight_scale", "weight_scale_2", "input_scale"] {
            tensors.remove(&format!("{module}.{part}"));
        }
        tensors.set(format!("{module}.weight"), raw(Dtype::F8_E4M3, &[16, 32], &[0x38; 512]));
        tensors.set(format!("{module}.weight_scale"), f32s(&[], &[0.5]));
    }
    let (of_mixed, why) = runs(&tensors, "experts.*.up_proj");
    assert_eq!(of_mixed, ["linear"]);
    assert!(
        why.contains("experts.0.gate_proj.weight: its dtype is F8_E4M3") && why.contains("nvfp4 quantize"),
        "{why}"
    );
    assert_eq!(runs(&tensors, "experts.*.down_proj").0, ["plain", "linear"]);
}

#[test]
fn layer_with_other_experts_names_the_layers_that_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let config =
        r#"{"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": true, "hidden_act": "silu"}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let (mut tensors, names) = (Tensors::default(), ["gate_proj", "up_proj", "down_proj"]);
    for layer in 0..5 {
        let block = format!("model.layers.{layer}.mlp");
        tensors.set_experts(&block, names, Format::ModelOpt, 2);
        tensors.set(format!("{block}.gate.weight"), f32s(&[2, 32], &[0.5; 64]));
    }
    let mut in_form = |module: String, parts: &[(&str, &[usize])]| {
        for part in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
            tensors.remove(&format!("{module}.{part}"));
        }
        let dtype = if parts.len() == 1 { Dtype::BF16 } else { Dtype::F8_E4M3 };
        let bytes = vec![0x38; 16 * 32 * dtype.bitsize() / 8];
        tensors.set(format!("{module}.weight"), raw(dtype, parts[0].1, &bytes));
        parts[1..].iter().for_each(|(part, shape)| _ = tensors.set(format!("{module}.{part}"), f32s(shape, &[0.5])));
    };
    // Layer 1 is bf16. In layer 4, only the down projections are FP8, with a scale for each block.
    for expert in 0..2 {
        for (name, shape) in names.into_iter().zip([[16, 32], [16, 32], [32, 16]]) {
            in_form(format!("model.layers.1.mlp.experts.{expert}.{name}"), &[("weight", &shape)]);
        }
        let down = format!("model.layers.4.mlp.experts.{expert}.down_proj");
        in_form(down, &[("weight", &[32, 16]), ("weight_scale_inv", &[1, 1])]);
    }
    tensors.write(&folder.join("model.safetensors"));
    let checkpoint = Checkpoint::open(folder).unwrap();
    let whole = |layer| checkpoint.moe_layer(layer, TokenDtype::Bf16).map(|_| ()).unwrap_err().to_string();
    let quantize = "quantize the model with `nvfp4 quantize`, or use a layer that has them:";
    for (message, words) in [
        (whole(1), "layers.1.mlp.experts.0.gate_proj.weight: its dtype is BF16, but only NVFP4 or MXFP4 experts run"),
        (
            whole(4),
            "layers.4.mlp.experts.0.down_proj.weight: its dtype is F8_E4M3, but only NVFP4 or MXFP4 experts run",
        ),
    ] {
        assert!(message.contains(&format!("{words}; {quantize} 0, 2-3")), "{message}");
    }
    let single = |layer, op| checkpoint.layer(layer, op).map(|_| ()).map_err(|error| error.to_string());
    let message = single(1, Op::Gated).unwrap_err();
    assert!(
        message.contains(&format!("its dtype is BF16, but only NVFP4 weights run; {quantize} 0, 2-4")),
        "{message}"
    );
    assert!(single(4, Op::Gated).is_ok());
    assert!(single(4, Op::Plain).unwrap_err().ends_with("a layer that has them: 0, 2-3"));
}
