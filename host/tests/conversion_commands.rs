//! `dequantize`, `convert`, `verify` and `diff`, run as a user runs them.

use std::path::Path;
use std::process::{Command, Output};

use half::bf16;
use model_files::{Tensors, f32s, gguf, raw};
use nvfp4::checkpoint::{Checkpoint, Dtype, Format, TensorFile};
use nvfp4::format::{e2m1, e4m3};
use serde_json::{Value, json};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const BLOCK: &str = "model.layers.0.mlp";

fn nvfp4(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.current_dir(folder).args(line.split_whitespace()).output().expect("the command was built")
}

fn passes(folder: &Path, line: &str) -> String {
    let output = nvfp4(folder, line);
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the exit code and stderr of a command that must fail.
fn fails(folder: &Path, line: &str) -> (i32, String) {
    let output = nvfp4(folder, line);
    assert!(!output.status.success(), "{line}: {output:?}");
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn json(folder: &Path, line: &str) -> (Option<i32>, Value) {
    let output = nvfp4(folder, &format!("{line} --json"));
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

/// Numbers of an NVFP4 matrix, from the definition of the format.
fn numbers(values: &[u8], scales: &[u8], global: f32) -> Vec<f32> {
    let number = |index: usize| {
        let code = values[index / 2] >> (4 * (index % 2));
        e2m1::decode(code) * (e4m3::decode(scales[index / 16]) * global)
    };
    (0..2 * values.len()).map(number).collect()
}

/// Numbers of a module in ModelOpt's names.
fn numbers_of(file: &TensorFile, module: &str) -> Vec<f32> {
    let data = |part: &str| file.tensor(&format!("{module}{part}")).unwrap().data;
    numbers(data(".weight"), data(".weight_scale"), 0.25)
}

/// A folder with a model of two experts and a norm.
fn model(folder: &Path, name: &str, format: Format) -> Tensors {
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, format, 2);
    tensors.set("model.norm.weight", f32s(&[3], &[1.0, -0.0, 2.0]));
    let at = folder.join(name);
    std::fs::create_dir(&at).unwrap();
    tensors.write(&at.join("model.safetensors"));
    let quantization = match format {
        Format::ModelOpt => json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
        Format::CompressedTensors => json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head"], "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16},
            "input_activations": {"dynamic": "local"}}}}),
    };
    let config = json!({"model_type": "qwen3_moe", "hidden_size": 32, "torch_dtype": "float16",
        "quantization_config": quantization});
    std::fs::write(at.join("config.json"), config.to_string()).unwrap();
    std::fs::write(at.join("tokenizer.json"), "{}").unwrap();
    tensors
}

#[test]
fn dequantized_numbers_follow_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for format in [Format::ModelOpt, Format::CompressedTensors] {
        let name = format.name();
        let tensors = model(folder, name, format);
        passes(folder, &format!("dequantize {name} {name}-f32 --dtype f32"));
        passes(folder, &format!("dequantize {name} {name}-bf16"));
        let wide = TensorFile::open(&folder.join(format!("{name}-f32/model.safetensors"))).unwrap();
        let narrow = TensorFile::open(&folder.join(format!("{name}-bf16/model.safetensors"))).unwrap();
        assert_eq!(wide.tensors().count(), 7, "six weights and the norm");
        for expert in 0..2 {
            for projection in NAMES {
                let module = format!("{BLOCK}.experts.{expert}.{projection}");
                let part = |suffix: &str| {
                    let (_, content) = tensors.iter().find(|(name, _)| *name == format!("{module}{suffix}")).unwrap();
                    content.2.clone()
                };
                let expected = numbers(&part(format.values()), &part(format.scales()), 0.25);
                let tensor = wide.tensor(&format!("{module}.weight")).unwrap();
                assert_eq!((tensor.dtype, &*tensor.numbers::<f32>()), (Dtype::F32, &expected[..]));
                let rounded: Vec<u16> = expected.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                assert_eq!(*narrow.tensor(&format!("{module}.weight")).unwrap().numbers::<u16>(), rounded);
            }
        }
        let config: Value =
            serde_json::from_slice(&std::fs::read(folder.join(format!("{name}-bf16/config.json"))).unwrap()).unwrap();
        assert_eq!((&config["quantization_config"], &config["torch_dtype"]), (&Value::Null, &json!("bfloat16")));
        assert!(folder.join(format!("{name}-bf16/tokenizer.json")).exists());
        let same = passes(folder, &format!("diff {name} {name}-f32"));
        assert!(same.contains("weights: 6 equal, 0 different; other tensors: 1 equal, 0 different"), "{same}");
    }
    passes(folder, "diff modelopt compressed-tensors");
}

#[test]
fn filtered_weights_alone_become_floats() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, "in", Format::ModelOpt);
    passes(folder, "dequantize in out --filter down_proj");
    let out = Checkpoint::open(&folder.join("out")).unwrap();
    assert_eq!(out.quantized_modules().len(), 4);
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("out/config.json")).unwrap()).unwrap();
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    assert_eq!(ignored.len(), 3, "{ignored:?}");
    let (code, line) = fails(folder, "dequantize in other --filter nothing");
    assert!(code == 2 && line.contains("--filter matches none of the 6 tensors"), "{line}");
    assert!(!folder.join("other").exists());
}

/// Stores the experts of [`model`] as ModelOpt stores the experts of Llama 4: `[E, K/2, N]`.
fn fused_and_transposed(tensors: &Tensors) -> Tensors {
    let part = |expert: usize, projection: &str, suffix: &str| {
        let name = format!("{BLOCK}.experts.{expert}.{projection}{suffix}");
        tensors.iter().find(|(other, _)| *other == name).unwrap().1.2.clone()
    };
    let mut fused = Tensors::default();
    for (called, projections) in [("gate_up_proj", &NAMES[..2]), ("down_proj", &NAMES[2..])] {
        let mut lines: [Vec<u8>; 2] = Default::default();
        let (n, k) = if called == "down_proj" { (32, 16) } else { (32, 32) };
        for (line, (suffix, bytes)) in lines.iter_mut().zip([(".weight", k / 2), (".weight_scale", k / 16)]) {
            for expert in 0..2 {
                let rows: Vec<u8> = projections.iter().flat_map(|name| part(expert, name, suffix)).collect();
                line.extend((0..bytes).flat_map(|column| {
                    let rows = &rows;
                    (0..n).map(move |row| rows[row * bytes + column])
                }));
            }
        }
        let name = |suffix: &str| format!("{BLOCK}.experts.{called}{suffix}");
        let [values, scales] = lines;
        fused.set(name(""), raw(Dtype::U8, &[2, k / 2, n], &values));
        fused.set(name("_weight_scale"), raw(Dtype::F8_E4M3, &[2, k / 16, n], &scales));
        fused.set(name("_weight_scale_2"), f32s(&[], &[0.25]));
        fused.set(name("_input_scale"), f32s(&[2], &[0.5, 0.5]));
    }
    fused
}

#[test]
fn experts_in_one_tensor_are_converted_in_place_and_apart() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let tensors = model(folder, "apart", Format::ModelOpt);
    let apart = TensorFile::open(&folder.join("apart/model.safetensors")).unwrap();
    fused_and_transposed(&tensors).write(&folder.join("fused.safetensors"));
    passes(folder, "dequantize fused.safetensors plain.safetensors --dtype f32");
    let plain = TensorFile::open(&folder.join("plain.safetensors")).unwrap();
    let gate_up = plain.tensor(&format!("{BLOCK}.experts.gate_up_proj")).unwrap();
    assert_eq!(gate_up.shape, [2, 32, 32]);
    for expert in 0..2 {
        for (part, projection) in NAMES[..2].iter().enumerate() {
            let expected = numbers_of(&apart, &format!("{BLOCK}.experts.{expert}.{projection}"));
            for (index, expected) in expected.into_iter().enumerate() {
                let (row, column) = (16 * part + index / 32, index % 32);
                assert_eq!(gate_up.numbers::<f32>()[(32 * expert + column) * 32 + row], expected);
            }
        }
    }
    passes(folder, "convert fused.safetensors again.safetensors --to modelopt --experts apart");
    let again = TensorFile::open(&folder.join("again.safetensors")).unwrap();
    for (name, tensor) in again.tensors() {
        let expected = apart.tensor(name).unwrap_or_else(|| panic!("{name} is new"));
        assert_eq!((tensor.dtype, tensor.data), (expected.dtype, expected.data), "{name}");
    }
    assert_eq!(again.tensors().count(), 24);
    // Apart, fused by the command, and apart again: the same numbers.
    passes(folder, "convert apart fused --to compressed-tensors --experts fused");
    passes(folder, "diff apart fused");
    passes(folder, "convert fused back --to modelopt --experts apart");
    let back = TensorFile::open(&folder.join("back/model.safetensors")).unwrap();
    for (name, tensor) in apart.tensors() {
        assert_eq!(back.tensor(name).unwrap().data, tensor.data, "{name}");
    }
}

#[test]
fn verification_finds_the_worst_weight() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, "model", Format::ModelOpt);
    passes(folder, "dequantize model source --dtype f32");
    passes(folder, "verify model --source source --max-relative-rms 0");
    // One number of one weight is off by one.
    let module = format!("{BLOCK}.experts.1.up_proj");
    let source = TensorFile::open(&folder.join("source/model.safetensors")).unwrap();
    let mut changed = Tensors::default();
    for (name, tensor) in source.tensors() {
        let mut data = tensor.data.to_vec();
        if name == format!("{module}.weight") {
            let place = 4 * (3 * 32 + 5);
            let number = f32::from_le_bytes(data[place..place + 4].try_into().unwrap());
            data[place..place + 4].copy_from_slice(&(number + 1.0).to_le_bytes());
        }
        changed.set(name, raw(tensor.dtype, tensor.shape, &data));
    }
    changed.write(&folder.join("changed.safetensors"));
    let (code, report) = json(folder, "verify model --source changed.safetensors");
    assert_eq!((code, &report["passed"]), (Some(0), &json!(true)));
    let worst = &report["weights"][0];
    assert_eq!((&worst["module"], &worst["errors"]["max_abs"]), (&json!(module), &json!(1.0)));
    assert_eq!((&worst["worst_row"], &worst["worst_column"]), (&json!(3), &json!(5)));
    assert_eq!(report["layers"][0]["weights"], 6);
    for limit in ["--max-relative-rms 0", "--max-abs 0.5", "--min-snr 200", "--min-cosine 1"] {
        let (code, report) = json(folder, &format!("verify model --source changed.safetensors {limit}"));
        assert_eq!((code, report["failures"].as_array().unwrap().len()), (Some(1), 1), "{limit}: {report}");
    }
    // A missing weight and a changed copy fail without any threshold.
    changed.remove(&format!("{module}.weight")).set("model.norm.weight", f32s(&[3], &[1.0, 0.0, 3.0]));
    changed.write(&folder.join("less.safetensors"));
    let (code, report) = json(folder, "verify model --source less.safetensors");
    let failures = report["failures"].to_string();
    assert!(
        code == Some(1) && failures.contains("missing in the source") && failures.contains("bytes differ"),
        "{failures}"
    );
    assert_eq!(json(folder, "diff model less.safetensors").0, Some(1));
    let mut other = Tensors::default();
    other.set_nvfp4("model.layers.7.mlp.down_proj", Format::ModelOpt, [32, 16], 1);
    other.write(&folder.join("other.safetensors"));
    assert!(fails(folder, "verify model --source other.safetensors").1.contains("no weight has the same name"));
}

#[test]
fn better_scales_have_smaller_errors_and_the_same_layout() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let weight: Vec<f32> = (0..64 * 64).map(|i: usize| ((i * 7919) % 1009) as f32 / 100.0 - 5.0).collect();
    let mut tensors = Tensors::default();
    tensors.set(format!("{BLOCK}.down_proj.weight"), f32s(&[64, 64], &weight));
    tensors.write(&folder.join("in.safetensors"));
    let mut errors = Vec::new();
    for scales in ["max", "four-over-six", "mse"] {
        passes(folder, &format!("quantize in.safetensors {scales}.safetensors --scales {scales}"));
        let (_, report) = json(folder, &format!("verify {scales}.safetensors --source in.safetensors"));
        errors.push(report["errors"]["relative_rms"].as_f64().unwrap());
    }
    assert!(errors[0] > errors[1] && errors[0] > errors[2], "{errors:?}");
    passes(folder, "quantize in.safetensors default.safetensors");
    let [default, max] =
        ["default", "max"].map(|name| std::fs::read(folder.join(format!("{name}.safetensors"))).unwrap());
    assert_eq!(default, max);
}

#[test]
fn factors_of_the_tokens_are_multiplied_into_the_weight() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let module = "model.layers.0.mlp.down_proj";
    let factors: Vec<f32> = (0..16).map(|i| 0.5 + i as f32).collect();
    let mut tensors = Tensors::default();
    tensors.set_nvfp4(module, Format::ModelOpt, [32, 16], 1);
    let expected = |tensors: &Tensors| {
        tensors.write(&folder.join("in.safetensors"));
        numbers_of(&TensorFile::open(&folder.join("in.safetensors")).unwrap(), module)
    };
    let plain = expected(&tensors);
    tensors.set(format!("{module}.pre_quant_scale"), f32s(&[16], &factors));
    tensors.write(&folder.join("in.safetensors"));
    passes(folder, "dequantize in.safetensors out.safetensors --dtype f32");
    let out = TensorFile::open(&folder.join("out.safetensors")).unwrap();
    let got = out.tensor(&format!("{module}.weight")).unwrap().numbers::<f32>().into_owned();
    let expected: Vec<f32> = plain.iter().zip(factors.iter().cycle()).map(|(number, factor)| number * factor).collect();
    assert_eq!((got, out.tensors().count()), (expected, 1));
    let (code, line) = fails(folder, "convert in.safetensors ct.safetensors --to compressed-tensors");
    assert!(code == 2 && line.contains("NVFP4_AWQ"), "{line}");
    tensors.set(format!("{module}.pre_quant_scale"), f32s(&[8], &factors[..8]));
    tensors.write(&folder.join("in.safetensors"));
    assert!(fails(folder, "dequantize in.safetensors x.safetensors").1.contains("its shape is [8], not [16]"));
}

#[test]
fn refusals_name_the_form_and_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder, "in", Format::CompressedTensors);
    let config = json!({"quantization_config": {"quant_method": "compressed-tensors",
        "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}});
    std::fs::write(folder.join("in/config.json"), config.to_string()).unwrap();
    for line in ["dequantize in out", "convert in out --to modelopt", "verify in --source in"] {
        let (code, error) = fails(folder, line);
        assert!(code == 2 && error.contains("transform_config"), "{line}: {error}");
    }
    std::fs::write(folder.join("in/config.json"), "{}").unwrap();
    let (code, error) = fails(folder, "dequantize in in");
    assert!(code == 2 && error.contains("in"), "{error}");
    let mut large = Tensors::default();
    large.set_nvfp4("model.layers.0.mlp.down_proj", Format::ModelOpt, [32, 16], 1);
    large.set("model.layers.0.mlp.down_proj.weight_scale_2", f32s(&[], &[1e4]));
    large.write(&folder.join("large.safetensors"));
    let (code, error) = fails(folder, "dequantize large.safetensors out --dtype f16");
    assert!(code == 2 && error.contains("which f16 cannot represent; use bf16 or f32"), "{error}");
    let mut floats = Tensors::default();
    floats.set("model.layers.0.mlp.down_proj.weight", f32s(&[32, 16], &[0.5; 512]));
    floats.write(&folder.join("floats.safetensors"));
    assert!(fails(folder, "dequantize floats.safetensors out").1.contains("has no quantized weight"));
    assert!(fails(folder, "convert floats.safetensors out --to modelopt").1.contains("has no NVFP4 weight"));
    assert!(!folder.join("out").exists());
    let names = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(names, 3, "no leftovers");
}

#[test]
fn gguf_and_back_keeps_every_code_and_scale() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    for expert in 0..2 {
        for (index, name) in NAMES.iter().enumerate() {
            let module = format!("{BLOCK}.experts.{expert}.{name}");
            tensors.set_nvfp4(&module, Format::ModelOpt, [64, 128], (3 * expert + index) as u8);
            tensors.remove(&format!("{module}.input_scale"));
        }
    }
    tensors.set(format!("{BLOCK}.experts.1.up_proj.weight_scale_2"), f32s(&[], &[0.5]));
    tensors.write(&folder.join("model.safetensors"));
    let norm: Vec<u8> = [1.0f32, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let experts = |name| (name, 1, &[2, 64, 128][..], vec![0; 2 * 2 * 64 * 128]);
    let template = gguf(
        "qwen3moe",
        &[
            ("output_norm.weight", 0, &[3], norm.clone()),
            experts("blk.0.ffn_gate_exps.weight"),
            experts("blk.0.ffn_up_exps.weight"),
            experts("blk.0.ffn_down_exps.weight"),
        ],
    );
    std::fs::write(folder.join("template.gguf"), &template).unwrap();
    let line = "convert model.safetensors model.gguf --to gguf --template template.gguf";
    let said = passes(folder, line);
    assert!(said.contains("6 weights from safetensors to gguf, 1 tensors copied"), "{said}");
    passes(folder, "convert model.gguf back.safetensors --to modelopt");
    let back = TensorFile::open(&folder.join("back.safetensors")).unwrap();
    assert_eq!(back.tensor("model.norm.weight").unwrap().data, norm);
    for (name, (dtype, shape, data)) in tensors.iter() {
        let got = back.tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((got.dtype, got.shape, got.data), (*dtype, &shape[..], &data[..]), "{name}");
    }
    assert_eq!(back.tensors().count(), tensors.iter().count() + 1);
    // The file type of the metadata says NVFP4.
    let file = std::fs::read(folder.join("model.gguf")).unwrap();
    let place = file.windows(17).position(|bytes| bytes == b"general.file_type").unwrap() + 17 + 4;
    assert_eq!(file[place..place + 4], 39u32.to_le_bytes());
    // Refusals.
    let unknown = gguf("rwkv7", &[("output_norm.weight", 0, &[3], norm.clone())]);
    std::fs::write(folder.join("unknown.gguf"), unknown).unwrap();
    assert!(fails(folder, "convert unknown.gguf x --to modelopt").1.contains("general.architecture is \"rwkv7\""));
    std::fs::write(folder.join("cut.gguf"), &template[..template.len() - 40]).unwrap();
    assert!(fails(folder, "convert cut.gguf x --to modelopt").1.contains("does not fit"));
    std::fs::write(folder.join("none.gguf"), gguf("llama", &[("output_norm.weight", 0, &[3], norm)])).unwrap();
    assert!(fails(folder, "convert none.gguf x --to modelopt").1.contains("no NVFP4 tensor"));
    assert!(fails(folder, "convert model.safetensors x --to gguf").1.contains("--template"));
    assert!(!folder.join("x").exists());
}

#[test]
fn doctor_names_engines_that_compute_something_else() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = model(folder, "model", Format::ModelOpt);
    let (code, report) = json(folder, "doctor model --backend nvfp4");
    assert_eq!((code, &report["verdicts"][0]["verdict"]), (Some(0), &json!("serves it")), "{report}");
    let module = format!("{BLOCK}.experts.1.up_proj");
    tensors.set(format!("{module}.weight_scale_2"), f32s(&[], &[0.5]));
    tensors.set(format!("{BLOCK}.experts.0.down_proj.weight"), raw(Dtype::U8, &[32, 8], &[0x80; 256]));
    tensors.write(&folder.join("model/model.safetensors"));
    std::fs::remove_file(folder.join("model/tokenizer.json")).unwrap();
    let (code, report) = json(folder, "doctor model --backend vllm");
    assert_eq!((code, &report["verdicts"][0]["effect"]), (Some(1), &json!("wrong results")), "{report}");
    let codes: Vec<&str> =
        report["findings"].as_array().unwrap().iter().filter_map(|finding| finding["code"].as_str()).collect();
    for code in ["unequal-global-scales", "dead-experts", "tokenizer"] {
        assert!(codes.contains(&code), "{codes:?}");
    }
    let text = String::from_utf8(nvfp4(folder, "doctor model").stdout).unwrap();
    assert!(text.contains("vllm 0.24 to 0.33: wrong results; quantize without --separate-scales"), "{text}");
}

#[test]
fn pictures_show_every_projection() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = model(folder, "model", Format::ModelOpt);
    passes(folder, "dequantize model source");
    tensors.set(format!("{BLOCK}.experts.1.up_proj.weight_scale_2"), f32s(&[], &[0.5]));
    tensors.write(&folder.join("model/model.safetensors"));
    let picture = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let text = |name: &str| String::from_utf8(picture(name)).unwrap();
    passes(folder, "verify model --source source --plot verify.svg");
    assert!(!nvfp4(folder, "diff source model --plot diff.svg").status.success(), "the models differ");
    let (_, report) = json(folder, "inspect model --plot inspect.svg");
    assert_eq!(report["plot"], "inspect.svg");
    for name in ["verify.svg", "diff.svg"] {
        assert!(
            text(name).contains("Relative RMS error of weights") && text(name).contains("mlp.experts.*.up_proj"),
            "{name}"
        );
    }
    for words in ["Codes of the values", "Scales of the blocks", "Outlier columns", "mlp.experts.*.down_proj", "2^-9"] {
        assert!(text("inspect.svg").contains(words), "{words}");
    }
    // A system without fonts cannot render a PNG, and the command says so.
    let png = nvfp4(folder, "inspect model --plot inspect.png");
    match png.status.success() {
        true => assert!(picture("inspect.png").starts_with(b"\x89PNG")),
        false => assert!(String::from_utf8_lossy(&png.stderr).contains("no fonts"), "{png:?}"),
    }
    assert!(fails(folder, "inspect model --plot picture.jpg").1.contains(".svg or .png"));
    let (code, line) = fails(folder, "inspect source --plot none.svg");
    assert!(code == 2 && line.contains("no weight to draw") && !folder.join("none.svg").exists(), "{line}");
    assert!(fails(folder, "inspect model --plot missing/a.svg").1.contains("cannot be written"));
}
