//! With the feature `kernels`: compiles the kernels of `kernels-gpu` to PTX and writes the table that `kernels::builds`
//! includes, one line per kernel and architecture. Without the feature: does nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "kernels")]
    if let Err(error) = kernels::embed() {
        kernels::fail(&*error);
    }
}

#[cfg(feature = "kernels")]
mod kernels {
    use std::error::Error;
    use std::fmt::Write;
    use std::path::PathBuf;
    use std::{env, fs};

    use cuda_builder::KernelCrate;

    pub fn embed() -> Result<(), Box<dyn Error>> {
        let out = PathBuf::from(env::var("OUT_DIR")?);
        let kernels = KernelCrate::open(PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../kernels-gpu"))?;
        kernels.print_rerun_if_changed();
        let mut table = String::from("vec![\n");
        for built in kernels.build_all(&out)? {
            let (name, arch) = (built.kernel, built.arch.to_string());
            let packed = built.path.with_extension("ptx.lz4");
            fs::write(&packed, lz4_flex::compress_prepend_size(&fs::read(&built.path)?))?;
            writeln!(table, "    Build::new({name:?}, {arch:?}, include_bytes!({packed:?})),")?;
        }
        table.push_str("]\n");
        fs::write(out.join("builds.rs"), table)?;
        Ok(())
    }

    /// Ends the build and prints every cause of the error; `?` in `main` would print the `Debug` text.
    pub fn fail(error: &dyn Error) -> ! {
        let mut causes = vec![error.to_string()];
        let mut source = error.source();
        while let Some(cause) = source {
            causes.push(cause.to_string());
            source = cause.source();
        }
        println!("cargo::error=GPU kernels: {}", causes.join(": ").replace('\n', " | "));
        std::process::exit(1)
    }
}
