//! The Rust toolchain for the kernels: its cargo and its LLVM tools.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::Error;

/// Prefixes of variables that the outer cargo, clippy or a user's profile may set and the nested cargo must not see.
const SCRUBBED: [&str; 11] = [
    "CARGO_BUILD_",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_INCREMENTAL",
    "CARGO_MAKEFLAGS",
    "CARGO_PROFILE_",
    "CARGO_TARGET_",
    "CARGO_UNSTABLE_",
    "CLIPPY_ARGS",
    "MAKEFLAGS",
    "RUSTC_",
    "RUSTFLAGS",
];

/// Paths in the toolchain that is active in the crate's folder.
pub(crate) struct Toolchain {
    /// Folder of the source of `core`.
    pub(crate) library: PathBuf,
    pub(crate) opt: PathBuf,
    pub(crate) llc: PathBuf,
}

impl Toolchain {
    /// Finds the toolchain. Missing components are added by rustup.
    pub(crate) fn find(crate_path: &Path) -> Result<Self, Error> {
        let sysroot = PathBuf::from(rustc(crate_path, &["--print", "sysroot"])?);
        let host = rustc(crate_path, &["--print", "host-tuple"])?;
        let bin = sysroot.join("lib/rustlib").join(host).join("bin");
        let library = sysroot.join("lib/rustlib/src/rust/library");
        let found = Self { library, opt: bin.join("opt"), llc: bin.join("llc") };

        let missing = [
            ("rust-src", &found.library.join("core/Cargo.toml")),
            ("llvm-tools", &found.opt),
            ("llvm-tools", &found.llc),
        ];
        let absent = || {
            let mut names: Vec<_> = missing.iter().filter(|(_, file)| !file.exists()).map(|(name, _)| *name).collect();
            names.dedup();
            names
        };
        if !absent().is_empty() {
            let components = absent().join(" ");
            eprintln!("cuda_builder: rustup component add {components}");
            let added = scrubbed("rustup", crate_path).args(["component", "add"]).args(absent()).status();
            if !added.is_ok_and(|status| status.success()) || !absent().is_empty() {
                return Err(Error::MissingComponents { sysroot, components });
            }
        }
        Ok(found)
    }
}

/// Returns a command for the running cargo, or the cargo on PATH, in the crate's folder. Variables that would change
/// the build are removed.
pub(crate) fn cargo(crate_path: &Path) -> Command {
    scrubbed(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), crate_path)
}

/// Runs `command` and returns its standard output. On failure the error contains its messages.
pub(crate) fn output(mut command: Command, path: &Path) -> Result<Vec<u8>, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(Error::Failed { program, path: path.to_owned(), status: output.status, stderr })
        }
        Err(source) => Err(Error::Spawn { program, source }),
    }
}

fn rustc(crate_path: &Path, args: &[&str]) -> Result<String, Error> {
    let mut command = scrubbed(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()), crate_path);
    command.args(args);
    let stdout = output(command, crate_path)?;
    Ok(String::from_utf8_lossy(&stdout).trim().to_owned())
}

fn scrubbed(program: impl Into<OsString>, crate_path: &Path) -> Command {
    let mut command = Command::new(program.into());
    command.current_dir(crate_path);
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| SCRUBBED.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    // An empty value overrides `build.rustc-wrapper` in a user's cargo configuration; an absent one would not.
    command.env("RUSTC_WRAPPER", "").env("RUSTC_WORKSPACE_WRAPPER", "");
    command
}
