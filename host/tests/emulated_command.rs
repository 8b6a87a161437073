//! `nvfp4 run --backend emulated`, run as a user runs it: a verified result with counters instead of rates.

use std::process::{Command, Output};

fn run(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    let arguments = ["run", "--shape", "group-test-1", "--backend", "emulated"];
    command.args(arguments).args(line.split_whitespace()).output().expect("the command was built")
}

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn report_has_counters_and_no_rate() {
    let text = stdout(run("--arch sm_80 --schedule worst"));
    assert!(text.contains("emulated on sm_80, 108 SMs, schedule worst, plain_simt"), "{text}");
    assert!(text.contains("no fault") && text.contains("verified  yes: all 45,056 elements"), "{text}");
    assert!(!text.contains("/s"), "{text}");
}

#[test]
fn json_has_counters_and_the_common_keys() {
    let report: serde_json::Value = serde_json::from_str(&stdout(run("--json"))).unwrap();
    assert_eq!(report["device"], "sm_100f, 148 SMs, schedule fair");
    assert_eq!(report["verified"], true);
    assert!(report["time_us"]["median"].as_f64().unwrap() > 0.0);
    assert!(report["tflops"].is_null() && report["gb_per_s"].is_null());
    // Two bytes per element, for 96 × 128 + 128 × 256 elements.
    assert_eq!(report["counters"]["total"]["bytes"]["global_store"], 2 * 45_056);
    assert!(report["counters"]["total"]["thread_instructions"].as_u64().unwrap() > 0);
}

#[test]
fn architecture_without_a_kernel_is_bad_input() {
    let output = run("--arch sm_75");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text, "error: no kernel runs on sm_75; choose one of sm_80, sm_90a, sm_100f, sm_120f\n");
}

#[test]
fn architecture_of_no_gpu_is_bad_input() {
    let output = run("--arch sm_999");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("error: sm_999 is the architecture of no GPU; choose one of sm_80, sm_86, "), "{text}");
}

#[test]
fn variant_is_computed_and_reported() {
    let report: serde_json::Value =
        serde_json::from_str(&stdout(run("--op gated --variant unfused,t64 --json"))).unwrap();
    assert_eq!((&report["variant"], &report["kernel"]), (&"t64,unfused".into(), &"plain_sm100".into()));
    assert_eq!(report["counters"]["kernel"], "plain_sm100_t64, silu_mul");
    assert_eq!((&report["launches"], &report["verified"]), (&3.into(), &true.into()));
    // Three launches: gate, up and their product.
    assert_eq!(report["counters"]["total"]["bytes"]["global_store"], 3 * 2 * 45_056);
    assert!(report["host_us"].is_null(), "no driver is called");
}

#[test]
fn unknown_variant_is_bad_input_and_lists_the_variants() {
    for (variant, text) in [
        (
            "t63",
            "expected a launch schedule (persistent, per-group, streams=1 to streams=128, unfused), graph, or a kernel",
        ),
        ("graph", "the emulator cannot capture launches"),
        ("gated_sm90", "gated_sm90 is for sm_90a and does not run on compute capability 10.0"),
        ("unfused", "the schedule unfused works only with --op gated"),
        ("t64_s2", "`t64_s2` is not an instance of plain_sm100; expected one of t8, "),
    ] {
        let output = run(&format!("--variant {variant}"));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8(output.stderr).unwrap().contains(text), "{variant}");
    }
}
