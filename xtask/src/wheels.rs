//! `cargo xtask wheels`: builds the Python packages into `target/wheels`, for Linux with glibc 2.28 or newer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, bail, ensure};

use crate::release::{self, Copy, Machine, Tools};
use crate::{tools, workspace};

/// Build the Python packages into target/wheels: wheels, and the source of `nvfp4`.
#[derive(clap::Args)]
pub struct Args {
    /// Processor (may be given several times)
    #[arg(long, value_enum, default_values = ["x86_64"])]
    machine: Vec<Machine>,
    /// Also install the wheels for this machine into empty environments, and use them; PyTorch's CUDA libraries are stubs
    #[arg(long)]
    test: bool,
}

/// Packages with a native module.
const NATIVE: [&str; 2] = ["nvfp4", "ptx_emulator"];

/// Packages of Python alone, which need `nvfp4`.
const PLUGINS: [&str; 2] = ["nvfp4_vllm", "nvfp4_sglang"];

/// Lets the source package of `nvfp4` build without a CUDA toolkit, as `.cargo/config.toml` of the repository does.
const CARGO_CONFIG: &str =
    "[env]\nCUDA_LIBRARY_PATH = { value = \"crates/cuda_driver/link\", relative = true, force = true }\n";

/// Largest package, in bytes.
const LARGEST: u64 = 60_000_000;

/// PyTorch of the test, and what its CPU code needs.
const TORCH: &str = "torch==2.11.0";
const TORCH_NEEDS: [&str; 7] =
    ["filelock", "typing-extensions", "setuptools<82", "sympy", "networkx", "jinja2", "fsspec"];

/// A layer's result, which must be near the product of the dequantized weight.
const FORWARD: &str = "
import importlib.metadata, nvfp4, torch
for group in ['vllm.general_plugins', 'sglang.srt.plugins']:
    [plugin] = importlib.metadata.entry_points(group=group)
    plugin.load()
weight = nvfp4.quantize(torch.randn(64, 128))
x = torch.randn(3, 128).bfloat16()
y = nvfp4.Linear(weight)(x)
torch.testing.assert_close(y.float(), x.float() @ nvfp4.dequantize(weight).float().T, atol=0.02, rtol=0.01)
print('nvfp4.Linear:', tuple(y.shape))
";

/// A launch on an emulated GPU.
const EMULATE: &str = "
import numpy, ptx_emulator
ptx = '''
.version 8.0
.target sm_80
.address_size 64
.visible .entry seven(.param .u64 x) {
    .reg .b64 %d; .reg .b32 %r;
    ld.param.u64 %d, [x];
    mov.b32 %r, 7;
    st.global.b32 [%d], %r;
    ret;
}
'''
x = numpy.zeros(1, numpy.int32)
ptx_emulator.launch(ptx, 'seven', grid=1, block=1, args=[x])
assert x[0] == 7
print('ptx_emulator.launch:', x)
";

/// Builds, checks and tests the packages.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(!args.test || args.machine.iter().any(|machine| machine.is_here()), "--test needs wheels for this machine");
    let tools = Tools::install(Copy::make()?, &args.machine)?;
    let out = release::empty_folder("wheels")?;
    for &machine in &args.machine {
        for package in NATIVE {
            let mut maturin = tools.command("maturin", &format!("python/{package}"))?;
            maturin.args(["build", "--release", "--locked", "--zig", "--compatibility", "manylinux_2_28"]);
            tools::show(maturin.arg("--target").arg(machine.target()).arg("--out").arg(&out))?;
        }
        add_command(&tools, machine, &out)?;
    }
    for package in PLUGINS {
        let mut pip = tools.command("pip", ".")?;
        pip.args(["wheel", "--quiet", "--no-deps", "--wheel-dir"]).arg(&out).arg(format!("./python/{package}"));
        tools::show(&mut pip)?;
    }
    build_source_package(&tools, &out)?;
    let packages = release::require_sizes(&out, "", LARGEST)?;
    tools::show(tools.command("twine", ".")?.args(["check", "--strict"]).args(&packages))?;
    if args.test {
        test(&out)?;
    }
    println!("To publish: {}/twine upload {}/*", tools.bin.display(), out.display());
    Ok(())
}

/// Adds the command `nvfp4` to the package's wheel. The command starts without Python.
fn add_command(tools: &Tools, machine: Machine, out: &Path) -> anyhow::Result<()> {
    let program = tools.build_programs(machine)?.join("nvfp4");
    release::require_old_glibc(&program)?;
    let wheel = find(out, "nvfp4-", &format!("{}.whl", machine.name()))?;
    let scratch = tempfile::tempdir()?;
    tools::output(tools.command("wheel", ".")?.arg("unpack").arg(&wheel).arg("--dest").arg(scratch.path()))?;
    let unpacked = scratch.path().read_dir()?.next().context("the wheel is empty")??.path();
    let scripts =
        unpacked.join(unpacked.with_added_extension("data").file_name().expect("it has a name")).join("scripts");
    fs::create_dir_all(&scripts)?;
    fs::copy(&program, scripts.join("nvfp4"))?;
    fs::remove_file(&wheel)?;
    tools::output(tools.command("wheel", ".")?.arg("pack").arg(&unpacked).arg("--dest-dir").arg(out))?;
    Ok(())
}

/// Builds the source package of `nvfp4`. It contains PTX, so that rustup and a C linker can build it.
fn build_source_package(tools: &Tools, out: &Path) -> anyhow::Result<()> {
    let folder = tools.copy.folder.join("python/nvfp4");
    let source = "python-source = \"python\"\n";
    let include = format!("{source}include = [{{ path = \".cargo/config.toml\", format = \"sdist\" }}]\n");
    release::replace(&folder.join("pyproject.toml"), source, &include)?;
    fs::create_dir_all(folder.join(".cargo"))?;
    fs::write(folder.join(".cargo/config.toml"), CARGO_CONFIG)?;
    tools::show(tools.command("maturin", "python/nvfp4")?.args(["sdist", "--out"]).arg(out))
}

/// Returns the only wheel whose name has a beginning and an ending.
fn find(out: &Path, start: &str, end: &str) -> anyhow::Result<PathBuf> {
    let names = out.read_dir()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names: Vec<_> = names.filter(|name| name.starts_with(start) && name.ends_with(end)).collect();
    let [name] = &names[..] else { bail!("{}: expected one {start}*{end}, found {names:?}", out.display()) };
    Ok(out.join(name))
}

/// Installs the wheels for this machine and uses them: the command, a layer, the plugins' names, and the emulator.
fn test(out: &Path) -> anyhow::Result<()> {
    let here = format!("{}.whl", env::consts::ARCH);
    let nvfp4 = [find(out, "nvfp4-", &here)?, find(out, "nvfp4_vllm-", ".whl")?, find(out, "nvfp4_sglang-", ".whl")?];
    let environment = Environment::make()?;
    environment.install_torch()?;
    environment.install(&["--no-deps"], &nvfp4)?;
    environment.check(FORWARD, &["nvfp4", "run", "--shape", "group-test-1"])?;
    let environment = Environment::make()?;
    environment.install(&[], &[find(out, "ptx_emulator-", &here)?])?;
    environment.check(EMULATE, &["ptx-emulator", "--version"])?;
    fs::remove_dir_all(&environment.folder).with_context(|| environment.folder.display().to_string())
}

/// An empty environment of Python.
struct Environment {
    folder: PathBuf,
    bin: PathBuf,
    /// Libraries in place of NVIDIA's.
    stubs: PathBuf,
}

impl Environment {
    fn make() -> anyhow::Result<Self> {
        let folder = release::empty_folder("wheel-test")?;
        Ok(Self { bin: release::environment(&folder)?, stubs: folder.join("stubs"), folder })
    }

    /// Installs PyTorch as `.ci/run` does, with stubs in place of its gigabytes of CUDA libraries. So this test does not show
    /// that pip finds PyTorch.
    fn install_torch(&self) -> anyhow::Result<()> {
        self.install(&["--no-deps", TORCH], &[])?;
        self.install(&TORCH_NEEDS, &[])?;
        let program = workspace::root().join("python/nvfp4/tests/stub_cuda.py");
        tools::show(Command::new(self.bin.join("python")).arg(program).arg(&self.stubs))
    }

    fn install(&self, arguments: &[&str], wheels: &[PathBuf]) -> anyhow::Result<()> {
        tools::show(Command::new(self.bin.join("pip")).args(["install", "--quiet"]).args(arguments).args(wheels))
    }

    /// Runs a Python program and a command.
    fn check(&self, program: &str, command: &[&str]) -> anyhow::Result<()> {
        let mut python = Command::new(self.bin.join("python"));
        python.args(["-c", program]).env("LD_LIBRARY_PATH", &self.stubs);
        tools::show(python.current_dir(&self.folder))?;
        tools::show(Command::new(self.bin.join(command[0])).args(&command[1..]).current_dir(&self.folder))
    }
}
