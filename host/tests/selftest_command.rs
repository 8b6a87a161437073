//! `nvfp4 selftest` on an emulated GPU: the emulator's driver library is found as `libcuda.so.1`, and kernels run as on
//! a GPU.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A machine with an emulated GPU: its driver, and the cache of its user.
struct Machine {
    folder: TempDir,
    card: &'static str,
}

impl Machine {
    fn new(card: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(fake_cuda::built(), folder.path().join("libcuda.so.1")).unwrap();
        Self { folder, card }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn nvfp4(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command.current_dir(self.path()).args(line.split_whitespace());
        command.env("LD_LIBRARY_PATH", self.path()).env("XDG_CACHE_HOME", self.path());
        command.env("PTX_EMULATOR_GPU", self.card).output().expect("the command was built")
    }

    /// Returns the output, and checks the exit code.
    fn stdout(&self, code: i32, line: &str) -> String {
        let output = self.nvfp4(line);
        assert_eq!(output.status.code(), Some(code), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the only verdict in the cache.
    fn verdict(&self) -> (String, Value) {
        let mut files: Vec<_> = fs::read_dir(self.path().join("nvfp4/selftest")).unwrap().collect();
        let file = files.pop().expect("a verdict").unwrap().path();
        assert!(files.is_empty(), "one verdict");
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        (name, serde_json::from_slice(&fs::read(file).unwrap()).unwrap())
    }
}

#[test]
fn passing_kernel_is_tested_once() {
    let machine = Machine::new("h200");
    let text = machine.stdout(0, "selftest router");
    assert!(text.starts_with("NVIDIA H200, compute capability 9.0, 132 SMs, driver "), "{text}");
    assert!(text.contains("\nrouter       passed, 7 parts (") && !text.contains("known"), "{text}");
    let (name, verdict) = machine.verdict();
    assert!(name.starts_with("router.NVIDIA-H200.") && name.ends_with(".json"), "{name}");
    assert_eq!(verdict["failed"], json!([]));
    assert_eq!(verdict["passed"].as_array().unwrap().len(), 7);

    assert!(machine.stdout(0, "selftest router").contains("router       passed, 7 parts (known)"));
    let again: Value = serde_json::from_str(&machine.stdout(0, "selftest router --again --json")).unwrap();
    assert_eq!((&again["new"], &again["subject"]), (&json!(true), &json!("router")));
    let known: Value = serde_json::from_str(&machine.stdout(0, "selftest router --json")).unwrap();
    assert_eq!((&known["new"], &known["card"]), (&json!(false), &json!("NVIDIA H200")));
}

#[test]
fn trap_fails_its_part_only_in_the_given_code() {
    let machine = Machine::new("h200");
    let ptx = nvfp4::kernels::ptx("router").unwrap();
    // The body of the entry begins after its directives.
    let at = ptx.find(".entry router(").unwrap();
    let body = at + ptx[at..].find("\n{").unwrap() + 2;
    fs::write(machine.path().join("trap.ptx"), [&ptx[..body], "\ntrap;", &ptx[body..]].concat()).unwrap();
    let text = machine.stdout(1, "selftest router --ptx trap.ptx");
    assert!(text.contains("router       FAILED, 0 of 7 parts passed"), "{text}");
    assert!(text.contains("\n    softmax: cuStreamSynchronize failed on CUDA device 0 (NVIDIA H200): "), "{text}");
    assert!(text.contains("\n    sigmoid: not tested, because 3 earlier parts ended their process"), "{text}");
    assert_eq!(machine.verdict().1["passed"], json!([]));

    // The built-in kernel still has no verdict.
    assert!(machine.stdout(0, "selftest router").contains("router       passed, 7 parts"));
}

#[test]
fn wrong_kernel_or_missing_device_is_refused() {
    let machine = Machine::new("h200");
    let output = machine.nvfp4("selftest gated_sm100");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(said, "error: gated_sm100 does not run on NVIDIA H200, compute capability 9.0\n");
    assert!(String::from_utf8(machine.nvfp4("selftest --device 3").stderr).unwrap().contains("there is no device 3"));
    let none =
        Command::new(env!("CARGO_BIN_EXE_nvfp4")).arg("selftest").env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert_eq!(none.status.code(), Some(3), "{none:?}");
}

#[test]
fn kernel_without_a_verdict_is_reported() {
    let machine = Machine::new("b200");
    let text = machine.stdout(0, "devices");
    assert!(text.contains("NVIDIA B200") && text.contains("gated_simt (sm_80)"), "{text}");
    assert!(text.contains("note: cuda:0: gated_sm100 was not tested on NVIDIA B200"), "{text}");
}
