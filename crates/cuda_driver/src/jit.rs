//! Error log of the driver's PTX compiler.

use std::ffi::{CStr, c_void};
use std::ptr;

use crate::sys;

/// Size of the buffer for the log.
const LOG_BYTES: usize = 8 << 10;

/// Loads `ptx` again to get the compiler's error log. `None`: the log is empty.
///
/// `cust` has no option for the log, so call this after `Module::from_ptx` failed. Needs a current context.
pub fn jit_log(ptx: &CStr) -> Option<String> {
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // A size is passed by value instead of a pointer (cuda.h, CUjit_option).
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a C string, both arrays have the given length, and `log` has the given size and outlives the
    // call. A module that does load is unloaded at once.
    unsafe {
        let result = sys::cuModuleLoadDataEx(
            &mut module,
            ptx.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        );
        if result == sys::CUresult::CUDA_SUCCESS {
            sys::cuModuleUnload(module);
        }
    }
    let text = CStr::from_bytes_until_nul(&log).ok()?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}
