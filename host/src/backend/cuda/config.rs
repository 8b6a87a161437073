//! Launch attributes and configurations in the form that the driver expects.

use cuda_driver::abi::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CUlaunchAttribute, CUlaunchAttributeValue, CUlaunchConfig,
};
use cuda_driver::sys::CUstream;

use nvfp4_kernels::launch::Grid;

/// Attribute that sets the cluster size, in CTAs along x.
pub(super) fn cluster_attribute(blocks: u32) -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        value: CUlaunchAttributeValue { cluster_dim: [blocks, 1, 1] },
    }
}

/// Configuration of a grid's launch. Its `attrs` points to `attributes`.
pub(super) fn launch_config(grid: &Grid, stream: CUstream, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: grid.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared_bytes,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}
