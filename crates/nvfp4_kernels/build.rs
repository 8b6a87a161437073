//! Compiles the kernels of `kernels-gpu` to PTX and writes the table that `builds` includes, one entry per kernel and
//! architecture. If the variable `NVFP4_PTXAS` names a ptxas, the table also has machine code, which a GPU's driver loads
//! without compiling.

use std::error::Error;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

use cuda_builder::{Built, KernelCrate};
use gpu_arch::{Arch, Reach};

/// Devices that code for later devices is assembled for, because machine code does not run on the next major
/// capability.
const ONWARD_MACHINE_CODE: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];

/// Level of Zstandard at which packing 230 MB of PTX takes seconds.
const LEVEL: i32 = 9;

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
    let kernels = KernelCrate::open(PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../kernels-gpu"))?;
    kernels.print_rerun_if_changed();
    let built = kernels.build_all(&out)?;
    let ptxas = env::var_os("NVFP4_PTXAS").map(PathBuf::from);
    let machine_code = match &ptxas {
        Some(ptxas) => assemble_all(ptxas, &built)?,
        None => built.iter().map(|_| Vec::new()).collect(),
    };
    let mut table = String::from("vec![\n");
    for (built, codes) in built.iter().zip(machine_code) {
        let ptx = packed(&built.path)?;
        write!(table, "    Build::new({:?}, {:?}, {ptx}, &[", built.kernel, built.arch.to_string())?;
        for Cubin { arch, path } in codes {
            write!(table, "MachineCode {{ arch: \"{arch}\", code: {} }}, ", packed(&path)?)?;
        }
        table.push_str("]),\n");
    }
    table.push_str("]\n");
    fs::write(out.join("builds.rs"), table)?;
    Ok(())
}

/// Compresses a file beside it. Returns an expression of type `Packed`.
fn packed(path: &Path) -> Result<String, Box<dyn Error>> {
    let bytes = fs::read(path)?;
    let mut hasher = DefaultHasher::new();
    hasher.write(&bytes);
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
    encoder.long_distance_matching(true)?;
    encoder.write_all(&bytes)?;
    let packed = path.with_added_extension("zst");
    fs::write(&packed, encoder.finish()?)?;
    Ok(format!("Packed {{ bytes: include_bytes!({packed:?}), hash: {} }}", hasher.finish()))
}

/// Assembles every build for its devices, several at a time. Returns the files of each build.
fn assemble_all(ptxas: &Path, built: &[Built]) -> Result<Vec<Vec<Cubin>>, Box<dyn Error>> {
    let mut jobs = Vec::new();
    for (index, build) in built.iter().enumerate() {
        match build.arch.reach() {
            Reach::Onward => {
                for arch in ONWARD_MACHINE_CODE.map(|arch| arch.parse::<Arch>().expect("the list has valid names")) {
                    if arch >= build.arch {
                        jobs.push((index, arch));
                    }
                }
            }
            Reach::Family | Reach::Alone => jobs.push((index, build.arch)),
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(index, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((index, arch, assemble(ptxas, &built[index].path, arch)));
        }
        done
    };
    let threads = thread::available_parallelism()?.get();
    let done: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no worker panics")).collect()
    });
    let mut codes: Vec<Vec<Cubin>> = built.iter().map(|_| Vec::new()).collect();
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
