//! Sets the library's soname. Its symbols get that name as their version, like NVIDIA's, so that the loader prints no
//! warning. GNU's linker can do this, LLVM's cannot.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcudart.so.13");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--default-symver");
    println!("cargo::rerun-if-changed=build.rs");
}
