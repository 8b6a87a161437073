//! Compiles the probes' kernels to PTX and writes the table that `src/gpu.rs` includes, a line for each module and
//! architecture.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

use cuda_builder::KernelCrate;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let kernels = KernelCrate::open(PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("kernels"))?;
    kernels.print_rerun_if_changed();
    let mut table = String::from("&[\n");
    for built in kernels.build_all(&out)? {
        writeln!(table, "    ({:?}, {:?}, include_str!({:?})),", built.kernel, built.arch.to_string(), built.path)?;
    }
    table.push_str("]\n");
    fs::write(out.join("kernels.rs"), table)?;
    Ok(())
}
