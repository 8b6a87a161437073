//! NVIDIA's assembler and disassembler: how to find or install them, and how to run them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};
use cuda_builder::{Arch, Built};

use crate::{
    build_ptx::{self, Selection},
    workspace,
};

/// A program of the CUDA toolkit that is also on PyPI, for Linux.
pub struct Tool {
    program: &'static str,
    /// Package on PyPI. The version is pinned because the program's output is compared with recorded output.
    package: &'static str,
    /// Folder under `target/` in which the package is installed.
    folder: &'static str,
    /// Whether any version that is already on this machine may be used instead.
    any_version: bool,
}

/// The assembler. The first version with `sm_100f` is 12.9.
pub const PTXAS: Tool =
    Tool { program: "ptxas", package: "nvidia-cuda-nvcc==13.5.37", folder: "ptxas", any_version: true };

/// The assembler of CUDA 13.0. Drivers of CUDA 13.0 compile PTX as this version does; newer assemblers differ.
pub const OLDER_PTXAS: Tool =
    Tool { program: "ptxas", package: "nvidia-cuda-nvcc==13.0.88", folder: "ptxas-13.0", any_version: false };

/// The disassembler.
pub const NVDISASM: Tool =
    Tool { program: "nvdisasm", package: "nvidia-cuda-nvdisasm==13.5.37", folder: "nvdisasm", any_version: true };

impl Tool {
    /// Returns the path of the program: from PATH or a CUDA toolkit if any version may be used, otherwise from PyPI.
    pub fn find(&self, install: bool) -> anyhow::Result<PathBuf> {
        let Self { program, package, folder, any_version } = self;
        let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
        let toolkit = env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("bin"));
        let of_machine = on_path.into_iter().chain(toolkit).filter(|_| *any_version);
        let installed = workspace::target_dir().join(folder);
        let of_wheel = || {
            // nvidia/<cu13, cuda_nvcc, …>/bin: the folder's name depends on the version.
            let versions = installed.join("nvidia").read_dir().into_iter().flatten().flatten();
            versions.map(|version| version.path().join("bin"))
        };
        let found = |folder: PathBuf| Some(folder.join(program)).filter(|file| file.is_file());
        if let Some(path) = of_machine.chain(of_wheel()).find_map(found) {
            return Ok(path);
        }
        if !install {
            let place = installed.display();
            bail!("found no {program} on PATH, under CUDA_PATH or in {place}; use --install to get it from PyPI");
        }
        // The program runs without the packages that its wheel depends on.
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&installed).arg(package);
        let status = pip.status().with_context(|| format!("cannot run python3, whose pip would install {program}"))?;
        ensure!(status.success(), "pip failed to install {package} into {}", installed.display());
        of_wheel()
            .find_map(found)
            .with_context(|| format!("{package} contains no {program}; install the CUDA toolkit and set CUDA_PATH"))
    }
}

/// Returns the version of an assembler, such as `13.5.37`.
pub fn version(ptxas: &Path) -> anyhow::Result<String> {
    let text = output(Command::new(ptxas).arg("--version"))?.0;
    let version = text.lines().find_map(|line| line.rsplit_once(", V")).map(|(_, version)| version.trim().to_owned());
    version.with_context(|| format!("cannot find the version in the output of {}:\n{text}", ptxas.display()))
}

/// Returns the GPUs that a build is assembled for. PTX of a family is assembled for each member of the family.
fn cards(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::SM_80 => &["sm_80"],
        Arch::SM_90A => &["sm_90a"],
        Arch::SM_100F => &["sm_100f", "sm_103f"],
        Arch::SM_120F => &["sm_120f", "sm_121f"],
        _ => panic!("no known GPU for {arch}"),
    }
}

/// Builds the selected kernels. Returns a pair for each build and each GPU that the build is assembled for.
pub fn builds(selection: &Selection) -> anyhow::Result<Vec<(Built, &'static str)>> {
    let of_build = |built: Built| cards(built.arch).iter().map(move |&card| (built.clone(), card));
    Ok(build_ptx::build(selection)?.into_iter().flat_map(of_build).collect())
}

/// Assembles a build for `card` into a cubin beside the PTX. Returns the cubin's path and the assembler's messages.
///
/// Uses the cubin of an earlier call if its messages are newer than the PTX. The messages are in a file beside the cubin,
/// which is written after the cubin.
pub fn assemble(ptxas: &Path, built: &Built, card: &str) -> anyhow::Result<(PathBuf, String)> {
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    let cubin = built.path.with_file_name(format!("{}.{card}.{}.cubin", built.kernel, version(ptxas)?));
    let kept = cubin.with_extension("log");
    if modified(&kept) > modified(&built.path) {
        return Ok((cubin, fs::read_to_string(&kept)?));
    }
    let mut command = Command::new(ptxas);
    command.args(["--verbose", "--gpu-name", card, "--output-file"]).arg(&cubin).arg(&built.path);
    let (_, log) = output(&mut command).with_context(|| format!("cannot assemble {}", built.path.display()))?;
    fs::write(&kept, &log).with_context(|| format!("cannot write {}", kept.display()))?;
    Ok((cubin, log))
}

/// Runs a program. Returns its standard output and standard error, or an error if the program fails.
pub fn output(command: &mut Command) -> anyhow::Result<(String, String)> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let [out, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    ensure!(output.status.success(), "{} failed:\n{error}", program.display());
    Ok((out, error))
}

/// Runs a program with its output on the terminal.
pub fn show(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(status.success(), "{command:?} failed; its messages are above");
    Ok(())
}
