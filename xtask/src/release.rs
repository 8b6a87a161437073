//! The copy of the workspace that is published, and the sizes of its packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, ensure};

use crate::table::Table;
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
        replace(&folder.join("Cargo.toml"), r#"exclude = ["kernels-gpu", "#, "exclude = [")?;
        replace(&folder.join("Cargo.toml"), r#""crates/*"]"#, r#""crates/*", "kernels-gpu"]"#)?;
        let license = "license = \"MIT OR Apache-2.0\"\n";
        replace(&folder.join("kernels-gpu/Cargo.toml"), license, &format!("{license}repository.workspace = true\n"))?;
        // The list of a member's dependencies in Cargo.lock is complete.
        tools::output(Command::new("cargo").args(["update", "--workspace"]).current_dir(&folder))?;
        pack_ptx(&folder.join("crates/nvfp4_ptx/ptx"))?;
        let published = published(&folder)?;
        for package in &published {
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
fn replace(file: &Path, old: &str, new: &str) -> anyhow::Result<()> {
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
    fn replacement_refuses_texts_that_occur_twice_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "a b b").unwrap();
        replace(&file, "a", "c").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "c b b");
        assert!(replace(&file, "b", "c").is_err() && replace(&file, "x", "c").is_err());
    }

    #[test]
    fn sizes_are_of_files_with_the_ending() {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("b.deb", 3), ("a.deb", 2), ("c.txt", 9)] {
            fs::write(folder.path().join(name), vec![0; bytes]).unwrap();
        }
        let files = require_sizes(folder.path(), ".deb", 3).unwrap();
        assert_eq!(files, ["a.deb", "b.deb"].map(|name| folder.path().join(name)));
        assert!(require_sizes(folder.path(), ".deb", 2).unwrap_err().to_string().ends_with("b.deb"));
    }
}
