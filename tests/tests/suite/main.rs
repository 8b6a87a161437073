//! The integration tests that may share a process: one program links and starts faster than a program per file, and its
//! tests keep all cores busy. A filter selects a file: `cargo test -p nvfp4-tests --test suite moe::`.

mod checkpoint;
mod cpu_bits;
mod edges;
mod emulated;
mod every_kernel;
mod formats_against_ml_dtypes;
mod fp8;
mod gated_sm120;
mod gated_sm90;
mod kernels_gpu;
mod layer_of_a_model;
mod linear;
mod moe;
mod moe_few_sm90;
mod moe_fp8_sm90;
mod moe_lists;
mod moe_products;
mod moe_quantize;
mod operations;
mod router;
mod shapes;
mod sm100;
mod variants;
