//! `cargo xtask publish`: rehearses the publication of the crates, in a copy of the workspace.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::{release, tools, workspace};

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

/// Makes the copy, rehearses, and prints the packages' sizes.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let copy = release::Copy::make()?;
    let mut cargo = Command::new("cargo");
    cargo.args(["publish", "--workspace", "--dry-run", "--allow-dirty", "--no-verify"]);
    tools::show(cargo.current_dir(&copy.folder).env_remove("CARGO_TARGET_DIR"))?;
    // A rehearsal puts the packages into a registry of its own.
    let folder = copy.folder.join("target/package/tmp-registry");
    let packages = release::require_sizes(&folder, ".crate", LARGEST)?;
    let (found, expected) = (packages.len(), copy.published.len());
    ensure!(found == expected, "{}: {found} packages, expected {expected}", folder.display());
    if args.build {
        build_outside(&packages)?;
    }
    println!("To publish: (cd {} && cargo publish --workspace --allow-dirty --no-verify)", copy.folder.display());
    Ok(())
}

/// Builds and runs a program that takes the packages in place of crates.io's, outside the workspace.
fn build_outside(packages: &[PathBuf]) -> anyhow::Result<()> {
    let outside = tempfile::tempdir()?;
    let folder = outside.path();
    let mut manifest = String::from(
        "[package]\nname = \"outside\"\nedition = \"2024\"\n\n[dependencies]\n\
         nvfp4 = { version = \"*\", features = [\"cuda\", \"emulated\"] }\n\n[patch.crates-io]\n",
    );
    for file in packages {
        tools::output(Command::new("tar").arg("-xzf").arg(file).arg("-C").arg(folder))?;
        let name = file.file_stem().and_then(|name| name.to_str()).context("a package's name is ASCII")?;
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
    tools::show(cargo.env("CARGO_TARGET_DIR", workspace::target_dir().join("publish-build")))
}
