//! NVIDIA's assembler and disassembler: found on this machine, or installed from PyPI; and what they are run on.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};
use cuda_builder::{Arch, Built};

use crate::workspace;

/// A program of the CUDA toolkit that PyPI has too, for Linux.
pub struct Tool {
    program: &'static str,
    /// Pinned: what it says is compared with what it said.
    package: &'static str,
    /// Where it is installed under `target/`.
    folder: &'static str,
    /// Whether one that this machine has serves as well.
    any_version: bool,
}

/// The assembler; 12.9 was the first to know `sm_100f`.
pub const PTXAS: Tool =
    Tool { program: "ptxas", package: "nvidia-cuda-nvcc==13.5.37", folder: "ptxas", any_version: true };

/// That of the drivers of CUDA 13.0, which compile PTX as it does and newer ones do not.
pub const OLDER_PTXAS: Tool =
    Tool { program: "ptxas", package: "nvidia-cuda-nvcc==13.0.88", folder: "ptxas-13.0", any_version: false };

/// The disassembler.
pub const NVDISASM: Tool =
    Tool { program: "nvdisasm", package: "nvidia-cuda-nvdisasm==13.5.37", folder: "nvdisasm", any_version: true };

impl Tool {
    /// The program: on PATH or of a CUDA toolkit, if any version serves, or of PyPI.
    pub fn find(&self, install: bool) -> anyhow::Result<PathBuf> {
        let Self { program, package, folder, any_version } = self;
        let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
        let toolkit = env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("bin"));
        let of_machine = on_path.into_iter().chain(toolkit).filter(|_| *any_version);
        let installed = workspace::target_dir().join(folder);
        let of_wheel = || {
            // nvidia/<cu13, cuda_nvcc, …>/bin: the folder's name follows the version.
            let versions = installed.join("nvidia").read_dir().into_iter().flatten().flatten();
            versions.map(|version| version.path().join("bin"))
        };
        let found = |folder: PathBuf| Some(folder.join(program)).filter(|file| file.is_file());
        if let Some(path) = of_machine.chain(of_wheel()).find_map(found) {
            return Ok(path);
        }
        if !install {
            let place = installed.display();
            bail!("no {program} on PATH, under CUDA_PATH or in {place}; pass --install to get it from PyPI");
        }
        // It needs none of the packages that its own asks for.
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&installed).arg(package);
        let status = pip.status().with_context(|| format!("cannot run python3, whose pip installs {program}"))?;
        ensure!(status.success(), "pip could not install {package} into {}", installed.display());
        of_wheel()
            .find_map(found)
            .with_context(|| format!("{package} has no {program}; install the CUDA toolkit and set CUDA_PATH"))
    }
}

/// The version of an assembler, as `13.5.37`.
pub fn version(ptxas: &Path) -> anyhow::Result<String> {
    let text = output(Command::new(ptxas).arg("--version"))?.0;
    let version = text.lines().find_map(|line| line.rsplit_once(", V")).map(|(_, version)| version.trim().to_owned());
    version.with_context(|| format!("{} does not tell its version:\n{text}", ptxas.display()))
}

/// The cards that a build is assembled for: PTX of a family is for each of them.
pub fn cards(arch: Arch) -> &'static [&'static str] {
    match arch {
        Arch::SM_80 => &["sm_80"],
        Arch::SM_90A => &["sm_90a"],
        Arch::SM_100F => &["sm_100f", "sm_103f"],
        Arch::SM_120F => &["sm_120f", "sm_121f"],
        _ => panic!("no card is known for {arch}"),
    }
}

/// Assembles a build for a card to a cubin beside it; returns its path and the assembler's messages.
pub fn assemble(ptxas: &Path, built: &Built, card: &str) -> anyhow::Result<(PathBuf, String)> {
    let cubin = built.path.with_file_name(format!("{}.{card}.cubin", built.kernel));
    let log = assemble_to(&cubin, ptxas, built, card)?;
    Ok((cubin, log))
}

/// As [`assemble`], to a file of this name; returns what ptxas says.
pub fn assemble_to(cubin: &Path, ptxas: &Path, built: &Built, card: &str) -> anyhow::Result<String> {
    let mut command = Command::new(ptxas);
    command.args(["--verbose", "--gpu-name", card, "--output-file"]).arg(cubin).arg(&built.path);
    let (_, log) = output(&mut command).with_context(|| format!("{} does not assemble", built.path.display()))?;
    Ok(log)
}

/// What a program that ends well writes to its standard output and its standard error.
pub fn output(command: &mut Command) -> anyhow::Result<(String, String)> {
    let program = command.get_program().to_owned();
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let [out, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    ensure!(output.status.success(), "{} failed:\n{error}", program.display());
    Ok((out, error))
}
