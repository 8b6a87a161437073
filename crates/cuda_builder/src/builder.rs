//! [`CudaBuilder`] compiles one crate for one architecture in three steps (see the crate's documentation).

use std::{
    collections::HashSet,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    iter,
    num::NonZero,
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    slice::from_ref,
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use crate::{
    Arch, Error,
    arch::ptx_version,
    ir,
    packages::common_root,
    toolchain::{self, Toolchain},
};

const TARGET: &str = "nvptx64-nvidia-cuda";

/// Compiles one crate to PTX.
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    path: PathBuf,
    arch: Option<Arch>,
    copy_to: Option<PathBuf>,
    build_args: Vec<String>,
    emit_llvm_ir: bool,
}

impl CudaBuilder {
    /// Creates a build of the crate in the folder `path`.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_owned(), arch: None, copy_to: None, build_args: Vec::new(), emit_llvm_ir: false }
    }

    /// Sets the architecture to compile for, one of [`arches`](crate::arches). There is no default.
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = Some(arch);
        self
    }

    /// Sets the path of the PTX. By default the PTX stays in the crate's own target folder.
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> Self {
        self.copy_to = Some(path.as_ref().to_owned());
        self
    }

    /// Adds arguments for the nested cargo, such as `--features NAME`.
    pub fn build_args<S: AsRef<str>>(mut self, args: &[S]) -> Self {
        self.build_args.extend(args.iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// With `true`, also writes the LLVM IR that `opt` reads beside the PTX, with the extension `.ll`.
    pub fn emit_llvm_ir(mut self, emit: bool) -> Self {
        self.emit_llvm_ir = emit;
        self
    }

    /// Compiles the crate if something has changed, and returns the path of the PTX.
    pub fn build(self) -> Result<PathBuf, Error> {
        let built = build_all(&self.path, from_ref(&self))?;
        Ok(built.into_iter().next().expect("one build produces one PTX"))
    }

    /// Step 1: compiles Rust to IR before any LLVM pass. cargo decides whether a rebuild is needed.
    fn rustc(&self, nested: &Nested) -> Result<Ir, Error> {
        let path = &nested.path;
        let arch = self.arch.ok_or_else(|| Error::NoArch { path: path.clone() })?;
        let version = ptx_version(arch).ok_or(Error::UnknownArch { arch })?;
        let ir = nested.target_dir.join(format!("{arch}-{:016x}.ll", hash(&self.build_args)));
        let mut cargo = toolchain::cargo(path);
        cargo
            // Enables `-Z` flags and the unstable features of the kernel ABI on the stable toolchain.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", &nested.rustflags)
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            // llc turns these into `.loc` lines; ptxas rejects full debug information. A `.cargo/config.toml` above the crate
            // may set another level for dependencies.
            .env("CARGO_PROFILE_RELEASE_DEBUG", "line-directives-only")
            .args(["--config", "profile.release.package.'*'.debug='line-directives-only'"])
            .env("CARGO_PROFILE_RELEASE_STRIP", "none")
            // A static library is not linked, and only the IR is needed.
            .args(["rustc", "--release", "--lib", "--crate-type=staticlib", "-Zbuild-std=core"])
            // `core` takes longer to compile than most kernels, so it is compiled once, for no particular architecture.
            // Step 2 sets the architecture of its functions.
            .args(["-Zprofile-rustflags", "--config"])
            .arg(format!("profile.release.rustflags=['-Ctarget-cpu={arch}']"))
            .args(
                ["build-override", "package.core", "package.compiler_builtins"]
                    .iter()
                    .flat_map(|generic| ["--config".to_owned(), format!("profile.release.{generic}.rustflags=[]")]),
            )
            .args(["--target", TARGET, "--target-dir"])
            .arg(&nested.target_dir)
            .args(&self.build_args)
            .arg("--")
            .arg(format!("--emit=llvm-ir={}", ir.display()))
            .stdin(Stdio::null())
            // cargo reads the standard output of a build script.
            .stdout(Stdio::null());
        let status = cargo.status().map_err(|source| Error::Spawn { program: "cargo".to_owned(), source })?;
        if !status.success() {
            return Err(Error::Failed {
                program: "cargo".to_owned(),
                path: path.clone(),
                status,
                stderr: String::new(),
            });
        }
        Ok(Ir { arch, version, path: ir })
    }

    /// Runs steps 2 and 3.
    fn llvm(&self, tools: &Toolchain, ir: &Ir) -> Result<PathBuf, Error> {
        let text = fs::read_to_string(&ir.path).map_err(Error::io("read", &ir.path))?;
        let text =
            ir::prepare(&text, ir.arch).map_err(|(line, reason)| Error::Ir { path: ir.path.clone(), line, reason })?;
        let made = llvm(tools, ir.arch, ir.version, &text, &ir.path)?;
        let ptx = match &self.copy_to {
            Some(place) => {
                write_if_changed(place, &fs::read(&made).map_err(Error::io("read", &made))?)?;
                place.clone()
            }
            None => made,
        };
        if self.emit_llvm_ir {
            write_if_changed(&ptx.with_extension("ll"), text.as_bytes())?;
        }
        Ok(ptx)
    }
}

/// State that all builds of a crate share.
struct Nested {
    path: PathBuf,
    tools: Toolchain,
    target_dir: PathBuf,
    rustflags: String,
    /// Lock on the target folder, held until the builds end: two cargo commands may build the same kernels at once.
    _lock: File,
}

impl Nested {
    fn open(path: &Path) -> Result<Self, Error> {
        let found = path.canonicalize().ok().filter(|path| path.join("Cargo.toml").is_file());
        let path = found.ok_or_else(|| Error::NoCrate { path: path.to_owned() })?;
        let tools = Toolchain::find(&path)?;

        let target_dir = path.join("target");
        fs::create_dir_all(&target_dir).map_err(Error::io("create", &target_dir))?;
        let lock_path = target_dir.join(".cuda_builder.lock");
        let lock = File::create(&lock_path).map_err(Error::io("create", &lock_path))?;
        lock.lock().map_err(Error::io("lock", &lock_path))?;

        // Source paths are relative to the common folder of all packages, so that `.file` is the same in every
        // checkout.
        let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
        // These flags apply to `core` and the other dependencies too, because generic and inlined functions are
        // compiled from their MIR.
        let rustflags = [
            // Jump threading clones `asm!` into the branches that lead to it, before LLVM runs.
            "-Zmir-enable-passes=-JumpThreading".to_owned(),
            "-Cno-prepopulate-passes".to_owned(),
            remap(&common_root(&path)?, ""),
            remap(&tools.library, "library"),
        ];
        Ok(Self { path, tools, target_dir, rustflags: rustflags.join("\x1f"), _lock: lock })
    }
}

/// Result of step 1.
struct Ir {
    arch: Arch,
    version: u32,
    path: PathBuf,
}

/// Runs all builds of the crate in the folder `path`, which must differ from each other, and returns their PTX in
/// order.
pub(crate) fn build_all(path: &Path, builds: &[CudaBuilder]) -> Result<Vec<PathBuf>, Error> {
    let nested = &Nested::open(path)?;
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(builds.len());
    let (queue, prepared) = mpsc::channel::<(usize, Ir)>();
    let prepared = &Mutex::new(prepared);
    let take = || prepared.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
    let work = move || {
        let made = iter::from_fn(take).map(|(index, ir)| Ok((index, builds[index].llvm(&nested.tools, &ir)?)));
        made.collect::<Result<Vec<_>, _>>()
    };
    // The closure owns the queue: an error drops the queue, and the threads end.
    let made: Result<Vec<_>, Error> = thread::scope(move |scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        // cargo locks its target folder, so one build at a time does step 1. Meanwhile the threads compile earlier builds.
        for (index, build) in builds.iter().enumerate() {
            queue.send((index, build.rustc(nested)?)).expect("the queue's receiver outlives the threads");
        }
        drop(queue);
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let mut made = made?.concat();
    made.sort_unstable();
    Ok(made.into_iter().map(|(_, ptx)| ptx).collect())
}

/// Step 3: compiles IR to the PTX beside it and returns the PTX's path. Skips the work if the stamp shows that the PTX
/// was made from the same IR with the same options.
fn llvm(tools: &Toolchain, arch: Arch, version: u32, ir: &str, ir_path: &Path) -> Result<PathBuf, Error> {
    let prepared = ir_path.with_extension("convergent.ll");
    let optimized = ir_path.with_extension("opt.ll");
    let (cpu, features) = (format!("-mcpu={arch}"), format!("-mattr=+ptx{version}"));
    let (opt_args, llc_args) = (["-O3", "-S", &cpu], ["-O3", &cpu, &features]);

    // The stamp holds hashes of the PTX's inputs and of the PTX itself. It does not depend on the folder, so a copy of the
    // crate can use a copy of the PTX.
    let (ptx, stamp_path) = (ir_path.with_extension("ptx"), ir_path.with_extension("stamp"));
    let made_from = hash(&(&tools.opt, opt_args, &tools.llc, llc_args, ir));
    let stamp = |ptx: &[u8]| format!("{made_from:016x} {:016x}", hash(&ptx));
    if fs::read(&ptx).is_ok_and(|ptx| fs::read_to_string(&stamp_path).is_ok_and(|made| made == stamp(&ptx))) {
        return Ok(ptx);
    }
    fs::write(&prepared, ir).map_err(Error::io("write", &prepared))?;
    let mut opt = Command::new(&tools.opt);
    opt.args(opt_args).arg("-o").args([&optimized, &prepared]);
    toolchain::output(opt, &prepared)?;
    let mut llc = Command::new(&tools.llc);
    llc.args(llc_args).args(["-o", "-"]).arg(&optimized);
    let text = align_tensor_maps(toolchain::output(llc, &optimized)?);
    write_if_changed(&ptx, &text)?;
    write_if_changed(&stamp_path, stamp(&text).as_bytes())?;
    Ok(ptx)
}

/// Raises the alignment of tensor-map parameters to 64. The parameter begins with a tensor map, and its kernel takes
/// its address (`cuda_std::tensor_map_of_parameter!`). rustc declares the alignment of the parameter's type, at most
/// 16.
fn align_tensor_maps(ptx: Vec<u8>) -> Vec<u8> {
    let Ok(text) = str::from_utf8(&ptx) else { return ptx };
    let taken: HashSet<_> =
        text.lines().filter_map(|line| line.trim().strip_prefix("mov.b64")?.split(", ").nth(1)).collect();
    let declared = |line: &str| {
        let (align, rest) = line.trim().strip_prefix(".param .align ")?.split_once(" .b8 ")?;
        let name = rest.split('[').next()?;
        taken.contains(&*format!("{name};")).then(|| line.replace(&format!(".align {align} "), ".align 64 "))
    };
    let line = |line: &str| declared(line).unwrap_or_else(|| line.to_owned());
    text.split_inclusive('\n').map(line).collect::<String>().into_bytes()
}

/// Writes a temporary file and renames it, so that no reader sees a partial file. If the bytes are unchanged, the file
/// and its modification time stay as they are.
fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    if fs::read(path).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    let partial = path.with_extension("partial");
    fs::write(&partial, bytes).map_err(Error::io("write", &partial))?;
    fs::rename(&partial, path).map_err(Error::io("write", path))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_map_parameter_is_aligned() {
        let of = |kernel: &str, align: u32, body: &str| {
            format!(".entry {kernel}(\n\t.param .align {align} .b8 {kernel}_param_0[192]\n)\n{{\n\t{body}\n}}\n")
        };
        let (taken, read) = ("mov.b64 %rd1, map_param_0;", "ld.param.b64 %rd1, [values_param_0];");
        for align in [1, 8, 16] {
            let text = of("map", align, taken) + &of("values", align, read);
            let aligned = align_tensor_maps(text.into_bytes());
            assert_eq!(String::from_utf8(aligned).unwrap(), of("map", 64, taken) + &of("values", align, read));
        }
    }
}
