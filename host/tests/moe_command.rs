//! `nvfp4 run --op moe`, run as a user runs it: output and exit codes.

use std::process::{Command, Output};

fn nvfp4(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.args(line.split_whitespace()).output().expect("the command was built")
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn report(line: &str) -> serde_json::Value {
    serde_json::from_str(&stdout(nvfp4(&format!("run --backend cpu --json {line}")))).unwrap()
}

#[test]
fn built_in_layer_runs_and_is_verified() {
    let text = stdout(nvfp4("run --shape layer-test-7 --backend cpu --repeat 1"));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("layer-test-7 moe · gaussian, uniform routing, bf16 · cpu on "), "{text}");
    assert!(lines[0].ends_with(nvfp4::backend::cpu::Cpu::new().isa().name()), "{text}");
    assert_eq!(lines[1], "layer     H 160, I 48, 4 experts, top 2, a shared expert of I 112, silu");
    assert_eq!(lines[2], "step      9 tokens, 18 rows of 4 experts, at most 6 per expert");
    // 4 · 3 · 160 · 48 and 3 · 160 · 112 elements of 9/16 byte; 9 · 160 elements of 2 bytes, in and out.
    assert_eq!(lines[3], "bytes     87.8 kB, 82.1 kB of them weights of the experts in use and the shared expert");
    assert!(lines[4].starts_with("time      median ") && lines[5].starts_with("rate      "), "{text}");
    for stage in ["intermediate", "down projection", "shared expert's intermediate", "shared expert's down projection"]
    {
        assert!(lines.iter().any(|line| line.trim_start().starts_with(stage)), "{text}");
    }
    let checked = "verified  yes: all 7,632 elements within the bounds of f32 sums, the output bit for bit";
    assert_eq!(*lines.last().unwrap(), checked);
}

#[test]
fn json_reports_sizes_routing_and_stages() {
    let report = report("--op moe --shape layer-test-8 --dtype f16 --routing zipf --tokens 40 --seed 3 --repeat 1");
    for (key, value) in [
        ("op", "moe".into()),
        ("routing", "zipf".into()),
        ("dtype", "f16".into()),
        ("experts", 4.into()),
        ("named_experts", 16.into()),
        ("tokens", 40.into()),
        ("mismatches", 0.into()),
        ("first_mismatch", serde_json::Value::Null),
        ("same_bits", true.into()),
        ("verified", true.into()),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
    let rows = report["rows"].as_u64().unwrap();
    assert!((1..160).contains(&rows), "a part of the experts is elsewhere: {rows}");
    let checked: Vec<_> = report["stages"].as_array().unwrap().iter().map(|stage| stage["checked"].as_u64()).collect();
    assert_eq!(checked, [Some(rows * 80), Some(rows * 144), Some(40 * 144)]);
    assert!(report["time_us"]["median"].as_f64().unwrap() > 0.0);
}

#[test]
fn layer_has_the_activation_and_biases_of_its_shape() {
    let text = stdout(nvfp4("run --shape layer-test-10 --backend cpu --repeat 1"));
    assert!(text.contains("layer     H 112, I 144, 4 experts, top 2, gpt-oss with biases\n"), "{text}");
    let report = report("--shape layer-test-11 --repeat 1");
    for (key, value) in
        [("activation", "relu2".into()), ("biases", true.into()), ("verified", serde_json::Value::Bool(true))]
    {
        assert_eq!(report[key], value, "{key}");
    }
}

#[test]
fn fp8_tokens_have_separate_stages() {
    let text = stdout(nvfp4("run --shape layer-test-7 --token-format fp8 --backend cpu --repeat 1"));
    assert!(text.contains("step      9 FP8 tokens, 18 rows of 4 experts") && text.contains(", fp8\n"), "{text}");
    // 18 · (160 + 48) and 9 · (160 + 112) elements twice, and 9 · 160 output elements.
    assert!(text.contains("verified  yes: all 13,824 elements "), "{text}");
    let report = report("--shape layer-test-5 --token-format fp8 --repeat 1");
    assert_eq!((&report["token_format"], &report["verified"]), (&"fp8".into(), &true.into()));
    let stages: Vec<_> = report["stages"].as_array().unwrap().iter().map(|stage| stage["stage"].clone()).collect();
    assert_eq!(stages, ["quantized tokens", "intermediate", "quantized intermediate", "down projection", "output"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layer.json");
    let sizes = r#""hidden": 48, "intermediate": 32, "experts": 2, "top_k": 1, "tokens": 3"#;
    std::fs::write(&path, format!(r#"{{{sizes}, "token_format": "fp8"}}"#)).unwrap();
    let run = |more: &str| self::report(&format!("--op moe --shape {} --repeat 1 {more}", path.display()));
    assert_eq!(run("")["token_format"], "fp8");
    assert_eq!(run("--token-format 16-bit")["token_format"], "16-bit");
}

#[test]
fn partial_checks_do_not_claim_full_verification() {
    assert_eq!(report("--shape layer-test-9 --repeat 1")["verified"], true, "nothing to compute, nothing wrong");
    let sample = report("--shape layer-test-1 --verify sample --repeat 1");
    assert_eq!((&sample["verified"], &sample["stages"][0]["checked"]), (&false.into(), &4096.into()));
    assert_eq!(report("--shape layer-test-1 --verify off --repeat 1")["verified"], false);
    assert_eq!(report("--shape layer-test-5 --repeat 1 --input all-codes")["verified"], true);
}

#[test]
fn layer_in_a_file_is_found_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layers.json");
    let entry = |name: &str| {
        format!(r#"{{"name": "{name}", "hidden": 48, "intermediate": 32, "experts": 2, "top_k": 1, "tokens": 3}}"#)
    };
    std::fs::write(&path, format!("[{}, {}]", entry("a"), entry("b"))).unwrap();
    let run = |name: &str| nvfp4(&format!("run --op moe --shape {}{name} --backend cpu --repeat 1", path.display()));
    assert!(stdout(run("#b")).contains("H 48, I 32, 2 experts, top 1"));
    let unnamed = run("");
    assert_eq!(unnamed.status.code(), Some(2));
    assert!(String::from_utf8(unnamed.stderr).unwrap().contains("the file contains 2 layers; select one with "));
}

#[test]
fn bad_input_is_refused_with_a_remedy() {
    for (line, text) in [
        ("--op moe --shape moe-1", "layer `moe-1` is neither a .json file nor one of deepseek-v3, "),
        ("--op gated --shape layer-test-1", "shape `layer-test-1` is neither"),
        ("--op moe --shape layer-test-1 --output absent/out.safetensors", "create the folder absent first"),
        ("--op moe --activations x.safetensors", "--weights <CHECKPOINT>"),
        ("--shape group-1 --routing zipf", "--routing needs --op moe"),
        ("--shape group-1 --tokens 3", "--tokens needs --op moe or --weights"),
        ("--op moe --routing skewed", "[possible values: uniform, zipf]"),
        ("--op moe --token-format fp4", "[possible values: 16-bit, fp8, nvfp4]"),
        ("--op moe --token-format nvfp4-per-batch", "one global scale for a batch"),
        ("--shape group-1 --token-format fp8", "--token-format needs --op moe or --op linear"),
        ("--op moe --tokens 18446744073709551615", "the shape needs about"),
    ] {
        let output = nvfp4(&format!("run --backend cpu {line}"));
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(text), "{line}: {error}");
    }
}

#[test]
fn layers_and_group_shapes_are_listed() {
    let text = stdout(nvfp4("shapes"));
    for name in ["decode-16", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-r1-rank", "layer-test-9"] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(name)), "{name}: {text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "more than 100 columns: {line}");
    }
}

#[test]
fn too_large_layer_is_refused_with_a_rank_that_fits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.json");
    let layer =
        r#"{"name": "large", "hidden": 16384, "intermediate": 32768, "experts": 1024, "top_k": 1, "tokens": 1}"#;
    std::fs::write(&path, layer).unwrap();
    let output = nvfp4(&format!("run --op moe --backend cpu --shape {}", path.display()));
    let error = String::from_utf8(output.stderr).unwrap();
    // A rank of 1024 needs 6 GB.
    let rank = format!("run the part of one GPU, --shape {}@ep", path.display());
    assert!(error.contains("the shape needs about 1.9 TB of memory") && error.contains(&rank), "{error}");
}

#[test]
fn part_of_a_built_in_layer_needs_no_op() {
    let text = stdout(nvfp4("run --shape layer-test-8@ep2 --backend cpu --repeat 1"));
    assert!(text.starts_with("layer-test-8@ep2 moe · ") && text.contains("2 experts of 16"), "{text}");
}

#[test]
fn report_says_that_no_routed_expert_was_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank.json");
    let layer = r#"{"name": "rank", "hidden": 32, "intermediate": 16, "experts": 1, "named_experts": 1024, "top_k": 1, "tokens": 1, "shared_intermediate": 16}"#;
    std::fs::write(&path, layer).unwrap();
    let text = stdout(nvfp4(&format!("run --op moe --backend cpu --repeat 1 --shape {}", path.display())));
    assert!(text.contains("step      1 token, 0 rows of 0 experts, at most 0 per expert"), "{text}");
    assert!(text.contains("of them weights of the shared expert\n"), "{text}");
    assert!(text.contains("; no token names an expert of this layer, so no routed expert was checked\n"), "{text}");
}

#[test]
fn emulated_gpu_computes_a_layer_and_reports_no_rate() {
    let text = stdout(nvfp4("run --shape layer-test-8 --backend emulated --tokens 2"));
    assert!(text.contains("emulated on sm_90a, ") && text.contains("no fault"), "{text}");
    assert!(text.contains("verified  yes: all ") && !text.contains("/s"), "{text}");
    let text = stdout(nvfp4("run --shape layer-test-8 --backend emulated --tokens 2 --arch sm_80"));
    assert!(text.contains("emulated on sm_80, ") && text.contains("moe_sm80") && text.contains("no fault"), "{text}");
}
