//! `nvfp4 explain`: the plan of a layer, beside the launches that the emulated GPU runs.

use std::process::{Command, Output};

use serde_json::{Value, json};

fn nvfp4(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4")).args(line.split_whitespace()).output().expect("the command was built")
}

fn stdout(line: &str) -> String {
    let output = nvfp4(line);
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn document(line: &str) -> Value {
    serde_json::from_str(&stdout(line)).unwrap()
}

#[test]
fn plan_has_the_launches_that_run() {
    for (shape, run, tokens) in [
        ("layer-test-1", "--op moe --shape layer-test-1", 5),
        ("layer-test-2", "--op moe --shape layer-test-2", 40),
        ("48,80", "--op linear --shape 7,48,80", 7),
    ] {
        let plan = document(&format!("explain --shape {shape} --tokens {tokens} --gpu h200 --json"));
        let line = format!("run {run} --tokens {tokens} --backend emulated --arch sm_90a --verify off --json");
        let launches = plan["plans"][0]["launches"].as_array().unwrap();
        assert_eq!(json!(launches.len()), document(&line)["launches"], "{shape}");
    }
}

#[test]
fn plan_names_the_instances_that_it_chose_among() {
    let text = stdout("explain --shape qwen3-30b-a3b --tokens 1,4096 --gpu h100");
    assert!(text.starts_with("qwen3-30b-a3b on h100 (132 SMs), tokens: 1; 2 launches\n"), "{text}");
    assert!(text.contains("tokens: 4096; 5 launches\n") && text.contains("  or moe_plain_bf16_t128_narrow "), "{text}");
    let plan = document("explain --shape 4096,14336 --tokens 1 --dtype f16 --json");
    assert_eq!((&plan["schema_version"], &plan["gpu"], &plan["sms"]), (&json!(1), &json!("h200"), &json!(132)));
    let launch = &plan["plans"][0]["launches"][0];
    assert_eq!((&launch["entry"], &launch["cluster"]), (&json!("linear_mma8_f16_k2"), &json!(2)));
    assert_eq!(launch["candidates"][0]["entry"], launch["entry"]);
}

#[test]
fn what_has_no_plan_is_refused() {
    for (line, words) in [
        ("--tokens 0", "a call without tokens has no launches"),
        ("--shape 12,x", "expected N,K of a matrix"),
        ("--shape 12,16", "multiple"),
        ("--shape nothing", "layer `nothing` is neither"),
        ("--gpu a100 --token-format fp8", "no MoE layer with FP8 tokens for a100 yet"),
        ("--gpu a100 --shape 64,64 --token-format nvfp4", "no linear layer with NVFP4 tokens for a100 yet"),
    ] {
        let output = nvfp4(&format!("explain {line}"));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(words), "{line}: {error}");
    }
}
