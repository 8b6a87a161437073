//! What `publish`, `wheels` and `dist` share: a copy of the workspace with compiled kernels, the machines that programs are
//! built for, and the tools from PyPI.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::{build_ptx, tools, workspace};

/// Newest glibc that released programs may need: Debian 10, RHEL 8, `manylinux_2_28`.
pub const GLIBC: (u32, u32) = (2, 28);

/// Tools from PyPI. zig links against an old glibc, whichever one this machine has.
const TOOLS: [&str; 5] =
    ["cargo-zigbuild==0.24.1", "maturin==1.16.0", "twine==7.0.0", "wheel==0.48.0", "ziglang==0.17.1"];

const LICENSES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Processor that programs are built for.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Machine {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

impl Machine {
    /// Returns the name as `uname -m` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Returns the name in Debian packages.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// Returns rustc's name of the target.
    pub fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// Whether this machine runs the programs.
    pub fn is_here(self) -> bool {
        self.name() == env::consts::ARCH
    }
}

/// A copy of the workspace, `target/publish`. It differs from the workspace in three points:
///
/// 1. `kernels-gpu` is a member, so that Cargo publishes it in its turn. Here it is outside, because a member would inherit
///    the workspace's profiles.
/// 2. `nvfp4-ptx` contains the PTX, so that nothing that is built from the copy compiles kernels.
/// 3. Each published crate has the licenses.
pub struct Copy {
    pub folder: PathBuf,
}

impl Copy {
    /// Compiles the kernels and makes the copy.
    pub fn make() -> anyhow::Result<Self> {
        let copy = Self { folder: workspace::target_dir().join("publish") };
        let folder = &copy.folder;
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let root = workspace::root();
        let (files, _) = tools::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root))?;
        for file in files.split_terminator('\0') {
            let (from, to) = (root.join(file), folder.join(file));
            fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
            fs::copy(&from, &to).with_context(|| from.display().to_string())?;
        }
        replace(&folder.join("Cargo.toml"), r#"exclude = ["kernels-gpu", "#, "exclude = [")?;
        replace(&folder.join("Cargo.toml"), r#""crates/*"]"#, r#""crates/*", "kernels-gpu"]"#)?;
        let table = "\n[package.metadata";
        replace(&folder.join("kernels-gpu/Cargo.toml"), table, &format!("repository.workspace = true\n{table}"))?;
        pack_ptx(&folder.join("crates/nvfp4_ptx/ptx"))?;
        for package in copy.published()? {
            for license in LICENSES {
                fs::copy(root.join(license), package.join(license))?;
            }
        }
        Ok(copy)
    }

    /// Returns the folders of the crates that are published.
    pub fn published(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut cargo = Command::new("cargo");
        cargo.args(["metadata", "--no-deps", "--format-version=1"]).current_dir(&self.folder);
        let metadata: serde_json::Value = serde_json::from_str(&tools::output(&mut cargo)?.0)?;
        let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
        let published = packages.iter().filter(|package| package["publish"].is_null());
        let folder = |package: &serde_json::Value| {
            let manifest = package["manifest_path"].as_str().context("cargo metadata names no manifest")?;
            Ok(Path::new(manifest).parent().expect("a file lies in a folder").to_owned())
        };
        published.map(folder).collect()
    }
}

/// Replaces the only occurrence of a text.
fn replace(file: &Path, old: &str, new: &str) -> anyhow::Result<()> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    ensure!(text.matches(old).count() == 1, "{}: expected {old:?} once", file.display());
    Ok(fs::write(file, text.replace(old, new))?)
}

/// Compiles the kernels, and writes the files that `nvfp4-ptx` documents.
fn pack_ptx(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    let mut list = String::new();
    for built in build_ptx::build(&build_ptx::Selection::default())? {
        let name = format!("{}.{}.ptx.zst", built.kernel, built.arch);
        let (bytes, hash) = nvfp4_ptx::pack(&fs::read(&built.path)?)?;
        fs::write(folder.join(name), bytes)?;
        list += &format!("{} {} {hash}\n", built.kernel, built.arch);
    }
    Ok(fs::write(folder.join(nvfp4_ptx::LIST), list)?)
}

/// The tools, in a virtual environment below `target`.
pub struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Installs the tools from PyPI, and rustc's libraries for `machines`.
    pub fn install(machines: &[Machine]) -> anyhow::Result<Self> {
        let place = workspace::target_dir().join("release-tools");
        let bin = environment(&place)?;
        tools::output(Command::new(bin.join("pip")).args(["install", "--quiet"]).args(TOOLS))?;
        let targets = machines.iter().map(|machine| machine.target());
        tools::output(Command::new("rustup").args(["target", "add"]).args(targets).current_dir(workspace::root()))?;
        Ok(Self { bin })
    }

    /// Returns a command that finds the tools.
    pub fn command(&self, program: impl AsRef<OsStr>) -> anyhow::Result<Command> {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = [self.bin.clone()].into_iter().chain(env::split_paths(&path));
        let path = env::join_paths(folders)?;
        let mut command = Command::new("env");
        command.env("PATH", path).arg(program);
        Ok(command)
    }
}

/// Builds stripped programs and libraries of the copy for a machine. Returns their folder.
pub fn build_programs(tools: &Tools, copy: &Copy, machine: Machine, packages: &[&str]) -> anyhow::Result<PathBuf> {
    let target = machine.target();
    let mut cargo = tools.command("cargo")?;
    cargo.args(["zigbuild", "--release", "--locked", "--config", "profile.release.strip=true", "--target"]);
    cargo.arg(format!("{target}.{}.{}", GLIBC.0, GLIBC.1));
    packages.iter().for_each(|package| {
        cargo.args(["--package", package]);
    });
    if packages.contains(&"nvfp4") {
        cargo.args(["--features", "nvfp4/cli"]);
    }
    show(in_copy(&mut cargo, &copy.folder)?)?;
    Ok(build_folder().join(target).join("release"))
}

/// Sets the environment of builds from the copy: their folder, and the assembler of machine code.
pub fn in_copy<'c>(command: &'c mut Command, folder: &Path) -> anyhow::Result<&'c mut Command> {
    Ok(command.current_dir(folder).env("CARGO_TARGET_DIR", build_folder()).env("NVFP4_PTXAS", tools::PTXAS.find(true)?))
}

/// Folder of builds from the copy, which stays when the copy is made again.
fn build_folder() -> PathBuf {
    workspace::target_dir().join("release-build")
}

/// Makes a virtual environment if it does not exist. Returns its folder of programs.
pub fn environment(place: &Path) -> anyhow::Result<PathBuf> {
    let bin = place.join("bin");
    if !bin.join("pip").exists() {
        tools::output(Command::new("python3").args(["-m", "venv"]).arg(place))?;
    }
    Ok(bin)
}

/// Runs a command with its output on the terminal.
pub fn show(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(status.success(), "{command:?} failed; its messages are above");
    Ok(())
}

/// Checks that a program or library needs no newer glibc than [`GLIBC`].
pub fn require_old_glibc(file: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let (major, minor) = newest_glibc(&bytes).with_context(|| format!("{} names no glibc", file.display()))?;
    ensure!((major, minor) <= GLIBC, "{} needs glibc {major}.{minor}; at most {GLIBC:?} is allowed", file.display());
    Ok(())
}

/// Returns the newest version in the names of symbols' versions, such as `GLIBC_2.28`.
fn newest_glibc(bytes: &[u8]) -> Option<(u32, u32)> {
    const PREFIX: &[u8] = b"\0GLIBC_";
    let starts = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(PREFIX));
    let names = starts.map(|at| bytes[at + PREFIX.len()..].split(|&byte| byte == 0).next().unwrap_or_default());
    let version = |name: &[u8]| {
        let mut numbers = std::str::from_utf8(name).ok()?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    };
    names.filter_map(version).max()
}

/// Checks the size of a file that is released, and prints it.
pub fn require_size(file: &Path, most_megabytes: u64) -> anyhow::Result<()> {
    let bytes = fs::metadata(file).with_context(|| file.display().to_string())?.len();
    println!("{} {:.1} MB", file.display(), bytes as f64 / 1e6);
    ensure!(bytes <= most_megabytes * 1_000_000, "{} is larger than {most_megabytes} MB", file.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_glibc_compares_numbers_and_skips_other_names() {
        assert_eq!(newest_glibc(b"x\0GLIBC_2.9\0GLIBC_2.28\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBCXX_3.4\0"), Some((2, 28)));
        assert_eq!(newest_glibc(b"libc.so.6\0 GLIBC_2.40"), None);
    }

    #[test]
    fn replacement_refuses_texts_that_occur_twice_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "a b b").unwrap();
        replace(&file, "a", "c").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "c b b");
        assert!(replace(&file, "b", "c").is_err() && replace(&file, "x", "c").is_err());
    }
}
