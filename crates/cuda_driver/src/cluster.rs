//! Clusters of more blocks than every card takes.

use cust::sys::{CUfunction, CUresult};

use crate::abi::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
use crate::record::{NO_DEVICE, record};
use crate::table::driver;

/// Lets launches of a function have clusters of more than eight blocks, on cards that take such (`cuFuncSetAttribute`).
///
/// # Safety
///
/// A function of a module that is loaded.
pub unsafe fn allow_large_clusters(function: CUfunction) -> CUresult {
    let code = match driver() {
        // SAFETY: `# Safety` above; the attribute takes a truth value.
        Ok(table) => unsafe {
            (table.set_function_attribute)(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        },
        Err(_) => NO_DEVICE,
    };
    record("cuFuncSetAttribute", code)
}
