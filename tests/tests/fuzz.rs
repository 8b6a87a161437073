//! Readers get mutated files: they must not panic or abort, and a small file must not allocate much memory. Each
//! reader is fuzzed for two seconds, or for `NVFP4_FUZZ_SECONDS`. A failing case prints its seed; `NVFP4_FUZZ_SEED` is
//! the first seed of a run.

use std::path::Path;
use std::time::{Duration, Instant};

use model_files::{Tensors, f32s, gguf, i64s, raw};
use nvfp4::checkpoint::{
    Activations, Calibration, Checkpoint, Conversion, Dequantization, Dtype, Examination, Format, FromGguf, INDEX_NAME,
    Inspection, Options, Recorded, Reform, ToGguf, Usage,
};
use nvfp4::plan::roofline::Roofline;
use nvfp4::problem::{Op, TokenDtype};
use nvfp4::{Error, shape};
use nvfp4_tests::allocation::{self, Counting};
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::{Value, json};

/// Limit of live bytes while a file of a few kilobytes is read, for all concurrent tests of this binary together.
const ALLOCATION_LIMIT: usize = 16 << 20;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Prints how to reproduce a case that panicked.
struct Case(u64);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Printing a backtrace allocates much memory.
            allocation::limit(usize::MAX);
            eprintln!("reproduce with NVFP4_FUZZ_SEED={} NVFP4_FUZZ_SECONDS=0", self.0);
        }
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be an unsigned integer, found `{text}`")))
}

/// Runs cases until the time is over, at least one; the case's seed seeds its random numbers.
fn fuzz(mut case: impl FnMut(&mut Xoshiro256PlusPlus)) {
    let time = Duration::from_secs(variable("NVFP4_FUZZ_SECONDS").unwrap_or(2));
    allocation::limit(ALLOCATION_LIMIT);
    let begin = Instant::now();
    let mut count = 0;
    for seed in variable("NVFP4_FUZZ_SEED").unwrap_or(0).. {
        allocation::set_case(seed);
        let _named = Case(seed);
        case(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
        count += 1;
        if begin.elapsed() >= time {
            break;
        }
    }
    println!("{count} cases");
}

/// Returns a result's value, or checks that its error is one line of text.
fn check<T>(result: Result<T, Error>) -> Option<T> {
    result.map_err(|error| check_message(&error)).ok()
}

fn check_message(error: &Error) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
}

/// Returns a number that readers are likely to mishandle.
fn number(rng: &mut impl Rng) -> Value {
    let edges = [0, 1, 2, 7, 8, 15, 16, 24, 32, 1 << 20, (1 << 20) + 16, 1 << 31, 1 << 32, 1 << 61, 1 << 63, u64::MAX];
    match rng.random_range(0..8) {
        0 => json!(-1),
        1 => json!(0.5),
        2 => json!(1e300),
        3 => json!(rng.random::<u64>()),
        _ => json!(edges.choose(rng).expect("a non-empty list").wrapping_sub(rng.random_range(0..2))),
    }
}

/// Returns a random JSON value of another kind.
fn value(rng: &mut impl Rng) -> Value {
    let texts = [
        "",
        "U8",
        "F32",
        "BF16",
        "F4",
        "F8_E4M3",
        "I64",
        "gated",
        "\u{0}\n",
        "model-00001-of-00002.safetensors",
        "../x",
    ];
    match rng.random_range(0..6) {
        0 => json!(null),
        1 => json!({}),
        2 => (0..rng.random_range(0..200)).fold(json!([]), |inner, _| Value::Array(vec![inner])),
        3 | 4 => json!(*texts.choose(rng).expect("a non-empty list")),
        _ => number(rng),
    }
}

/// Makes one random change in a JSON document.
fn mutate_json(document: &mut Value, rng: &mut impl Rng) {
    let stop = rng.random_bool(0.2);
    match document {
        Value::Object(map) if !map.is_empty() && !stop => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = keys.choose(rng).expect("a non-empty map");
            match rng.random_range(0..10) {
                0 => _ = map.remove(key),
                1 => {
                    let other = keys.choose(rng).expect("a non-empty map").clone();
                    let value = map[key].clone();
                    map.insert(other, value);
                }
                2 => {
                    let value = map.remove(key).expect("an existing key");
                    map.insert(
                        format!("{key}{}", [".x", "\n", "_2", ""].choose(rng).expect("a non-empty list")),
                        value,
                    );
                }
                _ => mutate_json(&mut map[key], rng),
            }
        }
        Value::Array(values) if !values.is_empty() && !stop => {
            let index = rng.random_range(0..values.len());
            match rng.random_range(0..6) {
                0 => _ = values.remove(index),
                1 => values.insert(index, value(rng)),
                2 => values.insert(index, values[index].clone()),
                _ => mutate_json(&mut values[index], rng),
            }
        }
        Value::Number(_) if !stop => *document = number(rng),
        other => *other = value(rng),
    }
}

/// Makes one random change to bytes of any meaning.
fn mutate_bytes(bytes: &mut Vec<u8>, rng: &mut impl Rng) {
    let at = rng.random_range(0..=bytes.len());
    match rng.random_range(0..6) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, rng.random()),
        2 => {
            let end = rng.random_range(at..=bytes.len());
            let copy = bytes[at..end].to_vec();
            bytes.splice(at..at, copy);
        }
        3 if at < bytes.len() => {
            bytes[at] = *[0, 0x7F, 0x80, 0xFF, b'"', b'{', b']'].choose(rng).expect("a non-empty list")
        }
        _ if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
        _ => {}
    }
}

/// Either changes the header of a safetensors file and updates the header's length, or changes bytes anywhere.
fn mutate_safetensors(file: &mut Vec<u8>, rng: &mut impl Rng) {
    let header = file.split_first_chunk().and_then(|(length, rest)| {
        let length = u64::from_le_bytes(*length) as usize;
        Some((serde_json::from_slice::<Value>(rest.get(..length)?).ok()?, rest[length..].to_vec()))
    });
    match header {
        Some((mut header, data)) if rng.random_bool(0.6) => {
            mutate_json(&mut header, rng);
            let header = header.to_string();
            *file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
        }
        _ => mutate_bytes(file, rng),
    }
}

fn times(rng: &mut impl Rng) -> usize {
    *[0, 1, 1, 1, 2, 3, 8].choose(rng).expect("a non-empty list")
}

/// Creates a folder in memory if the system has a RAM disk, else on disk.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("a folder to write to")
}

/// Makes a model with weights in both formats and in floats, and with activations.
fn model() -> Tensors {
    let names = ["gate_proj", "up_proj", "down_proj"];
    let mut tensors = Tensors::default();
    tensors.set_experts("model.layers.0.mlp", names, Format::ModelOpt, 2);
    tensors.set_experts("model.layers.1.mlp", names, Format::CompressedTensors, 1);
    tensors.set("model.layers.2.mlp.gate_proj.weight", f32s(&[8, 16], &[0.5; 128]));
    tensors.set("model.layers.2.mlp.up_proj.weight", raw(Dtype::BF16, &[8, 16], &[0x3F; 256]));
    tensors.set("hidden", f32s(&[3, 32], &[1.5; 96])).set("group_sizes", i64s(&[1, 2]));
    tensors
}

/// Makes a model with fused experts, and with experts under names that few model families use.
fn fused_model() -> Tensors {
    let names = ["gate_proj", "up_proj", "down_proj"];
    let bytes = |shape: &[usize]| raw(Dtype::U8, shape, &vec![0x22; shape.iter().product()]);
    let bf16 = |shape: &[usize]| raw(Dtype::BF16, shape, &vec![0x3F; 2 * shape.iter().product::<usize>()]);
    let mut tensors = Tensors::default();
    // Llama 4 and Qwen3-VL-MoE; gpt-oss.
    tensors.set("model.layers.0.feed_forward.experts.gate_up_proj", bf16(&[2, 16, 16]));
    tensors.set("model.layers.0.feed_forward.experts.down_proj", bf16(&[2, 8, 16]));
    tensors.set("model.layers.0.feed_forward.experts.gate_up_proj_bias", bf16(&[2, 16]));
    tensors.set("model.layers.1.mlp.experts.gate_up_proj_blocks", bytes(&[2, 16, 1, 16]));
    tensors.set("model.layers.1.mlp.experts.gate_up_proj_scales", bytes(&[2, 16, 1]));
    tensors.set("model.layers.1.mlp.experts.gate_up_proj_bias", bf16(&[2, 16]));
    tensors.set("model.layers.1.mlp.experts.down_proj_blocks", bytes(&[2, 8, 1, 16]));
    tensors.set("model.layers.1.mlp.experts.down_proj_scales", bytes(&[2, 8, 1]));
    // DeepSeek's FP8 in blocks, and DeepSeek-V4's MXFP4.
    let fp8 = raw(Dtype::F8_E4M3, &[8, 16], &[0x38; 128]);
    tensors.set("model.layers.2.mlp.experts.0.gate_proj.weight", fp8);
    tensors.set("model.layers.2.mlp.experts.0.gate_proj.weight_scale_inv", f32s(&[1, 1], &[0.5]));
    tensors.set("layers.3.ffn.experts.0.w1.weight", raw(Dtype::I8, &[8, 16], &[0x22; 128]));
    tensors.set("layers.3.ffn.experts.0.w1.scale", raw(Dtype::F8_E8M0, &[8, 1], &[0x7F; 8]));
    // Experts directly under the layer, and expert numbers after the projection.
    tensors.set_experts("model.layers.4", names, Format::ModelOpt, 1);
    for name in names {
        tensors.set_nvfp4(&format!("model.layers.5.mlp.experts.{name}.0"), Format::CompressedTensors, [16, 16], 3);
    }
    tensors
}

/// Uses a model in every way that the library offers.
fn use_model(path: &Path, out: &Path) {
    let inspection = Inspection::of(path);
    inspection.problems.iter().for_each(|problem| check_message(&problem.error));
    if let Some(activations) = check(Activations::open(path)) {
        for scales in [&[None, Some(0.5)][..], &[]] {
            check(activations.quantize(scales));
        }
    }
    let Some(checkpoint) = check(Checkpoint::open(path)) else { return };
    for layer in 0..6 {
        for op in [Op::Gated, Op::Plain] {
            check(checkpoint.layer(layer, op));
        }
    }
    for layer in 0..6 {
        check(checkpoint.moe_layer(layer, TokenDtype::Bf16));
    }
    for module in checkpoint.quantized_modules() {
        check(checkpoint.single(module));
        let tokens = &mut [0x3C00; 32];
        if let Some(layer) =
            check(checkpoint.scaled_linear(module, TokenDtype::F16)).filter(|layer| layer.weights.sizes().k == 32)
        {
            check(layer.scale(tokens));
        }
    }
    check(Examination::of(path));
    check(Usage::of(&checkpoint, &|_| true, &|_| ()));
    if let Some(dequantization) = check(Dequantization::new(&checkpoint, Dtype::BF16, &|_| true)) {
        written(dequantization.write(out, |_| ()), out);
    }
    for format in [Format::ModelOpt, Format::CompressedTensors] {
        if let Some(reform) = check(Reform::new(&checkpoint, format, None)) {
            written(reform.write(out, |_| ()), out);
        }
    }
    let recorded = check(Recorded::open(path));
    let calibration = check(Calibration::open(path));
    for (format, separate_scales) in [(Format::ModelOpt, false), (Format::CompressedTensors, true)] {
        // The conversion refuses tensors that are already in the other format.
        let exclude = |name: &str| {
            let other =
                if format == Format::ModelOpt { ["layers.1.", "layers.5."] } else { ["layers.0.", "layers.4."] };
            other.iter().any(|layer| name.contains(layer) && name.contains("mlp.experts")).then(|| "other".to_owned())
        };
        let options = Options { exclude: &exclude, separate_scales, ..Options::new(format, &|_| true) };
        for calibration in std::iter::once(None).chain(calibration.as_ref().map(Some)) {
            let options = Options { calibration, ..options };
            let Some(mut conversion) = check(Conversion::new(&checkpoint, &options)) else { continue };
            conversion.left().iter().filter_map(|left| left.refusal.as_ref()).for_each(check_message);
            if let Some(recorded) = recorded.as_ref().filter(|_| calibration.is_some()) {
                let Some(with_activations) = check(conversion.with_activations(recorded)) else { continue };
                conversion = with_activations;
            }
            written(conversion.write(out, |_| ()), out);
        }
    }
}

/// Checks that a written model can be read, or that the error is one line of text; then removes the model.
fn written(result: Result<(), Error>, out: &Path) {
    if check(result).is_some() {
        Checkpoint::open(out).expect("a written model must be readable");
        _ = std::fs::remove_file(out).or_else(|_| std::fs::remove_dir_all(out));
    }
}

#[test]
fn mutated_model_files_are_read_or_refused() {
    let folder = folder();
    let (path, out) = (folder.path().join("m.safetensors"), folder.path().join("out"));
    let originals = [model().to_bytes(), fused_model().to_bytes()];
    fuzz(|rng| {
        let mut file = originals.choose(rng).expect("a non-empty list").clone();
        for _ in 0..times(rng) {
            mutate_safetensors(&mut file, rng);
        }
        std::fs::write(&path, &file).unwrap();
        use_model(&path, &out);
    });
}

#[test]
fn mutated_indices_and_shards_are_read_or_refused() {
    let folder = folder();
    let (sharded, out) = (folder.path().join("in"), folder.path().join("out"));
    std::fs::create_dir(&sharded).unwrap();
    let index = model().write_sharded(&sharded, 2);
    let shard = sharded.join(model_files::shard_name(1, 2));
    let (original_index, original_shard) = (std::fs::read(&index).unwrap(), std::fs::read(&shard).unwrap());
    assert_eq!(index.file_name().unwrap(), INDEX_NAME);
    fuzz(|rng| {
        let mut text = original_index.clone();
        for _ in 0..times(rng) {
            match serde_json::from_slice::<Value>(&text) {
                Ok(mut document) if rng.random_bool(0.7) => {
                    mutate_json(&mut document, rng);
                    text = document.to_string().into_bytes();
                }
                _ => mutate_bytes(&mut text, rng),
            }
        }
        let mut file = original_shard.clone();
        for _ in 0..rng.random_range(0..2) {
            mutate_safetensors(&mut file, rng);
        }
        std::fs::write(&index, &text).unwrap();
        std::fs::write(&shard, &file).unwrap();
        use_model(&sharded, &out);
    });
}

#[test]
fn mutated_configurations_are_read_or_refused() {
    let folder = folder();
    let (folder, out) = (folder.path().join("in"), folder.path().join("out"));
    std::fs::create_dir(&folder).unwrap();
    model().write_sharded(&folder, 2);
    let weights = json!({"num_bits": 4, "type": "float", "group_size": 16});
    let originals = [
        json!({"hidden_act": "silu", "num_hidden_layers": 3, "num_experts": 2, "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "model.*.gate", "re:a("],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": weights}}}}),
        json!({"text_config": {"hidden_activation": "silu", "num_local_experts": 1, "swiglu_limit": null},
            "quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": weights, "input_activations": {"dynamic": "local"}}}}}),
        json!({"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "**a*"]}}),
        json!({"model_type": "deepseek_v3", "num_experts_per_tok": 1, "norm_topk_prob": true, "n_group": 1, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "n_shared_experts": 1,
            "quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {
                "type": "hadamard", "head_dim": 16, "randomize": false, "apply": [
                    {"targets": ["Linear"], "location": "input", "inverse": false, "ignore": ["re:.*gate"]},
                    {"targets": ["re:.*down"], "location": "weight_input"}]}}}}}),
        json!({"quantization_config": {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight":
            [{"dtype": "fp4", "group_size": 16}, {"dtype": "fp8"}]}, "layer_quant_config": {"*": {"weight": {"dtype": "fp4"}}}}}),
        json!({"quantization_config": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers":
            {"model.layers.0.mlp": {"quant_algo": "NVFP4"}, "model.layers.1": {"quant_algo": "W4A8_NVFP4_FP8"}}}}),
    ];
    fuzz(|rng| {
        for name in ["config.json", "hf_quant_config.json"] {
            let mut document = originals.choose(rng).expect("a non-empty list").clone();
            for _ in 0..times(rng) {
                mutate_json(&mut document, rng);
            }
            let mut text = document.to_string().into_bytes();
            for _ in 0..rng.random_range(0..2) {
                mutate_bytes(&mut text, rng);
            }
            std::fs::write(folder.join(name), &text).unwrap();
        }
        use_model(&folder, &out);
    });
}

#[test]
fn mutated_gguf_files_are_read_or_refused() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    // Superblocks of 64 values have four scales and 32 bytes of codes.
    let nvfp4 =
        |name, sizes: &'static [usize]| (name, 40, sizes, vec![0x31; sizes.iter().product::<usize>() / 64 * 36]);
    let floats = |name, sizes: &'static [usize]| (name, 0, sizes, vec![0; 4 * sizes.iter().product::<usize>()]);
    let originals = [
        gguf(
            "qwen3",
            &[
                ("output_norm.weight", 1, &[4], vec![0x3C; 8]),
                nvfp4("blk.0.ffn_gate.weight", &[2, 64]),
                floats("blk.0.ffn_gate.scale", &[1]),
                nvfp4("blk.0.attn_q.weight", &[4, 64]),
            ],
        ),
        gguf(
            "qwen3moe",
            &[
                nvfp4("blk.0.ffn_up_exps.weight", &[2, 3, 64]),
                floats("blk.0.ffn_up_exps.scale", &[2]),
                floats("blk.0.ffn_gate_inp.weight", &[2, 64]),
            ],
        ),
    ];
    for original in &originals {
        std::fs::write(at("in.gguf"), original).unwrap();
        FromGguf::open(&at("in.gguf"), Format::ModelOpt).expect("the original is valid");
    }
    let mut tensors = Tensors::default();
    tensors.set_nvfp4("model.layers.0.mlp.gate_proj", Format::ModelOpt, [2, 64], 1);
    let checkpoint = Checkpoint::open(&tensors.write(&at("model.safetensors"))).unwrap();
    fuzz(|rng| {
        let mut file = originals.choose(rng).expect("a non-empty list").clone();
        for _ in 0..times(rng) {
            // Most of the meaning lies before the data.
            match rng.random_bool(0.5) {
                true => mutate_bytes(&mut file, rng),
                false if file.is_empty() => {}
                false => {
                    let place = rng.random_range(0..file.len().min(400));
                    file[place] = rng.random_range(0..=4) * 10;
                }
            }
        }
        std::fs::write(at("in.gguf"), &file).unwrap();
        for format in [Format::ModelOpt, Format::CompressedTensors] {
            if let Some(gguf) = check(FromGguf::open(&at("in.gguf"), format)) {
                check(gguf.modules());
                written(gguf.write(&at("out.safetensors"), |_| ()), &at("out.safetensors"));
            }
        }
        if let Some(gguf) = check(ToGguf::new(&checkpoint, &at("in.gguf")))
            && check(gguf.write(&at("out.gguf"), |_| ())).is_some()
        {
            // The file has all tensors of the template, also those that the way back does not know.
            check(FromGguf::open(&at("out.gguf"), Format::ModelOpt));
        }
    });
}

#[test]
fn mutated_shapes_are_read_or_refused() {
    let folder = folder();
    let path = folder.path().join("shapes.json");
    let original = json!([
        {"name": "a", "op": "gated", "groups": [[80, 4096, 7168], [0, 8, 16]], "input": "gaussian", "note": {"x": [1]}},
        {"name": "b", "op": "plain", "groups": [[1, 8, 48]], "b200_light_us": 4.708, "b200_best_public_us": 12.4},
    ]);
    shape::parse(&original.to_string()).expect("the original is valid");
    fuzz(|rng| {
        let mut document = original.clone();
        if rng.random_bool(0.3) {
            document = document[rng.random_range(0..2)].take();
        }
        for _ in 0..times(rng) {
            mutate_json(&mut document, rng);
        }
        let mut text = document.to_string().into_bytes();
        for _ in 0..rng.random_range(0..2) {
            mutate_bytes(&mut text, rng);
        }
        std::fs::write(&path, &text).unwrap();
        check(shape::find(&format!("{}#a", path.display())));
        for shape in check(shape::read(&path)).unwrap_or_default() {
            let problem = shape.problem(TokenDtype::F16).expect("`shape::read` has checked the sizes");
            Roofline::new(&problem);
        }
    });
}
