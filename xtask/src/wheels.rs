//! `cargo xtask wheels`: builds the Python packages into `target/wheels`: wheels for Linux with glibc 2.28 or newer, and
//! source packages.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::{
    release::{self, Copy, Machine, Tools},
    tools, workspace,
};

/// Build the Python packages into target/wheels, and check them.
#[derive(clap::Args)]
pub struct Args {
    /// Processor (may be given several times)
    #[arg(long, value_enum, default_values = ["x86_64", "aarch64"])]
    machine: Vec<Machine>,
    /// Also install each wheel for this machine in a new environment, from PyPI, and run its tests there
    #[arg(long)]
    test: bool,
}

/// Packages with a native module.
const NATIVE: [&str; 2] = ["nvfp4", "ptx_emulator"];

/// Packages of Python alone, and the modules whose plugins they register.
const PLUGINS: [&str; 2] = ["nvfp4_vllm", "nvfp4_sglang"];

/// Largest wheel, in megabytes.
const LARGEST: u64 = 60;

/// Builds, checks and tests the packages.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let out = workspace::target_dir().join("wheels");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    fs::create_dir_all(&out)?;
    let (copy, tools) = (Copy::make()?, Tools::install(&args.machine)?);
    for &machine in &args.machine {
        native(&tools, &copy, machine, &out)?;
    }
    for package in NATIVE {
        let mut maturin = tools.command("maturin")?;
        maturin.args(["sdist", "--out"]).arg(&out);
        release::show(release::in_copy(&mut maturin, &copy.folder.join("python").join(package))?)?;
    }
    for package in PLUGINS {
        let mut pip = tools.command("pip")?;
        pip.args(["wheel", "--quiet", "--no-deps", "--wheel-dir"]).arg(&out).arg(format!("./python/{package}"));
        release::show(pip.current_dir(&copy.folder))?;
    }
    let files = files(&out, "")?;
    release::show(tools.command("twine")?.args(["check", "--strict"]).args(&files))?;
    files.iter().try_for_each(|file| release::require_size(file, LARGEST))?;
    if args.test {
        test(&out)?;
    }
    println!(
        "To publish: {} upload target/wheels/*",
        workspace::target_dir().join("release-tools/bin/twine").display()
    );
    Ok(())
}

/// Builds the wheels with native modules for a machine.
fn native(tools: &Tools, copy: &Copy, machine: Machine, out: &Path) -> anyhow::Result<()> {
    for package in NATIVE {
        let mut maturin = tools.command("maturin")?;
        maturin.args(["build", "--release", "--locked", "--zig", "--compatibility", "manylinux_2_28", "--target"]);
        maturin.arg(machine.target()).arg("--out").arg(out);
        release::show(release::in_copy(&mut maturin, &copy.folder.join("python").join(package))?)?;
    }
    let programs = release::build_programs(tools, copy, machine, &["nvfp4"])?;
    let suffix = format!("{}.whl", machine.name());
    let scratch = tempfile::tempdir()?;
    for wheel in files(out, &suffix)? {
        tools::output(tools.command("wheel")?.arg("unpack").arg(&wheel).arg("--dest").arg(scratch.path()))?;
        let name = wheel.file_name().and_then(|name| name.to_str()).context("a wheel's name is ASCII")?;
        let stem = name.split('-').take(2).collect::<Vec<_>>().join("-");
        let unpacked = scratch.path().join(&stem);
        if stem.starts_with("nvfp4-") {
            let scripts = unpacked.join(format!("{stem}.data/scripts"));
            fs::create_dir_all(&scripts)?;
            fs::copy(programs.join("nvfp4"), scripts.join("nvfp4"))?;
            fs::remove_file(&wheel)?;
            tools::output(tools.command("wheel")?.arg("pack").arg(&unpacked).arg("--dest-dir").arg(out))?;
        }
        let programs = programs_below(&unpacked)?;
        ensure!(!programs.is_empty(), "{name} has no program");
        programs.iter().try_for_each(|program| release::require_old_glibc(program))?;
    }
    Ok(())
}

/// Returns the programs and libraries below a folder.
fn programs_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for entry in folder.read_dir()? {
        let path = entry?.path();
        if path.is_dir() {
            programs.extend(programs_below(&path)?);
        } else if fs::read(&path)?.starts_with(b"\x7fELF") {
            programs.push(path);
        }
    }
    Ok(programs)
}

/// Returns the files of a folder whose names have an ending, sorted.
fn files(folder: &Path, ending: &str) -> anyhow::Result<Vec<PathBuf>> {
    let entries = folder.read_dir()?.collect::<Result<Vec<_>, _>>()?;
    let mut files: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|file| file.to_string_lossy().ends_with(ending));
    files.sort();
    Ok(files)
}

/// Installs the wheels for this machine and runs their tests.
fn test(out: &Path) -> anyhow::Result<()> {
    let place = workspace::target_dir().join("wheel-tests");
    for package in NATIVE {
        let folder = place.join(package);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        let bin = release::environment(&folder)?;
        let mut pip = std::process::Command::new(bin.join("pip"));
        pip.args(["install", "--quiet", "--find-links"]).arg(out).arg(format!("{package}[test]"));
        release::show(&mut pip)?;
        let mut pytest = std::process::Command::new(bin.join("python"));
        pytest.args(["-m", "pytest", "--quiet"]).current_dir(workspace::root().join("python").join(package));
        release::show(&mut pytest)?;
        if package == "nvfp4" {
            release::show(std::process::Command::new(bin.join("nvfp4")).arg("devices"))?;
        }
    }
    Ok(())
}
