//! Commands that read and write model files, run as a user runs them: checks the results, and that bad input gives one
//! clear line and exit code 2 and destroys nothing.

use std::path::Path;
use std::process::{Command, Output};

use half::{bf16, f16};
use model_files::{Tensors, f32s, i64s, raw};
use nvfp4::checkpoint::{Checkpoint, Dtype, Format, INDEX_NAME, TensorFile};
use nvfp4::quantize::{global_scale, quantize_with};

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const BLOCK: &str = "model.layers.0.mlp";
/// Content of the output file before a command that fails.
const PRECIOUS: &[u8] = b"precious";

fn nvfp4(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.current_dir(folder).args(line.split_whitespace()).output().expect("the command was built")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the one line on stderr of a command that must fail.
fn refusal(output: &Output) -> String {
    let line = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "one line: {line:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    line
}

/// Varied numbers, exact in f16 and bf16.
fn numbers(count: usize, seed: usize, unit: f32) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 129) as f32 * unit - 64.0 * unit).collect()
}

/// Returns a model of one layer with two experts in f32, f16 and bf16. Up is ten times gate, and two tensors are not
/// quantized.
fn float_model() -> Tensors {
    let mut tensors = Tensors::default();
    for expert in 0..2 {
        let weight = |name| format!("{BLOCK}.experts.{expert}.{name}.weight");
        let [gate, up, down] = [0.25, 2.5, 0.5].map(|unit| numbers(16 * 32, expert, unit));
        let bits = |numbers: &[f32], bits: fn(f32) -> u16| -> Vec<u8> {
            numbers.iter().flat_map(|&x| bits(x).to_le_bytes()).collect()
        };
        tensors
            .set(weight("gate_proj"), raw(Dtype::F16, &[16, 32], &bits(&gate, |x| f16::from_f32(x).to_bits())))
            .set(weight("up_proj"), f32s(&[16, 32], &up))
            .set(weight("down_proj"), raw(Dtype::BF16, &[32, 16], &bits(&down, |x| bf16::from_f32(x).to_bits())));
    }
    tensors.set("model.norm.weight", f32s(&[3], &[f32::NAN, -0.0, f32::from_bits(1)]));
    tensors.set("model.embed_tokens.weight", raw(Dtype::F16, &[5, 3], &[0xA5; 30]));
    tensors
}

#[test]
fn quantized_model_keeps_other_tensors_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = float_model().write(&folder.join("in.safetensors"));
    for format in [Format::ModelOpt, Format::CompressedTensors] {
        let table =
            stdout(&nvfp4(folder, &format!("quantize in.safetensors out.safetensors --format {}", format.name())));
        assert!(table.contains("6 tensors quantized, 2 copied"), "{table}");
        let (before, after) =
            (TensorFile::open(&model).unwrap(), Checkpoint::open(&folder.join("out.safetensors")).unwrap());
        for name in ["model.norm.weight", "model.embed_tokens.weight"] {
            let (before, after) = (before.tensor(name).unwrap(), after.tensor(name).unwrap());
            assert_eq!((before.dtype, before.shape, before.data), (after.dtype, after.shape, after.data));
        }
        for expert in 0..2 {
            let [gate, up, down] = [0.25, 2.5, 0.5].map(|unit| numbers(16 * 32, expert, unit));
            // Merged projections share the larger global scale.
            let fused = global_scale(&up).unwrap();
            for (name, numbers, n, global) in
                [(0, &gate, 16, fused), (1, &up, 16, fused), (2, &down, 32, global_scale(&down).unwrap())]
            {
                let found = after.quantized(&format!("{BLOCK}.experts.{expert}.{}", NAMES[name])).unwrap();
                let global = match format {
                    Format::ModelOpt => global,
                    Format::CompressedTensors => global.recip().recip(),
                };
                assert_eq!(found.format, format);
                assert_eq!(found.matrix, quantize_with(numbers, n, 512 / n, global).unwrap(), "{}", NAMES[name]);
            }
        }
    }
}

#[test]
fn file_metadata_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let weight = numbers(16 * 16, 0, 1.0);
    let bytes: Vec<u8> = weight.iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![16, 16], &bytes).unwrap();
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let path = folder.path().join("in.safetensors");
    safetensors::serialize_to_file([("a.w1.weight", view)], Some(metadata.clone()), &path).unwrap();
    stdout(&nvfp4(folder.path(), "quantize in.safetensors out.safetensors"));
    assert_eq!(TensorFile::open(&folder.path().join("out.safetensors")).unwrap().metadata(), Some(&metadata));
}

#[test]
fn sharded_model_stays_sharded() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("in")).unwrap();
    let model = float_model();
    model.write(&folder.join("in.safetensors"));
    // Gate and up are in different files but share a global scale.
    model.write_sharded(&folder.join("in"), 3);
    stdout(&nvfp4(folder, "quantize in.safetensors one.safetensors"));
    for (input, output) in [("in", "out"), (&*format!("in/{INDEX_NAME}"), "from-index")] {
        stdout(&nvfp4(folder, &format!("quantize {input} {output}")));
        let [one, sharded] = ["one.safetensors", output].map(|name| Checkpoint::open(&folder.join(name)).unwrap());
        assert_eq!(sharded.files().len(), 3);
        assert!(folder.join(output).join(INDEX_NAME).exists());
        assert_eq!(one.names().collect::<Vec<_>>(), sharded.names().collect::<Vec<_>>());
        for name in one.names() {
            assert_eq!(one.tensor(name).unwrap().data, sharded.tensor(name).unwrap().data, "{name}");
        }
    }
}

#[test]
fn quantized_model_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    float_model().write(&folder.join("in.safetensors"));
    stdout(&nvfp4(folder, "quantize in.safetensors w.safetensors"));
    let mut tensors = Tensors::default();
    tensors.set("hidden", f32s(&[5, 32], &numbers(160, 0, 0.001))).set("group_sizes", i64s(&[5, 0]));
    tensors.write(&folder.join("a.safetensors"));
    let line = "run --weights w.safetensors --layer 0 --activations a.safetensors --output o.safetensors --json";
    let json: serde_json::Value = serde_json::from_str(&stdout(&nvfp4(folder, line))).unwrap();
    assert_eq!((&json["verified"], &json["groups"][1]["m"]), (&true.into(), &0.into()), "{json}");
    let output = TensorFile::open(&folder.join("o.safetensors")).unwrap();
    assert_eq!(output.tensor("output").unwrap().shape, [5, 16]);
}

#[test]
fn inspect_lists_weights_and_every_problem() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, 12).set("model.norm.weight", f32s(&[1], &[1.0]));
    tensors.write(&folder.join("m.safetensors"));
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&nvfp4(folder, "inspect m.safetensors --json"))).unwrap();
    let weights = json["weights"].as_array().unwrap();
    assert_eq!((weights.len(), &json["problems"]), (3, &serde_json::json!([])), "{json}");
    let gate = weights.iter().find(|weight| weight["module"] == format!("{BLOCK}.experts.*.gate_proj")).unwrap();
    assert_eq!(["count", "n", "k"].map(|key| gate[key].as_u64().unwrap()), [12, 16, 32]);
    assert_eq!(gate["global_scales"], serde_json::json!({"min": 0.25, "max": 0.25}));
    assert_eq!(gate["format"], "modelopt");
    assert_eq!((&json["schema_version"], &gate["runs"]), (&3.into(), &serde_json::json!(["gated", "linear"])));

    let expert = |number: usize, name: &str| format!("{BLOCK}.experts.{number}.{name}");
    tensors.remove(&expert(1, "gate_proj.weight_scale")).set(expert(2, "up_proj.weight_scale_2"), f32s(&[], &[-1.0]));
    tensors.set_nvfp4(&expert(3, "gate_proj"), Format::ModelOpt, [24, 32], 0);
    tensors.set(expert(4, "down_proj.weight"), f32s(&[32, 16], &[0.0; 512]));
    for suffix in [".weight", ".weight_scale", ".weight_scale_2", ".input_scale"] {
        tensors.remove(&expert(5, &format!("up_proj{suffix}")));
    }
    tensors.write(&folder.join("m.safetensors"));
    let output = nvfp4(folder, "inspect m.safetensors");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    for words in [
        "experts.1.gate_proj.weight_scale: this tensor is missing",
        "experts.2.up_proj.weight_scale_2: global scale -1 must be",
        "experts.3.up_proj: its shape is [16, 32] but",
        "experts.4.down_proj.weight: its dtype is F32, not U8",
        "experts.5.up_proj.weight: this tensor is missing",
    ] {
        assert_eq!(text.matches(words).count(), 1, "{words}: {text}");
    }
    assert!(text.contains("problems: 5\n"), "{text}");
    let json = nvfp4(folder, "inspect m.safetensors --json").stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let problems = json["problems"].as_array().unwrap();
    let count = |code: &str| problems.iter().filter(|problem| problem["code"] == code).count();
    assert_eq!(["missing", "global-scale", "unequal-shapes", "dtype"].map(count), [2, 1, 1, 1], "{problems:#?}");
    assert!(problems.iter().all(|problem| problem["severity"] == "error" && problem["message"].is_string()));
}

#[test]
fn inspect_lists_weights_that_do_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, 2);
    tensors.set(format!("{BLOCK}.experts.1.up_proj.weight_scale_2"), f32s(&[], &[0.5]));
    tensors.set("model.layers.1.mlp.gate_proj.weight", raw(Dtype::BF16, &[8, 16], &[0; 256]));
    tensors.set("model.layers.1.self_attn.o_proj.weight", raw(Dtype::F8_E4M3, &[8, 16], &[0; 128]));
    tensors.set("model.layers.1.mlp.\u{202e}w1.weight", raw(Dtype::I32, &[1], &[0; 4]));
    tensors.write(&folder.join("m.safetensors"));
    let text = stdout(&nvfp4(folder, "inspect m.safetensors"));
    for words in ["no problems", "warnings: 1", "[unequal-global-scales]", "BF16", "FP8", "o_proj"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains('\u{202e}'), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&nvfp4(folder, "inspect m.safetensors --json"))).unwrap();
    assert_eq!(json["problems"][0]["severity"], "warning");
    assert_eq!(json["others"].as_array().unwrap().len(), 2, "{json}");
    assert_eq!(json["others"][0]["type"], "BF16");
}

#[test]
fn run_reports_the_computed_layer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, 2).write(&folder.join("m.safetensors"));
    let run = "run --backend cpu --weights m.safetensors --layer 0 --repeat 1 --op";
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&nvfp4(folder, &format!("{run} plain --json")))).unwrap();
    assert_eq!(
        (&json["op"], &json["modules"]),
        (&"plain".into(), &serde_json::json!([format!("{BLOCK}.experts.*.down_proj")]))
    );
    let text = stdout(&nvfp4(folder, &format!("{run} gated")));
    assert!(text.contains(&format!("weights   {BLOCK}.experts.*.gate_proj, {BLOCK}.experts.*.up_proj")), "{text}");
    assert!(text.contains("verified  yes"), "{text}");
    for (name, words) in [("bias", "this bias is not computed"), ("pre_quant_scale", "(NVFP4_AWQ) is not computed")] {
        let mut tensors = tensors.clone();
        tensors.set(format!("{BLOCK}.experts.1.up_proj.{name}"), f32s(&[16], &[0.0; 16]));
        tensors.write(&folder.join("m.safetensors"));
        let message = refusal(&nvfp4(folder, &format!("{run} gated --output o.safetensors")));
        assert!(message.contains(&format!("experts.1.up_proj.{name}: ")) && message.contains(words), "{message}");
        assert!(!folder.join("o.safetensors").exists());
    }
}

#[test]
fn shared_expert_in_bf16_and_fp8_is_added() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let shared = format!("{BLOCK}.shared_expert");
    let config = serde_json::json!({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": true,
        "hidden_act": "silu", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",
        "ignore": ["*shared_expert*"]}});
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, 2);
    tensors.set(format!("{BLOCK}.gate.weight"), f32s(&[2, 32], &numbers(64, 3, 0.25)));
    let run = "run --op moe --backend cpu --weights . --layer 0 --tokens 3 --repeat 1";
    let mut output = |code: Option<u8>| {
        if let Some(code) = code {
            let bytes = |size: usize| [0x3C, code].repeat(size);
            tensors
                .set(format!("{shared}.gate_proj.weight"), raw(Dtype::BF16, &[32, 32], &bytes(1024)))
                .set(format!("{shared}.up_proj.weight"), raw(Dtype::BF16, &[32, 32], &bytes(1024)))
                .set(format!("{shared}.down_proj.weight"), raw(Dtype::F8_E4M3, &[32, 32], &[code; 1024]))
                .set(format!("{shared}.down_proj.weight_scale"), f32s(&[32, 1], &[0.5; 32]));
        }
        tensors.write(&folder.join("model.safetensors"));
        let report: serde_json::Value =
            serde_json::from_str(&stdout(&nvfp4(folder, &format!("{run} --json --output out.safetensors")))).unwrap();
        assert_eq!(report["verified"], true);
        let output = std::fs::read(folder.join("out.safetensors")).unwrap();
        std::fs::remove_file(folder.join("out.safetensors")).unwrap();
        (output, report["around"].clone())
    };
    let (alone, around) = output(None);
    assert_eq!(around, serde_json::Value::Null);
    let (with_zeros, _) = output(Some(0));
    assert!(with_zeros == alone, "a shared expert of zeros adds nothing");
    let (with_shared, around) = output(Some(0x3F));
    assert!(with_shared != alone);
    let forms = NAMES.map(|name| (format!("{shared}.{name}"), if name == "down_proj" { "FP8" } else { "BF16" }));
    let forms: serde_json::Value =
        forms.into_iter().map(|(module, form)| (module, serde_json::Value::from(form))).collect();
    assert_eq!((&around["forms_on_host"], &around["branch_on_host"]), (&forms, &true.into()));
    let text = stdout(&nvfp4(folder, run));
    let line = "around    a branch beside the experts, 32 → 32 → 32 with silu, on the host (BF16, FP8). ";
    assert!(text.contains(line), "{text}");
    let text = stdout(&nvfp4(folder, "inspect model.safetensors"));
    assert!(text.contains("shared_expert.down_proj\n  1 × [32, 32] FP8; computed by moe\n"), "{text}");
    let text = stdout(&nvfp4(folder, "doctor . --backend nvfp4"));
    assert!(text.ends_with("nvfp4: serves it\n"), "{text}");
}

#[test]
fn hints_appear_once_and_control_characters_are_escaped() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for line in ["run --layer 0 --weights Qwen/Qwen3-30B-A3B", "quantize Qwen/Qwen3-30B-A3B out"] {
        let message = refusal(&nvfp4(folder, line));
        assert_eq!(message.matches("hf download Qwen/Qwen3-30B-A3B").count(), 1, "{message}");
    }
    let message = refusal(&nvfp4(folder, "run --layer 0 --weights absent.safetensors"));
    assert_eq!(message.matches("No such file").count(), 1, "{message}");
    let name = "\u{1b}[31m\u{7}.safetensors";
    std::fs::write(folder.join(name), b"version https://git-lfs.github.com/spec/v1\n").unwrap();
    let message = refusal(&nvfp4(folder, &format!("run --layer 0 --weights {name}")));
    assert!(message.contains(r"\u{1b}[31m\u{7}.safetensors: the file is a Git-LFS pointer"), "{message}");
    let output = nvfp4(folder, &format!("inspect {name}"));
    assert!(!output.stdout.contains(&0x1B) && output.status.code() == Some(2), "{output:?}");
}

#[cfg(unix)]
#[test]
fn leftover_of_a_killed_run_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join(".o.safetensors.99-0.partial"), "half").unwrap();
    let output = nvfp4(folder, "run --backend cpu --shape dual-test-2 --repeat 1 --output o.safetensors --json");
    // The groups of the shape may differ in N; the note appears before this is checked.
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(".o.safetensors.99-0.partial is left over from a killed run"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn run_ended_by_a_signal_leaves_no_output() {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let shapes = tempfile::tempdir().unwrap();
    let shape = shapes.path().join("shape.json");
    std::fs::write(&shape, r#"{"op": "plain", "groups": [[64, 512, 512]]}"#).unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let shape = shape.display();
        let line = format!("run --backend cpu --shape {shape} --repeat 1000000 --verify off --output o.safetensors");
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        // SAFETY: `signal` is async-signal-safe, so it may be called between fork and exec. It undoes the ignored state
        // that `nohup` or a background shell sets.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut child = command.current_dir(folder).args(line.split(' ')).spawn().unwrap();
        while std::fs::read_dir(folder).unwrap().count() == 0 {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it wrote");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // SAFETY: the child was not waited for, so its process id is still valid.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0, "signal {signal}");
    }
}

#[test]
fn model_changed_during_the_run_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    let path = tensors.set_experts(BLOCK, NAMES, Format::ModelOpt, 2).write(&folder.join("m.safetensors"));
    let line = "run --backend cpu --weights m.safetensors --layer 0 --repeat 20000 --output o.safetensors";
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.current_dir(folder).args(line.split(' ')).stdout(std::process::Stdio::null());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    while child.try_wait().unwrap().is_none() {
        let now = std::time::SystemTime::now();
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(now).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let message = refusal(&output);
    assert!(message.contains("m.safetensors: the file was changed while it was read"), "{message}");
    assert!(!folder.join("o.safetensors").exists());
}

#[test]
fn command_prints_help_and_version() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let version = stdout(&nvfp4(folder, "--version"));
    assert!(version.starts_with("nvfp4 ") && version.contains("(features: cli, cuda, emulated, kernels)"), "{version}");
    let script = stdout(&nvfp4(folder, "completions bash"));
    for names in ["gated plain", "f16 bf16", "public-dual public-group gaussian all-codes", "decode-1 ", "fair worst"] {
        assert!(script.contains(names), "{names}");
    }
    stdout(&nvfp4(folder, "man ."));
    let page = std::fs::read_to_string(folder.join("nvfp4-inspect.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("schema_version"), "{page}");
    assert!(["nvfp4.1", "nvfp4-run.1", "nvfp4-quantize.1"].iter().all(|name| folder.join(name).is_file()));
    assert!(refusal(&nvfp4(folder, "man no/such")).contains("no/such"));
}

#[test]
fn inspect_reports_files_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut tensors = Tensors::default();
    tensors.set_experts(BLOCK, NAMES, Format::CompressedTensors, 1).write_sharded(folder, 4);
    let shards: Vec<_> = Checkpoint::open(folder).unwrap().files().iter().map(|file| file.path().to_owned()).collect();
    std::fs::remove_file(&shards[0]).unwrap();
    std::fs::write(&shards[1], b"not a model").unwrap();
    let output = nvfp4(folder, "inspect . --json");
    assert_eq!(output.status.code(), Some(2));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let problems = json["problems"].as_array().unwrap().iter();
    let problems: Vec<_> = problems.map(|problem| problem["message"].as_str().unwrap()).collect();
    for words in
        ["00001-of-00004.safetensors: No such file", "00002-of-00004.safetensors: not a valid safetensors file"]
    {
        assert_eq!(problems.iter().filter(|line| line.contains(words)).count(), 1, "{words}: {problems:#?}");
    }
}

/// Runs `line`, which writes to `out.safetensors` and must fail; returns its message. The old file must remain.
fn refusal_to_write(folder: &Path, line: &str) -> String {
    std::fs::write(folder.join("out.safetensors"), PRECIOUS).unwrap();
    let before = std::fs::read_dir(folder).unwrap().count();
    let message = refusal(&nvfp4(folder, line));
    assert_eq!(std::fs::read(folder.join("out.safetensors")).unwrap(), PRECIOUS, "{line}");
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), before, "no rubbish is left by {line}");
    message
}

#[test]
fn failed_quantization_keeps_the_old_output() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let whole = float_model().to_bytes();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    write("cut.safetensors", &whole[..whole.len() - 1]);
    write("garbage.safetensors", &[0xFF; 100]);
    write("empty.safetensors", b"");
    let with = |name: &str, weight: &str, content| {
        float_model().set(format!("{BLOCK}.experts.1.{weight}"), content).write(&folder.join(name));
    };
    with("k24.safetensors", "up_proj.weight", f32s(&[16, 24], &[1.0; 384]));
    with("n15.safetensors", "up_proj.weight", f32s(&[15, 16], &[1.0; 240]));
    with("nan.safetensors", "up_proj.weight", f32s(&[16, 32], &[[1.0; 511].as_slice(), &[f32::NAN]].concat()));
    with("taken.safetensors", "up_proj.weight_scale", f32s(&[1], &[1.0]));
    for (input, words) in [
        ("cut", "cut.safetensors: not a valid safetensors file: tensor"),
        ("garbage", "garbage.safetensors: not a valid safetensors file: its header claims"),
        ("empty", "empty.safetensors: not a valid safetensors file: the file is truncated within its header"),
        ("absent", "absent.safetensors: No such file"),
        ("k24", "k24.safetensors: model.layers.0.mlp.experts.1.up_proj.weight: K = 24 is not a multiple of 16"),
        ("n15", "n15.safetensors: model.layers.0.mlp.experts.1.up_proj.weight: N = 15 is not"),
        ("nan", "nan.safetensors: model.layers.0.mlp.experts.1.up_proj.weight: element 511 is NaN"),
        ("taken", "experts.1.up_proj.weight_scale: two tensors would have this name"),
    ] {
        let message = refusal_to_write(folder, &format!("quantize {input}.safetensors out.safetensors"));
        assert!(message.contains(words), "{words}: {message}");
    }
    float_model().write(&folder.join("in.safetensors"));
    let nothing = refusal_to_write(folder, "quantize in.safetensors out.safetensors --include nothing");
    assert!(nothing.contains("nothing to quantize"), "{nothing}");
}

#[test]
fn unwritable_outputs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    float_model().write(&folder.join("in.safetensors"));
    for name in ["sharded", "full", "full/something"] {
        std::fs::create_dir(folder.join(name)).unwrap();
    }
    float_model().write_sharded(&folder.join("sharded"), 2);
    for (line, words) in [
        ("quantize in.safetensors in.safetensors", "in.safetensors: the output is also an input"),
        ("quantize in.safetensors ./sharded/../in.safetensors", "the output is also an input"),
        ("quantize in.safetensors no/such/out.safetensors", "no/such/out.safetensors: No such file"),
        ("quantize in.safetensors full", "full: the path is a folder, not a regular file"),
        ("quantize in.safetensors /dev/null", "/dev/null: the path exists and is not a regular file"),
        ("quantize sharded full", "full: the path already exists; give the path of a new or an empty folder"),
        ("quantize sharded in.safetensors", "in.safetensors: the path already exists"),
        ("run --shape dual-test-2 --output no/such/out.safetensors", "no/such/out.safetensors: No such file"),
    ] {
        let message = refusal_to_write(folder, line);
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(TensorFile::open(&folder.join("in.safetensors")).is_ok());
}

#[test]
fn bad_model_or_activations_stop_a_run_early() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut model = Tensors::default();
    model.set_experts(BLOCK, NAMES, Format::ModelOpt, 1).write(&folder.join("good.safetensors"));
    let gate = format!("{BLOCK}.experts.0.gate_proj");
    model.clone().remove(&format!("{gate}.weight_scale")).write(&folder.join("no-scale.safetensors"));
    model.set(format!("{gate}.weight_scale"), raw(Dtype::F8_E4M3, &[16, 2], &[0x7F; 32]));
    model.write(&folder.join("nan-scale.safetensors"));
    float_model().write(&folder.join("float.safetensors"));
    let mut activations = Tensors::default();
    activations.set("hidden", f32s(&[2, 16], &[1.0; 32])).set("group_sizes", i64s(&[2]));
    activations.write(&folder.join("k16.safetensors"));
    activations.set("hidden", f32s(&[2, 32], &[1.0; 64])).set("group_sizes", i64s(&[1]));
    activations.write(&folder.join("sum.safetensors"));
    std::fs::write(folder.join("nonsense.json"), r#"{"op": "gated"}"#).unwrap();
    let huge = r#"{"name": "huge", "op": "gated", "groups": [[9223372036854775807, 8, 16]]}"#;
    std::fs::write(folder.join("huge.json"), huge).unwrap();
    for (arguments, words) in [
        (
            "--weights good.safetensors --layer 1",
            "good.safetensors: a feed-forward block of layer 1 is missing; the model has layers 0",
        ),
        ("--shape nonsense.json", "nonsense.json: missing field `groups`"),
        ("--shape huge.json", "huge.json: shape `huge`: group 0: the product of the sizes exceeds"),
        ("--weights absent.safetensors --layer 0", "absent.safetensors: No such file"),
        ("--weights no-scale.safetensors --layer 0", "gate_proj.weight_scale: this tensor is missing"),
        ("--weights nan-scale.safetensors --layer 0", "gate_proj.weight_scale: scale 0x7f at row 0, block 0 is NaN"),
        (
            "--weights float.safetensors --layer 0",
            "gate_proj.weight: its dtype is F16, but only NVFP4 weights run; quantize the model with `nvfp4 quantize`",
        ),
        (
            "--weights good.safetensors --layer 0 --activations k16.safetensors",
            "K of the activations: got 16, expected 32",
        ),
        ("--weights good.safetensors --layer 0 --activations sum.safetensors", "group_sizes: sum of the group sizes"),
        (
            "--weights good.safetensors --layer 0 --activations good.safetensors",
            "good.safetensors: hidden: this tensor is missing",
        ),
    ] {
        let message = refusal_to_write(folder, &format!("run {arguments} --output out.safetensors"));
        assert!(message.contains(words), "{words}: {message}");
    }
    for output in ["good.safetensors", "./good.safetensors"] {
        let message = refusal(&nvfp4(folder, &format!("run --weights good.safetensors --layer 0 --output {output}")));
        assert!(message.contains("the output is also an input"), "{message}");
        assert!(TensorFile::open(&folder.join(output)).unwrap().tensor(&format!("{gate}.weight")).is_some());
    }
}
