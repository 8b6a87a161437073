//! `nvfp4 quantize` on the layouts of published models: converted tensors, skipped tensors with their reasons, and the
//! files that servers read. `tests/data/check_quantize.py` compares every byte; this file checks what a user sees.

use std::path::Path;
use std::process::{Command, Output};

use model_files::{Content, Tensors, f32s, raw};
use nvfp4::checkpoint::{Checkpoint, Dtype, Format, TensorFile};
use nvfp4::quantize::{global_scale, quantize_with};
use serde_json::{Value, json};

fn nvfp4(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.current_dir(folder).args(arguments).output().expect("the command was built")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the JSON of a conversion from `in` to `out`; `out` is deleted first.
fn quantize(folder: &Path, arguments: &[&str]) -> Value {
    _ = std::fs::remove_dir_all(folder.join("out"));
    let arguments = [&["quantize", "in", "out", "--json"], arguments].concat();
    serde_json::from_str(&stdout(&nvfp4(folder, &arguments))).unwrap()
}

/// Returns the line of output that says why nothing was written.
fn refusal(folder: &Path, arguments: &[&str]) -> String {
    let arguments = [&["quantize", "in", "refused"], arguments].concat();
    let output = nvfp4(folder, &arguments);
    let line = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(line.starts_with("error: ") && line.lines().count() == 1 && output.stdout.is_empty(), "{output:?}");
    assert!(!folder.join("refused").exists());
    line
}

/// Runs a test in a folder with a model in `in`.
fn with_model(model: &Tensors, config: Option<Value>, test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("in")).unwrap();
    model.write(&folder.path().join("in/model.safetensors"));
    if let Some(config) = config {
        std::fs::write(folder.path().join("in/config.json"), config.to_string()).unwrap();
    }
    test(folder.path());
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("out/config.json")).unwrap()).unwrap()
}

/// Varied numbers, larger for a larger seed.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| (((i * 37 + seed * 11) % 129) as f32 / 8.0 - 8.0) * (1 + seed) as f32).collect()
}

fn weight(n: usize, k: usize, seed: usize) -> Content {
    f32s(&[n, k], &numbers(n * k, seed))
}

/// Returns the names in a list of objects.
fn names<'j>(list: &'j Value, key: &str) -> Vec<&'j str> {
    list.as_array().unwrap().iter().map(|entry| entry[key].as_str().unwrap()).collect()
}

/// Returns a model with attention, a dense layer and a router.
fn small_model() -> Tensors {
    let mut model = Tensors::default();
    for layer in [2, 10] {
        let p = format!("model.layers.{layer}");
        for (seed, name) in ["q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"].into_iter().enumerate() {
            model.set(format!("{p}.self_attn.{name}.weight"), weight(16, 32, seed + layer));
        }
        for expert in 0..2 {
            let sizes = [("gate_proj", [16, 32]), ("up_proj", [16, 32]), ("down_proj", [32, 16])];
            for (seed, (name, [n, k])) in sizes.into_iter().enumerate() {
                model.set(format!("{p}.mlp.experts.{expert}.{name}.weight"), weight(n, k, expert + layer + seed));
            }
        }
        model.set(format!("{p}.mlp.gate.weight"), weight(8, 32, 0));
    }
    model
}

#[test]
fn fused_experts_are_split_and_run() {
    let (hidden, inner) = (32, 16);
    let mut model = Tensors::default();
    let p = "model.layers.0.mlp.experts";
    let (gate_up, down) = (numbers(2 * hidden * 2 * inner, 1), numbers(2 * inner * hidden, 2));
    model
        .set(format!("{p}.gate_up_proj"), f32s(&[2, hidden, 2 * inner], &gate_up))
        .set(format!("{p}.down_proj"), f32s(&[2, inner, hidden], &down));
    with_model(&model, None, |folder| {
        let report = quantize(folder, &[]);
        assert_eq!(report["quantised"].as_array().unwrap().len(), 6);
        assert_eq!(report["quantised"][0]["tensor"], format!("{p}.down_proj"));
        let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
        for expert in 0..2 {
            // [H, 2I], with gate in the first half of each row.
            let matrix = |first: usize| -> Vec<f32> {
                let at = |n: usize, k: usize| gate_up[expert * hidden * 2 * inner + k * 2 * inner + first + n];
                (0..inner).flat_map(|n| (0..hidden).map(move |k| at(n, k))).collect()
            };
            let (gate, up) = (matrix(0), matrix(inner));
            let global = global_scale(&[&gate[..], &up].concat()).unwrap();
            for (name, numbers) in [("gate_proj", gate), ("up_proj", up)] {
                let found = checkpoint.quantized(&format!("{p}.{expert}.{name}")).unwrap();
                assert_eq!(found.matrix, quantize_with(&numbers, inner, hidden, global).unwrap(), "{name}");
            }
        }
        stdout(&nvfp4(folder, &["run", "--weights", "out", "--layer", "0", "--tokens", "3"]));
    });
}

#[test]
fn biases_of_fused_experts_are_split_with_their_projection() {
    let mut model = Tensors::default();
    let p = "model.layers.0.mlp.experts";
    let bias: Vec<f32> = (0..64).map(|x| x as f32).collect();
    model
        .set(format!("{p}.gate_up_proj"), f32s(&[2, 16, 32], &numbers(1024, 0)))
        .set(format!("{p}.gate_up_proj_bias"), f32s(&[2, 32], &bias))
        .set(format!("{p}.down_proj"), f32s(&[2, 16, 16], &numbers(512, 1)));
    with_model(&model, Some(json!({"model_type": "gpt_oss"})), |folder| {
        quantize(folder, &[]);
        let file = TensorFile::open(&folder.join("out/model.safetensors")).unwrap();
        let of = |name: &str| file.tensor(&format!("{p}.1.{name}.bias")).unwrap().numbers::<f32>().into_owned();
        assert_eq!(of("gate_proj"), bias[32..].iter().step_by(2).copied().collect::<Vec<_>>());
        assert_eq!(of("up_proj"), bias[33..].iter().step_by(2).copied().collect::<Vec<_>>());
        assert!(file.tensor(&format!("{p}.gate_up_proj_bias")).is_none());
    });
    // A bias with another shape cannot be split, so the tensor is refused.
    model.set(format!("{p}.gate_up_proj_bias"), f32s(&[2, 31], &bias[..62]));
    with_model(&model, None, |folder| {
        assert!(refusal(folder, &[]).contains("gate_up_proj_bias: its shape is [2, 31]"))
    });
}

#[test]
fn ambiguous_order_of_dimensions_is_refused() {
    let mut model = Tensors::default();
    model.set("model.layers.0.mlp.experts.gate_up_proj", f32s(&[2, 32, 64], &numbers(4096, 0)));
    with_model(&model, None, |folder| assert!(refusal(folder, &[]).contains("cannot tell which dimension is K")));
    with_model(&model, Some(json!({"text_config": {"hidden_size": 64}})), |folder| {
        assert_eq!(quantize(folder, &[])["quantised"][0]["k"], 64);
    });
    with_model(&model, Some(json!({"hidden_size": 32})), |folder| {
        assert_eq!(quantize(folder, &[])["quantised"][0]["k"], 32);
    });
}

#[test]
fn unquantized_fp8_becomes_bf16() {
    let mut model = small_model();
    let scale = f32s(&[1, 1], &[0.5]);
    for name in ["o_proj", "down_proj"] {
        model
            .set(format!("model.layers.3.mlp.{name}.weight"), raw(Dtype::F8_E4M3, &[16, 16], &[0x40; 256]))
            .set(format!("model.layers.3.mlp.{name}.weight_scale_inv"), scale.clone());
    }
    let fp8 = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}});
    with_model(&model, Some(fp8), |folder| {
        let report = quantize(folder, &[]);
        assert_eq!(names(&report["dequantised"], "module"), ["model.layers.3.mlp.o_proj"]);
        let file = TensorFile::open(&folder.join("out/model.safetensors")).unwrap();
        let widened = file.tensor("model.layers.3.mlp.o_proj.weight").unwrap();
        assert_eq!((widened.dtype, &widened.data[..2]), (Dtype::BF16, &[0x80, 0x3F][..]), "2 × 0.5");
        assert!(file.tensor("model.layers.3.mlp.o_proj.weight_scale_inv").is_none());
        let description = &config(folder)["quantization_config"];
        assert_eq!(description["quant_algo"], "W4A16_NVFP4");
        assert!(description["ignore"].as_array().unwrap().contains(&json!("model.layers.3.mlp.o_proj")));
    });
    model.remove("model.layers.3.mlp.down_proj.weight_scale_inv");
    with_model(&model, None, |folder| {
        let line = refusal(folder, &[]);
        assert!(line.contains("down_proj.weight: its scale is missing"), "{line}");
        let report = quantize(folder, &["--exclude", "model.layers.3.mlp.down_proj"]);
        assert_eq!(names(&report["left"], "reason"), ["--exclude model.layers.3.mlp.down_proj"]);
    });
}

#[test]
fn requested_tensor_that_cannot_be_quantized_is_an_error() {
    for (name, content, words) in [
        ("mlp.up_proj.weight", raw(Dtype::I8, &[16, 32], &[0; 512]), "the dtype is I8 and there is no scale"),
        ("mlp.up_proj.weight_packed", raw(Dtype::I32, &[16, 4], &[0; 256]), "the dtype is I32 and there is no scale"),
        ("mlp.up_proj.qweight", raw(Dtype::I32, &[16, 4], &[0; 256]), "quantized to integers"),
        ("mlp.experts.mlp.w1", weight(16, 32, 0), "the tensor's name does not end in .weight"),
        ("mlp.up_proj.weight", weight(16, 24, 0), "K = 24 is not a multiple of 16"),
        ("mlp.experts.down_proj", f32s(&[0, 16, 16], &[]), "the tensor holds no experts"),
        ("mlp.experts.gate_up_proj", f32s(&[1, 3, 5], &[0.0; 15]), "cannot tell which dimension is K"),
    ] {
        let mut model = small_model();
        model.set(format!("model.layers.3.{name}"), content);
        with_model(&model, Some(json!({"hidden_size": 16})), |folder| {
            let line = refusal(folder, &[]);
            assert!(line.contains(words), "{words}: {line}");
            let dry = nvfp4(folder, &["quantize", "in", "--dry-run"]);
            let text = String::from_utf8(dry.stdout).unwrap();
            assert_eq!(dry.status.code(), Some(2));
            assert!(text.contains("cannot be quantized:\n") && text.contains(words), "{text}");
            quantize(folder, &["--exclude", "model.layers.3.*"]);
        });
    }
}

#[test]
fn parts_outside_the_language_model_are_skipped_and_reported() {
    let mut model = small_model();
    for (name, [n, k]) in [
        ("model.visual.blocks.0.mlp.gate_proj.weight", [16, 16]),
        ("mtp.layers.0.mlp.up_proj.weight", [16, 16]),
        ("model.layers.11.mlp.up_proj.weight", [16, 16]),
        ("model.layers.11.eh_proj.weight", [16, 32]),
        ("lm_head.weight", [16, 32]),
        ("model.embed_tokens.weight", [16, 32]),
    ] {
        model.set(name, weight(n, k, 0));
    }
    with_model(&model, None, |folder| {
        let report = quantize(folder, &["--include", "weight"]);
        let left: Vec<_> = names(&report["left"], "tensor").into_iter().zip(names(&report["left"], "reason")).collect();
        assert_eq!(
            left,
            [
                ("lm_head.weight", "the output head"),
                ("model.embed_tokens.weight", "an embedding"),
                ("model.layers.2.mlp.gate.weight", "part of a router"),
                ("model.layers.10.mlp.gate.weight", "part of a router"),
                ("model.layers.11.eh_proj.weight", "part of layers that draft tokens"),
                ("model.layers.11.mlp.up_proj.weight", "part of layers that draft tokens"),
                ("model.visual.blocks.0.mlp.gate_proj.weight", "part of a tower for images or sound"),
                ("mtp.layers.0.mlp.up_proj.weight", "part of layers that draft tokens"),
            ]
        );
        let ignored = config(folder)["quantization_config"]["ignore"].clone();
        let unquantized: Vec<_> = left.iter().map(|(name, _)| name.trim_end_matches(".weight")).collect();
        let expected: Vec<_> = unquantized.into_iter().filter(|name| !name.contains("embed")).collect();
        assert_eq!(ignored, json!(expected));
    });
}

#[test]
fn merged_projections_share_a_scale_by_default() {
    let include = ["--include", "_proj"];
    with_model(&small_model(), None, |folder| {
        for format in [Format::ModelOpt, Format::CompressedTensors] {
            for separate in [false, true] {
                let extra = if separate { vec!["--separate-scales"] } else { vec![] };
                quantize(folder, &[&include[..], &["--format", format.name()], &extra].concat());
                let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
                let global = |module: &str| {
                    let module = format!("model.layers.2.{module}");
                    checkpoint.quantized(&module).unwrap().matrix.global_scale()
                };
                for group in [
                    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
                    &["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
                    &["mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"],
                ] {
                    let scales: Vec<f32> = group.iter().map(|module| global(module)).collect();
                    let alike = scales.iter().all(|scale| *scale == scales[0]);
                    assert_eq!(alike, !separate, "{group:?} {scales:?}");
                }
            }
        }
    });
}

#[test]
fn merged_weights_are_quantized_together_or_not_at_all() {
    with_model(&small_model(), None, |folder| {
        let line = refusal(folder, &["--include", "q_proj"]);
        assert!(
            line.contains("q_proj.weight: engines merge it with") && line.contains("(1 more refused tensors"),
            "{line}"
        );
        let alone = quantize(folder, &["--include", "2.*q_proj", "--separate-scales"]);
        assert_eq!(names(&alone["quantised"], "module"), ["model.layers.2.self_attn.q_proj"]);

        let report = quantize(folder, &["--exclude", "*.2.mlp.experts.1.up_proj"]);
        let quantized = names(&report["quantised"], "module");
        assert!(
            quantized.len() == 6 && quantized.iter().all(|name| name.starts_with("model.layers.10")),
            "{quantized:?}"
        );
        assert_eq!(report["left"].as_array().unwrap().len(), 6);
        let ignored = config(folder)["quantization_config"]["ignore"].to_string();
        assert_eq!(ignored.matches("model.layers.2.mlp.experts.").count(), 6, "{ignored}");
    });
}

#[test]
fn nvfp4_weights_stay_unchanged() {
    let mut model = small_model();
    model.set_nvfp4("model.layers.3.mlp.up_proj", Format::CompressedTensors, [16, 32], 0);
    with_model(&model, None, |folder| {
        let line = refusal(folder, &[]);
        assert!(line.contains("up_proj.weight_packed: already NVFP4 in compressed-tensors format"), "{line}");
        quantize(folder, &["--exclude", "model.layers.3"]);
        let report = quantize(folder, &["--format", "compressed-tensors"]);
        assert_eq!(names(&report["left"], "reason"), ["already NVFP4"]);
        assert_eq!(config(folder)["quantization_config"]["ignore"].to_string().matches("layers.3").count(), 0);
    });
}

#[test]
fn small_files_of_a_model_are_copied() {
    let config_before =
        json!({"model_type": "x", "quantization_config": {"old": 1}, "text_config": {"hidden_size": 32}});
    with_model(&small_model(), Some(config_before), |folder| {
        let of = |name: &str| folder.join("in").join(name);
        for name in ["tokenizer.json", "generation_config.json", "chat_template.jinja"] {
            std::fs::write(of(name), name).unwrap();
        }
        std::fs::write(of("hf_quant_config.json"), "{}").unwrap();
        for name in ["pytorch_model.bin", "model.gguf", ".gitattributes", "pytorch_model.bin.index.json"] {
            std::fs::write(of(name), name).unwrap();
        }
        std::fs::create_dir(of("original")).unwrap();
        // A symlink, as in the cache of Hugging Face.
        #[cfg(unix)]
        {
            std::fs::write(folder.join("blob"), "merges").unwrap();
            std::os::unix::fs::symlink("../blob", of("merges.txt")).unwrap();
        }
        #[cfg(not(unix))]
        std::fs::write(of("merges.txt"), "merges").unwrap();
        let report = quantize(folder, &[]);
        let mut written: Vec<_> = std::fs::read_dir(folder.join("out"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        written.sort();
        let expected = [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "hf_quant_config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(written, expected);
        assert!(folder.join("out/merges.txt").symlink_metadata().unwrap().is_file());
        assert_eq!(report["files"].as_array().unwrap().len(), 6);
        assert_eq!(report["notes"], json!(["not copied: model.gguf, original/, pytorch_model.bin"]));
        let written = config(folder);
        assert_eq!(
            written.as_object().unwrap().keys().collect::<Vec<_>>(),
            ["model_type", "text_config", "quantization_config"]
        );
        let other: Value =
            serde_json::from_slice(&std::fs::read(folder.join("out/hf_quant_config.json")).unwrap()).unwrap();
        assert_eq!(other["quantization"]["exclude_modules"], written["quantization_config"]["ignore"]);
        assert_eq!(other["quantization"]["kv_cache_quant_algo"], Value::Null);

        quantize(folder, &["--format", "compressed-tensors"]);
        assert!(!folder.join("out/hf_quant_config.json").exists());
        assert_eq!(config(folder)["quantization_config"]["quant_method"], "compressed-tensors");
    });
}

#[test]
fn invalid_configuration_stops_the_conversion_early() {
    with_model(&small_model(), None, |folder| {
        for text in ["", "[]", "{\"a\": ", "\u{0}"] {
            std::fs::write(folder.join("in/config.json"), text).unwrap();
            let line = refusal(folder, &[]);
            assert!(line.contains("in/config.json: not a valid configuration"), "{line}");
        }
        // Any JSON object is accepted.
        for text in ["{}", r#"{"hidden_size": -1, "text_config": 3, "quantization_config": [], "model_type": null}"#] {
            std::fs::write(folder.join("in/config.json"), text).unwrap();
            quantize(folder, &[]);
        }
    });
}

#[test]
fn input_scales_come_from_a_calibration_file() {
    with_model(&small_model(), None, |folder| {
        let mut activations = Tensors::default();
        let layer = "model.layers.2.mlp";
        activations
            .set("model.layers.10.mlp.experts.gate_up_proj.input_amax", f32s(&[], &[5.0]))
            .set("model.layers.10.mlp.experts.*.down_proj", f32s(&[1], &[7.0]))
            .set(format!("{layer}.input"), f32s(&[2, 3, 32], &[&[-3.0][..], &[1.0; 191]].concat()))
            .set(format!("{layer}.experts.1.down_proj"), f32s(&[1, 16], &[0.5; 16]));
        activations.write(&folder.join("a.safetensors"));
        for format in [Format::ModelOpt, Format::CompressedTensors] {
            let report = quantize(folder, &["--calibrate", "a.safetensors", "--format", format.name()]);
            assert_eq!(report["input_scales"], true);
            let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
            for (module, amax) in [
                ("model.layers.10.mlp.experts.1.up_proj", 5.0f32),
                ("model.layers.10.mlp.experts.0.down_proj", 7.0),
                ("model.layers.2.mlp.experts.0.gate_proj", 3.0),
                ("model.layers.2.mlp.experts.1.down_proj", 0.5),
                // No token reached this expert; it gets the magnitude of the layer's other experts.
                ("model.layers.2.mlp.experts.0.down_proj", 0.5),
            ] {
                let scale = checkpoint.quantized(module).unwrap().input_scale.unwrap();
                assert!((scale / (amax / 2688.0) - 1.0).abs() < 1e-6, "{module}: {scale}");
            }
            let description = &config(folder)["quantization_config"];
            assert!(!description["config_groups"]["group_0"]["input_activations"].is_null(), "{description}");
        }
        activations.set(format!("{layer}.input"), f32s(&[2, 16], &[1.0; 32])).write(&folder.join("a.safetensors"));
        let line = refusal(folder, &["--calibrate", "a.safetensors"]);
        assert!(line.contains("width of the activations: got 16, expected 32"), "{line}");
        activations.remove(&format!("{layer}.input")).write(&folder.join("a.safetensors"));
        let line = refusal(folder, &["--calibrate", "a.safetensors"]);
        assert!(line.contains("calibration data for model.layers.2.mlp.experts.0.gate_proj is missing"), "{line}");

        std::fs::write(folder.join("a.json"), r#"{"*": 2.0, "model.layers.2.mlp": 4}"#).unwrap();
        quantize(folder, &["--calibrate", "a.json"]);
        let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
        let scale = |module: &str| checkpoint.quantized(module).unwrap().input_scale.unwrap() * 2688.0;
        assert_eq!(scale("model.layers.10.mlp.experts.0.gate_proj").round(), 2.0);
        for (text, words) in [
            ("[]", "expected a JSON object of names and magnitudes"),
            (r#"{"a": -1}"#, "a: -1 is not a magnitude"),
            (r#"{"a": "x"}"#, "a: \"x\" is not a magnitude"),
            ("{}", "no activations and no magnitudes"),
        ] {
            std::fs::write(folder.join("a.json"), text).unwrap();
            let line = refusal(folder, &["--calibrate", "a.json"]);
            assert!(line.contains(words), "{line}");
        }
    });
}

#[test]
fn dry_run_reports_the_plan_and_writes_nothing() {
    with_model(&small_model(), None, |folder| {
        let text = stdout(&nvfp4(folder, &["quantize", "in", "--dry-run"]));
        let order: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let at = |name: &str| order.iter().position(|found| *found == name).unwrap_or_else(|| panic!("{name}: {text}"));
        // Experts share a row, and layers are in numerical order.
        assert!(at("model.layers.2.mlp.experts.*.up_proj") < at("model.layers.10.mlp.experts.*.down_proj"));
        assert!(text.contains("12 tensors would be quantized"), "{text}");
        stdout(&nvfp4(folder, &["quantize", "in", "out", "--dry-run", "--json"]));
        assert!(!folder.join("out").exists());
        let quiet = nvfp4(folder, &["quantize", "in", "out", "--quiet"]);
        assert_eq!((stdout(&quiet), quiet.stderr), (String::new(), Vec::new()));
        let unused = nvfp4(folder, &["quantize", "in", "--dry-run", "--exclude", "nothing*"]);
        assert!(String::from_utf8_lossy(&unused.stderr).contains("note: --exclude nothing* matches no tensor"));
    });
}

#[test]
fn json_has_every_weight_and_reason() {
    let mut model = small_model();
    model.set("model.norm.weight", f32s(&[4], &[1.0; 4]));
    with_model(&model, None, |folder| {
        let report = quantize(folder, &["--exclude", "model.layers.10"]);
        assert_eq!(
            (&report["schema_version"], &report["format"], &report["dry_run"]),
            (&json!(1), &json!("modelopt"), &json!(false))
        );
        let first = &report["quantised"][0];
        assert_eq!((&first["n"], &first["k"]), (&json!(32), &json!(16)));
        assert!(first["relative_rms"].as_f64().unwrap() > 0.0 && first["snr_db"].as_f64().unwrap() > 10.0);
        assert_eq!(names(&report["left"], "reason"), ["--exclude model.layers.10"; 6]);
        assert_eq!(report["copied"], 19);
        assert_eq!(report["files"], json!(["config.json", "hf_quant_config.json"]));
    });
}

#[test]
fn non_finite_number_is_reported_with_its_expert() {
    let mut model = Tensors::default();
    let mut bad = numbers(1024, 0);
    bad[512 + 3 * 32 + 20] = f32::NAN;
    model.set("model.layers.0.mlp.experts.gate_up_proj", f32s(&[2, 16, 32], &bad));
    with_model(&model, Some(json!({"hidden_size": 16})), |folder| {
        let line = refusal(folder, &[]);
        assert!(
            line.contains("experts.gate_up_proj: ") && line.contains("experts.1.up_proj: element 67 is NaN"),
            "{line}"
        );
    });
}

/// Returns an MXFP4 weight of one row, with every code 1 (0.5) and one exponent per 32 numbers.
fn mxfp4(model: &mut Tensors, module: &str, exponents: &[u8]) {
    let count = exponents.len();
    model.set(format!("{module}.weight"), raw(Dtype::I8, &[8, 16 * count], &[0x11; 16].repeat(8 * count)));
    model.set(format!("{module}.scale"), raw(Dtype::F8_E8M0, &[8, count], &exponents.repeat(8)));
}

#[test]
fn mxfp4_keeps_its_numbers_and_the_share_is_reported() {
    let mut model = Tensors::default();
    // Gate and up share a global scale, so the larger exponent of both counts.
    mxfp4(&mut model, "layers.0.ffn.experts.0.w1", &[120, 105]);
    mxfp4(&mut model, "layers.0.ffn.experts.0.w3", &[122, 106]);
    mxfp4(&mut model, "layers.0.ffn.experts.0.w2", &[100, 83, 82]);
    for format in ["modelopt", "compressed-tensors"] {
        with_model(&model, None, |folder| {
            let report = quantize(folder, &["--format", format]);
            // One of the seven exponents lies 18 below the largest; each stands for two blocks in each of 8 rows.
            assert_eq!(report["exact_blocks"], json!({"exact": 6 * 16, "all": 7 * 16}), "{report}");
            let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
            for (module, exponents) in [("w1", vec![120, 105]), ("w3", vec![122, 106]), ("w2", vec![100, 83])] {
                let weight = checkpoint.quantized(&format!("layers.0.ffn.experts.0.{module}")).unwrap().matrix;
                let mut row = vec![0.0; weight.k()];
                weight.dequantize_row(7, &mut row);
                for (exponent, block) in exponents.iter().zip(row.chunks(32)) {
                    assert_eq!(block, [0.5 * f32::exp2(f32::from(*exponent as u8) - 127.0); 32], "{module}");
                }
            }
            _ = std::fs::remove_dir_all(folder.join("out"));
            let text = stdout(&nvfp4(folder, &["quantize", "in", "out"]));
            assert!(
                text.contains("MXFP4 without loss: 85.714 % of the blocks of 16; 16 blocks were rounded"),
                "{text}"
            );
            let line = refusal(folder, &["--exact"]);
            assert!(line.contains("w2.weight: 16 of 48 blocks of 16 cannot keep their numbers"), "{line}");
        });
    }
}

#[test]
fn quantized_kv_cache_stays_described() {
    let scheme = json!({"num_bits": 8, "type": "float", "dynamic": false, "strategy": "tensor", "symmetric": true});
    let mut model = small_model();
    model.set("model.layers.2.self_attn.k_proj.k_scale", f32s(&[], &[0.75]));
    let compressed = json!({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}});
    let older = json!({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}});
    for (config_json, older) in [(compressed, None), (json!({}), Some(older))] {
        with_model(&model, Some(config_json), |folder| {
            if let Some(older) = &older {
                std::fs::write(folder.join("in/hf_quant_config.json"), older.to_string()).unwrap();
            }
            for format in ["modelopt", "compressed-tensors"] {
                quantize(folder, &["--format", format]);
                let scheme = &config(folder)["quantization_config"]["kv_cache_scheme"];
                assert_eq!((&scheme["num_bits"], &scheme["type"]), (&json!(8), &json!("float")), "{format}");
                let file = TensorFile::open(&folder.join("out/model.safetensors")).unwrap();
                assert_eq!(*file.tensor("model.layers.2.self_attn.k_proj.k_scale").unwrap().numbers::<f32>(), [0.75]);
            }
            quantize(folder, &[]);
            let described = std::fs::read(folder.join("out/hf_quant_config.json")).unwrap();
            let described: Value = serde_json::from_slice(&described).unwrap();
            assert_eq!(described["quantization"]["kv_cache_quant_algo"], "FP8");
        });
    }
    let other = json!({"quantization": {"kv_cache_quant_algo": "NVFP4"}});
    with_model(&model, Some(json!({})), |folder| {
        std::fs::write(folder.join("in/hf_quant_config.json"), other.to_string()).unwrap();
        let report = quantize(folder, &["--format", "compressed-tensors"]);
        let note = "the KV cache of the input is quantized (NVFP4), which compressed-tensors format does not describe";
        assert!(report["notes"].as_array().unwrap().contains(&json!(note)), "{report}");
        assert!(quantize(folder, &[])["notes"].as_array().unwrap().is_empty());
    });
}

#[test]
fn only_tensors_in_the_output_count_as_copied() {
    let mut model = small_model();
    model
        .set("model.layers.3.mlp.o_proj.weight", raw(Dtype::F8_E4M3, &[16, 16], &[0x40; 256]))
        .set("model.layers.3.mlp.o_proj.weight_scale_inv", f32s(&[1, 1], &[0.5]));
    with_model(&model, None, |folder| {
        let report = quantize(folder, &[]);
        let input = TensorFile::open(&folder.join("in/model.safetensors")).unwrap();
        let output = TensorFile::open(&folder.join("out/model.safetensors")).unwrap();
        let same = output.tensors().filter(|(name, tensor)| {
            input.tensor(name).is_some_and(|before| before.dtype == tensor.dtype && before.data == tensor.data)
        });
        assert_eq!(report["copied"], same.count());
    });
}

#[test]
fn the_same_weights_twice_are_refused_without_an_index() {
    with_model(&small_model(), None, |folder| {
        small_model().write(&folder.join("in/consolidated.safetensors"));
        let line = refusal(folder, &[]);
        assert!(
            line.contains("consolidated.safetensors usually holds the same weights as model.safetensors"),
            "{line}"
        );
        let names: Vec<String> = small_model().iter().map(|(name, _)| name.to_owned()).collect();
        let weight_map: serde_json::Map<String, Value> =
            names.into_iter().map(|name| (name, json!("model.safetensors"))).collect();
        let index = json!({"weight_map": weight_map});
        std::fs::write(folder.join("in/model.safetensors.index.json"), index.to_string()).unwrap();
        let report = quantize(folder, &[]);
        assert!(report["notes"].to_string().contains("not copied: consolidated.safetensors"), "{report}");
        let inspected = stdout(&nvfp4(folder, &["inspect", "in"]));
        assert!(inspected.contains("consolidated.safetensors [files-outside-the-index]"), "{inspected}");
    });
}

#[test]
fn error_with_json_is_an_object_too() {
    with_model(&small_model(), None, |folder| {
        let output = nvfp4(folder, &["quantize", "absent", "out", "--json"]);
        assert_eq!(output.status.code(), Some(2));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(format!("error: {}\n", json["error"].as_str().unwrap()), line);
        assert_eq!((&json["code"], &json["schema_version"]), (&json!("io"), &json!(1)));
    });
}

#[test]
fn recorded_activations_change_the_rounding() {
    with_model(&small_model(), None, |folder| {
        let plain = quantize(folder, &[]);
        assert_eq!(plain["calibrate_hessian"], Value::Null);
        let read = || std::fs::read(folder.join("out/model.safetensors")).unwrap();
        let nearest = read();
        // Columns of each token depend on each other.
        let tokens = |k: usize| {
            let numbers = numbers(4 * k * k, 3);
            let mixed =
                (0..numbers.len()).map(|index| numbers[index] + 0.9 * numbers[index / k * k]).collect::<Vec<_>>();
            f32s(&[4 * k, k], &mixed)
        };
        let mut recorded = Tensors::default();
        recorded.set("model.layers.2.mlp", tokens(32)).set("model.layers.*.experts.*.down_proj", tokens(16));
        recorded.set("model.layers.7.mlp.input", tokens(16));
        recorded.write(&folder.join("recorded.safetensors"));
        let report = quantize(folder, &["--calibrate-hessian", "recorded.safetensors"]);
        assert_ne!(read(), nearest);
        assert_eq!(quantize(folder, &["--calibrate-hessian", "recorded.safetensors"]), report, "the same every time");
        let of = |module: &str| {
            let rows = report["quantised"].as_array().unwrap().iter();
            rows.filter(|row| row["module"] == module).map(|row| row["activations"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(of("model.layers.2.mlp.experts.1.up_proj"), [json!("model.layers.2.mlp")]);
        assert_eq!(of("model.layers.10.mlp.experts.0.down_proj"), [json!("model.layers.*.experts.*.down_proj")]);
        assert_eq!(of("model.layers.10.mlp.experts.0.up_proj"), [Value::Null]);
        let notes = report["notes"].to_string();
        let without =
            "without recorded activations: 4 of 12 weights, starting with model.layers.10.mlp.experts.0.gate_proj";
        assert!(notes.contains(without) && notes.contains("model.layers.7.mlp.input"), "{notes}");
        for (name, tensor, words) in [
            ("model.layers.2.mlp", f32s(&[4, 16], &[1.0; 64]), "width of the activations"),
            ("model.layers.2.mlp", f32s(&[4, 32], &[0.0; 128]), "all activations are 0; record"),
            ("model.layers.2.mlp", f32s(&[1, 32], &[f32::NAN; 32]), "element 0 is NaN"),
            ("model.layers.2.mlp", f32s(&[32], &[1.0; 32]), "[tokens, K] with at least one token"),
            ("model.layers.2.mlp", raw(Dtype::U8, &[4, 32], &[1; 128]), "its dtype is U8"),
            ("model.layers.9.mlp", tokens(32), "such as model.layers.10.mlp.experts.0.down_proj"),
        ] {
            let mut recorded = Tensors::default();
            recorded.set(name, tensor).write(&folder.join("recorded.safetensors"));
            let line = refusal(folder, &["--calibrate-hessian", "recorded.safetensors"]);
            assert!(line.contains(words) && line.contains(name) | line.contains("recorded"), "{words}: {line}");
        }
    });
}
