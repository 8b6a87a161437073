//! Compiles the kernels of `kernels-gpu` to PTX and writes the table that `builds` includes, one entry per kernel and
//! architecture. If the package `nvfp4-ptx` has PTX, as the published one does, nothing is compiled. If the variable
//! `NVFP4_PTXAS` names a ptxas, the table also has machine code, which a GPU's driver loads without compiling.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

use cuda_builder::KernelCrate;
use gpu_arch::{Arch, Reach};

/// Devices that code for later devices is assembled for, because machine code does not run on the next major
/// capability.
const ONWARD_MACHINE_CODE: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// PTX of a kernel for one architecture.
struct Ptx {
    kernel: String,
    arch: Arch,
    /// The text.
    path: PathBuf,
    /// Expression of type `Packed`.
    packed: String,
}

/// A file of machine code.
struct Cubin {
    arch: Arch,
    path: PathBuf,
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=NVFP4_PTXAS");
    if let Err(error) = embed() {
        fail(&*error);
    }
}

fn embed() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let ptxas = env::var_os("NVFP4_PTXAS").map(PathBuf::from);
    let list = Path::new(nvfp4_ptx::FOLDER).join(nvfp4_ptx::LIST);
    let texts = if list.exists() { published(&list, &out, ptxas.is_some())? } else { compile(&out)? };
    let machine_code = match &ptxas {
        Some(ptxas) => assemble_all(ptxas, &texts)?,
        None => texts.iter().map(|_| Vec::new()).collect(),
    };
    let mut table = String::from("vec![\n");
    for (Ptx { kernel, arch, packed: ptx, .. }, codes) in texts.iter().zip(machine_code) {
        write!(table, "    Build::new({kernel:?}, \"{arch}\", {ptx}, &[")?;
        for Cubin { arch, path } in codes {
            write!(table, "MachineCode {{ arch: \"{arch}\", code: {} }}, ", packed(&path)?)?;
        }
        table.push_str("]),\n");
    }
    table.push_str("]\n");
    fs::write(out.join("builds.rs"), table)?;
    Ok(())
}

/// Compiles the kernels of a checkout.
fn compile(out: &Path) -> Result<Vec<Ptx>, Box<dyn Error>> {
    let kernels = KernelCrate::open(PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../kernels-gpu"))?;
    kernels.print_rerun_if_changed();
    let with_packed = |built: cuda_builder::Built| {
        let packed = packed(&built.path)?;
        Ok(Ptx { kernel: built.kernel, arch: built.arch, path: built.path, packed })
    };
    kernels.build_all(out)?.into_iter().map(with_packed).collect()
}

/// Reads the list of `nvfp4-ptx`, and unpacks the texts if an assembler needs them.
fn published(list: &Path, out: &Path, unpack: bool) -> Result<Vec<Ptx>, Box<dyn Error>> {
    println!("cargo::rerun-if-changed={}", list.display());
    let lines = fs::read_to_string(list).map_err(|error| format!("{}: {error}", list.display()))?;
    let mut texts = Vec::new();
    for line in lines.lines() {
        let words: Vec<_> = line.split(' ').collect();
        let &[kernel, arch, hash] = &words[..] else {
            return Err(format!("{}: {line:?} is not KERNEL ARCH HASH", list.display()).into());
        };
        let file = format!("{kernel}.{arch}.ptx");
        let (path, zst) = (out.join(&file), list.with_file_name(format!("{file}.zst")));
        if unpack {
            fs::write(&path, nvfp4_ptx::unpack(&fs::read(&zst)?)?)?;
        }
        let packed = expression(&zst, hash.parse()?);
        texts.push(Ptx { kernel: kernel.to_owned(), arch: arch.parse()?, path, packed });
    }
    Ok(texts)
}

/// Compresses a file beside it. Returns an expression of type `Packed`.
fn packed(path: &Path) -> Result<String, Box<dyn Error>> {
    let (bytes, hash) = nvfp4_ptx::pack(&fs::read(path)?)?;
    let packed = path.with_added_extension("zst");
    fs::write(&packed, bytes)?;
    Ok(expression(&packed, hash))
}

/// Returns an expression of type `Packed`.
fn expression(packed: &Path, hash: u64) -> String {
    format!("Packed {{ bytes: include_bytes!({packed:?}), hash: {hash} }}")
}

/// Assembles every build for its devices, several at a time. Returns the files of each build.
fn assemble_all(ptxas: &Path, texts: &[Ptx]) -> Result<Vec<Vec<Cubin>>, Box<dyn Error>> {
    let mut jobs = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        match text.arch.reach() {
            Reach::Onward => {
                for arch in ONWARD_MACHINE_CODE.map(|arch| arch.parse::<Arch>().expect("the list has valid names")) {
                    if arch >= text.arch {
                        jobs.push((index, arch));
                    }
                }
            }
            Reach::Family | Reach::Alone => jobs.push((index, text.arch)),
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(index, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((index, arch, assemble(ptxas, &texts[index].path, arch)));
        }
        done
    };
    let threads = thread::available_parallelism()?.get();
    let done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no worker panics")).collect()
    });
    let mut codes: Vec<Vec<Cubin>> = texts.iter().map(|_| Vec::new()).collect();
    for (index, arch, path) in done {
        codes[index].push(Cubin { arch, path: path? });
    }
    Ok(codes)
}

/// Assembles PTX for an architecture. Returns the file of machine code, or the assembler's message.
fn assemble(ptxas: &Path, ptx: &Path, arch: Arch) -> Result<PathBuf, String> {
    let cubin = ptx.with_extension(format!("{arch}.cubin"));
    let output =
        Command::new(ptxas).arg("--gpu-name").arg(arch.to_string()).arg(ptx).arg("--output-file").arg(&cubin).output();
    let output = output.map_err(|error| format!("NVFP4_PTXAS={}: {error}", ptxas.display()))?;
    if output.status.success() {
        Ok(cubin)
    } else {
        Err(format!("{} for {arch}: {}", ptx.display(), String::from_utf8_lossy(&output.stderr)))
    }
}

/// Ends the build and prints every cause of the error; `?` in `main` would print the `Debug` text.
fn fail(error: &dyn Error) -> ! {
    let mut causes = vec![error.to_string()];
    let mut source = error.source();
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    println!("cargo::error=GPU kernels: {}", causes.join(": ").replace('\n', " | "));
    std::process::exit(1)
}
