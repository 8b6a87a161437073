//! Types and constants of the driver API that cust_raw 0.11.3 lacks: tensor maps (CUDA 12.0), extensible launches and
//! clusters (CUDA 11.8). Names and layouts follow NVIDIA's `cuda.h` of CUDA 12.9.

#![allow(missing_docs, reason = "the names are cuda.h's, documented there")]

use std::ffi::{c_int, c_uint};

use cust::sys::CUstream;

/// An opaque TMA descriptor, as the driver encodes it and as a kernel reads it from global memory.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CUtensorMap {
    pub opaque: [u64; 16],
}

pub type CUtensorMapDataType = c_int;
pub const CU_TENSOR_MAP_DATA_TYPE_UINT8: CUtensorMapDataType = 0;
pub const CU_TENSOR_MAP_DATA_TYPE_FLOAT16: CUtensorMapDataType = 6;
pub const CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: CUtensorMapDataType = 9;
/// Packed 4-bit values, two per byte, without gaps in shared memory (the format that `kind::mxf4nvf4` reads).
pub const CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B: CUtensorMapDataType = 13;

pub type CUtensorMapInterleave = c_int;
pub const CU_TENSOR_MAP_INTERLEAVE_NONE: CUtensorMapInterleave = 0;

pub type CUtensorMapSwizzle = c_int;
pub const CU_TENSOR_MAP_SWIZZLE_NONE: CUtensorMapSwizzle = 0;
pub const CU_TENSOR_MAP_SWIZZLE_32B: CUtensorMapSwizzle = 1;
pub const CU_TENSOR_MAP_SWIZZLE_64B: CUtensorMapSwizzle = 2;
pub const CU_TENSOR_MAP_SWIZZLE_128B: CUtensorMapSwizzle = 3;

pub type CUtensorMapL2promotion = c_int;
pub const CU_TENSOR_MAP_L2_PROMOTION_NONE: CUtensorMapL2promotion = 0;
pub const CU_TENSOR_MAP_L2_PROMOTION_L2_128B: CUtensorMapL2promotion = 2;
pub const CU_TENSOR_MAP_L2_PROMOTION_L2_256B: CUtensorMapL2promotion = 3;

pub type CUtensorMapFloatOOBfill = c_int;
/// Elements outside the tensor read as zero.
pub const CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: CUtensorMapFloatOOBfill = 0;

/// A `CUfunction_attribute`. 1: clusters may have more CTAs than every GPU supports.
pub const CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: c_int = 14;

pub type CUlaunchAttributeID = c_int;
pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: CUlaunchAttributeID = 4;
/// The grid may begin before the previous grid of its stream has ended. It waits for that grid by
/// `griddepcontrol.wait`.
pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: CUlaunchAttributeID = 6;

/// Value of a launch attribute: a union of 64 bytes. Only the parts in use are declared.
#[repr(C)]
#[derive(Clone, Copy)]
pub union CUlaunchAttributeValue {
    /// CTAs per cluster along x, y and z.
    pub cluster_dim: [c_uint; 3],
    /// 1: the grid may begin early. 0: it may not.
    pub programmatic_stream_serialization_allowed: c_int,
    /// Sets the union's size and alignment.
    pub pad: [u64; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttribute {
    pub id: CUlaunchAttributeID,
    pub value: CUlaunchAttributeValue,
}

#[repr(C)]
#[allow(non_snake_case, reason = "cuda.h's names")]
#[derive(Debug, Clone, Copy)]
pub struct CUlaunchConfig {
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub numAttrs: c_uint,
}

const _: () = {
    assert!(size_of::<CUtensorMap>() == 128 && align_of::<CUtensorMap>() == 64);
    assert!(size_of::<CUlaunchAttributeValue>() == 64);
    assert!(size_of::<CUlaunchAttribute>() == 72);
    assert!(size_of::<CUlaunchConfig>() == 56);
};
