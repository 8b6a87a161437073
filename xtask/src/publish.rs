//! `cargo xtask publish`: rehearses the publication of the crates, in a copy of the workspace. The copy differs from the
//! workspace in three points:
//!
//! 1. `kernels-gpu` is a member, so that Cargo publishes it in its turn. Here it is outside, because a member would inherit
//!    the workspace's profiles.
//! 2. `nvfp4-ptx` contains the PTX, so that nothing that is built from the packages compiles kernels.
//! 3. Each published crate has the licenses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::{build_ptx, table::Table, tools, workspace};

/// Rehearse the publication of the crates, in a copy of the workspace in target/publish.
#[derive(clap::Args)]
pub struct Args {
    /// Also build a program outside the workspace on the packages, as a user of crates.io would
    #[arg(long)]
    build: bool,
}

/// Largest package that crates.io accepts, in bytes.
const LARGEST: u64 = 10 << 20;

/// A program with the kernels' PTX and cust.
const PROGRAM: &str = r#"
fn main() {
    let ptx = nvfp4::kernels::ptx("moe_sm80").expect("the package has the kernel");
    println!("{} bytes of PTX; GPU: {:?}", ptx.len(), nvfp4::backend::cuda::Cuda::open(0).map(|_| ()));
}
"#;

const LICENSES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Makes the copy, rehearses, and prints the packages' sizes.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let folder = workspace::target_dir().join("publish");
    copy_workspace(&folder)?;
    let published = published(&folder)?;
    for (package, license) in published.iter().flat_map(|package| LICENSES.map(|license| (package, license))) {
        fs::copy(workspace::root().join(license), package.join(license))?;
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["publish", "--workspace", "--dry-run", "--allow-dirty", "--no-verify"]);
    show(cargo.current_dir(&folder).env_remove("CARGO_TARGET_DIR"))?;
    // A rehearsal puts the packages into a registry of its own.
    let packages = folder.join("target/package/tmp-registry");
    let found = sizes(&packages)?;
    ensure!(found == published.len(), "{}: {found} packages, expected {}", packages.display(), published.len());
    if args.build {
        build_outside(&packages)?;
    }
    println!("To publish: (cd {} && cargo publish --workspace --allow-dirty --no-verify)", folder.display());
    Ok(())
}

/// Copies the files that git tracks, and changes points 1 and 2.
fn copy_workspace(folder: &Path) -> anyhow::Result<()> {
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
    pack_ptx(&folder.join("crates/nvfp4_ptx/ptx"))
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

/// Prints the size of each package, and fails if one is too large. Returns their number.
fn sizes(folder: &Path) -> anyhow::Result<usize> {
    let mut packages = Vec::new();
    for entry in folder.read_dir().with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "crate") {
            packages.push((entry.file_name().to_string_lossy().into_owned(), entry.metadata()?.len()));
        }
    }
    packages.sort();
    let mut table = Table::new(1, &["package", "KiB"]);
    packages.iter().for_each(|(name, bytes)| table.row([name.clone(), bytes.div_ceil(1024).to_string()]));
    print!("{table}");
    let large: Vec<_> = packages.iter().filter(|(_, bytes)| *bytes > LARGEST).map(|(name, _)| name.as_str()).collect();
    ensure!(large.is_empty(), "crates.io accepts 10 MiB; larger: {}", large.join(", "));
    Ok(packages.len())
}

/// Builds and runs a program that takes the packages in place of crates.io's, outside the workspace.
fn build_outside(packages: &Path) -> anyhow::Result<()> {
    let outside = tempfile::tempdir()?;
    let folder = outside.path();
    let mut manifest = String::from(
        "[package]\nname = \"outside\"\nedition = \"2024\"\n\n[dependencies]\n\
         nvfp4 = { version = \"*\", features = [\"cuda\", \"emulated\"] }\n\n[patch.crates-io]\n",
    );
    for entry in packages.read_dir()? {
        let file = entry?.path();
        let Some(name) = file.file_name().and_then(|name| name.to_str()?.strip_suffix(".crate")) else { continue };
        tools::output(Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(folder))?;
        let (package, _) = name.rsplit_once('-').context("a package's file is NAME-VERSION.crate")?;
        manifest += &format!("{package} = {{ path = \"{name}\" }}\n");
    }
    fs::write(folder.join("Cargo.toml"), manifest)?;
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/main.rs"), PROGRAM)?;
    // The folder that crates/cuda_driver/README.md describes.
    fs::create_dir_all(folder.join("cuda/lib64"))?;
    let mut cargo = Command::new("cargo");
    cargo.args(["run", "--quiet"]).current_dir(folder).env("CUDA_LIBRARY_PATH", folder.join("cuda"));
    show(cargo.env("CARGO_TARGET_DIR", workspace::target_dir().join("publish-build")))
}

/// Runs a command with its output on the terminal.
fn show(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(status.success(), "{command:?} failed; its messages are above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
