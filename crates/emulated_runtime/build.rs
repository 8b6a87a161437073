//! Sets the library's soname. Its symbols get that name as their version, like NVIDIA's, so that the loader prints no
//! warning. GNU's linker can do this, LLVM's and zig's cannot: with zig, the loader prints the warning.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcudart.so.13");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Cargo sets the variable if a linker was chosen; cargo-zigbuild and maturin choose a script of this name.
    if !std::env::var("RUSTC_LINKER").is_ok_and(|linker| linker.contains("zigcc")) {
        println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
        println!("cargo::rustc-cdylib-link-arg=-Wl,--default-symver");
    }
}
