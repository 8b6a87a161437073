//! Compiles a Rust crate to PTX.
