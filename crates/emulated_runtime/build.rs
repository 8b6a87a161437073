//! Names the library as programs know it. Its symbols have the version that those of NVIDIA's have, its name, so that the
//! loader has nothing to warn of; LLVM's linker cannot do this, GNU's can.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcudart.so.13");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--default-symver");
    println!("cargo::rerun-if-changed=build.rs");
}
