//! The data path of NVIDIA GPUs as pure functions of bytes and integers: number formats, shared-memory swizzles,
//! tensor maps, matrix descriptors, tensor memory and the tensor cores' arithmetic and fragment layouts.
//!
//! Nothing here knows PTX syntax, threads, time or memory allocation: the caller hands in bits and gets bits or
//! addresses back. Every module names the PTX ISA sections it implements.

pub mod approx;
pub mod descriptor;
pub mod exact;
pub mod fp8;
pub mod fragment;
pub mod matmul;
pub mod number;
mod simd;
pub mod sparse;
pub mod swizzle;
pub mod tensor_map;
pub mod tmem;

/// A CuTe layout, as CUTLASS writes those that tests compare with: (extent, stride) pairs, first fastest.
#[cfg(test)]
fn cute(modes: &[(u32, u32)], mut index: u32) -> u32 {
    let mut offset = 0;
    for &(extent, stride) in modes {
        offset += index % extent * stride;
        index /= extent;
    }
    offset
}
