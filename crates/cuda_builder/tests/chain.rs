//! Tests of the whole build with kernels that rustc alone compiles incorrectly (`fixture/src/lib.rs`).
//!
//! Each test builds the fixture. After the first build that takes milliseconds.

use std::{
    env,
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use cuda_builder::{Arch, CudaBuilder, Error, KernelCrate, arches};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixture");
const KERNEL: &str = "convergence";

/// Entries, each with the number of aligned instructions in its source.
const EXPECTED: [(&str, &[(&str, usize)]); 3] = [
    ("barrier_between_guarded_regions", &[("bar.warp.sync", 1)]),
    ("collective_between_guarded_regions", &[("vote.sync.ballot.b32", 1)]),
    ("barrier_and_shuffle_in_a_loop", &[("shfl.sync.down.b32", 1), ("bar.warp.sync", 1), ("bar.sync", 1)]),
];

#[test]
fn aligned_instructions_appear_once_for_every_arch() {
    for arch in arches() {
        let ptx = fs::read_to_string(build(arch)).unwrap();
        for (entry, instructions) in EXPECTED {
            for &(instruction, count) in instructions {
                assert_eq!(occurrences(&ptx, entry, instruction), count, "{instruction} in {entry}, {arch}");
            }
        }
    }
}

/// Shows that the test above can fail: without the added attribute, the same IR compiles incorrectly.
#[test]
fn aligned_instruction_is_cloned_without_the_attribute() {
    let arch = Arch::SM_80;
    let marked = fs::read_to_string(build(arch).with_extension("ll")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [ir, optimized, ptx] = ["unmarked.ll", "optimized.ll", "ptx"].map(|name| folder.path().join(name));
    fs::write(&ir, marked.replace(" convergent", "")).unwrap();
    llvm_tool("opt", &["-O3", "-S", "-mcpu=sm_80"], &ir, &optimized);
    llvm_tool("llc", &["-O3", "-mcpu=sm_80", "-mattr=+ptx70"], &optimized, &ptx);

    let ptx = fs::read_to_string(ptx).unwrap();
    let cloned = |(entry, instructions): &(&str, &[(&str, usize)])| {
        instructions.iter().any(|&(instruction, count)| occurrences(&ptx, entry, instruction) > count)
    };
    assert!(EXPECTED.iter().any(cloned), "this toolchain does not clone inline assembly, so the test proves nothing");
}

#[test]
fn launch_bounds_arch_and_version_reach_the_ptx() {
    for (arch, version) in [(Arch::SM_80, "7.0"), (Arch::SM_90A, "8.3"), (Arch::SM_100F, "8.8")] {
        let ptx = fs::read_to_string(build(arch)).unwrap();
        assert!(ptx.contains(&format!("\n.version {version}\n.target {arch}\n")), "{arch}");
        let both = body(&ptx, "barrier_between_guarded_regions");
        assert!(both.contains(".maxntid 384") && both.contains(".minnctapersm 1"), "{both}");
        let threads = body(&ptx, "collective_between_guarded_regions");
        assert!(threads.contains(".maxntid 64") && !threads.contains(".minnctapersm"), "{threads}");
        // Clusters exist from Hopper on.
        assert_eq!(threads.contains(".reqnctapercluster 2"), arch != Arch::SM_80, "{threads}");
        let none = body(&ptx, "barrier_and_shuffle_in_a_loop");
        assert!(!none.contains(".maxntid") && !none.contains("cluster"), "{none}");
        assert!(!ptx.contains("__launch_bounds"), "the PTX still contains the builder's own symbols");
    }
}

#[test]
fn ptx_lines_name_their_rust_lines() {
    let ptx = fs::read_to_string(build(Arch::SM_80)).unwrap();
    let source = format!("{FIXTURE}/src/lib.rs");
    // Relative to `crates`, the common folder of the fixture's packages.
    let name = "\"cuda_builder/tests/fixture/src/lib.rs\"";
    let file = ptx.lines().find(|line| line.contains(".file") && line.ends_with(name)).unwrap();
    let number = file.split_whitespace().nth(1).unwrap();
    let line = 1 + fs::read_to_string(&source).unwrap().lines().position(|line| line.contains("= *mine + 1")).unwrap();
    assert!(ptx.contains(&format!(".loc\t{number} {line} ")), ".loc {number} {line}");
}

#[test]
fn ptx_is_the_same_in_every_checkout() {
    let here = fs::read_to_string(build(Arch::SM_100F)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let checkout = folder.path().join("a checkout of another name");
    for file in ["cuda_std", "cuda_std_macros", "cuda_builder/tests/fixture", "../Cargo.toml"] {
        copy(&crates.join(file), &checkout.join("crates").join(file));
    }
    let builder = CudaBuilder::new(checkout.join("crates/cuda_builder/tests/fixture")).arch(Arch::SM_100F);
    let there = builder.build_args(&["--features", KERNEL]).build().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(fs::read_to_string(there).unwrap(), here);
    assert!(!here.contains(&*crates.to_string_lossy()) && !here.contains("/rustlib/"), "{here}");
}

/// Copies a file, or a folder without its `target`.
fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().file_name()).filter(|name| name != "target")
        {
            copy(&from.join(&entry), &to.join(&entry));
        }
    } else {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }
}

#[test]
fn unchanged_kernel_is_not_rebuilt() {
    let arch = Arch::SM_90A;
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let ptx = build(arch);
    let (before, ir_before) = (modified(&ptx), newest_ir(arch));
    assert_eq!(build(arch), ptx);
    assert_eq!((modified(&ptx), newest_ir(arch)), (before, ir_before));

    // A newer source with the same contents is recompiled, but its PTX file is not rewritten.
    let source = File::options().append(true).open(format!("{FIXTURE}/src/lib.rs")).unwrap();
    source.set_modified(SystemTime::now()).unwrap();
    build(arch);
    assert!(newest_ir(arch) > ir_before);
    assert_eq!(modified(&ptx), before);
}

/// Variables that an outer cargo, clippy or a user's shell may set.
const OUTER: [(&str, &str); 7] = [
    ("CARGO_BUILD_TARGET", "no-such-target"),
    ("CARGO_ENCODED_RUSTFLAGS", "--no-such-flag"),
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_TARGET_DIR", "/no/such/folder"),
    ("RUSTC_WORKSPACE_WRAPPER", "/no/such/wrapper"),
    ("RUSTC_WRAPPER", "/no/such/wrapper"),
    ("RUSTFLAGS", "--no-such-flag"),
];

#[test]
fn outer_environment_does_not_reach_the_nested_build() {
    let test = "aligned_instructions_appear_once_for_every_arch";
    let output = Command::new(env::current_exe().unwrap()).args(["--exact", test]).envs(OUTER).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn components_that_rustup_cannot_add_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let asked = folder.path().join("asked");
    let script = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    };
    let rustc = script("rustc", format!("echo {}", folder.path().display()));
    script("rustup", format!("echo \"$@\" > {}; exit 1", asked.display()));
    let path = format!("{}:{}", folder.path().display(), env::var("PATH").unwrap());

    let test = "ptx_lines_name_their_rust_lines";
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env("RUSTC", rustc).env("PATH", path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("run `rustup component add rust-src llvm-tools`"), "{text}");
    assert_eq!(fs::read_to_string(asked).unwrap().trim(), "component add rust-src llvm-tools");
}

#[test]
fn kernel_table_is_read_and_lists_its_sources() {
    let kernels = KernelCrate::open(FIXTURE).unwrap();
    let [kernel] = kernels.kernels() else { panic!("{:?}", kernels.kernels()) };
    assert_eq!((kernel.name.as_str(), &kernel.arches), (KERNEL, &arches().collect()));
    for wanted in ["fixture/src", "fixture/Cargo.toml", "cuda_std/src", "cuda_std_macros/src"] {
        assert!(kernels.sources().iter().any(|source| source.ends_with(wanted)), "{:?}", kernels.sources());
    }
    assert!(kernels.sources().iter().all(|source| source.exists()), "{:?}", kernels.sources());
}

#[test]
fn errors_name_the_place_and_the_remedy() {
    let error = CudaBuilder::new("/no/such/crate").arch(Arch::SM_80).build().unwrap_err();
    assert_eq!(error.to_string(), "/no/such/crate: found no Cargo.toml; pass the folder of the crate to compile");
    let error = CudaBuilder::new(FIXTURE).build().unwrap_err();
    assert!(matches!(&error, Error::NoArch { .. }) && error.to_string().contains("call `.arch"), "{error}");
    let error = CudaBuilder::new(FIXTURE).arch("sm_75".parse().unwrap()).build().unwrap_err();
    assert_eq!(error.to_string(), "unknown architecture sm_75; expected one of sm_80, sm_90a, sm_100f, sm_120f");
}

fn build(arch: Arch) -> PathBuf {
    let ptx = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{KERNEL}.{arch}.ptx"));
    let builder = CudaBuilder::new(FIXTURE).arch(arch).build_args(&["--features", KERNEL]);
    builder.copy_to(ptx).emit_llvm_ir(true).build().unwrap_or_else(|error| panic!("{error}"))
}

/// Time of rustc's last write of IR of the fixture.
fn newest_ir(arch: Arch) -> SystemTime {
    let files = fs::read_dir(format!("{FIXTURE}/target")).unwrap().map(|file| file.unwrap());
    let ir = files.filter(|file| {
        let name = file.file_name().into_string().unwrap();
        name.starts_with(&arch.to_string()) && name.matches('.').count() == 1 && name.ends_with(".ll")
    });
    ir.map(|file| file.metadata().unwrap().modified().unwrap()).max().unwrap()
}

fn body<'a>(ptx: &'a str, entry: &str) -> &'a str {
    let start = ptx.find(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry}"));
    let body = &ptx[start..];
    body[1..].find(".entry ").map_or(body, |end| &body[..end])
}

fn occurrences(ptx: &str, entry: &str, instruction: &str) -> usize {
    body(ptx, entry).lines().filter(|line| line.split_whitespace().next() == Some(instruction)).count()
}

fn llvm_tool(name: &str, args: &[&str], from: &Path, to: &Path) {
    let rustc = |what| {
        let output = Command::new("rustc").args(["--print", what]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let tool = Path::new(&rustc("sysroot")).join("lib/rustlib").join(rustc("host-tuple")).join("bin").join(name);
    assert!(Command::new(tool).args(args).arg("-o").args([to, from]).status().unwrap().success());
}
