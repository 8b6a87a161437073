//! Hides the driver functions that `cuda_driver` defines inside the module, because PyTorch has its own.

use std::path::Path;
use std::{env, fs};

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return Ok(());
    }
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Cargo sets the variable if a linker was chosen; maturin chooses a script of this name for zig.
    if env::var("RUSTC_LINKER").is_ok_and(|linker| linker.contains("zigcc")) {
        // zig has no `--exclude-libs`. The last list of exported names replaces rustc's.
        let list = Path::new(&env::var("OUT_DIR").expect("Cargo sets it")).join("exported");
        fs::write(&list, "{ global: PyInit__native; local: *; };\n")?;
        println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", list.display());
    } else {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
    Ok(())
}
