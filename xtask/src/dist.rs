//! `cargo xtask dist`: builds the commands for Linux with glibc 2.28 or newer into `target/dist`: a tarball and a Debian
//! package per processor, a list of their parts (SBOM), and checksums.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::{
    release::{self, Copy, Machine, Tools},
    tools, workspace,
};

/// Build tarballs and Debian packages of the commands into target/dist.
#[derive(clap::Args)]
pub struct Args {
    /// Processor (may be given several times)
    #[arg(long, value_enum, default_values = ["x86_64", "aarch64"])]
    machine: Vec<Machine>,
}

/// Packages of the workspace whose programs and libraries are released.
const PACKAGES: [&str; 4] = ["nvfp4", "ptx_emulator", "emulated_driver", "emulated_runtime"];

const PROGRAMS: [&str; 2] = ["nvfp4", "ptx-emulator"];

/// Libraries that `ptx-emulator run` looks for beside itself.
const LIBRARIES: [&str; 2] = ["libemulated_driver.so", "libemulated_runtime.so"];

/// Shells, and where Debian keeps their completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/nvfp4"),
    ("fish", "share/fish/vendor_completions.d/nvfp4.fish"),
    ("zsh", "share/zsh/vendor-completions/_nvfp4"),
];

/// Largest file, in megabytes.
const LARGEST: u64 = 30;

/// Builds everything.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let out = workspace::target_dir().join("dist");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    fs::create_dir_all(&out)?;
    let (copy, tools) = (Copy::make()?, Tools::install(&args.machine)?);
    let here = args.machine.iter().find(|machine| machine.is_here());
    let here = *here.with_context(|| "its own processor must be among them: its command writes the manual pages")?;
    let own = release::build_programs(&tools, &copy, here, &PACKAGES)?.join("nvfp4");
    let (version, _) = tools::output(Command::new(&own).arg("--version"))?;
    let version = version.trim().strip_prefix("nvfp4 ").context("`nvfp4 --version` prints another name")?.to_owned();
    let mut made = vec![out.join(format!("nvfp4-{version}.cdx.json"))];
    fs::write(&made[0], serde_json::to_string_pretty(&parts(&copy, &version)?)?)?;
    for &machine in &args.machine {
        let programs = release::build_programs(&tools, &copy, machine, &PACKAGES)?;
        let folder = out.join(format!("nvfp4-{version}-{}-linux", machine.name()));
        fill(&folder, &programs, &own, &made[0])?;
        made.push(tarball(&folder)?);
        made.push(debian(&folder, machine, &version)?);
        fs::remove_dir_all(&folder)?;
    }
    made.iter().try_for_each(|file| release::require_size(file, LARGEST))?;
    let names = made.iter().map(|file| file.file_name().expect("a file has a name"));
    let (sums, _) = tools::output(Command::new("sha256sum").args(names).current_dir(&out))?;
    fs::write(out.join("SHA256SUMS"), sums)?;
    println!("To publish: gh release create v{version} --draft {}/*", out.display());
    Ok(())
}

/// Fills the folder of a tarball: programs, libraries, completions, manual pages, licenses and the list of parts.
fn fill(folder: &Path, programs: &Path, own: &Path, parts: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder.join("bin"))?;
    for file in PROGRAMS.iter().chain(&LIBRARIES) {
        release::require_old_glibc(&programs.join(file))?;
        fs::copy(programs.join(file), folder.join("bin").join(file))?;
    }
    for (shell, place) in COMPLETIONS {
        let place = folder.join(place);
        fs::create_dir_all(place.parent().expect("a file lies in a folder"))?;
        fs::write(&place, tools::output(Command::new(own).args(["completions", shell]))?.0)?;
    }
    let manual = folder.join("share/man/man1");
    fs::create_dir_all(&manual)?;
    tools::output(Command::new(own).arg("man").arg(&manual))?;
    ensure!(manual.join("nvfp4.1").exists(), "`nvfp4 man` wrote no nvfp4.1");
    let documents = folder.join("share/doc/nvfp4");
    fs::create_dir_all(&documents)?;
    for file in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        fs::copy(workspace::root().join(file), documents.join(file))?;
    }
    fs::copy(parts, documents.join("nvfp4.cdx.json"))?;
    Ok(())
}

/// Packs a folder, the same bytes for the same files.
fn tarball(folder: &Path) -> anyhow::Result<PathBuf> {
    let file = folder.with_added_extension("tar.xz");
    let (parent, name) = (folder.parent().expect("target/dist"), folder.file_name().expect("a folder has a name"));
    pack(&file, parent, &[name.to_str().context("the name is ASCII")?])?;
    Ok(file)
}

/// Packs files of a folder, owned by root and without a time.
fn pack(tarball: &Path, folder: &Path, files: &[&str]) -> anyhow::Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=u+rw,go=rX", "-cJf"]);
    tools::output(tar.arg(tarball).arg("-C").arg(folder).args(files))?;
    Ok(())
}

/// Makes a Debian package: an archive of a version, a tarball with the package's description, and a tarball with its
/// files (deb(5)). The programs lie in `usr/lib/nvfp4`, beside their libraries, and `usr/bin` has links.
fn debian(folder: &Path, machine: Machine, version: &str) -> anyhow::Result<PathBuf> {
    let scratch = tempfile::tempdir()?;
    let (root, control) = (scratch.path().join("root"), scratch.path().join("control"));
    fs::create_dir_all(root.join("usr/lib"))?;
    fs::create_dir_all(root.join("usr/bin"))?;
    fs::create_dir_all(&control)?;
    let usr = root.join("usr");
    tools::output(Command::new("cp").arg("-R").arg(folder.join("share")).arg(folder.join("bin")).arg(&usr))?;
    fs::rename(usr.join("bin"), usr.join("lib/nvfp4"))?;
    fs::create_dir_all(usr.join("bin"))?;
    for program in PROGRAMS {
        std::os::unix::fs::symlink(Path::new("../lib/nvfp4").join(program), usr.join("bin").join(program))?;
    }
    let (used, _) = tools::output(Command::new("du").args(["-sk", "--apparent-size"]).arg(&root))?;
    let used = used.split_whitespace().next().context("du prints a size")?;
    fs::write(
        control.join("control"),
        format!(
            "Package: nvfp4\nVersion: {version}\nArchitecture: {}\nMaintainer: The developers of nvfp4 <nvfp4@localhost>\n\
             Installed-Size: {used}\nDepends: libc6 (>= {}.{})\nSection: science\nPriority: optional\n\
             Description: 4-bit (NVFP4) layers of large models, and an emulator of NVIDIA GPUs\n \
             The command nvfp4 runs, verifies and quantizes mixture-of-experts layers.\n \
             The command ptx-emulator runs PTX on the CPU and finds its faults.\n",
            machine.debian(),
            release::GLIBC.0,
            release::GLIBC.1,
        ),
    )?;
    pack(&scratch.path().join("control.tar.xz"), &control, &["./control"])?;
    pack(&scratch.path().join("data.tar.xz"), &root, &["./usr"])?;
    fs::write(scratch.path().join("debian-binary"), "2.0\n")?;
    let file = folder.with_file_name(format!("nvfp4_{version}_{}.deb", machine.debian()));
    let members = ["debian-binary", "control.tar.xz", "data.tar.xz"];
    tools::output(Command::new("ar").arg("rcD").arg(&file).args(members).current_dir(scratch.path()))?;
    ensure!(File::open(&file)?.metadata()?.len() > 0, "{} is empty", file.display());
    Ok(file)
}

/// Returns the crates in the programs, in the format CycloneDX 1.5.
fn parts(copy: &Copy, version: &str) -> anyhow::Result<Value> {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--locked", "--format-version=1", "--filter-platform", "x86_64-unknown-linux-gnu"]);
    let metadata: Value = serde_json::from_str(&tools::output(cargo.current_dir(&copy.folder))?.0)?;
    let used = linked(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let components = packages.iter().filter(|package| used.contains(&package["id"].as_str()));
    let components: Vec<_> = components
        .map(|package| {
            let (name, version) = (package["name"].as_str().unwrap_or(""), package["version"].as_str().unwrap_or(""));
            json!({
                "type": "library",
                "name": name,
                "version": version,
                "purl": format!("pkg:cargo/{name}@{version}"),
                "licenses": [{ "expression": package["license"] }],
            })
        })
        .collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "application", "name": "nvfp4", "version": version } },
        "components": components,
    }))
}

/// Returns the ids of the released packages and of everything that is linked into them.
fn linked(metadata: &Value) -> anyhow::Result<Vec<Option<&str>>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata has no resolution")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let released = packages.iter().filter(|package| PACKAGES.iter().any(|name| package["name"] == *name));
    let mut used: Vec<_> = released.map(|package| package["id"].as_str()).collect();
    ensure!(used.len() == PACKAGES.len(), "cargo metadata lists {} of {PACKAGES:?}", used.len());
    let mut next = 0;
    while let Some(&id) = used.get(next) {
        next += 1;
        let node = nodes.iter().find(|node| node["id"].as_str() == id).context("every package is resolved")?;
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            let id = dependency["pkg"].as_str();
            if kinds.into_iter().any(|kind| kind["kind"].is_null()) && !used.contains(&id) {
                used.push(id);
            }
        }
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_what_is_linked_and_not_what_builds_or_tests() {
        let package = |name: &str| json!({ "id": name, "name": name });
        let dependency = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let mut nodes: Vec<_> = PACKAGES[1..].iter().map(|name| json!({ "id": name, "deps": [] })).collect();
        let deps = [dependency("a", Value::Null), dependency("b", json!("build")), dependency("t", json!("dev"))];
        nodes.push(json!({ "id": "nvfp4", "deps": deps }));
        nodes.push(json!({ "id": "a", "deps": [dependency("c", Value::Null)] }));
        nodes.push(json!({ "id": "c", "deps": [] }));
        let packages: Vec<_> = PACKAGES.iter().map(|name| package(name)).collect();
        let metadata = json!({ "packages": packages, "resolve": { "nodes": nodes } });
        let used = linked(&metadata).unwrap();
        assert_eq!(used[PACKAGES.len()..], [Some("a"), Some("c")]);
        assert!(linked(&json!({ "packages": [], "resolve": { "nodes": [] } })).is_err());
    }
}
