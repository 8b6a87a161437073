//! Gives the library the name of NVIDIA's, so that a later lookup of `libcudart.so.13` in a process finds it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcudart.so.13");
    }
}
