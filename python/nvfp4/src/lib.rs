//! The native module of the Python package `nvfp4`. It uses PyTorch's tensors by pointer, on the CPU or on the current
//! CUDA stream.
//!
//! Python (`python/nvfp4/_operators.py`) registers these functions as PyTorch operators. Each call checks its tensors
//! here; the library checks the layer.

mod device;
mod error;
mod linear;
mod moe;
mod prepared;
mod quantize;
mod route;
mod tensor;

use pyo3::prelude::*;

/// Functions for the operators and for packing.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("Error", module.py().get_type::<error::Error>())?;
    module.add_function(wrap_pyfunction!(moe::moe, module)?)?;
    module.add_function(wrap_pyfunction!(moe::pack_moe, module)?)?;
    module.add("MOE_HEAD_BYTES", nvfp4::backend::cuda::MoeLauncher::HEAD_BYTES)?;
    module.add_function(wrap_pyfunction!(moe::check_packed_moe, module)?)?;
    module.add_function(wrap_pyfunction!(moe::moe_weight_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(moe::moe_expert_parts, module)?)?;
    module.add_function(wrap_pyfunction!(moe::moe_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear, module)?)?;
    module.add_function(wrap_pyfunction!(linear::pack_linear, module)?)?;
    module.add("LINEAR_HEAD_BYTES", nvfp4::backend::cuda::LinearLauncher::HEAD_BYTES)?;
    module.add_function(wrap_pyfunction!(linear::check_packed_linear, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_weight_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(route::route, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::dequantize, module)?)?;
    Ok(())
}
