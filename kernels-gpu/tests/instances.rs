//! An instance that does not fit the hardware is an error of `cargo check`, at its own line of the list.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A copy of this crate, whose lines can be replaced.
struct Copy {
    folder: PathBuf,
    crate_folder: &'static Path,
}

impl Copy {
    fn new() -> Self {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("copy");
        let _ = fs::remove_dir_all(&folder);
        copy_folder(&crate_folder.join("src"), &folder.join("src"));
        fs::copy(crate_folder.join("../Cargo.lock"), folder.join("Cargo.lock")).unwrap();
        let manifest = fs::read_to_string(crate_folder.join("Cargo.toml")).unwrap();
        let manifest = manifest.replace("repository.workspace = true\n", ""); // The copy has no workspace.
        let crates = crate_folder.parent().unwrap().join("crates");
        fs::write(folder.join("Cargo.toml"), manifest.replace("../crates", crates.to_str().unwrap())).unwrap();
        Self { folder, crate_folder }
    }

    /// Checks the crate as the host compiles it, without features, with a line of a kernel's ABI replaced. Returns what the
    /// compiler says if it refuses, and the number of the line.
    fn check(&self, kernel: &str, line: &str, replaced: &str) -> (Result<(), String>, usize) {
        let abi = Path::new("src").join(kernel).join("abi.rs");
        let text = fs::read_to_string(self.crate_folder.join(&abi)).unwrap();
        let number = text.lines().position(|of_text| of_text.trim() == line).expect("the line is in the list") + 1;
        fs::write(self.folder.join(&abi), text.replace(line, replaced)).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        // A target folder beside the copy, so that dependencies are compiled once.
        cargo.args(["check", "--quiet", "--target-dir"]).arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("target"));
        let output = cargo.current_dir(&self.folder).output().unwrap();
        fs::write(self.folder.join(&abi), text).unwrap();
        (output.status.success().then_some(()).ok_or_else(|| String::from_utf8(output.stderr).unwrap()), number)
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn oversized_instance_is_an_error_at_its_line() {
    let copy = Copy::new();
    for (kernel, line, refused) in [
        (
            "tcgen05/gated_sm100",
            "gated_sm100_t64 = gated(64).stages(4);",
            &[
                ("gated(64).stages(5)", "the stages do not fit in shared memory"),
                ("gated(224).stages(1)", "accumulators and scales do not fit in tensor memory"),
                ("gated(24).pair().stages(1)", "the tensor core's N must be a multiple of 8, or of 16 for a pair"),
                ("gated(16).tma_store().stages(4)", "with stores by tensor map, a tile's tokens must be a multiple"),
                ("gated(64).stages(0)", "a pipeline needs at least 1 stage"),
                ("gated(64).serial().pair().stages(1)", "serial roles require a single CTA"),
            ][..],
        ),
        (
            "mma_sync/gated_sm120",
            "gated_sm120_t64 = gated(64).stages(3);",
            &[
                ("gated(64).stages(4)", "the stages do not fit in shared memory"),
                ("gated(96).stages(2)", "the tokens of a tile must be a power of two"),
                ("gated(64).stages(0)", "a pipeline needs at least 1 stage"),
            ][..],
        ),
        (
            "wgmma/gated_sm90",
            "gated_sm90_t64 = gated(64).consumers(2).buffers(4).stages(9);",
            &[
                ("gated(64).consumers(2).buffers(4).stages(12)", "stages and buffers do not fit in shared memory"),
                ("gated(64).consumers(2).buffers(1).stages(9)", "filling it would wait for emptying it"),
                ("gated(64).consumers(3).buffers(2).stages(3)", "1, 2 or 4 warpgroups must multiply"),
                (
                    "gated(24).consumers(2).buffers(4).stages(9)",
                    "the smallest N must be a multiple of a core matrix's rows",
                ),
                ("gated(256).consumers(2).buffers(2).stages(2)", "a tile must have 1 to 128 tokens"),
            ][..],
        ),
        (
            "simt/gated_simt",
            "gated_simt = gated(Tile::LARGE);",
            &[("gated(Tile { tokens: 32, ..Tile::LARGE })", "the tile must have 256 threads")][..],
        ),
    ] {
        copy.check(kernel, line, line).0.unwrap();
        for (instance, reason) in refused {
            let entry = line.split(" = ").next().unwrap();
            let (result, number) = copy.check(kernel, line, &format!("{entry} = {instance};"));
            let error = result.unwrap_err();
            assert!(error.contains("error[E0080]") && error.contains(reason), "{instance}: {error}");
            assert!(error.contains(&format!("--> src/{kernel}/abi.rs:{number}:")), "{instance}: {error}");
            assert!(error.contains(&format!("INSTANCES::{entry}`")), "{instance}: {error}");
        }
    }
}
