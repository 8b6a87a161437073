//! Guarantees of the checkpoint reader and writers, on small files.

use std::path::Path;

use half::{bf16, f16};
use model_files::{Tensors, f32s, i64s, raw, shard_name};
use nvfp4::checkpoint::{
    Activations, Checkpoint, Dtype, Format, INDEX_NAME, Inspection, Layer, OutputFile, TensorFile,
};
use nvfp4::problem::{Expert, Group, GroupedProblem, Op, Step, TokenDtype};
use nvfp4::quantize::{quantize, quantize_with};
use nvfp4::{Error, Output};
use serde_json::json;

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const BLOCK: &str = "model.layers.3.mlp";
const GATE: &str = "model.layers.3.mlp.experts.1.gate_proj";

fn experts(format: Format) -> Tensors {
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, format, 2);
    tensors
}

fn in_folder<T>(test: impl FnOnce(&Path) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    test(folder.path())
}

/// Returns everything in a layer that a backend reads.
fn contents(layer: &Layer<'_>) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
    let projections = layer.weights.experts().iter().flat_map(Expert::projections);
    projections.map(|matrix| (matrix.values().to_vec(), matrix.scales().to_vec(), matrix.global_scale())).collect()
}

fn layer_of(path: &Path, op: Op) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
    contents(&Checkpoint::open(path).unwrap().layer(3, op).unwrap())
}

/// Returns the message for a file that is right except for one change.
fn refusal(change: impl FnOnce(&mut Tensors)) -> String {
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        change(&mut tensors);
        let path = tensors.write(&folder.join("m.safetensors"));
        Checkpoint::open(&path)
            .and_then(|file| file.layer(3, Op::Gated).map(drop))
            .expect_err("the changed file must be refused")
            .to_string()
    })
}

#[test]
fn both_formats_mean_the_same_numbers() {
    in_folder(|folder| {
        let paths = [Format::ModelOpt, Format::CompressedTensors]
            .map(|format| experts(format).write(&folder.join(format!("{format:?}.safetensors"))));
        for op in [Op::Gated, Op::Plain] {
            let [modelopt, compressed] = paths.each_ref().map(|path| layer_of(path, op));
            assert_eq!(modelopt.len(), 2 * op.projections());
            assert_eq!(modelopt, compressed);
            assert!(modelopt.iter().all(|(_, _, global)| *global == 0.25));
        }
        for path in paths {
            let checkpoint = Checkpoint::open(&path).unwrap();
            assert_eq!(checkpoint.layer(3, Op::Gated).unwrap().input_scales, [Some(0.5); 2]);
        }
    });
}

#[test]
fn shards_folder_and_single_file_give_the_same_model() {
    in_folder(|folder| {
        let tensors = experts(Format::ModelOpt);
        let file = tensors.write(&folder.join("one.safetensors"));
        let [sharded, loose] = ["sharded", "loose"].map(|name| folder.join(name));
        for folder in [&sharded, &loose] {
            std::fs::create_dir(folder).unwrap();
        }
        let index = tensors.write_sharded(&sharded, 3);
        std::fs::remove_file(tensors.write_sharded(&loose, 2)).unwrap();
        let expected = layer_of(&file, Op::Gated);
        for path in [&sharded, &index, &loose] {
            assert_eq!(layer_of(path, Op::Gated), expected, "{}", path.display());
        }
    });
}

#[test]
fn weights_stay_in_the_memory_map() {
    in_folder(|folder| {
        let path = experts(Format::ModelOpt).write(&folder.join("m.safetensors"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let layer = checkpoint.layer(3, Op::Gated).unwrap();
        let Expert::Gated { gate, .. } = &layer.weights.experts()[1] else { panic!("expected a gated expert") };
        let in_map = |suffix| checkpoint.tensor(&format!("{GATE}{suffix}")).unwrap().data.as_ptr();
        assert_eq!((gate.values().as_ptr(), gate.scales().as_ptr()), (in_map(".weight"), in_map(".weight_scale")));
    });
}

#[test]
fn layers_are_found_under_every_family_of_names() {
    let blocks = [
        ("model.layers.3.mlp", NAMES),
        ("model.language_model.layers.3.mlp", NAMES),
        ("language_model.model.layers.3.mlp", NAMES),
        ("model.layers.3.block_sparse_moe", ["w1", "w3", "w2"]),
        ("language_model.model.layers.3.feed_forward", NAMES),
        ("model.layers.3.feed_forward", ["w1", "w3", "w2"]),
        // DeepSeek-V4, Nemotron-H with a gate, Gemma 4 under vLLM's name, and an unknown wrapper.
        ("layers.3.ffn", ["w1", "w3", "w2"]),
        ("backbone.layers.3.mixer", NAMES),
        ("model.language_model.layers.3.moe", NAMES),
        ("thinker.inner.model.layers.3.mlp", NAMES),
    ];
    let layers = blocks.map(|(block, names)| {
        in_folder(|folder| {
            let mut tensors = Tensors::default();
            // Tensors of other modules must not be mistaken for experts.
            tensors.set_experts(block, names, Format::ModelOpt, 11);
            tensors.set(format!("{block}.gate.weight"), f32s(&[1], &[0.0]));
            tensors.set(format!("{block}.shared_experts.gate_proj.weight"), f32s(&[1], &[0.0]));
            tensors.set(format!("{block}.gate.e_score_correction_bias"), f32s(&[1], &[0.0]));
            tensors.set("vision_tower.layers.3.mlp.experts.0.gate_proj.weight", f32s(&[1], &[0.0]));
            tensors.set("mtp.layers.3.mlp.experts.0.gate_proj.weight", f32s(&[1], &[0.0]));
            layer_of(&tensors.write(&folder.join("m.safetensors")), Op::Gated)
        })
    });
    assert_eq!(layers[0].len(), 22);
    assert!(layers.iter().all(|layer| layer == &layers[0]));
}

/// Returns the tensors of `experts` under other names.
fn renamed(rename: impl Fn(&str) -> String) -> Tensors {
    let mut tensors = Tensors::default();
    for (name, content) in experts(Format::ModelOpt).iter() {
        tensors.set(rename(name), content.clone());
    }
    tensors
}

#[test]
fn experts_are_found_under_the_layer_and_after_the_projection() {
    in_folder(|folder| {
        let expected = layer_of(&experts(Format::ModelOpt).write(&folder.join("usual.safetensors")), Op::Gated);
        let below_layer = renamed(|name| name.replace(".mlp.", "."));
        let mut beside_dense = below_layer.clone();
        beside_dense.set_nvfp4(&format!("{BLOCK}.gate_proj"), Format::ModelOpt, [8, 16], 9);
        beside_dense.set("model.layers.3.router.per_expert_scale", f32s(&[2], &[1.0; 2]));
        let behind = renamed(|name| {
            let parts: Vec<_> = name.split('.').collect();
            let [stack, layers, three, mlp, experts, expert, projection, part] = parts[..] else { panic!("{name}") };
            [stack, layers, three, mlp, experts, projection, expert, part].join(".")
        });
        for (index, tensors) in [below_layer, beside_dense, behind].iter().enumerate() {
            let path = tensors.write(&folder.join(format!("{index}.safetensors")));
            assert_eq!(layer_of(&path, Op::Gated), expected, "{index}");
        }
    });
}

#[test]
fn layer_lists_the_names_of_its_weights() {
    in_folder(|folder| {
        let path = experts(Format::ModelOpt).write(&folder.join("m.safetensors"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let modules = |op| checkpoint.layer(3, op).unwrap().modules;
        let named = |names: &[&str]| names.iter().map(|name| format!("{BLOCK}.experts.*.{name}")).collect::<Vec<_>>();
        assert_eq!(modules(Op::Gated), named(&["gate_proj", "up_proj"]));
        assert_eq!(modules(Op::Plain), named(&["down_proj"]));
    });
}

#[test]
fn tensors_that_would_change_the_result_are_refused() {
    for (name, words) in [
        (format!("{GATE}.bias"), "this bias is not computed"),
        (format!("{GATE}.pre_quant_scale"), "this scale of the activations (NVFP4_AWQ) is not computed"),
        (format!("{GATE}.lora_A.weight"), "this tensor is unknown"),
        (format!("{GATE}.weight_zero_point"), "this tensor is unknown"),
        (format!("{GATE}.weight_global_scale_2"), "this tensor is unknown"),
        (format!("{BLOCK}.experts.gate_up_proj_bias"), "this bias is not computed"),
        (format!("{BLOCK}.experts.1.act_fn.beta"), "this tensor is unknown"),
    ] {
        let message = refusal(|tensors| _ = tensors.set(&name, f32s(&[1], &[0.0])));
        assert!(message.contains(&format!("m.safetensors: {name}: {words}")), "{name}: {message}");
    }
    // Tensors of another operation, or of no expert, change nothing.
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        for name in [
            "fc1_latent_proj.weight",
            "experts.1.down_proj.bias",
            "shared_experts.up_proj.bias",
            "gate.bias",
            "e_score_correction_bias",
        ] {
            tensors.set(format!("{BLOCK}.{name}"), f32s(&[1], &[0.0]));
        }
        tensors.set("model.layers.3.self_attn.q_proj.bias", f32s(&[1], &[0.0]));
        let checkpoint = Checkpoint::open(&tensors.write(&folder.join("m.safetensors"))).unwrap();
        assert!(checkpoint.layer(3, Op::Gated).is_ok());
        assert!(checkpoint.layer(3, Op::Plain).unwrap_err().to_string().contains("down_proj.bias"));
        assert!(checkpoint.single(&format!("{BLOCK}.experts.1.down_proj")).is_err());
    });
}

#[test]
fn ambiguous_layers_are_refused() {
    let two_blocks = refusal(|tensors| _ = tensors.set_experts("model.layers.3.moe", NAMES, Format::ModelOpt, 2));
    assert!(two_blocks.contains("two blocks, model.layers.3.mlp. and model.layers.3.moe."), "{two_blocks}");
    let two_stacks = refusal(|tensors| _ = tensors.set_experts("other.layers.3.mlp", NAMES, Format::ModelOpt, 2));
    assert!(two_stacks.contains("two blocks"), "{two_stacks}");
    let two_names = refusal(|tensors| _ = tensors.set_experts(BLOCK, ["w1", "w3", "w2"], Format::ModelOpt, 2));
    assert!(two_names.contains("are two names for one projection"), "{two_names}");
    let no_gate = refusal(|tensors| {
        *tensors = Tensors::default();
        for expert in 0..2 {
            let module = |name| format!("backbone.layers.3.mixer.experts.{expert}.{name}");
            tensors.set_nvfp4(&module("up_proj"), Format::ModelOpt, [16, 32], 0);
            tensors.set_nvfp4(&module("down_proj"), Format::ModelOpt, [32, 16], 0);
        }
    });
    assert!(no_gate.contains("no gate projection") && no_gate.contains("--op plain"), "{no_gate}");
}

#[test]
fn unsupported_activation_is_refused() {
    in_folder(|folder| {
        experts(Format::ModelOpt).write(&folder.join("m.safetensors"));
        let layer = |op| Checkpoint::open(folder).and_then(|checkpoint| checkpoint.layer(3, op).map(drop));
        for (config, words) in [
            (r#"{"hidden_act": "gelu"}"#, "hidden_act is \"gelu\"; only silu"),
            (r#"{"text_config": {"hidden_activation": "gelu_pytorch_tanh"}}"#, "hidden_activation"),
            (r#"{"swiglu_limit": 7.0}"#, "swiglu_limit is 7.0"),
            ("{", "not a valid configuration"),
        ] {
            std::fs::write(folder.join("config.json"), config).unwrap();
            let message = layer(Op::Gated).unwrap_err().to_string();
            assert!(message.contains("config.json: ") && message.contains(words), "{message}");
            assert_eq!(layer(Op::Plain).is_ok(), config != "{", "down projections have no activation to refuse");
        }
        let runs = |config: &str| -> Vec<bool> {
            std::fs::write(folder.join("config.json"), config).unwrap();
            let computes = |operation: &&str| ["gated", "plain"].contains(operation);
            Inspection::of(folder).weights.iter().map(|weight| weight.runs.iter().any(computes)).collect()
        };
        assert_eq!(runs(r#"{"hidden_act": "gelu"}"#), [true, false, false], "only the down projection runs");
        assert_eq!(runs(r#"{"hidden_act": "silu"}"#), [true; 3]);
        assert!(layer(Op::Gated).is_ok());
    });
}

/// Returns the codes of the problems that an inspection of a folder finds, with warnings in parentheses.
fn codes(folder: &Path) -> Vec<String> {
    let problems = Inspection::of(folder).problems.into_iter();
    problems.map(|problem| if problem.is_error { problem.code.into() } else { format!("({})", problem.code) }).collect()
}

#[test]
fn unequal_and_partly_missing_scales_are_found() {
    in_folder(|folder| {
        let path = folder.join("m.safetensors");
        let mut tensors = experts(Format::ModelOpt);
        tensors.set(format!("{GATE}.weight_scale_2"), f32s(&[], &[0.5])).write(&path);
        assert_eq!(codes(folder), ["(unequal-global-scales)"]);
        tensors.set(format!("{GATE}.weight_scale_2"), f32s(&[], &[0.25]));
        tensors.remove(&format!("{GATE}.input_scale")).write(&path);
        assert_eq!(codes(folder), ["input-scales-partly-missing"]);
        for name in ["experts.1.up_proj", "experts.0.gate_proj", "experts.0.up_proj"] {
            tensors.remove(&format!("{BLOCK}.{name}.input_scale"));
        }
        tensors.write(&path);
        assert_eq!(codes(folder), [""; 0], "a model without input scales is valid");
        tensors.set(format!("{GATE}.bias"), f32s(&[1], &[0.0]));
        tensors.set(format!("{BLOCK}.experts.act.beta"), f32s(&[1], &[0.0])).write(&path);
        assert_eq!(codes(folder), ["not-computed"; 2]);
        let weights = Inspection::of(folder).weights;
        assert!(weights.iter().all(|weight| !weight.runs.contains(&"gated") && weight.why_not.is_some()));
    });
}

#[test]
fn configuration_that_contradicts_the_tensors_is_found() {
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        tensors.write(&folder.join("m.safetensors"));
        let found = |config: serde_json::Value| {
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
            codes(folder)
        };
        let quantization = |more: serde_json::Value| {
            let mut quantization = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16});
            quantization.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"quantization_config": quantization, "num_experts": 2})
        };
        assert_eq!(found(quantization(json!({}))), [""; 0]);
        assert_eq!(found(json!({})), ["config-without-quantisation"]);
        assert_eq!(found(quantization(json!({"quant_method": "compressed-tensors"}))), ["config-format"]);
        assert_eq!(found(quantization(json!({"group_size": 32}))), ["config-quantisation"]);
        assert_eq!(found(quantization(json!({"ignore": ["lm_head", BLOCK]}))), ["config-exclusion"]);
        assert_eq!(found(quantization(json!({"ignore": ["*.gate_proj"]}))), ["config-exclusion"]);
        let sizes = |more: serde_json::Value| {
            let mut config = quantization(json!({}));
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            found(config)
        };
        assert_eq!(sizes(json!({"num_experts": 3})), ["config-experts"]);
        assert_eq!(sizes(json!({"num_hidden_layers": 4})), ["config-layers"], "layers 0-2 are missing");
        assert_eq!(
            sizes(json!({"num_hidden_layers": 2})),
            ["config-layers"; 2],
            "layers 0-1 are missing and layer 3 is one too many"
        );
        for expert in 0..2 {
            for name in NAMES {
                tensors.remove(&format!("{BLOCK}.experts.{expert}.{name}.input_scale"));
            }
        }
        tensors.write(&folder.join("m.safetensors"));
        assert_eq!(found(quantization(json!({}))), ["config-input-scales"]);
        assert_eq!(found(quantization(json!({"quant_algo": "W4A16_NVFP4"}))), [""; 0]);
        std::fs::write(folder.join("config.json"), "version https://git-lfs.github.com/spec/v1\n").unwrap();
        assert_eq!(codes(folder), ["invalid"]);
    });
}

#[test]
fn weights_of_other_types_are_listed_with_the_reason() {
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        let module = |layer: usize, name: &str| format!("model.layers.{layer}.{name}");
        let fp8 = |shape: &[usize]| raw(Dtype::F8_E4M3, shape, &vec![1; shape.iter().product()]);
        let bytes = |shape: &[usize]| raw(Dtype::U8, shape, &vec![1; shape.iter().product()]);
        tensors.set(module(4, "mlp.gate_proj.weight"), fp8(&[8, 16]));
        tensors.set(module(4, "mlp.gate_proj.weight_scale"), f32s(&[], &[1.0]));
        tensors.set(module(5, "mlp.experts.0.gate_proj.weight"), fp8(&[8, 16]));
        tensors.set(module(5, "mlp.experts.1.gate_proj.weight"), fp8(&[8, 16]));
        for expert in 0..2 {
            tensors.set(module(5, &format!("mlp.experts.{expert}.gate_proj.weight_scale_inv")), f32s(&[1, 1], &[1.0]));
        }
        tensors.set(module(6, "mlp.experts.gate_up_proj_blocks"), bytes(&[2, 8, 1, 16]));
        tensors.set(module(6, "mlp.experts.gate_up_proj_scales"), bytes(&[2, 8, 1]));
        tensors.set(module(7, "ffn.experts.0.w1.weight"), raw(Dtype::I8, &[8, 16], &[1; 128]));
        tensors.set(module(7, "ffn.experts.0.w1.scale"), raw(Dtype::F8_E8M0, &[8, 1], &[1; 8]));
        tensors.set(module(8, "mlp.up_proj.weight_packed"), bytes(&[8, 16]));
        tensors.set(module(8, "mlp.up_proj.weight_scale"), bytes(&[8, 1]));
        tensors.set(module(9, "mlp.up_proj.weight"), raw(Dtype::BF16, &[8, 16], &[0; 256]));
        tensors.set(module(9, "mlp.gate.weight"), raw(Dtype::BF16, &[8, 16], &[0; 256]));
        tensors.set(module(9, "mlp.experts.down_proj"), raw(Dtype::BF16, &[2, 8, 16], &[0; 512]));
        tensors.set(module(10, "mlp.up_proj.qweight"), raw(Dtype::I32, &[8, 2], &[0; 64]));
        tensors.set_nvfp4(&module(3, "self_attn.q_proj"), Format::ModelOpt, [16, 32], 0);
        tensors.set(module(3, "self_attn.q_proj.bias"), f32s(&[16], &[0.0; 16]));
        tensors.set_nvfp4(&module(3, "mlp.shared_experts.up_proj"), Format::ModelOpt, [16, 32], 0);
        tensors.write(&folder.join("m.safetensors"));
        let found = Inspection::of(folder);
        assert!(found.problems.is_empty(), "{:?}", found.problems);
        let others: Vec<_> = found
            .others
            .iter()
            .map(|other| (&other.module["model.layers.".len()..], &other.kind[..], other.count))
            .collect();
        assert_eq!(
            others,
            [
                ("4.mlp.gate_proj", "FP8", 1),
                ("5.mlp.experts.*.gate_proj", "FP8 in blocks", 2),
                ("6.mlp.experts.gate_up_proj", "MXFP4", 1),
                ("7.ffn.experts.*.w1", "MXFP4", 1),
                ("8.mlp.up_proj", "MXFP4", 1),
                ("9.mlp.experts.down_proj", "BF16", 1),
                ("9.mlp.up_proj", "BF16", 1),
                ("10.mlp.up_proj", "integers packed in I32", 1),
            ]
        );
        assert!(found.others.iter().all(|other| other.why.is_some_and(|why| !why.is_empty())));
        let runs = |module: &str| {
            let weight = found.weights.iter().find(|weight| weight.module.ends_with(module)).unwrap();
            (weight.runs.clone(), weight.why_not.clone().unwrap_or_default())
        };
        assert_eq!(runs("3.mlp.experts.*.gate_proj").0, ["gated", "linear"]);
        assert_eq!(runs("3.mlp.experts.*.down_proj").0, ["plain", "linear"]);
        assert_eq!(runs("q_proj"), (vec!["linear"], String::new()));
        let (shared, why) = runs("shared_experts.up_proj");
        assert!(shared == ["linear"] && why.contains("not by moe: "), "{why}");
    });
}

#[test]
fn dense_layer_and_single_weight_are_one_expert() {
    in_folder(|folder| {
        let mut tensors = Tensors::default();
        for (seed, (name, sizes)) in NAMES.iter().zip([[16, 32], [16, 32], [32, 16]]).enumerate() {
            tensors.set_nvfp4(&format!("{BLOCK}.{name}"), Format::CompressedTensors, sizes, seed as u8);
        }
        let path = tensors.write(&folder.join("m.safetensors"));
        assert_eq!(layer_of(&path, Op::Gated).len(), 2);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let single = checkpoint.single(&format!("{BLOCK}.down_proj")).unwrap();
        assert_eq!(contents(&single), layer_of(&path, Op::Plain));
    });
}

#[test]
fn larger_input_scale_of_gate_and_up_is_used() {
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        tensors.set(format!("{GATE}.input_scale"), f32s(&[], &[0.75]));
        for name in ["gate_proj", "up_proj"] {
            tensors.remove(&format!("{BLOCK}.experts.0.{name}.input_scale"));
        }
        let path = tensors.write(&folder.join("m.safetensors"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.layer(3, Op::Gated).unwrap().input_scales, [None, Some(0.75)]);
    });
}

#[test]
fn wrong_tensor_is_refused_with_file_tensor_and_remedy() {
    let scales = |code: u8| {
        let mut scales = vec![0x38; 32];
        scales[5] = code;
        scales
    };
    let values = |shape: [usize; 2]| Some(raw(Dtype::U8, &shape, &vec![0; shape[0] * shape[1]]));
    let e4m3 = |shape: &[usize], code| Some(raw(Dtype::F8_E4M3, shape, &scales(code)));
    let scalar = |x| Some(f32s(&[], &[x]));
    for (suffix, content, words) in [
        (".weight", None, "missing; quantize the model with `nvfp4 quantize`"),
        (".weight_scale", None, "missing; export the model again"),
        (".weight_scale_2", None, "missing; export the model again"),
        (
            ".weight",
            Some(f32s(&[16, 32], &[0.5; 512])),
            "dtype is F32, but only NVFP4 weights run; quantize the model with `nvfp4 quantize`",
        ),
        (".weight", Some(raw(Dtype::U8, &[256], &[0; 256])), "shape is [256], not [N, K/2]"),
        (".weight", values([16, 12]), "K = 24 is not a multiple of 16"),
        (".weight", values([16, 0]), "K = 0 is not"),
        (".weight", values([8, (1 << 19) + 8]), "K = 1048592 is not a multiple of 16 from 16 to 2^20"),
        (".weight", Some(raw(Dtype::U8, &[0, 1 << 63], &[])), "exceeds the address space of this machine"),
        (".weight", values([15, 16]), "N = 15 is not a positive multiple of 8"),
        (".weight_scale", Some(raw(Dtype::U8, &[16, 2], &scales(1))), "dtype is U8, not F8_E4M3"),
        (".weight_scale", e4m3(&[32], 1), "shape is [32], not [16, 2]"),
        (".weight_scale", e4m3(&[2, 16], 1), "shape is [2, 16], not [16, 2]"),
        (".weight_scale", e4m3(&[16, 2], 0x7F), "row 2, block 1 is NaN"),
        (".weight_scale", e4m3(&[16, 2], 0x81), "row 2, block 1 is negative"),
        (".weight_scale_2", scalar(f32::NAN), "global scale NaN must be"),
        (".weight_scale_2", scalar(f32::INFINITY), "global scale inf must be"),
        (".weight_scale_2", scalar(-1.0), "global scale -1 must be"),
        (".weight_scale_2", Some(f32s(&[2], &[1.0; 2])), "shape is [2], not [] or [1]"),
        (".weight_scale_2", Some(f32s(&[0], &[])), "shape is [0], not [] or [1]"),
        (".input_scale", scalar(0.0), "input scale 0e0 must be from 2^-100 to 2^100"),
        (".input_scale", scalar(f32::NAN), "global scale NaN must be"),
        (".input_scale", Some(raw(Dtype::BF16, &[], &[0; 2])), "dtype is BF16, not F32"),
    ] {
        let message = refusal(|tensors| _ = tensors.change(&format!("{GATE}{suffix}"), content));
        // A missing tensor is in no file, so the message names the model.
        assert!(message.contains(&format!("m.safetensors: {GATE}{suffix}: ")), "{suffix}: {message}");
        assert!(message.contains(words) && !message.contains('\n'), "{words}: {message}");
    }
}

#[test]
fn divisor_of_zero_is_refused() {
    in_folder(|folder| {
        for divisor in [0.0, f32::NAN, f32::INFINITY, -2.0] {
            let mut tensors = experts(Format::CompressedTensors);
            let path = tensors
                .set(format!("{GATE}.weight_global_scale"), f32s(&[1], &[divisor]))
                .write(&folder.join("m.safetensors"));
            let error = Checkpoint::open(&path).unwrap().layer(3, Op::Gated).unwrap_err().to_string();
            assert!(error.contains(&format!("{GATE}.weight_global_scale: global scale {divisor} must be")), "{error}");
        }
    });
}

#[test]
fn missing_layer_or_expert_is_reported_with_the_existing_ones() {
    let layers = refusal(|tensors| {
        *tensors = Tensors::default();
        for layer in [0, 1, 2, 7] {
            tensors.set_experts(&format!("model.layers.{layer}.mlp"), NAMES, Format::ModelOpt, 1);
        }
    });
    assert!(layers.contains("block of layer 3 is missing; the model has layers 0-2, 7"), "{layers}");

    let expert = refusal(|tensors| {
        _ = tensors.set_nvfp4(&format!("{BLOCK}.experts.18446744073709551615.gate_proj"), Format::ModelOpt, [8, 16], 0)
    });
    assert!(expert.contains("expert 2 of layer 3 is missing"), "{expert}");

    let fused = refusal(|tensors| {
        *tensors = Tensors::default();
        tensors.set("model.layers.3.mlp.experts.gate_up_proj", f32s(&[1], &[0.0]));
    });
    assert!(fused.contains("For fused NVFP4 experts use --op moe"), "{fused}");

    let nothing = refusal(|tensors| *tensors = Tensors::default());
    assert!(nothing.contains("the model needs tensors named model.layers.L"), "{nothing}");
}

#[test]
fn gate_and_up_of_different_shapes_are_refused() {
    let message = refusal(|tensors| _ = tensors.set_nvfp4(GATE, Format::ModelOpt, [24, 32], 0));
    assert!(message.contains("layer 3: expert 1: N of up (gate's is expected): got 16, expected 24"), "{message}");
}

#[test]
fn survey_lists_every_fault_of_a_weight() {
    in_folder(|folder| {
        let mut tensors = experts(Format::ModelOpt);
        let suffixes = [".weight", ".weight_scale", ".weight_scale_2", ".input_scale"];
        let contents = [Some(f32s(&[1], &[0.0])), None, Some(f32s(&[], &[-1.0])), Some(f32s(&[], &[f32::NAN]))];
        for (suffix, content) in suffixes.iter().zip(contents) {
            tensors.change(&format!("{GATE}{suffix}"), content);
        }
        let checkpoint = Checkpoint::open(&tensors.write(&folder.join("m.safetensors"))).unwrap();
        let faults = checkpoint.survey_quantized(GATE).unwrap_err();
        for suffix in &suffixes[..3] {
            let named = faults.iter().filter(|fault| fault.to_string().contains(&format!("{GATE}{suffix}:"))).count();
            assert_eq!(named, 1, "{suffix}: {faults:?}");
        }
        assert_eq!(faults.len(), 3);
        let fault = checkpoint.input_scale(GATE).unwrap_err().to_string();
        assert!(fault.contains(&format!("{GATE}.input_scale: ")), "{fault}");
    });
}

#[test]
fn every_prefix_of_a_file_is_refused_by_name() {
    in_folder(|folder| {
        let whole = experts(Format::ModelOpt).to_bytes();
        let path = folder.join("cut.safetensors");
        for length in (0..whole.len()).step_by(61).chain([whole.len() - 1]) {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = Checkpoint::open(&path).unwrap_err().to_string();
            assert!(error.contains("cut.safetensors: not a valid safetensors file"), "{length}: {error}");
        }
    });
}

#[test]
fn paths_that_hold_no_model_are_refused() {
    in_folder(|folder| {
        let refusal = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
        assert!(refusal(&folder.join("absent.safetensors")).contains("absent.safetensors: "));
        assert!(refusal(folder).contains("no *.safetensors file"));
        assert!(refusal(Path::new("/dev/zero")).contains("not a regular file"));
        let index = folder.join(INDEX_NAME);
        for (json, words) in [
            ("{", "not a valid index of shards"),
            (r#"{"weight_map": {"a": 1}}"#, "not a valid index of shards"),
            (r#"{"weight_map": {"a": "../a.safetensors"}}"#, "is not a file name in the folder of the index"),
            (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "is not a file name in the folder of the index"),
            (r#"{"weight_map": {"a": "a\n.safetensors"}}"#, "is not a file name in the folder of the index"),
            (r#"{"weight_map": {"a": "gone.safetensors"}}"#, "gone.safetensors: "),
            (r#"{"weight_map": {}}"#, "the index lists no tensors"),
            (r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#, "tensor a is listed twice"),
            ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git-LFS pointer"),
            ("", "not a valid index of shards"),
        ] {
            std::fs::write(&index, json).unwrap();
            assert!(refusal(folder).contains(words), "{json}: {}", refusal(folder));
        }
    });
}

#[test]
fn other_kinds_of_files_are_named_in_the_refusal() {
    in_folder(|folder| {
        let refusal = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
        let pointer = folder.join("pointer.safetensors");
        std::fs::write(&pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n").unwrap();
        assert!(refusal(&pointer).ends_with("the file is a Git-LFS pointer; run `git lfs pull` to get its content"));
        let gguf = folder.join("gguf").join("model.gguf");
        std::fs::create_dir(gguf.parent().unwrap()).unwrap();
        std::fs::write(&gguf, "GGUF\x03\0\0\0").unwrap();
        assert!(refusal(&gguf).contains("a GGUF file"));
        assert!(refusal(gguf.parent().unwrap()).contains("GGUF files (llama.cpp)"));
        assert!(refusal(Path::new("no-such-organization/model")).contains("hf download no-such-organization/model"));
        assert!(!refusal(&folder.join("no-such/model")).contains("hf download"));
    });
}

/// Reading any of these would fill memory or never end.
#[cfg(unix)]
#[test]
fn pipes_and_devices_are_never_read() {
    in_folder(|folder| {
        let index = folder.join(INDEX_NAME);
        let pipe = folder.join("pipe.json");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for source in [Path::new("/dev/zero"), &pipe] {
            std::os::unix::fs::symlink(source, &index).unwrap();
            for path in [folder, &index] {
                let message = Checkpoint::open(path).unwrap_err().to_string();
                assert!(message.contains("not a regular file"), "{message}");
            }
            let message = nvfp4::shape::find(index.to_str().unwrap()).unwrap_err().to_string();
            assert!(message.contains("not a regular file"), "{message}");
            std::fs::remove_file(&index).unwrap();
        }
        // A sparse file of one terabyte, which takes no disk space.
        std::fs::File::create(&index).unwrap().set_len(1 << 40).unwrap();
        assert!(Checkpoint::open(folder).unwrap_err().to_string().contains("longer than 100000000 bytes"));
        assert!(nvfp4::shape::read(&index).unwrap_err().to_string().contains("longer than 16777216 bytes"));
    });
}

#[test]
fn tensor_in_two_shards_is_refused() {
    in_folder(|folder| {
        let index = experts(Format::ModelOpt).write_sharded(folder, 2);
        let mut second = Tensors::default();
        for (name, tensor) in TensorFile::open(&folder.join(shard_name(1, 2))).unwrap().tensors() {
            second.set(name, raw(tensor.dtype, tensor.shape, tensor.data));
        }
        let first = TensorFile::open(&folder.join(shard_name(0, 2))).unwrap();
        let (name, tensor) = first.tensors().next().unwrap();
        second.set(name, raw(tensor.dtype, tensor.shape, tensor.data)).write(&folder.join("second"));
        std::fs::rename(folder.join("second"), folder.join(shard_name(1, 2))).unwrap();
        let error = Checkpoint::open(&index).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{name}: this tensor is also in ")) && error.contains("; remove one"),
            "{error}"
        );
    });
}

#[test]
fn index_that_contradicts_the_shards_is_refused() {
    in_folder(|folder| {
        let index = experts(Format::ModelOpt).write_sharded(folder, 2);
        let text = std::fs::read_to_string(&index).unwrap();
        let (first, second) = (shard_name(0, 2), shard_name(1, 2));
        std::fs::write(
            &index,
            text.replace(&first, "x").replace(&second, &first).replace("\"x\"", &format!("{second:?}")),
        )
        .unwrap();
        let (_, errors) = Checkpoint::survey(folder);
        assert_eq!(errors.len(), 24, "each tensor is in the other shard");
        assert!(errors[0].to_string().contains("lists it"), "{}", errors[0]);
        // One more file holds the same tensors.
        std::fs::write(&index, text).unwrap();
        std::fs::remove_file(&index).unwrap();
        std::fs::copy(folder.join(&first), folder.join("copy.safetensors")).unwrap();
        let error = Checkpoint::open(folder).unwrap_err().to_string();
        assert!(error.contains("copy.safetensors; remove one"), "{error}");
    });
}

#[test]
fn activations_are_quantized_per_expert() {
    in_folder(|folder| {
        // All of these numbers are exact in all three types.
        let hidden: Vec<f32> = (0..5 * 32).map(|i| (i as f32 - 70.0) / 8.0).collect();
        let bytes = |bits: fn(f32) -> u16| hidden.iter().flat_map(|&x| bits(x).to_le_bytes()).collect::<Vec<u8>>();
        let whole = quantize(&hidden, 5, 32).unwrap();
        for content in [
            f32s(&[5, 32], &hidden),
            raw(Dtype::F16, &[5, 32], &bytes(|x| f16::from_f32(x).to_bits())),
            raw(Dtype::BF16, &[5, 32], &bytes(|x| bf16::from_f32(x).to_bits())),
        ] {
            let mut tensors = Tensors::default();
            tensors.set("hidden", content).set("group_sizes", i64s(&[2, 0, 3]));
            let activations = Activations::open(&tensors.write(&folder.join("a.safetensors"))).unwrap();
            assert_eq!((activations.group_sizes(), activations.k()), (&[2, 0, 3][..], 32));
            let groups = activations.quantize(&[None, None, Some(0.5)]).unwrap();
            assert_eq!(groups[0], whole.slice_rows(0..2));
            assert_eq!(groups[1].rows(), 0);
            assert_eq!(groups[2], quantize_with(&hidden[64..], 3, 32, 0.5).unwrap());
        }
    });
}

#[test]
fn wrong_activations_are_refused_by_tensor_name() {
    in_folder(|folder| {
        let hidden = |shape: &[usize], x| Some(f32s(shape, &vec![x; shape.iter().product()]));
        for (name, content, words) in [
            ("hidden", None, "this tensor is missing; an activations file must contain"),
            ("hidden", Some(raw(Dtype::U8, &[4, 16], &[0; 64])), "dtype is U8, not F32 or F16 or BF16"),
            ("hidden", hidden(&[4, 24], 1.0), "K = 24 is not"),
            ("hidden", hidden(&[4, 4, 4], 1.0), "its shape is [4, 4, 4], not [T, K]"),
            ("hidden", hidden(&[4, 16], f32::NAN), "element 0 is NaN"),
            ("hidden", hidden(&[4, 16], f32::NEG_INFINITY), "element 0 is -inf"),
            ("group_sizes", None, "this tensor is missing; an activations file must contain"),
            ("group_sizes", Some(raw(Dtype::I32, &[2], &[0; 8])), "its dtype is I32, not I64"),
            ("group_sizes", Some(raw(Dtype::I64, &[], &[0; 8])), "its shape is [], not [E]"),
            (
                "group_sizes",
                Some(i64s(&[1, 2])),
                "sum of the group sizes (must equal the rows of `hidden`): got 3, expected 4",
            ),
            ("group_sizes", Some(i64s(&[-1, 5])), "group 0 has -1 tokens"),
            ("group_sizes", Some(i64s(&[i64::MAX, i64::MAX, 6])), "group 2 has 6 tokens"),
            ("group_sizes", Some(i64s(&[1, 2, 1])), "number of token groups (one per expert): got 3, expected 2"),
        ] {
            let mut tensors = Tensors::default();
            tensors.set("hidden", f32s(&[4, 16], &[1.0; 64])).set("group_sizes", i64s(&[1, 3])).change(name, content);
            let path = tensors.write(&folder.join("a.safetensors"));
            let result = Activations::open(&path).and_then(|activations| activations.quantize(&[None, None]));
            let message = result.expect_err("the changed file must be refused").to_string();
            assert!(
                message.contains(&format!("a.safetensors: {name}: ")) && message.contains(words),
                "{words}: {message}"
            );
        }
    });
}

#[test]
fn step_runs_from_files_and_its_output_reads_back() {
    in_folder(|folder| {
        let weights = experts(Format::ModelOpt).write(&folder.join("m.safetensors"));
        let mut tensors = Tensors::default();
        tensors.set("hidden", f32s(&[3, 32], &[0.01; 96])).set("group_sizes", i64s(&[3, 0]));
        let activations = tensors.write(&folder.join("a.safetensors"));

        let checkpoint = Checkpoint::open(&weights).unwrap();
        let layer = checkpoint.layer(3, Op::Gated).unwrap();
        let tokens = Activations::open(&activations).unwrap().quantize(&layer.input_scales).unwrap();
        for (out_dtype, dtype) in [(TokenDtype::F16, Dtype::F16), (TokenDtype::Bf16, Dtype::BF16)] {
            let step = Step::new(&layer.weights, tokens.clone(), out_dtype).unwrap();
            let path = folder.join("out.safetensors");
            let file = OutputFile::create(&path, step.problem()).unwrap();
            let mut output = Output::new(step.problem());
            output.bits_mut().iter_mut().enumerate().for_each(|(index, bits)| *bits = index as u16);
            file.write(&output).unwrap();
            let read = TensorFile::open(&path).unwrap();
            let tensor = read.tensor("output").unwrap();
            assert_eq!((tensor.dtype, tensor.shape), (dtype, &[3, 16][..]));
            assert_eq!(&*tensor.numbers::<u16>(), output.bits());
        }
    });
}

#[test]
fn groups_of_different_n_have_no_output_file() {
    let groups = vec![Group { m: 1, n: 8, k: 16 }, Group { m: 1, n: 16, k: 16 }];
    let problem = GroupedProblem::new(Op::Plain, TokenDtype::F16, groups).unwrap();
    in_folder(|folder| {
        let refused = OutputFile::create(&folder.join("o.safetensors"), &problem);
        assert!(matches!(refused, Err(Error::At { .. })));
    });
}
