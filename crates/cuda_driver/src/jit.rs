//! What the driver's PTX compiler says about a module that it refuses.

use std::ffi::{CStr, c_void};
use std::ptr;

use crate::sys;

/// Room for the compiler's complaint.
const LOG_BYTES: usize = 8 << 10;

/// Loads `ptx` once more for the sake of the compiler's error log; `None` where the log stays empty.
///
/// `cust` has no option for the log, so this is for the moment after `Module::from_ptx` failed. Needs a current context.
pub fn jit_log(ptx: &CStr) -> Option<String> {
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // A size is passed by value in the pointer's place (cuda.h, CUjit_option).
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a C string, both arrays have the length given, and `log` has the size it claims and outlives
    // the call; a module that does load is unloaded at once.
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
