//! Clusters of more CTAs than every GPU supports.

use cust::sys::{CUfunction, CUresult};

use crate::abi::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
use crate::record::{NO_DEVICE, record};
use crate::table::driver;

/// Allows launches of a function with clusters of more than eight CTAs, on GPUs that support them
/// (`cuFuncSetAttribute`).
///
/// # Safety
///
/// `function` belongs to a loaded module.
pub unsafe fn allow_large_clusters(function: CUfunction) -> CUresult {
    let code = match driver() {
        // SAFETY: the caller guarantees that `function` belongs to a loaded module; the attribute takes 0 or 1.
        Ok(table) => unsafe {
            (table.set_function_attribute)(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        },
        Err(_) => NO_DEVICE,
    };
    record("cuFuncSetAttribute", code)
}
