//! Reads layers of small models in published layouts: MoE layers with routers, with separate or fused experts, and
//! single weights.

use std::path::Path;

use model_files::{Content, Tensors, f32s, raw};
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, Dtype, Format, MoeLayer};
use nvfp4::format::Matrix;
use nvfp4::fp4::InputScales;
use nvfp4::linear::{self, LinearOutput, LinearStep};
use nvfp4::moe::compare::compare;
use nvfp4::moe::{Activation, MoeExpert, MoeInputs, MoeOutput, MoeStep, MoeWeights};
use nvfp4::problem::{Expert, Op, TokenDtype, TokenFormat};
use nvfp4::router::{Rule, Score, Scoring};
use serde_json::{Value, json};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const BLOCK: &str = "model.layers.3.mlp";
const EXPERTS: usize = 3;
const HIDDEN: usize = 32;

fn numbers(count: usize, step: usize) -> Vec<f32> {
    (0..count).map(|i| (i * step % 23) as f32 / 10.0 - 1.1).collect()
}

fn router(experts: usize) -> Content {
    f32s(&[experts, HIDDEN], &numbers(experts * HIDDEN, 7))
}

fn qwen3() -> Value {
    json!({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu"})
}

/// Makes layer 3 with separate experts and a router.
fn apart(format: Format) -> Tensors {
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, format, EXPERTS).set(format!("{BLOCK}.gate.weight"), router(EXPERTS));
    tensors
}

/// Writes a model and calls `test` with its checkpoint and its folder.
fn with_model<T>(tensors: &Tensors, config: Option<Value>, test: impl FnOnce(&Checkpoint, &Path) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    tensors.write(&folder.path().join("model.safetensors"));
    if let Some(config) = config {
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    }
    test(&Checkpoint::open(folder.path()).unwrap(), folder.path())
}

fn contents(weights: &MoeWeights<'_>) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
    let experts = weights.experts().iter().chain(weights.shared());
    let content = |matrix: &Matrix<'_>| (matrix.values().to_vec(), matrix.scales().to_vec(), matrix.global_scale());
    experts.flat_map(MoeExpert::projections).map(|(_, matrix, _)| content(matrix)).collect()
}

/// Returns the contents of a model's layer after checking that the CPU computes it correctly.
fn layer_of(tensors: &Tensors, config: Value) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
    with_layer(tensors, config, |layer, _| contents(&layer.weights))
}

/// Checks that the CPU computes a model's layer correctly, and calls `test` with the layer and the inputs of five
/// tokens.
fn with_layer<T>(tensors: &Tensors, config: Value, test: impl FnOnce(&MoeLayer<'_>, &MoeInputs<'_>) -> T) -> T {
    with_model(tensors, Some(config), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        let hidden =
            linear::generate::inputs(Default::default(), 5, HIDDEN, TokenDtype::Bf16, 1).unwrap().x.into_owned();
        let inputs = layer.router.inputs(layer.weights.sizes(), hidden).unwrap();
        let step = MoeStep::new(&layer.weights, inputs.clone()).unwrap();
        let mut output = MoeOutput::with_stages(&step);
        Cpu::new().prepare_moe(&layer.weights).unwrap().execute(&step, &mut output).unwrap();
        let found = compare(&layer.weights, &step, &output);
        assert!(found.passed() && found.checked() > 0, "{:?}", found.first());
        test(&layer, &inputs)
    })
}

/// Returns the error for a changed model.
fn refusal(config: Option<Value>, change: impl FnOnce(&mut Tensors)) -> String {
    let mut tensors = apart(Format::ModelOpt);
    change(&mut tensors);
    with_model(&tensors, config, |checkpoint, folder| {
        let error = checkpoint.moe_layer(3, TokenDtype::Bf16).map(|_| ()).unwrap_err().to_string();
        error.replace(&folder.display().to_string(), "MODEL")
    })
}

#[test]
fn experts_and_router_of_both_formats_make_a_layer() {
    let expected = layer_of(&apart(Format::ModelOpt), qwen3());
    assert_eq!(expected.len(), 3 * EXPERTS);
    assert_eq!(layer_of(&apart(Format::CompressedTensors), qwen3()), expected);
    // Mixtral's names, and its routing rule, which is not in its configuration.
    let mut mixtral = Tensors::default();
    let block = "model.layers.3.block_sparse_moe";
    mixtral.set_experts(block, ["w1", "w3", "w2"], Format::ModelOpt, EXPERTS);
    mixtral.set(format!("{block}.gate.weight"), router(EXPERTS));
    assert_eq!(layer_of(&mixtral, json!({"model_type": "mixtral", "num_experts_per_tok": 2})), expected);
}

#[test]
fn input_scales_are_used_or_refused_with_the_reason() {
    let mut tensors = apart(Format::ModelOpt);
    for (expert, name) in (0..EXPERTS).flat_map(|expert| NAMES.map(|name| (expert, name))) {
        let scale = (1 + expert) as f32 / if name == "up_proj" { 64.0 } else { 128.0 };
        tensors.set(format!("{BLOCK}.experts.{expert}.{name}.input_scale"), f32s(&[], &[scale]));
    }
    // Gate and up use the larger of their two scales.
    assert_eq!(input_scales_of(&tensors), Ok(Some(InputScales { gate_up: 3.0 / 64.0, down: 3.0 / 128.0 })));
    let name = format!("{BLOCK}.experts.1.down_proj.input_scale");
    for strange in [0.0, -1.0, 1e-40, f32::INFINITY] {
        tensors.set(&name, f32s(&[], &[strange]));
        let fault = input_scales_of(&tensors).unwrap_err();
        assert!(fault.contains(&name) && fault.contains("use 16-bit tokens"), "{fault}");
    }
    tensors.remove(&name);
    let fault = input_scales_of(&tensors).unwrap_err();
    let first = format!("1 of 9 projections have no input scale, starting with {BLOCK}.experts.1.down_proj");
    assert!(fault.contains(&first), "{fault}");
}

/// Returns the input scales of the last expert, after a check that a layer with NVFP4 tokens is right with them; or the
/// reason why it is refused. Tokens of 16 bits must run in any case.
fn input_scales_of(tensors: &Tensors) -> Result<Option<InputScales>, String> {
    with_layer(tensors, qwen3(), |layer, inputs| {
        let weights = layer.weights.clone().with_token_format(TokenFormat::Nvfp4);
        let step = MoeStep::new(&weights, inputs.clone()).map_err(|error| error.to_string())?;
        let mut output = MoeOutput::with_stages(&step);
        Cpu::new().prepare_moe(&weights).unwrap().execute(&step, &mut output).unwrap();
        assert!(compare(&weights, &step, &output).passed());
        Ok(weights.input_scales(EXPERTS - 1))
    })
}

#[test]
fn fused_experts_have_the_input_scales_of_all_or_each() {
    for (shape, gate_up, down) in [
        (&[][..], vec![0.25], vec![0.5]),
        (&[EXPERTS], vec![0.125, 0.5, 0.25], vec![1.0, 1.0, 0.5]),
        (&[EXPERTS, 2], vec![1.0, 1.0, 1.0, 1.0, 0.125, 0.25], vec![0.5]),
    ] {
        let mut tensors = fused(false, &[EXPERTS]);
        tensors.set(format!("{BLOCK}.experts.gate_up_proj_input_scale"), f32s(shape, &gate_up));
        let shape = if down.len() == 1 { &[][..] } else { shape };
        tensors.set(format!("{BLOCK}.experts.down_proj_input_scale"), f32s(shape, &down));
        assert_eq!(input_scales_of(&tensors), Ok(Some(InputScales { gate_up: 0.25, down: 0.5 })), "{gate_up:?}");
        tensors.remove(&format!("{BLOCK}.experts.down_proj_input_scale"));
        assert!(input_scales_of(&tensors).unwrap_err().contains("down_proj, expert 0"));
    }
}

#[test]
fn router_chooses_the_experts_with_the_largest_scores() {
    with_model(&apart(Format::ModelOpt), Some(qwen3()), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        assert_eq!(layer.modules[0], "model.layers.3.mlp.experts.*.gate_proj");
        // The router's first column, for the three experts: (i·7 mod 23) / 10 − 1.1 for i = 0, 32 and 64.
        let mut hidden = vec![0u16; 2 * HIDDEN];
        (hidden[0], hidden[HIDDEN]) = (0x4000, 0xC000);
        let inputs = layer.router.inputs(layer.weights.sizes(), hidden).unwrap();
        let scores = [0, 32, 64].map(|i| f64::from((i * 7 % 23) as f32 / 10.0 - 1.1));
        let mut order = [0, 1, 2];
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        assert_eq!(inputs.ids[..], [order[0], order[1], order[2], order[1]].map(|expert| expert as i32));
        let share = |a: usize, b: usize, x: f64| {
            ((scores[a] * x).exp() / ((scores[a] * x).exp() + (scores[b] * x).exp())) as f32
        };
        assert!((inputs.weights[0] - share(order[0], order[1], 2.0)).abs() < 1e-6, "{:?}", inputs.weights);
        assert!((inputs.weights[2] - share(order[2], order[1], -2.0)).abs() < 1e-6, "{:?}", inputs.weights);
    });
}

/// Makes fused experts: one tensor per role. Rows of gate and up alternate if `in_turn`, otherwise gate's rows come
/// first.
fn fused(in_turn: bool, globals: &[usize]) -> Tensors {
    let part = |tensors: &Tensors, name: String| {
        let (_, (_, _, bytes)) = tensors.iter().find(|(other, _)| *other == name).unwrap();
        bytes.clone()
    };
    let of_experts = apart(Format::ModelOpt);
    let mut tensors = Tensors::default();
    for (name, roles, [n, k]) in [("gate_up_proj", &NAMES[..2], [16, HIDDEN]), ("down_proj", &NAMES[2..], [HIDDEN, 16])]
    {
        for (suffix, of, row_bytes, dtype) in
            [("", ".weight", k / 2, Dtype::U8), ("_weight_scale", ".weight_scale", k / 16, Dtype::F8_E4M3)]
        {
            let mut bytes = Vec::new();
            for expert in 0..EXPERTS {
                let parts: Vec<_> = roles
                    .iter()
                    .map(|role| part(&of_experts, format!("{BLOCK}.experts.{expert}.{role}{of}")))
                    .collect();
                if in_turn {
                    for row in 0..n {
                        parts.iter().for_each(|part| bytes.extend(&part[row * row_bytes..][..row_bytes]));
                    }
                } else {
                    parts.iter().for_each(|part| bytes.extend(part));
                }
            }
            let shape = [EXPERTS, n * roles.len(), row_bytes];
            tensors.set(format!("{BLOCK}.experts.{name}{suffix}"), raw(dtype, &shape, &bytes));
        }
        let count = globals.iter().product();
        tensors.set(format!("{BLOCK}.experts.{name}_weight_scale_2"), f32s(globals, &vec![0.25; count]));
    }
    tensors.set(format!("{BLOCK}.gate.weight"), router(EXPERTS));
    tensors
}

#[test]
fn fused_experts_equal_separate_experts() {
    let expected = layer_of(&apart(Format::ModelOpt), qwen3());
    for globals in [&[][..], &[1], &[EXPERTS]] {
        assert!(layer_of(&fused(false, globals), qwen3()) == expected, "{globals:?}");
    }
    let gpt_oss = json!({"model_type": "gpt_oss", "num_experts_per_tok": 2, "hidden_act": "silu"});
    assert!(layer_of(&fused(true, &[EXPERTS]), gpt_oss) == expected);
    assert!(
        layer_of(&fused(true, &[EXPERTS]), qwen3()) != expected,
        "read as halves, alternating rows must give other experts"
    );
    for (name, content, words) in [
        (
            "down_proj_weight_scale",
            Some(raw(Dtype::F8_E4M3, &[3, 16, 2], &[0x38; 96])),
            "down_proj_weight_scale: its shape is [3, 16, 2]",
        ),
        (
            "gate_up_proj",
            Some(raw(Dtype::U8, &[3, 31, 16], &[0; 3 * 31 * 16])),
            "gate_up_proj: its shape is [3, 31, 16]",
        ),
        ("gate_up_proj", Some(f32s(&[3, 32, 32], &[0.0; 3 * 32 * 32])), "gate_up_proj: "),
        ("gate_up_proj_weight_scale_2", None, "global scales"),
        ("gate_up_proj_weight_scale_2", Some(f32s(&[2], &[0.1; 2])), "gate_up_proj_weight_scale_2: its shape is [2]"),
        ("gate_up_proj_bias", Some(f32s(&[3, 31], &[0.0; 93])), "gate_up_proj_bias: its shape is [3, 31]"),
        ("gate_up_proj_zeros", Some(f32s(&[3, 32], &[0.0; 96])), "gate_up_proj_zeros: this tensor is unknown"),
    ] {
        let mut tensors = fused(false, &[]);
        match content {
            Some(content) => tensors.set(format!("{BLOCK}.experts.{name}"), content),
            None => tensors.remove(&format!("{BLOCK}.experts.{name}")),
        };
        let error = with_model(&tensors, Some(qwen3()), |checkpoint, _| {
            checkpoint.moe_layer(3, TokenDtype::F16).map(|_| ()).unwrap_err().to_string()
        });
        assert!(error.contains(words), "{name}: {error}");
    }
}

/// Returns fused tensors with the last two dimensions swapped, as ModelOpt stores Llama 4 and gpt-oss.
fn transposed(tensors: &Tensors) -> Tensors {
    let mut out = tensors.clone();
    for (name, (dtype, shape, bytes)) in tensors.iter() {
        if let [experts, a, b] = shape[..] {
            let byte = |expert: usize, row: usize, column: usize| bytes[(expert * a + row) * b + column];
            let columns = (0..experts).flat_map(|expert| (0..b).map(move |column| (expert, column)));
            let swapped: Vec<u8> =
                columns.flat_map(|(expert, column)| (0..a).map(move |row| byte(expert, row, column))).collect();
            out.set(name, raw(*dtype, &[experts, b, a], &swapped));
        }
    }
    out
}

#[test]
fn other_layouts_of_fused_experts_hold_the_same_numbers() {
    let expected = layer_of(&apart(Format::ModelOpt), qwen3());
    let gpt_oss = json!({"model_type": "gpt_oss", "num_experts_per_tok": 2, "hidden_act": "silu"});
    assert!(layer_of(&transposed(&fused(false, &[])), qwen3()) == expected);
    assert!(layer_of(&transposed(&fused(true, &[EXPERTS])), gpt_oss) == expected);
    // vLLM's names.
    let mut renamed = Tensors::default();
    for (name, content) in fused(false, &[EXPERTS]).iter() {
        let name = match name.rsplit('.').next().unwrap() {
            "gate_up_proj" => format!("{BLOCK}.experts.w13_weight"),
            "down_proj" => format!("{BLOCK}.experts.w2_weight"),
            _ => name.replace("gate_up_proj", "w13").replace("down_proj", "w2"),
        };
        renamed.set(name, content.clone());
    }
    assert!(layer_of(&renamed, qwen3()) == expected);
    let mut with_shared = fused(false, &[]);
    for (index, (name, sizes)) in NAMES.iter().zip([[48, 32], [48, 32], [32, 48]]).enumerate() {
        with_shared.set_nvfp4(&format!("{BLOCK}.shared_expert.{name}"), Format::ModelOpt, sizes, 90 + index as u8);
    }
    let with_shared = layer_of(&with_shared, qwen3());
    assert!(with_shared.len() == expected.len() + 3 && with_shared[..expected.len()] == expected);
}

#[test]
fn shared_expert_beside_the_block_is_part_of_the_layer() {
    let mut granite = apart(Format::ModelOpt);
    granite.set_nvfp4("model.layers.3.shared_mlp.input_linear", Format::ModelOpt, [96, 32], 90);
    granite.set_nvfp4("model.layers.3.shared_mlp.output_linear", Format::ModelOpt, [32, 48], 91);
    granite.set("model.layers.3.self_attn.q_proj.weight", f32s(&[4, HIDDEN], &[0.5; 4 * HIDDEN]));
    granite.set("model.layers.3.input_layernorm.weight", f32s(&[HIDDEN], &[1.0; HIDDEN]));
    let config = json!({"model_type": "granitemoehybrid", "num_experts_per_tok": 2, "hidden_act": "silu"});
    with_layer(&granite, config, |layer, _| {
        let shared = layer.weights.shared().unwrap();
        let (gate, up) = (shared.gate.as_ref().unwrap(), &shared.up);
        assert_eq!((gate.rows(), up.rows(), shared.down.k()), (48, 48, 48));
        // Gate is the first half of the rows.
        let whole = granite.iter().find(|(name, _)| name.ends_with("input_linear.weight")).unwrap().1.2.clone();
        assert_eq!([gate.values(), up.values()].concat(), whole);
        let left = ["model.layers.3.input_layernorm.weight", "model.layers.3.self_attn.q_proj.weight"];
        assert_eq!(layer.tensors.left, left);
        for used in ["shared_mlp.output_linear.weight_scale", "mlp.experts.*.up_proj.weight_scale_2", "mlp.gate.weight"]
        {
            assert!(layer.tensors.used.contains(&format!("model.layers.3.{used}")), "{used}: {:?}", layer.tensors);
        }
    });
}

#[test]
fn everything_that_adds_to_the_output_is_computed_or_refused() {
    let matrix = || f32s(&[32, HIDDEN], &numbers(32 * HIDDEN, 5));
    for (name, words) in [
        ("model.layers.3.residual_mlp.w1.weight", "this dense branch beside the experts is not computed"),
        ("model.layers.3.mlp.gate_proj.weight", "this dense branch beside the experts is not computed"),
        ("model.layers.3.mlp.fc1_latent_proj.weight", "experts in a latent space"),
        ("model.layers.3.latent_proj.weight", "experts in a latent space"),
        ("model.layers.3.adapter.weight", "this tensor is unknown"),
        ("model.layers.3.mlp.shared_expert.norm.weight", "this tensor is unknown"),
    ] {
        let error = refusal(Some(qwen3()), |tensors| _ = tensors.set(name, matrix()));
        assert!(
            error.contains(&format!("{name}: {words}")) && error.contains("so the result would be wrong"),
            "{error}"
        );
    }
    let two = refusal(Some(qwen3()), |tensors| {
        for shared in ["mlp.shared_expert", "shared_mlp"] {
            tensors.set_nvfp4(&format!("model.layers.3.{shared}.up_proj"), Format::ModelOpt, [16, 32], 1);
        }
    });
    assert!(two.contains("two shared experts, model.layers.3.shared_mlp. and model.layers.3.mlp."), "{two}");
    for (model, key, value) in [
        ("qwen3_moe", "n_shared_experts", json!(1)),
        ("qwen3_moe", "num_shared_expert", json!([0, 0, 0, 2])),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(64)),
    ] {
        let mut config = qwen3();
        config["model_type"] = json!(model);
        config[key] = value;
        let error = refusal(Some(config), |_| ());
        assert!(error.contains("the shared expert of layer 3") && error.contains(key), "{error}");
    }
    let mut config = qwen3();
    config["n_shared_experts"] = json!(0);
    // The configuration class of Qwen3-VL-MoE has this key, its layers have no shared expert.
    config["shared_expert_intermediate_size"] = json!(64);
    assert_eq!(layer_of(&apart(Format::ModelOpt), config).len(), 3 * EXPERTS);
}

#[test]
fn configurations_of_every_family_give_the_router() {
    let correction = |name: &str| {
        let mut tensors = apart(Format::ModelOpt);
        tensors.set(format!("{BLOCK}.{name}"), f32s(&[EXPERTS], &[0.5, -0.5, 0.25]));
        tensors
    };
    let sigmoid = |renormalize, scale| Scoring::SigmoidGroups {
        bias: vec![0.5, -0.5, 0.25],
        groups: 1,
        top_groups: 1,
        renormalize,
        scale,
    };
    let plain = apart(Format::ModelOpt);
    let softmax = Scoring::Softmax { renormalize: true };
    for (tensors, config, scoring) in [
        (&plain, json!({"model_type": "qwen3_5_moe", "num_experts_per_tok": 2}), softmax.clone()),
        (&plain, json!({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 1, 1, 2]}), softmax),
        (
            &correction("expert_bias"),
            json!({"model_type": "lfm2_moe", "num_experts_per_tok": 2, "norm_topk_prob": true, "routed_scaling_factor": 1.5}),
            sigmoid(true, 1.5),
        ),
        (
            &correction("gate.expert_bias"),
            json!({"model_type": "bailing_moe_v2", "num_experts_per_tok": 2, "norm_topk_prob": false,
                "score_function": "sigmoid"}),
            sigmoid(false, 1.0),
        ),
        (
            &correction("router_bias"),
            json!({"model_type": "step3p5", "moe_top_k": 2, "norm_expert_weight": true, "moe_router_activation": "sigmoid",
                "moe_router_scaling_factor": 3.0}),
            sigmoid(true, 3.0),
        ),
        (
            &correction("gate.bias"),
            json!({"model_type": "deepseek_v3", "num_experts_per_tok": 2, "norm_topk_prob": true, "n_group": 1,
                "topk_group": 1}),
            sigmoid(true, 1.0),
        ),
    ] {
        with_layer(tensors, config.clone(), |layer, _| {
            assert_eq!((layer.router.rule.scoring(), layer.router.rule.top_k()), (&scoring, 2), "{config}");
            assert_eq!(layer.router.bias, [0.0; EXPERTS], "{config}");
        });
    }
    for (model, words) in [("phimoe", "SparseMixer"), ("kolibri1", "logit plus bias")] {
        let config = json!({"model_type": model, "num_experts_per_tok": 2, "norm_topk_prob": true});
        let error = refusal(Some(config), |_| ());
        assert!(error.contains(words) && error.contains("this router is not supported"), "{error}");
    }
}

#[test]
fn identity_experts_add_the_token_times_their_weight() {
    const IDENTITIES: usize = 2;
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, EXPERTS);
    tensors.set(format!("{BLOCK}.router.classifier.weight"), router(EXPERTS + IDENTITIES));
    // The layer's dense MLPs belong to its attentions.
    tensors.set_nvfp4("model.layers.3.mlps.0.up_proj", Format::ModelOpt, [16, HIDDEN], 91);
    let corrections = [-1.0, 0.0, 0.0, 1.0, 0.0];
    tensors.set(format!("{BLOCK}.router.e_score_correction_bias"), f32s(&[EXPERTS + IDENTITIES], &corrections));
    let config = json!({"model_type": "longcat_flash", "moe_topk": 2, "routed_scaling_factor": 6.0, "zero_expert_num": IDENTITIES,
        "zero_expert_type": "identity", "hidden_act": "silu"});
    with_layer(&tensors, config.clone(), |layer, inputs| {
        let around = layer.around.as_ref().unwrap();
        assert_eq!(around.identity_experts(), IDENTITIES);
        assert!(layer.tensors.left.iter().any(|name| name == "model.layers.3.mlps.0.up_proj.weight"));
        let routed = around.routed(TokenDtype::Bf16, inputs).unwrap();
        let step = MoeStep::new(&layer.weights, routed).unwrap();
        let mut output = MoeOutput::new(&step);
        Cpu::new().prepare_moe(&layer.weights).unwrap().execute(&step, &mut output).unwrap();
        let sum = around.output(TokenDtype::Bf16, inputs, &output.hidden, None);
        // The corrections let every token choose expert 3, which has no weights.
        assert!(inputs.ids.chunks(2).all(|ids| ids.contains(&-1)) && inputs.ids.iter().any(|id| *id >= 0));
        for (at, (got, experts)) in sum.iter().zip(&output.hidden).enumerate() {
            let token = at / HIDDEN;
            let chosen = inputs.ids[2 * token..][..2].iter().zip(&inputs.weights[2 * token..]);
            let weight: f64 = chosen.filter(|(id, _)| **id == -1).map(|(_, weight)| f64::from(*weight)).sum();
            let [experts, number] = [*experts, inputs.hidden[at]].map(|bits| TokenDtype::Bf16.decode(bits));
            assert!(weight > 0.0);
            assert_eq!(*got, TokenDtype::Bf16.round(experts + weight * number));
        }
    });
    let mut other = config;
    other["zero_expert_type"] = json!("drop");
    with_model(&tensors, Some(other), |checkpoint, _| {
        let error = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap_err().to_string();
        assert!(error.contains("config.json: zero_expert_type is drop"), "{error}");
    });
}

#[test]
fn average_of_routed_and_shared_experts_halves_both() {
    let mut tensors = apart(Format::ModelOpt);
    for (name, sizes) in NAMES.into_iter().zip([[16, HIDDEN], [16, HIDDEN], [HIDDEN, 16]]) {
        tensors.set_nvfp4(&format!("{BLOCK}.shared_experts.{name}"), Format::ModelOpt, sizes, 90);
    }
    let config = |strategy: &str| {
        json!({"model_type": "cohere2_moe", "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu",
            "expert_selection_fn": "softmax", "num_shared_experts": 1, "shared_expert_combination_strategy": strategy})
    };
    let of = |strategy: &str| {
        with_layer(&tensors, config(strategy), |_, MoeInputs { weights, shared_weights, .. }| {
            (weights.to_vec(), shared_weights.as_deref().map(<[f32]>::to_vec))
        })
    };
    let ((sum, of_sum), (average, of_average)) = (of("sum"), of("average"));
    assert_eq!((of_sum, of_average), (None, Some(vec![0.5; 5])));
    assert!(average.iter().zip(&sum).all(|(half, whole)| 2.0 * half == *whole));
}

#[test]
fn rules_of_new_families_are_read() {
    let bias = [0.5, -0.5, 0.25];
    let of = |name: &str, shape: &[usize]| {
        let mut tensors = apart(Format::ModelOpt);
        tensors.set(format!("{BLOCK}.{name}"), f32s(shape, &bias));
        tensors
    };
    // DeepSeek-V4, by its own name of the biases.
    let v4 = json!({"model_type": "deepseek_v4", "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0});
    let rule = Rule { score: Score::SqrtSoftplus, renormalize: true, scale: 1.5, ..Rule::default() };
    with_layer(&of("gate.bias", &[EXPERTS]), v4.clone(), |layer, _| {
        assert_eq!(layer.router.rule.scoring(), &Scoring::Rule(Rule { bias: bias.into(), ..rule.clone() }));
        assert_eq!(layer.weights.sizes().activation, Activation::SiluLimit { limit: 10.0 });
    });
    // Ernie 4.5: softmax with biases, in one row.
    let ernie = json!({"model_type": "ernie4_5_moe", "moe_k": 2, "hidden_act": "silu"});
    with_layer(&of("moe_statics.e_score_correction_bias", &[1, EXPERTS]), ernie, |layer, _| {
        let rule = Rule { bias: bias.into(), renormalize: true, ..Rule::default() };
        assert_eq!(layer.router.rule.scoring(), &Scoring::Rule(rule));
    });
    // DeepSeek-V2: softmax, with groups that are compared by their best expert.
    let v2 = json!({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": false, "hidden_act": "silu",
        "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": EXPERTS, "topk_group": 2,
        "routed_scaling_factor": 16.0});
    with_layer(&apart(Format::ModelOpt), v2, |layer, _| {
        let rule = Rule { groups: EXPERTS, top_groups: 2, scale: 16.0, ..Rule::default() };
        assert_eq!(layer.router.rule.scoring(), &Scoring::Rule(rule));
    });
    // A layer of DeepSeek-V4 whose experts follow from token ids.
    let mut hashed = apart(Format::ModelOpt);
    let ids: Vec<u8> = [2i64, 0, 1, 2, 0, 1].iter().flat_map(|id| id.to_le_bytes()).collect();
    hashed.set(format!("{BLOCK}.gate.tid2eid"), raw(Dtype::I64, &[3, 2], &ids));
    with_model(&hashed, Some(v4.clone()), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        let sizes = layer.weights.sizes();
        assert_eq!(layer.router.vocabulary(), Some(3));
        assert!(layer.router.inputs(sizes, vec![0x3F80; HIDDEN]).is_err());
        let inputs = layer.router.inputs_with_ids(sizes, vec![0x3F80; 3 * HIDDEN], &[2, 0, 7]).unwrap();
        assert_eq!(inputs.ids[..], [0, 1, 2, 0, -1, -1]);
        assert!((inputs.weights[0] + inputs.weights[1] - 1.5).abs() < 1e-6 && inputs.weights[4] == 0.0);
    });
    hashed.set(format!("{BLOCK}.gate.tid2eid"), raw(Dtype::I64, &[2, 3], &ids));
    let error = with_model(&hashed, Some(v4), |checkpoint, _| checkpoint.moe_layer(3, TokenDtype::F16).map(|_| ()));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("gate.tid2eid: experts of a token: got 3, expected 2"), "{error}");
}

/// Makes layer 3 in MXFP4: experts in separate tensors as in DeepSeek-V4, or all in one as in gpt-oss, where rows of gate
/// and up alternate. `lowest` is the exponent of the first block of the last expert's down projection.
fn mxfp4(fused: bool, lowest: u8) -> Tensors {
    let mut tensors = Tensors::default();
    let rows = |roles: &[usize], experts: std::ops::Range<usize>| {
        let (mut codes, mut exponents) = (Vec::new(), Vec::new());
        for (expert, row, &role) in experts
            .flat_map(|expert| (0..HIDDEN).flat_map(move |row| roles.iter().map(move |role| (expert, row, role))))
        {
            codes.extend((0..HIDDEN / 2).map(|pair| {
                mxfp4_code([expert, role, row, 2 * pair]) | mxfp4_code([expert, role, row, 2 * pair + 1]) << 4
            }));
            let is_lowest = [expert, role, row] == [EXPERTS - 1, 2, 0];
            exponents.push(if is_lowest { lowest } else { mxfp4_exponent(expert, role, row) });
        }
        (codes, exponents)
    };
    if fused {
        for (name, roles) in [("gate_up_proj", &[0, 1][..]), ("down_proj", &[2])] {
            let (codes, exponents) = rows(roles, 0..EXPERTS);
            let shape = [EXPERTS, roles.len() * HIDDEN, 1, 16];
            tensors.set(format!("{BLOCK}.experts.{name}_blocks"), raw(Dtype::U8, &shape, &codes));
            tensors.set(format!("{BLOCK}.experts.{name}_scales"), raw(Dtype::U8, &shape[..3], &exponents));
        }
        tensors.set(format!("{BLOCK}.router.weight"), router(EXPERTS));
        return tensors;
    }
    for (expert, (role, name)) in
        (0..EXPERTS).flat_map(|expert| ["w1", "w3", "w2"].into_iter().enumerate().map(move |of| (expert, of)))
    {
        let (codes, exponents) = rows(&[role], expert..expert + 1);
        let module = format!("{BLOCK}.experts.{expert}.{name}");
        tensors.set(format!("{module}.weight"), raw(Dtype::I8, &[HIDDEN, HIDDEN / 2], &codes));
        tensors.set(format!("{module}.scale"), raw(Dtype::F8_E8M0, &[HIDDEN, 1], &exponents));
    }
    tensors.set(format!("{BLOCK}.gate.weight"), router(EXPERTS));
    tensors
}

/// Code of an element of an expert's projection.
fn mxfp4_code([expert, role, row, column]: [usize; 4]) -> u8 {
    ((expert * 7 + role * 5 + row * 3 + column * 11) % 16) as u8
}

/// Exponent of a row of an expert's projection.
fn mxfp4_exponent(expert: usize, role: usize, row: usize) -> u8 {
    115 + ((expert + 2 * role + 3 * row) % 9) as u8
}

#[test]
fn experts_in_mxfp4_keep_their_numbers() {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let oss = json!({"model_type": "gpt_oss", "num_experts_per_tok": 2, "hidden_act": "silu"});
    for (fused, config) in [(false, qwen3()), (true, oss)] {
        with_layer(&mxfp4(fused, 110), config.clone(), |layer, _| {
            assert_eq!(layer.mxfp4_blocks, EXPERTS * 3 * HIDDEN * HIDDEN / 16);
            for (expert, of) in layer.weights.experts().iter().enumerate() {
                for (role, (name, matrix, _)) in of.projections().enumerate() {
                    for row in 0..HIDDEN {
                        let mut got = [0.0; HIDDEN];
                        matrix.dequantize_row(row, &mut got);
                        let is_lowest = [expert, role, row] == [EXPERTS - 1, 2, 0];
                        let exponent = if is_lowest { 110 } else { mxfp4_exponent(expert, role, row) };
                        for (column, got) in got.into_iter().enumerate() {
                            let code = mxfp4_code([expert, role, row, column]);
                            let magnitude = MAGNITUDES[usize::from(code % 8)] * f32::exp2(f32::from(exponent) - 127.0);
                            let want = if code < 8 { magnitude } else { -magnitude };
                            assert_eq!(got, want, "{name} of expert {expert}, row {row}, column {column}");
                        }
                    }
                }
            }
        });
        let error = with_model(&mxfp4(fused, 60), Some(config), |checkpoint, _| {
            checkpoint.moe_layer(3, TokenDtype::Bf16).map(|_| ()).unwrap_err().to_string()
        });
        let words = "2 of 64 blocks of 16 cannot keep their numbers in NVFP4";
        assert!(error.contains(words) && error.contains("`nvfp4 quantize`"), "{error}");
    }
}

#[test]
fn one_of_two_stacks_of_layers_is_chosen_by_name() {
    let mut tensors = Tensors::default();
    for (stack, experts) in [("thinker.model", 3), ("talker.model", 2)] {
        let block = format!("{stack}.layers.3.mlp");
        tensors.set_experts(&block, NAMES, Format::ModelOpt, experts);
        tensors.set(format!("{block}.gate.weight"), router(experts));
    }
    let config = json!({"model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": {"num_experts_per_tok": 3, "norm_topk_prob": true}},
        "talker_config": {"text_config": {"num_experts_per_tok": 1, "norm_topk_prob": false}}});
    with_model(&tensors, Some(config), |checkpoint, folder| {
        let error = checkpoint.moe_layer(3, TokenDtype::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("choose a stack of layers with --stack"), "{error}");
        for (stack, experts, top_k) in [("thinker", 3, 3), ("talker", 2, 1)] {
            let checkpoint = Checkpoint::open(folder).unwrap().in_stack(stack).unwrap();
            let sizes = checkpoint.moe_layer(3, TokenDtype::F16).unwrap().weights.sizes();
            assert_eq!((sizes.experts, sizes.top_k), (experts, top_k));
            assert!(checkpoint.layer(3, Op::Gated).is_ok());
        }
        let error = Checkpoint::open(folder).unwrap().in_stack("walker").unwrap_err().to_string();
        assert!(error.contains("the model has layers of talker.model.layers., thinker.model.layers."), "{error}");
    });
}

#[test]
fn halves_of_a_dense_matrix_are_gate_and_up() {
    let mut tensors = Tensors::default();
    tensors.set_nvfp4(&format!("{BLOCK}.gate_up_proj"), Format::CompressedTensors, [32, HIDDEN], 3);
    tensors.set_nvfp4(&format!("{BLOCK}.down_proj"), Format::CompressedTensors, [HIDDEN, 16], 4);
    with_model(&tensors, None, |checkpoint, _| {
        let layer = checkpoint.layer(3, Op::Gated).unwrap();
        let whole = checkpoint.quantized(&format!("{BLOCK}.gate_up_proj")).unwrap().matrix;
        let [Expert::Gated { gate, up }] = layer.weights.experts() else { panic!("one gated expert") };
        assert_eq!([gate.values(), up.values()].concat(), whole.values());
        assert_eq!([gate.scales(), up.scales()].concat(), whole.scales());
        assert_eq!([gate.global_scale(), up.global_scale()], [whole.global_scale(); 2]);
        assert_eq!(layer.modules, [format!("{BLOCK}.gate_up_proj")]);
        assert!(checkpoint.layer(3, Op::Plain).is_ok());
    });
}

#[test]
fn biases_belong_to_their_experts() {
    // Biases of gate, up and down; they differ in every expert and role.
    let bias = |expert: usize, role: usize| numbers([16, 16, HIDDEN][role], 1 + 3 * expert + role);
    let config = json!({"model_type": "gpt_oss", "num_experts_per_tok": 2, "hidden_act": "silu", "swiglu_limit": 7.0});
    let mut of_experts = apart(Format::ModelOpt);
    for (expert, role) in (0..EXPERTS).flat_map(|expert| (0..3).map(move |role| (expert, role))) {
        let bias = bias(expert, role);
        of_experts.set(format!("{BLOCK}.experts.{expert}.{}.bias", NAMES[role]), f32s(&[bias.len()], &bias));
    }
    let mut in_one = fused(true, &[EXPERTS]);
    let in_turn = |expert| bias(expert, 0).into_iter().zip(bias(expert, 1)).flat_map(|(gate, up)| [gate, up]);
    let gate_up: Vec<f32> = (0..EXPERTS).flat_map(in_turn).collect();
    let down: Vec<f32> = (0..EXPERTS).flat_map(|expert| bias(expert, 2)).collect();
    in_one.set(format!("{BLOCK}.experts.gate_up_proj_bias"), f32s(&[EXPERTS, 32], &gate_up));
    in_one.set(format!("{BLOCK}.experts.down_proj_bias"), f32s(&[EXPERTS, HIDDEN], &down));
    for tensors in [of_experts, in_one] {
        with_layer(&tensors, config.clone(), |layer, _| {
            assert_eq!(layer.weights.sizes().activation, Activation::GPT_OSS);
            for (expert, weights) in layer.weights.experts().iter().enumerate() {
                for (role, (name, _, found)) in weights.projections().enumerate() {
                    assert_eq!(*found.unwrap().numbers(TokenDtype::Bf16), bias(expert, role), "{name} of {expert}");
                }
            }
        });
    }
}

#[test]
fn experts_without_a_gate_make_a_relu2_layer() {
    let mut tensors = apart(Format::ModelOpt);
    let gates = tensors.iter().map(|(name, _)| name.to_owned()).filter(|name| name.contains("gate_proj"));
    gates.collect::<Vec<_>>().iter().for_each(|name| _ = tensors.remove(name));
    let config = json!({"model_type": "some", "scoring_func": "softmax", "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_hidden_act": "relu2"});
    assert_eq!(layer_of(&tensors, config.clone()).len(), 2 * EXPERTS);
    // Models call the activation the same with a gate.
    with_layer(&apart(Format::ModelOpt), config, |layer, _| {
        assert_eq!(layer.weights.sizes().activation, Activation::GatedRelu2);
        assert_eq!(contents(&layer.weights).len(), 3 * EXPERTS);
    });
}

/// H of the layer whose experts are in a latent space of `HIDDEN`.
const WIDE: usize = 48;

/// Numbers that FP8 and NVFP4 hold exactly.
fn latent_numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| [0.0, 0.5, 1.0, -1.0][(7 * i + i / 5) % 4]).collect()
}

/// Stores a projection to or from the latent space in a form.
fn set_latent(tensors: &mut Tensors, name: &str, sizes: [usize; 2], form: &str) {
    set_in_form(tensors, &format!("{BLOCK}.{name}"), sizes, form);
}

/// Forms of [`set_in_form`].
const FORMS: [&str; 8] = ["f32", "bf16", "f16", "fp8", "fp8 rows", "fp8 blocks", "mxfp4", "nvfp4"];

/// Stores a projection with `latent_numbers` in a form.
fn set_in_form(tensors: &mut Tensors, module: &str, [n, k]: [usize; 2], form: &str) {
    let numbers = latent_numbers(n * k);
    let code_of = |number: &f32| [0.0, 0.5, 1.0, -1.0].iter().position(|known| known == number).unwrap();
    let codes = |of: [u8; 4]| -> Vec<u8> { numbers.iter().map(|number| of[code_of(number)]).collect() };
    match form {
        "f32" => _ = tensors.set(format!("{module}.weight"), f32s(&[n, k], &numbers)),
        "bf16" => {
            let bytes: Vec<u8> =
                numbers.iter().flat_map(|number| ((number.to_bits() >> 16) as u16).to_le_bytes()).collect();
            tensors.set(format!("{module}.weight"), raw(Dtype::BF16, &[n, k], &bytes));
        }
        "f16" => {
            let of = |number: &f32| [0u16, 0x3800, 0x3C00, 0xBC00][code_of(number)].to_le_bytes();
            let bytes: Vec<u8> = numbers.iter().flat_map(of).collect();
            tensors.set(format!("{module}.weight"), raw(Dtype::F16, &[n, k], &bytes));
        }
        "fp8" | "fp8 rows" | "fp8 blocks" => {
            // The scale is 1/2, so the codes stand for twice the numbers.
            tensors.set(format!("{module}.weight"), raw(Dtype::F8_E4M3, &[n, k], &codes([0, 0x38, 0x40, 0xC0])));
            match form {
                "fp8" => tensors.set(format!("{module}.input_scale"), f32s(&[1], &[0.5])),
                "fp8 rows" => tensors.set(format!("{module}.weight_scale"), f32s(&[n, 1], &vec![0.5; n])),
                _ => tensors.set(format!("{module}.weight_scale_inv"), f32s(&[1, 1], &[0.5])),
            };
            if form == "fp8" {
                tensors.set(format!("{module}.weight_scale"), f32s(&[1], &[0.5]));
            }
        }
        "mxfp4" => {
            let packed: Vec<u8> = codes([0, 1, 2, 10]).chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
            tensors.set(format!("{module}.weight"), raw(Dtype::U8, &[n, k / 2], &packed));
            tensors.set(format!("{module}.weight_scale"), raw(Dtype::U8, &[n, k / 32], &vec![127; n * k / 32]));
        }
        _ => {
            let packed: Vec<u8> = codes([0, 1, 2, 10]).chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
            tensors.set(format!("{module}.weight"), raw(Dtype::U8, &[n, k / 2], &packed));
            tensors.set(format!("{module}.weight_scale"), raw(Dtype::F8_E4M3, &[n, k / 16], &vec![0x38; n * k / 16]));
            tensors.set(format!("{module}.weight_scale_2"), f32s(&[], &[1.0]));
        }
    }
}

/// Names of the projections to the latent space and back.
const NEMOTRON: [&str; 2] = ["fc1_latent_proj", "fc2_latent_proj"];
const KIMI: [&str; 2] = ["routed_expert_down_proj", "routed_expert_up_proj"];

/// Makes a layer of experts without a gate in a latent space, with a shared expert beside it, and its configuration.
fn latent([before, after]: [&str; 2], form: &str) -> (Tensors, Value) {
    let mut tensors = apart(Format::ModelOpt);
    let gates = tensors.iter().map(|(name, _)| name.to_owned()).filter(|name| name.contains("gate_proj"));
    gates.collect::<Vec<_>>().iter().for_each(|name| _ = tensors.remove(name));
    tensors.set(format!("{BLOCK}.gate.weight"), f32s(&[EXPERTS, WIDE], &numbers(EXPERTS * WIDE, 7)));
    set_latent(&mut tensors, before, [HIDDEN, WIDE], form);
    set_latent(&mut tensors, after, [WIDE, HIDDEN], form);
    tensors.set_nvfp4(&format!("{BLOCK}.shared_experts.up_proj"), Format::ModelOpt, [64, WIDE], 90);
    tensors.set_nvfp4(&format!("{BLOCK}.shared_experts.down_proj"), Format::ModelOpt, [WIDE, 64], 91);
    let config = json!({"model_type": "nemotron_h", "num_experts_per_tok": 2, "norm_topk_prob": true,
        "mlp_hidden_act": "relu2", "n_shared_experts": 1, "rms_norm_eps": EPSILON, "use_routing_bias": false});
    (tensors, config)
}

/// Returns the product of a projection with a row.
fn projected([n, k]: [usize; 2], row: &[f64]) -> Vec<f64> {
    let weights = latent_numbers(n * k);
    (0..n).map(|line| (0..k).map(|i| f64::from(weights[line * k + i]) * row[i]).sum()).collect()
}

/// `rms_norm_eps`: large enough that its omission is noticed.
const EPSILON: f64 = 0.25;

/// Returns a row divided by its root mean square, times weights.
fn normalized(row: &[f64], weights: &[f32]) -> Vec<f64> {
    let mean = row.iter().map(|number| number * number).sum::<f64>() / row.len() as f64;
    let root = (mean + EPSILON).sqrt();
    row.iter().zip(weights).map(|(number, &weight)| number / root * f64::from(weight)).collect()
}

fn decoded(row: &[u16]) -> Vec<f64> {
    row.iter().map(|&bits| TokenDtype::Bf16.decode(bits)).collect()
}

fn rounded(rows: impl Iterator<Item = f64>) -> Vec<u16> {
    rows.map(|number| TokenDtype::Bf16.round(number)).collect()
}

/// Five tokens of this width.
fn five_tokens(width: usize) -> Vec<u16> {
    linear::generate::inputs(Default::default(), 5, width, TokenDtype::Bf16, 1).unwrap().x.into_owned()
}

/// What goes into a layer with something around its experts, and what comes out of its parts.
struct Parts {
    routed_inputs: MoeInputs<'static>,
    branch_inputs: MoeInputs<'static>,
    routed: Vec<u16>,
    branch: Vec<u16>,
    output: Vec<u16>,
}

/// Computes a layer with experts and a branch for five tokens on the CPU, and checks both.
fn parts_of(layer: &MoeLayer<'_>) -> Parts {
    let dtype = TokenDtype::Bf16;
    let run = |weights: &MoeWeights<'_>, inputs: &MoeInputs<'static>| {
        let step = MoeStep::new(weights, inputs.clone()).unwrap();
        let mut output = MoeOutput::with_stages(&step);
        Cpu::new().prepare_moe(weights).unwrap().execute(&step, &mut output).unwrap();
        let found = compare(weights, &step, &output);
        assert!(found.passed() && found.checked() > 0, "{:?}", found.first());
        output.hidden
    };
    let around = layer.around.as_ref().unwrap();
    let inputs = layer.inputs(five_tokens(layer.hidden()), &[]).unwrap();
    let routed_inputs = around.routed(dtype, &inputs).unwrap();
    let branch_inputs = around.of_branch(dtype, &inputs).unwrap();
    let routed = run(&layer.weights, &routed_inputs);
    let branch = run(around.branch().unwrap(), &branch_inputs);
    let output = around.output(dtype, &inputs, &routed, Some(&branch));
    Parts { routed_inputs, branch_inputs, routed, branch, output }
}

#[test]
fn experts_in_a_latent_space_are_projected_before_and_after() {
    let tokens = five_tokens(WIDE);
    let norm: Vec<f32> = numbers(HIDDEN, 3);
    for (names, with_norm) in [(NEMOTRON, false), (KIMI, false), (KIMI, true)] {
        let outputs = ["f32", "bf16", "fp8", "nvfp4"].map(|form| {
            let (mut tensors, config) = latent(names, form);
            if with_norm {
                tensors.set(format!("{BLOCK}.routed_expert_norm.weight"), f32s(&[HIDDEN], &norm));
            }
            with_model(&tensors, Some(config), |checkpoint, _| {
                let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
                let around = layer.around.as_ref().unwrap();
                assert_eq!((layer.hidden(), around.hidden(), around.width()), (WIDE, WIDE, HIDDEN));
                for name in names.iter().chain(with_norm.then_some(&"routed_expert_norm")) {
                    assert!(layer.tensors.used.contains(&format!("{BLOCK}.{name}.weight")), "{:?}", layer.tensors);
                }
                let parts = parts_of(&layer);
                let narrow = tokens.chunks(WIDE).flat_map(|token| projected([HIDDEN, WIDE], &decoded(token)));
                assert_eq!(parts.routed_inputs.hidden[..], rounded(narrow));
                assert_eq!(parts.branch_inputs.hidden[..], tokens);
                let wide = parts.routed.chunks(HIDDEN).flat_map(|row| {
                    let row = if with_norm { normalized(&decoded(row), &norm) } else { decoded(row) };
                    projected([WIDE, HIDDEN], &row)
                });
                assert_eq!(parts.output, rounded(wide.zip(decoded(&parts.branch)).map(|(wide, branch)| wide + branch)));
                // Other operations leave what is around the experts.
                assert!(checkpoint.layer(3, Op::Plain).is_ok());
                // The router refuses tokens of the experts' width.
                assert!(layer.router.inputs(layer.weights.sizes(), vec![0; HIDDEN]).is_err());
                parts.output
            })
        });
        assert!(outputs.iter().all(|output| *output == outputs[0]));
    }
}

/// Returns the error for a layer with something around its experts.
fn error_of((mut tensors, mut config): (Tensors, Value), change: impl FnOnce(&mut Tensors, &mut Value)) -> String {
    change(&mut tensors, &mut config);
    with_model(&tensors, Some(config), |checkpoint, _| {
        checkpoint.moe_layer(3, TokenDtype::Bf16).map(|_| ()).unwrap_err().to_string()
    })
}

#[test]
fn projections_of_other_sizes_are_refused_by_name() {
    for names @ [before, after] in [NEMOTRON, KIMI] {
        let error = |change: &dyn Fn(&mut Tensors)| error_of(latent(names, "f32"), |tensors, _| change(tensors));
        let rows = error(&|tensors| set_latent(tensors, before, [16, WIDE], "f32"));
        assert!(rows.contains(before) && rows.contains("rows"), "{rows}");
        let columns = error(&|tensors| set_latent(tensors, after, [WIDE, 16], "f32"));
        assert!(columns.contains(after) && columns.contains("columns"), "{columns}");
        let other = error(&|tensors| _ = tensors.set(format!("{BLOCK}.{before}.lora_A"), f32s(&[1, 1], &[0.0])));
        assert!(other.contains(&format!("{before}.lora_A: experts in a latent space")), "{other}");
        let alone = error(&|tensors| _ = tensors.remove(&format!("{BLOCK}.{after}.weight")));
        assert!(alone.contains(&format!("{before}.weight: experts in a latent space")), "{alone}");
        let strange = error(&|tensors| {
            let numbers = f32s(&[HIDDEN, WIDE], &[f32::NAN; HIDDEN * WIDE]);
            tensors.set(format!("{BLOCK}.{before}.weight"), numbers);
        });
        assert!(strange.contains(before) && strange.contains("row 0, column 0 is not finite"), "{strange}");
    }
    let kimi = |uses: bool, length: usize| {
        error_of(latent(KIMI, "f32"), |tensors, config| {
            config["latent_moe_use_norm"] = json!(uses);
            if length > 0 {
                tensors.set(format!("{BLOCK}.routed_expert_norm.weight"), f32s(&[length], &numbers(length, 3)));
            }
        })
    };
    for (error, words) in [
        (kimi(true, 0), "this tensor is missing"),
        (kimi(true, WIDE), "not [32]"),
        (kimi(false, HIDDEN), "latent_moe_use_norm is false"),
    ] {
        assert!(error.contains("routed_expert_norm.weight: ") && error.contains(words), "{error}");
    }
}

/// Norms of a Gemma 4 layer before and behind its experts, and before and behind its dense branch.
const GEMMA_NORMS: [&str; 4] = [
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
];

/// Makes a Gemma 4 layer, and its configuration. Norm `i` of [`GEMMA_NORMS`] has `numbers(HIDDEN, i + 3)`.
fn gemma() -> (Tensors, Value) {
    const LAYER: &str = "model.layers.3";
    let mut tensors = Tensors::default();
    tensors.set_experts(LAYER, NAMES, Format::ModelOpt, EXPERTS);
    tensors.set(format!("{LAYER}.router.proj.weight"), router(EXPERTS));
    tensors.set(format!("{LAYER}.router.scale"), f32s(&[HIDDEN], &numbers(HIDDEN, 9)));
    tensors.set(format!("{LAYER}.router.per_expert_scale"), f32s(&[EXPERTS], &[0.5, 2.0, -3.0]));
    for (index, (name, sizes)) in NAMES.iter().zip([[48, 32], [48, 32], [32, 48]]).enumerate() {
        tensors.set_nvfp4(&format!("{LAYER}.mlp.{name}"), Format::ModelOpt, sizes, 90 + index as u8);
    }
    for (index, name) in GEMMA_NORMS.into_iter().enumerate() {
        tensors.set(format!("{LAYER}.{name}.weight"), f32s(&[HIDDEN], &numbers(HIDDEN, index + 3)));
    }
    for name in ["input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"] {
        tensors.set(format!("{LAYER}.{name}.weight"), f32s(&[HIDDEN], &[f32::NAN; HIDDEN]));
    }
    let config = json!({"model_type": "gemma4_text", "top_k_experts": 2, "rms_norm_eps": EPSILON,
        "hidden_activation": "gelu_pytorch_tanh"});
    (tensors, config)
}

#[test]
fn experts_and_dense_branch_have_norms_of_their_own() {
    let (tensors, config) = gemma();
    let norms = [0, 1, 2, 3].map(|index| numbers(HIDDEN, index + 3));
    let tokens = five_tokens(HIDDEN);
    with_model(&tensors, Some(config), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        assert_eq!(layer.weights.sizes().activation, Activation::GeluTanh);
        let left = ["input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"];
        assert_eq!(layer.tensors.left, left.map(|name| format!("model.layers.3.{name}.weight")));
        let parts = parts_of(&layer);
        let tokens_with =
            |weights: &[f32]| rounded(tokens.chunks(HIDDEN).flat_map(|token| normalized(&decoded(token), weights)));
        assert_eq!(parts.routed_inputs.hidden[..], tokens_with(&norms[0]));
        assert_eq!(parts.branch_inputs.hidden[..], tokens_with(&norms[2]));
        let rows = parts.routed.chunks(HIDDEN).zip(parts.branch.chunks(HIDDEN)).flat_map(|(routed, branch)| {
            let (routed, branch) = (normalized(&decoded(routed), &norms[1]), normalized(&decoded(branch), &norms[3]));
            routed.into_iter().zip(branch).map(|(routed, branch)| routed + branch).collect::<Vec<_>>()
        });
        assert_eq!(parts.output, rounded(rows));
        let (scale, matrix) = (numbers(HIDDEN, 9), numbers(EXPERTS * HIDDEN, 7));
        for (token, tokens) in tokens.chunks(HIDDEN).enumerate() {
            let row = normalized(&decoded(tokens), &scale);
            let dot = |line: &[f32]| row.iter().zip(line).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
            let scores: Vec<f64> =
                matrix.chunks(HIDDEN).map(|line| (dot(line) / (HIDDEN as f64).sqrt()).exp()).collect();
            let ids = &parts.routed_inputs.ids[2 * token..][..2];
            let sum: f64 = ids.iter().map(|&id| scores[id as usize]).sum();
            let left = (0..EXPERTS).find(|&expert| !ids.contains(&(expert as i32))).unwrap();
            for (&id, &weight) in ids.iter().zip(&parts.routed_inputs.weights[2 * token..]) {
                let expected = scores[id as usize] / sum * [0.5, 2.0, -3.0][id as usize];
                assert!(
                    (f64::from(weight) - expected).abs() < 1e-5 * expected.abs(),
                    "{token} {id}: {weight} {expected}"
                );
                assert!(scores[id as usize] >= scores[left], "{token}: {scores:?}");
            }
        }
    });
}

#[test]
fn tensors_of_a_block_named_like_draft_layers_and_towers_are_refused() {
    for name in ["mtp_gain", "vision_gain"] {
        let unknown = refusal(Some(qwen3()), |tensors| {
            tensors.set(format!("{BLOCK}.{name}"), f32s(&[EXPERTS], &[1.0; EXPERTS]));
        });
        assert!(unknown.contains(&format!("{BLOCK}.{name}: this tensor is unknown and is not computed")), "{unknown}");
    }
}

#[test]
fn wrong_parts_of_a_layer_with_a_dense_branch_are_refused_by_name() {
    let error = |change: &dyn Fn(&mut Tensors, &mut Value)| error_of(gemma(), change);
    let named = |name: &str| format!("model.layers.3.{name}");
    for norm in GEMMA_NORMS.map(|norm| named(&format!("{norm}.weight"))) {
        let strange = error(&|tensors, _| _ = tensors.set(&norm, f32s(&[HIDDEN], &[f32::INFINITY; HIDDEN])));
        assert!(strange.contains(&norm) && strange.contains("not finite"), "{strange}");
        let short = error(&|tensors, _| _ = tensors.set(&norm, f32s(&[16], &[1.0; 16])));
        assert!(short.contains(&norm) && short.contains("not [32]"), "{short}");
    }
    let without = |name: &str| error(&|tensors, _| _ = tensors.remove(&named(name)));
    for name in ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm_1.weight"] {
        let missing = without(name);
        assert!(missing.contains(&named(name)) && missing.contains("missing"), "{missing}");
    }
    for name in ["router.scale", "router.per_expert_scale"] {
        let missing = without(name);
        assert!(missing.contains(&format!("{} is missing", named(name))), "{missing}");
        // With this tensor, another model's router is another router.
        let other = refusal(Some(qwen3()), |tensors| {
            tensors.set(format!("{BLOCK}.router.proj.weight"), router(EXPERTS));
            tensors.remove(&format!("{BLOCK}.gate.weight"));
            tensors.set(format!("{BLOCK}.{name}"), f32s(&[EXPERTS], &[1.0; EXPERTS]));
        });
        assert!(other.contains(&format!("{BLOCK}.{name}: this part of the router is not computed")), "{other}");
    }
    // Without its norms the branch is one of an unknown model.
    let unknown = without("pre_feedforward_layernorm_2.weight");
    assert!(
        unknown.contains("mlp.down_proj.input_scale: this dense branch beside the experts is not computed"),
        "{unknown}"
    );
    let no_branch = error(&|tensors, _| {
        let names: Vec<_> =
            tensors.iter().map(|(name, _)| name.to_owned()).filter(|name| name.contains(".mlp.")).collect();
        names.iter().for_each(|name| _ = tensors.remove(name));
    });
    assert!(no_branch.contains("the dense branch beside the experts of layer 3 is missing"), "{no_branch}");
    let bias = error(&|tensors, _| {
        _ = tensors.set(named("post_feedforward_layernorm_1.bias"), f32s(&[HIDDEN], &[0.0; HIDDEN]));
    });
    assert!(bias.contains("post_feedforward_layernorm_1.bias: this bias is not computed"), "{bias}");
    let width = error(&|tensors, _| {
        for (name, sizes) in NAMES.iter().zip([[48, 64], [48, 64], [64, 48]]) {
            tensors.set_nvfp4(&named(&format!("mlp.{name}")), Format::ModelOpt, sizes, 90);
        }
    });
    assert!(width.contains("the branch beside the experts") && width.contains("64"), "{width}");
    for epsilon in [Value::Null, json!(-1.0)] {
        let wrong = error(&|_, config| config["rms_norm_eps"] = epsilon.clone());
        assert!(wrong.contains("config.json: rms_norm_eps is"), "{wrong}");
    }
}

/// Computes five tokens of a layer whose branch beside the experts is in another precision, with the experts on the CPU.
/// Returns the router's inputs, the experts' output and the layer's output.
fn parts_on_host(layer: &MoeLayer<'_>) -> (MoeInputs<'static>, Vec<u16>, Vec<u16>) {
    let around = layer.around.as_ref().unwrap();
    assert!(around.branch().is_none() && around.host_branch().is_some());
    let inputs = layer.inputs(five_tokens(layer.hidden()), &[]).unwrap();
    let step = MoeStep::new(&layer.weights, around.routed(TokenDtype::Bf16, &inputs).unwrap()).unwrap();
    let mut output = MoeOutput::with_stages(&step);
    Cpu::new().prepare_moe(&layer.weights).unwrap().execute(&step, &mut output).unwrap();
    let output = output.hidden;
    let sum = around.output(TokenDtype::Bf16, &inputs, &output, None);
    (inputs, output, sum)
}

/// Output of a block of width `hidden` and I 64 with `latent_numbers`, for one token.
fn block_of(hidden: usize, token: &[f64], activation: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    let up = projected([64, hidden], token);
    let inner: Vec<f64> = up.iter().map(|&up| activation(up, up)).collect();
    projected([hidden, 64], &inner)
}

fn silu_of(gate: f64, up: f64) -> f64 {
    gate / (1.0 + (-gate).exp()) * up
}

/// Adds gate, up and down of a block of I 64 in three forms.
fn set_block(tensors: &mut Tensors, block: &str, hidden: usize, forms: [&str; 3]) {
    for ((name, form), sizes) in NAMES.iter().zip(forms).zip([[64, hidden], [64, hidden], [hidden, 64]]) {
        set_in_form(tensors, &format!("{block}.{name}"), sizes, form);
    }
}

#[test]
fn shared_expert_in_any_form_is_added_on_the_host() {
    let mixtures = [["nvfp4", "bf16", "fp8 blocks"], ["fp8", "fp8 rows", "mxfp4"], ["mxfp4", "f16", "nvfp4"]];
    for forms in FORMS.iter().filter(|form| !form.ends_with("fp4")).map(|form| [*form; 3]).chain(mixtures) {
        let mut tensors = apart(Format::ModelOpt);
        set_block(&mut tensors, &format!("{BLOCK}.shared_expert"), HIDDEN, forms);
        tensors.set(format!("{BLOCK}.shared_expert_gate.weight"), f32s(&[1, HIDDEN], &numbers(HIDDEN, 3)));
        with_model(&tensors, Some(qwen3()), |checkpoint, _| {
            let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
            let (inputs, routed, output) = parts_on_host(&layer);
            let gates = inputs.shared_weights.clone().unwrap();
            let shared = inputs.hidden.chunks(HIDDEN).zip(&gates[..]).flat_map(|(token, &gate)| {
                let block = block_of(HIDDEN, &decoded(token), silu_of);
                block.into_iter().map(move |number| f64::from(gate) * number)
            });
            let want = rounded(shared.zip(decoded(&routed)).map(|(shared, routed)| routed + shared));
            assert_eq!(output, want, "{forms:?}");
            assert_ne!(output, routed);
            let words = forms.map(|form| if form.starts_with("fp8") { "FP8".into() } else { form.to_uppercase() });
            let found: Vec<_> = layer.around.as_ref().unwrap().projections().map(|part| part.form.clone()).collect();
            assert_eq!(found, words);
            assert_eq!(layer.tensors.left, [""; 0]);
        });
    }
}

#[test]
fn shared_expert_on_the_host_reads_the_layers_own_tokens() {
    // Latent experts: the shared expert has tokens of the layer's width.
    let (mut tensors, config) = latent(NEMOTRON, "bf16");
    for (name, sizes) in [("up_proj", [64, WIDE]), ("down_proj", [WIDE, 64])] {
        for part in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
            tensors.remove(&format!("{BLOCK}.shared_experts.{name}.{part}"));
        }
        set_in_form(&mut tensors, &format!("{BLOCK}.shared_experts.{name}"), sizes, "bf16");
    }
    with_model(&tensors, Some(config), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        let (inputs, routed, output) = parts_on_host(&layer);
        let rows = inputs.hidden.chunks(WIDE).zip(routed.chunks(HIDDEN)).flat_map(|(token, routed)| {
            let shared = block_of(WIDE, &decoded(token), |_, up| up.max(0.0).powi(2));
            projected([WIDE, HIDDEN], &decoded(routed)).into_iter().zip(shared).map(|(one, two)| one + two)
        });
        assert_eq!(output, rounded(rows));
    });
    // Weights on the input (Llama 4) belong to the routed experts alone.
    let mut tensors = apart(Format::ModelOpt);
    set_block(&mut tensors, &format!("{BLOCK}.shared_expert"), HIDDEN, ["bf16"; 3]);
    let llama = json!({"model_type": "llama4_text", "num_experts_per_tok": 1, "hidden_act": "silu"});
    with_model(&tensors, Some(llama), |checkpoint, _| {
        let (inputs, routed, output) = parts_on_host(&checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap());
        assert!(inputs.weights_on_input);
        let shared = inputs.hidden.chunks(HIDDEN).flat_map(|token| block_of(HIDDEN, &decoded(token), silu_of));
        assert_eq!(output, rounded(shared.zip(decoded(&routed)).map(|(shared, routed)| routed + shared)));
    });
    // Factors of the tokens (AWQ) of all routed experts are not factors of the shared expert's tokens.
    let plain = tensors.clone();
    for (expert, name) in (0..EXPERTS).flat_map(|expert| NAMES[..2].iter().map(move |name| (expert, name))) {
        let name = format!("{BLOCK}.experts.{expert}.{name}.pre_quant_scale");
        tensors.set(name, f32s(&[HIDDEN], &numbers(HIDDEN, 5)));
    }
    let [of_plain, of_awq] = [plain, tensors].map(|tensors| {
        with_model(&tensors, Some(qwen3()), |checkpoint, _| {
            let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
            // Any backend computes the experts.
            assert!(layer.weights.check_no_transforms("a GPU").is_ok());
            let (inputs, routed, output) = parts_on_host(&layer);
            let changed = layer.around.as_ref().unwrap().routed(TokenDtype::Bf16, &inputs).unwrap();
            let shared: Vec<f64> =
                inputs.hidden.chunks(HIDDEN).flat_map(|token| block_of(HIDDEN, &decoded(token), silu_of)).collect();
            assert_eq!(
                output,
                rounded(shared.into_iter().zip(decoded(&routed)).map(|(shared, routed)| routed + shared))
            );
            (inputs.hidden.into_owned(), changed.hidden.into_owned())
        })
    });
    assert_eq!((&of_plain.0, &of_plain.1), (&of_awq.0, &of_plain.0));
    let factors = numbers(HIDDEN, 5).into_iter().map(f64::from).cycle();
    let changed = decoded(&of_awq.0).into_iter().zip(factors).map(|(number, factor)| number * factor);
    // Products of tokens and factors are f32 numbers.
    assert_eq!(of_awq.1, rounded(changed.map(|number| f64::from(number as f32))));
}

#[test]
fn dense_branch_on_the_host_keeps_its_norms() {
    let (mut tensors, config) = gemma();
    let norms = [0, 1, 2, 3].map(|index| numbers(HIDDEN, index + 3));
    for name in NAMES {
        for part in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
            tensors.remove(&format!("model.layers.3.mlp.{name}.{part}"));
        }
    }
    set_block(&mut tensors, "model.layers.3.mlp", HIDDEN, ["bf16", "bf16", "fp8"]);
    with_model(&tensors, Some(config), |checkpoint, _| {
        let (inputs, routed, output) = parts_on_host(&checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap());
        let rows = inputs.hidden.chunks(HIDDEN).zip(routed.chunks(HIDDEN)).flat_map(|(token, routed)| {
            let token = normalized(&decoded(token), &norms[2]);
            let branch = block_of(HIDDEN, &token, |gate, up| Activation::GeluTanh.apply(gate, up));
            let branch = normalized(&branch, &norms[3]);
            normalized(&decoded(routed), &norms[1]).into_iter().zip(branch).map(|(one, two)| one + two)
        });
        assert_eq!(output, rounded(rows));
    });
}

#[test]
fn shared_expert_beside_the_block_has_biases_and_a_limit_of_its_own() {
    // Granite's names: gate and up in one matrix. The numbers of `latent_numbers` differ in both halves.
    let mut tensors = apart(Format::ModelOpt);
    let shared = "model.layers.3.shared_mlp";
    set_in_form(&mut tensors, &format!("{shared}.input_linear"), [128, HIDDEN], "bf16");
    set_in_form(&mut tensors, &format!("{shared}.output_linear"), [HIDDEN, 64], "fp8 rows");
    let (inner, outer) = (numbers(128, 3), numbers(HIDDEN, 5));
    tensors.set(format!("{shared}.input_linear.bias"), f32s(&[128], &inner));
    tensors.set(format!("{shared}.output_linear.bias"), f32s(&[HIDDEN], &outer));
    let config = json!({"model_type": "step3p5", "num_experts_per_tok": 2, "norm_expert_weight": true, "hidden_act": "silu",
        "swiglu_limits": [0, 0, 0, 7], "swiglu_limits_shared": [0, 0, 0, 0.5]});
    with_model(&tensors, Some(config.clone()), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        assert_eq!(layer.weights.sizes().activation, Activation::SwigluStep { limit: 7.0 });
        let (inputs, routed, output) = parts_on_host(&layer);
        let own = Activation::SwigluStep { limit: 0.5 };
        let shared = inputs.hidden.chunks(HIDDEN).flat_map(|token| {
            let both = projected([128, HIDDEN], &decoded(token));
            let biased: Vec<f64> = both.iter().zip(&inner).map(|(sum, &bias)| sum + f64::from(bias)).collect();
            let active: Vec<f64> = (0..64).map(|i| own.apply(biased[i], biased[64 + i])).collect();
            projected([HIDDEN, 64], &active).into_iter().zip(outer.clone()).map(|(sum, bias)| sum + f64::from(bias))
        });
        assert_eq!(output, rounded(shared.zip(decoded(&routed)).map(|(shared, routed)| routed + shared)));
    });
    // In NVFP4 it is a layer of its own.
    let mut tensors = apart(Format::ModelOpt);
    set_block(&mut tensors, &format!("{BLOCK}.shared_expert"), HIDDEN, ["nvfp4"; 3]);
    with_model(&tensors, Some(config), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        let branch = layer.around.as_ref().unwrap().branch().unwrap();
        assert_eq!(branch.sizes().activation, Activation::SwigluStep { limit: 0.5 });
        let parts = parts_of(&layer);
        let sum = decoded(&parts.routed).into_iter().zip(decoded(&parts.branch)).map(|(one, two)| one + two);
        assert_eq!(parts.output, rounded(sum));
    });
}

#[test]
fn wrong_parts_of_a_shared_expert_on_the_host_are_refused_by_name() {
    let error = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = apart(Format::ModelOpt);
        set_block(&mut tensors, &format!("{BLOCK}.shared_expert"), HIDDEN, ["bf16", "fp8", "fp8 blocks"]);
        change(&mut tensors);
        with_model(&tensors, Some(qwen3()), |checkpoint, folder| {
            let error = checkpoint.moe_layer(3, TokenDtype::Bf16).map(|_| ()).unwrap_err().to_string();
            error.replace(&folder.display().to_string(), "MODEL")
        })
    };
    let named = |name: &str| format!("{BLOCK}.shared_expert.{name}");
    let without = |name: &str| error(&|tensors| _ = tensors.remove(&named(name)));
    let with = |name: &str, content: Content| error(&|tensors| _ = tensors.set(named(name), content.clone()));
    let nan = f32s(&[64, HIDDEN], &[f32::NAN; 64 * HIDDEN]);
    for (error, words) in [
        (without("gate_proj.weight"), "MODEL: model.layers.3.mlp.: silu needs 1 gate projections, found 0"),
        (without("up_proj.weight_scale"), "up_proj.weight: its scale is missing"),
        (without("down_proj.weight"), "MODEL: model.layers.3.mlp.shared_expert.down_proj.weight is missing"),
        (with("gate_proj.weight", nan), "gate_proj: the number in row 0, column 0 is not finite"),
        (with("gate_proj.weight", f32s(&[48, HIDDEN], &[0.0; 48 * HIDDEN])), "gate_proj: rows: got 48, expected 64"),
        (with("gate_proj.weight", f32s(&[64, 16], &[0.0; 1024])), "gate_proj: columns: got 16, expected 32"),
        (with("up_proj.weight_scale", f32s(&[7], &[0.0; 7])), "up_proj.weight: its shape is [7]"),
        (with("down_proj.bias", f32s(&[7], &[0.0; 7])), "down_proj.bias: its shape is [7]"),
        (
            with("down_proj.weight", raw(Dtype::F8_E5M2, &[HIDDEN, 64], &[0; 64 * HIDDEN])),
            "down_proj.weight: its dtype is F8_E5M2",
        ),
        (
            with("gate_proj.pre_quant_scale", f32s(&[HIDDEN], &[1.0; HIDDEN])),
            "this scale of the activations (NVFP4_AWQ)",
        ),
        (with("norm.weight", f32s(&[64], &[1.0; 64])), "shared_expert.norm.weight: this tensor is unknown"),
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let transformed = |block: &str| {
        let mut tensors = apart(Format::CompressedTensors);
        set_block(&mut tensors, &format!("{BLOCK}.shared_expert"), HIDDEN, [block; 3]);
        let mut config = qwen3();
        let apply = json!([{"targets": ["re:.*shared_expert.*"], "location": "input"}]);
        let groups = json!({"u": {"type": "hadamard", "head_dim": 16, "apply": apply}});
        config["quantization_config"] =
            json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": groups}});
        error_of((tensors, config), |_, _| ())
    };
    let message = transformed("bf16");
    assert!(message.contains("transform u of the tokens of this projection is not computed; quantize"), "{message}");
}

#[test]
fn sigmoid_routers_use_the_correction_only_to_choose() {
    let config = json!({"model_type": "deepseek_v3", "num_experts_per_tok": 1, "norm_topk_prob": false, "hidden_act": "silu",
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5});
    for name in [format!("{BLOCK}.gate.e_score_correction_bias"), format!("{BLOCK}.e_score_correction_bias")] {
        let mut tensors = apart(Format::ModelOpt);
        tensors.set(name, f32s(&[EXPERTS], &[0.0, 0.0, 100.0]));
        with_layer(&tensors, config.clone(), |layer, inputs| {
            assert_eq!(inputs.ids[..], [2; 5]);
            assert!(inputs.weights.iter().all(|&weight| weight > 0.0 && weight < 2.5), "{:?}", inputs.weights);
            assert!(!inputs.weights_on_input && layer.router.factor == 1.0);
        });
    }
    // Llama 4 applies weights to the input.
    let llama = json!({"model_type": "llama4_text", "num_experts_per_tok": 1, "hidden_act": "silu"});
    with_layer(&apart(Format::ModelOpt), llama, |_, inputs| assert!(inputs.weights_on_input));
}

#[test]
fn shared_expert_is_read_with_its_gate() {
    let mut tensors = apart(Format::ModelOpt);
    for (index, (name, sizes)) in NAMES.iter().zip([[48, 32], [48, 32], [32, 48]]).enumerate() {
        tensors.set_nvfp4(&format!("{BLOCK}.shared_expert.{name}"), Format::ModelOpt, sizes, 90 + index as u8);
    }
    assert_eq!(layer_of(&tensors, qwen3()).len(), 3 * (EXPERTS + 1));
    tensors.set(format!("{BLOCK}.shared_expert_gate.weight"), f32s(&[1, HIDDEN], &numbers(HIDDEN, 3)));
    with_model(&tensors, Some(qwen3()), |checkpoint, _| {
        let layer = checkpoint.moe_layer(3, TokenDtype::Bf16).unwrap();
        assert_eq!(layer.weights.sizes().shared_intermediate, Some(48));
        let mut hidden = vec![0u16; 2 * HIDDEN];
        hidden[HIDDEN] = 0x3F80;
        let weights = layer.router.inputs(layer.weights.sizes(), hidden).unwrap().shared_weights.unwrap();
        // The first number of the gate is -1.1.
        assert!(
            (weights[0] - 0.5).abs() < 1e-6 && (weights[1] - 1.0 / (1.0 + 1.1f32.exp())).abs() < 1e-6,
            "{weights:?}"
        );
    });
}

#[test]
fn unsupported_layer_is_refused_with_file_tensor_and_remedy() {
    let with = |key: &str, value: Value| {
        let mut config = qwen3();
        config[key] = value;
        Some(config)
    };
    let gate = format!("{BLOCK}.gate.weight");
    for (config, words) in [
        (None, "MODEL: config.json is missing; it defines the router"),
        (with("num_experts_per_tok", Value::Null), "MODEL/config.json: the number of experts per token"),
        (with("norm_topk_prob", Value::Null), "MODEL/config.json: norm_topk_prob is missing"),
        (with("scoring_func", json!("entmax")), "MODEL/config.json: its router scores with entmax"),
        (with("topk_method", json!("balanced")), "MODEL/config.json: topk_method is balanced"),
        (with("model_type", json!("deepseek_v3")), "MODEL/config.json: n_group is missing"),
        (with("model_type", json!("llama4_text")), "MODEL/config.json: router: top_k of sigmoid top-1 = 2"),
        (with("hidden_act", json!("mish")), "MODEL/config.json: hidden_act is \"mish\""),
        (with("num_experts_per_tok", json!(0)), "MODEL: layer 3: top_k = 0 is not from 1 to 32"),
        (
            with("model_type", json!("some")),
            "MODEL/config.json: scoring_func is missing; the router of some is unknown",
        ),
        (
            with("routed_scaling_factor", json!("2.5")),
            "MODEL/config.json: routed_scaling_factor is \"2.5\", which is not",
        ),
        (
            with("use_routing_bias", json!(true)),
            "MODEL: the corrections of the router of layer 3 (e_score_correction_bias",
        ),
        (
            with("num_hash_layers", json!(4)),
            "MODEL: the table of experts by token id (tid2eid) of layer 3 (num_hash_layers is 4)",
        ),
    ] {
        let error = refusal(config, |_| ());
        assert!(error.starts_with(words), "{error}");
    }
    let change = |name: &str, content: Option<Content>| {
        refusal(Some(qwen3()), |tensors| {
            _ = match content {
                Some(content) => tensors.set(name, content),
                None => tensors.remove(name),
            }
        })
    };
    let file = "MODEL/model.safetensors: ";
    for (error, words) in [
        (change(&gate, None), "MODEL: the router (model.layers.3.mlp.gate.weight or ".to_owned()),
        (change(&gate, Some(f32s(&[2, HIDDEN], &[0.0; 64]))), format!("{file}{gate}: its shape is [2, 32]")),
        (change(&gate, Some(raw(Dtype::U8, &[3, HIDDEN], &[0; 96]))), format!("{file}{gate}: ")),
        (
            change(&gate, Some(f32s(&[3, HIDDEN], &[f32::NAN; 96]))),
            format!("{file}{gate}: element 0 is NaN; a router needs finite numbers"),
        ),
        (
            change(&format!("{BLOCK}.experts.1.up_proj.bias"), Some(f32s(&[15], &[0.0; 15]))),
            format!("{file}{BLOCK}.experts.1.up_proj.bias: its shape is [15]"),
        ),
        (
            change(&format!("{BLOCK}.gate.per_expert_scale"), Some(f32s(&[3], &[1.0; 3]))),
            format!("{file}{BLOCK}.gate.per_expert_scale: this part of the router is not computed"),
        ),
        (
            change(&format!("{BLOCK}.experts.1.down_proj.weight_scale_2"), None),
            format!("{file}{BLOCK}.experts.1.down_proj.weight_scale_2: this tensor is missing"),
        ),
    ] {
        assert!(
            error
                .replace("MODEL: model.layers.3.mlp.experts", &format!("{file}model.layers.3.mlp.experts"))
                .starts_with(&words),
            "{error}"
        );
    }
    let dense = |tensors: &mut Tensors| {
        tensors.set_nvfp4("model.layers.4.mlp.gate_proj", Format::ModelOpt, [16, 32], 1);
    };
    let mut tensors = apart(Format::ModelOpt);
    dense(&mut tensors);
    with_model(&tensors, Some(qwen3()), |checkpoint, _| {
        let error = |layer| checkpoint.moe_layer(layer, TokenDtype::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error(4).contains("layer 4 is dense and has no experts; use --op gated"), "{}", error(4));
        assert!(error(9).contains("the model has layers 3-4"), "{}", error(9));
    });
}

#[test]
fn weight_is_read_as_a_linear_layer_with_its_bias() {
    const MODULE: &str = "model.layers.0.self_attn.q_proj";
    for format in [Format::ModelOpt, Format::CompressedTensors] {
        let mut tensors = Tensors::default();
        tensors.set_nvfp4(MODULE, format, [48, 32], 5);
        // A scale of the key cache is stored with a projection and must not change it.
        tensors.set(format!("{MODULE}.k_scale"), f32s(&[], &[1.0]));
        let plain = with_model(&tensors, None, |checkpoint, _| run(checkpoint, MODULE));
        // 0.5 and -2 in bf16.
        let bias: Vec<u8> = (0..48).flat_map(|i| if i % 2 == 0 { [0x00, 0x3F] } else { [0x00, 0xC0] }).collect();
        tensors.set(format!("{MODULE}.bias"), raw(Dtype::BF16, &[48], &bias));
        let biased = with_model(&tensors, None, |checkpoint, _| run(checkpoint, &format!("{MODULE}.weight")));
        assert_ne!(plain, biased);
        // ModelOpt stores the scale, compressed-tensors its reciprocal.
        let (name, number) = match format {
            Format::ModelOpt => ("input_scale", 0.125),
            Format::CompressedTensors => ("input_global_scale", 8.0),
        };
        let mut calibrated = tensors.clone();
        calibrated.set(format!("{MODULE}.{name}"), f32s(&[], &[number]));
        let input_scale = |tensors: &Tensors| {
            with_model(tensors, None, |checkpoint, _| checkpoint.linear(MODULE, TokenDtype::F16).unwrap().input_scale())
        };
        let mut without = tensors.clone();
        without.change(&format!("{MODULE}.{name}"), None);
        assert_eq!((input_scale(&without), input_scale(&calibrated)), (None, Some(0.125)));
        // Tokens of 16 bits need no input scale.
        calibrated.set(format!("{MODULE}.{name}"), f32s(&[], &[f32::NAN]));
        with_model(&calibrated, None, |checkpoint, _| {
            assert_eq!(run(checkpoint, MODULE), biased);
            let weights = checkpoint.linear(MODULE, TokenDtype::Bf16).unwrap().with_token_format(TokenFormat::Nvfp4);
            let inputs = linear::generate::inputs(Default::default(), 3, HIDDEN, TokenDtype::Bf16, 1).unwrap();
            let error = LinearStep::new(&weights, inputs).unwrap_err().to_string();
            assert!(error.contains(&format!("{MODULE}.{name}: ")) && error.contains("use 16-bit tokens"), "{error}");
        });
        for (change, words) in [
            (("bias", Some(f32s(&[47], &[0.0; 47]))), "q_proj.bias: its shape is [47]"),
            (("bias", Some(raw(Dtype::U8, &[48], &[0; 48]))), "q_proj.bias: "),
            (
                ("pre_quant_scale", Some(f32s(&[32], &[1.0; 32]))),
                "q_proj.pre_quant_scale: this scale of the activations",
            ),
            (("weight_scale", None), "q_proj.weight_scale: this tensor is missing"),
        ] {
            let mut tensors = tensors.clone();
            tensors.change(&format!("{MODULE}.{}", change.0), change.1);
            let error = with_model(&tensors, None, |checkpoint, _| {
                checkpoint.linear(MODULE, TokenDtype::F16).map(|_| ()).unwrap_err().to_string()
            });
            assert!(error.contains(words), "{error}");
        }
        for absent in ["model.layers.0.self_attn.q", "model.layers.1.self_attn.q_proj", ""] {
            let error = with_model(&tensors, None, |checkpoint, _| {
                checkpoint.linear(absent, TokenDtype::F16).map(|_| ()).unwrap_err().to_string()
            });
            assert!(error.contains(&format!("a weight named {absent:?} is missing; run `nvfp4 inspect")), "{error}");
        }
    }
}

/// Computes a weight's linear layer for three tokens on the CPU, checks every element and returns the output.
fn run(checkpoint: &Checkpoint, module: &str) -> Vec<u16> {
    let weights = checkpoint.linear(module, TokenDtype::Bf16).unwrap();
    let inputs = linear::generate::inputs(Default::default(), 3, HIDDEN, TokenDtype::Bf16, 1).unwrap();
    let step = LinearStep::new(&weights, inputs).unwrap();
    let mut output = LinearOutput::new(&step);
    Cpu::new().prepare_linear(&weights).unwrap().execute(&step, &mut output).unwrap();
    let found = linear::compare::compare(&weights, &step, &output);
    assert_eq!((found.checked, found.mismatches), (3 * 48, 0), "{:?}", found.first);
    output.out
}
