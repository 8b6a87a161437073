//! `cargo xtask ptxas`: assembles every kernel and shows what it takes of the GPU.
//!
//! Fails on what makes a kernel slow without making it wrong: registers spilled to memory, a stack, and the
//! performance warnings of the assembler.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};

use crate::build_ptx;

/// Assemble every kernel for its architecture and print its registers, spills, stack and shared memory.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: build_ptx::Selection,
    /// Install ptxas from PyPI under target/ if there is none
    #[arg(long)]
    install: bool,
    /// Keep the assembled kernels beside the PTX, as target/ptx/KERNEL.ARCH.cubin
    #[arg(long)]
    cubin: bool,
}

/// ptxas's advisories that a kernel has lost performance: `setmaxnreg` ignored, `wgmma` serialised, and so on.
const PERFORMANCE_WARNINGS: std::ops::RangeInclusive<u32> = 7508..=7517;

/// The package of PyPI that has ptxas, for Linux; 12.9 was the first to know `sm_100f`.
const PACKAGE: &str = "nvidia-cuda-nvcc==13.*";

/// What ptxas says of an entry.
#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    name: String,
    registers: u32,
    /// Stores and loads of spilled registers, in bytes.
    spill: u32,
    stack: u32,
    /// Static shared memory, in bytes; dynamic shared memory is the launch's.
    shared: u32,
}

/// Builds, assembles, prints the table, and fails if a kernel is not as it should be.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let ptxas = find(args.install)?;
    let mut faults = Vec::new();
    println!(
        "{:<24} {:<8} {:>9} {:>11} {:>11} {:>12}",
        "entry", "arch", "registers", "spill bytes", "stack bytes", "shared bytes"
    );
    for built in build_ptx::build(&args.selection)? {
        let cubin = built.path.with_extension("cubin");
        let mut command = Command::new(&ptxas);
        command.args(["--verbose", "--gpu-name", built.arch.name(), "--output-file"]);
        let output = command.args([if args.cubin { &cubin } else { Path::new("/dev/null") }, &built.path]).output();
        let output = output.with_context(|| format!("cannot run {}", ptxas.display()))?;
        let log = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} does not assemble:\n{log}", built.path.display());

        let mut entries = entries(&log);
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        ensure!(!entries.is_empty(), "ptxas names no entry of {}:\n{log}", built.path.display());
        for Entry { name, registers, spill, stack, shared } in entries {
            println!("{name:<24} {:<8} {registers:>9} {spill:>11} {stack:>11} {shared:>12}", built.arch.name());
            if spill > 0 || stack > 0 {
                faults.push(format!("{name} for {}: {spill} bytes of spills, {stack} bytes of stack", built.arch));
            }
        }
        let warnings = log.lines().filter(|line| is_performance_warning(line));
        faults.extend(warnings.map(|line| format!("{} for {}: {line}", built.kernel, built.arch)));
    }
    ensure!(faults.is_empty(), "ptxas finds kernels that are slower than they should be:\n{}", faults.join("\n"));
    Ok(())
}

/// The entries in ptxas's verbose messages, in their order.
fn entries(log: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            entries.push(Entry { name, ..Entry::default() });
        }
        let Some(entry) = entries.last_mut() else {
            continue;
        };
        let number = |unit: &str| {
            let before = line.split(unit).next().filter(|before| before.len() < line.len())?;
            before.rsplit([' ', ',']).next()?.parse().ok()
        };
        entry.registers = number(" registers").unwrap_or(entry.registers);
        entry.stack = number(" bytes stack frame").unwrap_or(entry.stack);
        entry.shared = number(" bytes smem").unwrap_or(entry.shared);
        entry.spill += number(" bytes spill stores").unwrap_or(0) + number(" bytes spill loads").unwrap_or(0);
    }
    entries
}

/// Whether a line of ptxas's messages carries one of [`PERFORMANCE_WARNINGS`], as `(C7510)`.
fn is_performance_warning(line: &str) -> bool {
    line.match_indices("(C").any(|(at, _)| {
        let code = line[at + 2..].split(')').next().and_then(|code| code.parse().ok());
        code.is_some_and(|code: u32| PERFORMANCE_WARNINGS.contains(&code))
    })
}

/// The assembler: on PATH, of a CUDA toolkit, or of PyPI.
fn find(install: bool) -> anyhow::Result<PathBuf> {
    let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let toolkit = env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("bin"));
    let installed = crate::target_dir().join("ptxas");
    let of_wheel = || {
        // nvidia/<cu13, cuda_nvcc, …>/bin: the folder's name follows the version.
        let versions = installed.join("nvidia").read_dir().into_iter().flatten().flatten();
        versions.map(|version| version.path().join("bin"))
    };
    let found = |folder: PathBuf| Some(folder.join("ptxas")).filter(|file| file.is_file());
    if let Some(ptxas) = on_path.into_iter().chain(toolkit).chain(of_wheel()).find_map(found) {
        return Ok(ptxas);
    }
    if !install {
        bail!("no ptxas on PATH, under CUDA_PATH or in {}; pass --install to get it from PyPI", installed.display());
    }
    // ptxas needs none of the packages that the compiler beside it does.
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&installed).arg(PACKAGE);
    let status = pip.status().context("cannot run python3, whose pip installs ptxas")?;
    ensure!(status.success(), "pip could not install {PACKAGE} into {}", installed.display());
    of_wheel()
        .find_map(found)
        .with_context(|| format!("{PACKAGE} has no ptxas; install the CUDA toolkit and set CUDA_PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clean' for 'sm_80'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'spilling' for 'sm_80'
ptxas info    : Function properties for spilling
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 4096 bytes smem, 368 bytes cmem[0]
";

    #[test]
    fn each_entrys_resources_are_read_from_the_log() {
        let entry = |name: &str, registers, spill, stack, shared| Entry {
            name: name.to_owned(),
            registers,
            spill,
            stack,
            shared,
        };
        assert_eq!(entries(LOG), [entry("clean", 10, 0, 0, 0), entry("spilling", 255, 20, 16, 4096)]);
    }

    #[test]
    fn only_performance_warnings_count() {
        let wgmma = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        assert!(is_performance_warning(wgmma));
        assert!(!is_performance_warning("ptxas warning : (C7519) something else"));
        assert!(!LOG.lines().any(is_performance_warning));
    }
}
