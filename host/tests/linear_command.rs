//! `nvfp4 run --op linear`, and `--op moe` on a model written by `nvfp4 quantize`: output and exit codes.

use std::path::Path;
use std::process::{Command, Output};

use model_files::{Tensors, f32s, raw};
use nvfp4::checkpoint::{Checkpoint, Dtype, TensorFile};
use serde_json::{Value, json};

fn nvfp4(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.current_dir(folder).args(line.split_whitespace()).output().expect("the command was built")
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn report(folder: &Path, line: &str) -> Value {
    serde_json::from_str(&stdout(nvfp4(folder, &format!("run --backend cpu --repeat 1 --json {line}")))).unwrap()
}

fn here() -> &'static Path {
    Path::new(".")
}

#[test]
fn linear_shape_runs_and_is_verified() {
    let text = stdout(nvfp4(here(), "run --op linear --shape 5,48,80 --dtype f16 --backend cpu --repeat 1"));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("5,48,80 linear · gaussian, f16 · cpu on "), "{text}");
    assert_eq!(lines[1], "layer     N 48, K 80; 5 tokens");
    // 48 · 80 elements of 9/16 byte, and 5 · 128 elements of two bytes.
    assert_eq!(lines[2], "bytes     3.4 kB");
    assert_eq!(*lines.last().unwrap(), "verified  yes: all 240 elements within the bounds of f32 sums");
    let report = report(here(), "--op linear --shape 5,48,80 --tokens 3 --input all-codes --seed 2");
    for (key, value) in [
        ("op", json!("linear")),
        ("dtype", json!("bf16")),
        ("m", json!(3)),
        ("n", json!(48)),
        ("k", json!(80)),
        ("bias", json!(false)),
        ("checked", json!(144)),
        ("mismatches", json!(0)),
        ("same_bits", json!(true)),
        ("verified", json!(true)),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
}

#[test]
fn fp8_tokens_are_supported() {
    let text = stdout(nvfp4(here(), "run --op linear --shape 5,48,80 --token-format fp8 --backend cpu --repeat 1"));
    assert!(text.contains("layer     N 48, K 80; 5 FP8 tokens\n"), "{text}");
    assert!(text.contains("error     at most 0.00e0 ") && text.contains("verified  yes: all 240 elements "), "{text}");
    let report = report(here(), "--op linear --shape 5,48,80 --token-format fp8");
    assert_eq!((&report["token_format"], &report["verified"]), (&json!("fp8"), &json!(true)));
    let emulated = "run --op linear --shape 5,48,80 --token-format fp8 --backend emulated --arch sm_90a";
    let text = stdout(nvfp4(here(), emulated));
    assert!(text.contains("no fault") && text.contains("error     at most 0.00e0 "), "{text}");
    let refused = nvfp4(here(), &emulated.replace("sm_90a", "sm_120f"));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && error.contains("for sm_120f yet; take "), "{error}");
}

#[test]
fn emulated_gpu_computes_a_linear_layer() {
    let text = stdout(nvfp4(here(), "run --op linear --shape 3,80,144 --backend emulated"));
    assert!(text.contains("emulated on sm_90a, ") && text.contains("2 CTAs; no fault"), "{text}");
    assert!(text.contains("verified  yes: all 240 ") && !text.contains("GB/s"), "{text}");
    let timed =
        stdout(nvfp4(here(), "run --op linear --shape 3,80,144 --backend emulated --timed --gpu h200 --no-values"));
    assert!(timed.contains("predicted ") && timed.contains("verified  no: not checked"), "{timed}");
    for (arch, kernel) in [("sm_80", "linear_sm80"), ("sm_100f", "linear_sm80"), ("sm_120f", "linear_sm120")] {
        let text = stdout(nvfp4(here(), &format!("run --op linear --shape 3,80,144 --backend emulated --arch {arch}")));
        assert!(text.contains(&format!(", {kernel}\n")) && text.contains("verified  yes: all 240 "), "{text}");
    }
}

#[test]
fn nvfp4_tokens_are_supported() {
    let line = "run --op linear --shape 5,48,80 --token-format nvfp4 --backend cpu --repeat 1";
    let text = stdout(nvfp4(here(), line));
    assert!(
        text.contains("layer     N 48, K 80; 5 NVFP4 tokens\n") && text.contains("verified  yes: all 240 "),
        "{text}"
    );
    let report = report(here(), "--op linear --shape 5,48,80 --token-format nvfp4");
    assert_eq!((&report["token_format"], &report["input_scale"]), (&json!("nvfp4"), &json!(false)));
    let emulated = line.replace("cpu --repeat 1", "emulated --arch sm_100f");
    let text = stdout(nvfp4(here(), &emulated));
    assert!(text.contains(", moe_sm100\n") && text.contains("no fault"), "{text}");
    assert!(text.contains("verified  yes: all 240 "), "{text}");
    let refused = nvfp4(here(), &emulated.replace("sm_100f", "sm_90a"));
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let error = String::from_utf8(refused.stderr).unwrap();
    let says = "error: there is no linear layer with NVFP4 tokens for sm_90a yet; take 16-bit tokens or the CPU\n";
    assert_eq!(error, says);
}

#[test]
fn bad_input_is_refused_with_a_remedy() {
    for (line, text) in [
        (
            "--op linear --shape moe-1",
            "invalid shape \"moe-1\" of --op linear; expected M,N,K, for example --shape 16,",
        ),
        ("--op linear --shape 1,2", "expected M,N,K"),
        ("--op linear --shape 1,24,16", "N = 24 of a linear layer is not a multiple of 16"),
        ("--op linear --shape 1,16,8", "K = 8 of a linear layer is not a multiple of 16"),
        ("--op linear --shape 18446744073709551615,16,16", "the shape needs about"),
        ("--op linear --routing zipf", "--routing and --layer cannot be used with --op linear"),
        ("--weights x --tensor y", "--tensor needs --op linear"),
        ("--op linear --weights absent.safetensors --tensor y", "absent.safetensors: No such file"),
    ] {
        let output = nvfp4(here(), &format!("run --backend cpu {line}"));
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(text), "{line}: {error}");
    }
}

/// Returns a layer of four experts with attention and a router.
fn model() -> Tensors {
    let mut model = Tensors::default();
    let weight = |n: usize, k: usize, seed: usize| {
        let numbers: Vec<f32> = (0..n * k).map(|i| ((i * 37 + seed * 11) % 129) as f32 / 640.0 - 0.1).collect();
        f32s(&[n, k], &numbers)
    };
    for (seed, name) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
        model.set(format!("model.layers.2.self_attn.{name}.weight"), weight(48, 32, seed));
    }
    model.set("model.layers.2.self_attn.q_proj.bias", f32s(&[48], &[0.5; 48]));
    for expert in 0..4 {
        for (seed, (name, [n, k])) in
            [("gate_proj", [16, 32]), ("up_proj", [16, 32]), ("down_proj", [32, 16])].into_iter().enumerate()
        {
            model.set(format!("model.layers.2.mlp.experts.{expert}.{name}.weight"), weight(n, k, 3 * expert + seed));
        }
    }
    model.set("model.layers.2.mlp.gate.weight", weight(4, 32, 77));
    model
}

#[test]
fn layers_of_a_quantized_model_run_and_are_verified() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("in")).unwrap();
    model().write(&folder.join("in/model.safetensors"));
    let config = json!({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu",
        "hidden_size": 32});
    std::fs::write(folder.join("in/config.json"), config.to_string()).unwrap();
    for format in ["modelopt", "compressed-tensors"] {
        _ = std::fs::remove_dir_all(folder.join("out"));
        stdout(nvfp4(folder, &format!("quantize in out --format {format} --include _proj\\.weight$")));
        let moe = report(folder, "--op moe --weights out --layer 2 --tokens 64");
        for (key, value) in [
            ("shape", json!("out layer 2")),
            ("routing", json!("its router's")),
            ("experts", json!(4)),
            ("top_k", json!(2)),
            ("tokens", json!(64)),
            ("rows", json!(128)),
            ("verified", json!(true)),
        ] {
            assert_eq!(moe[key], value, "{format}: {key}");
        }
        let linear = report(folder, "--op linear --weights out --tensor model.layers.2.self_attn.q_proj");
        for (key, value) in
            [("m", json!(16)), ("n", json!(48)), ("k", json!(32)), ("bias", json!(true)), ("verified", json!(true))]
        {
            assert_eq!(linear[key], value, "{format}: {key}");
        }
    }
    for (line, text) in [
        ("--op moe --weights out --layer 2 --routing zipf", "a layer of a checkpoint has its own router"),
        ("--op moe --weights out --tensor x", "--tensor cannot be used with --op moe; use --layer"),
        ("--op moe --weights out --layer 7", "a feed-forward block of layer 7 is missing; the model has layers 2"),
        ("--op linear --weights out --layer 2", "--layer cannot be used with --op linear"),
        ("--op linear --weights out --tensor model.layers.2.mlp.gate", "gate.weight: its dtype is F32, not U8"),
    ] {
        let output = nvfp4(folder, &format!("run --backend cpu {line}"));
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(text), "{line}: {error}");
    }
}

/// Writes tokens `hidden` `[T, 32]` and returns them.
fn write_tokens(path: &Path, count: usize) -> Vec<f32> {
    // Exact in bf16.
    let numbers: Vec<f32> = (0..count * 32).map(|i| ((i * 29) % 64) as f32 / 16.0 - 2.0).collect();
    let bits: Vec<u8> = numbers.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    let mut tokens = Tensors::default();
    tokens.set("hidden", raw(Dtype::BF16, &[count, 32], &bits)).write(path);
    numbers
}

#[test]
fn tokens_of_a_file_give_an_output_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("in")).unwrap();
    model().write(&folder.join("in/model.safetensors"));
    let config =
        json!({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": true, "hidden_act": "silu"});
    std::fs::write(folder.join("in/config.json"), config.to_string()).unwrap();
    stdout(nvfp4(folder, "quantize in out --include _proj\\.weight$"));
    let numbers = write_tokens(&folder.join("x.safetensors"), 7);
    let files = "--weights out --activations x.safetensors --output y.safetensors";
    let linear = report(folder, &format!("--op linear --tensor model.layers.2.self_attn.q_proj {files}"));
    assert_eq!(
        (&linear["m"], &linear["input"], &linear["dtype"]),
        (&7.into(), &"x.safetensors".into(), &"bf16".into())
    );
    let used = linear["tensors"]["used"].as_array().unwrap();
    assert!(used.contains(&"model.layers.2.self_attn.q_proj.bias".into()), "{used:?}");
    let output = |shape: &[usize]| {
        let file = TensorFile::open(&folder.join("y.safetensors")).unwrap();
        let output = file.tensor("output").unwrap();
        assert_eq!((output.dtype, output.shape), (Dtype::BF16, shape));
        let numbers = output.numbers::<u16>();
        numbers.iter().map(|&bits| f64::from(half::bf16::from_bits(bits))).collect::<Vec<_>>()
    };
    // The product, from the weight's own numbers.
    let checkpoint = Checkpoint::open(&folder.join("out")).unwrap();
    let weight = checkpoint.quantized("model.layers.2.self_attn.q_proj").unwrap().matrix;
    for (index, got) in output(&[7, 48]).into_iter().enumerate() {
        let mut row = [0.0; 32];
        weight.dequantize_row(index % 48, &mut row);
        let token = &numbers[index / 48 * 32..][..32];
        let want = 0.5 + row.iter().zip(token).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
        assert!((got - want).abs() <= 0.005 * want.abs() + 1e-3, "element {index}: {got}, expected {want}");
    }
    let moe = report(folder, &format!("--op moe --layer 2 {files}"));
    assert_eq!((&moe["tokens"], &moe["verified"]), (&7.into(), &true.into()));
    let left = moe["tensors"]["left"].as_array().unwrap();
    assert!(left.contains(&"model.layers.2.self_attn.q_proj.weight".into()), "{left:?}");
    let first = output(&[7, 32]);
    assert!(first.iter().any(|&x| x != 0.0));
    // A token's output does not depend on the others.
    write_tokens(&folder.join("x.safetensors"), 3);
    report(folder, &format!("--op moe --layer 2 {files}"));
    assert_eq!(output(&[3, 32]), first[..3 * 32]);
    let text = stdout(nvfp4(folder, &format!("run --backend cpu --op moe --layer 2 {files} --repeat 1")));
    assert!(
        text.contains("used      ") && text.contains("mlp.experts.*.gate_proj") && text.contains("left      "),
        "{text}"
    );
}

#[test]
fn unusable_tokens_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut weight = Tensors::default();
    weight.set_nvfp4("m", nvfp4::checkpoint::Format::ModelOpt, [16, 32], 1).write(&folder.join("w.safetensors"));
    let refused = |content: Option<model_files::Content>, words: &str| {
        let mut tokens = Tensors::default();
        match content {
            Some(content) => tokens.set("hidden", content),
            None => tokens.set("tokens", f32s(&[1], &[0.0])),
        };
        tokens.write(&folder.join("x.safetensors"));
        let files = "--weights w.safetensors --activations x.safetensors --output y.safetensors";
        let output = nvfp4(folder, &format!("run --backend cpu --op linear --tensor m {files} --dtype f16"));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{words}: {error}");
        assert!(!folder.join("y.safetensors").exists());
    };
    refused(None, "x.safetensors: hidden: this tensor is missing; the file must contain hidden [T, H]");
    refused(Some(f32s(&[2, 16], &[0.0; 32])), "x.safetensors: hidden: elements per token");
    refused(Some(f32s(&[32], &[0.0; 32])), "x.safetensors: hidden: its shape is [32]");
    refused(Some(raw(Dtype::U8, &[1, 32], &[0; 32])), "x.safetensors: hidden: its dtype is U8");
    let mut large = vec![0.0; 64];
    large[35] = 1e6;
    refused(Some(f32s(&[2, 32], &large)), "hidden: element 3 of token 1 is 1000000, not a finite f16");
    let output =
        nvfp4(folder, "run --backend cpu --op linear --weights w.safetensors --tensor m --output w.safetensors");
    assert!(String::from_utf8(output.stderr).unwrap().contains("the output is also an input"));
}
