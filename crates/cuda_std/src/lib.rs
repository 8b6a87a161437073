//! Device-side standard library for kernels written in Rust.
