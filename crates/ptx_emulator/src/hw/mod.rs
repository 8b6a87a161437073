//! The data path of NVIDIA GPUs as pure functions of bytes and integers: number formats, shared-memory swizzles,
//! tensor maps, matrix descriptors, tensor memory and the tensor cores' arithmetic and fragment layouts.
//!
//! This module knows no PTX syntax, threads, time or memory allocation: callers pass bits and receive bits or
//! addresses. Every submodule names the PTX ISA sections that it implements.

pub mod approx;
mod cut;
pub mod descriptor;
pub mod exact;
pub mod fragment;
pub mod matmul;
mod mufu;
pub mod number;
mod simd;
pub mod sparse;
pub mod sums;
pub mod swizzle;
pub mod tensor_map;
pub mod tmem;

/// Evaluates a CuTe layout as CUTLASS writes it, for comparisons in tests: (extent, stride) pairs, first fastest.
#[cfg(test)]
fn cute(modes: &[(u32, u32)], mut index: u32) -> u32 {
    let mut offset = 0;
    for &(extent, stride) in modes {
        offset += index % extent * stride;
        index /= extent;
    }
    offset
}
