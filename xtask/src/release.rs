//! A copy of the workspace with compiled kernels, from which releases are made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::{build_ptx, tools, workspace};

const LICENSES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

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

/// Runs a command with its output on the terminal.
pub fn show(command: &mut Command) -> anyhow::Result<()> {
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
