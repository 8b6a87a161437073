//! Weights from a checkpoint's layout to what an MoE layer's kernels read, on the device.

pub mod abi;
