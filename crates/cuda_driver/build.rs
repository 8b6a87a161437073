//! Lets the linker find the empty `libcuda.a`, wherever `cust`'s build script looked for a toolkit.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("Cargo sets the variable");
    println!("cargo::rustc-link-search=native={folder}/link/lib64");
}
