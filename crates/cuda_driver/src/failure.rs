//! Description of a failed driver call.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr;

use crate::record::{Code, Failure, SUCCESS, SYMBOL_NOT_FOUND};
use crate::table;

impl Failure {
    /// Returns the name of the code, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn name(&self) -> String {
        // SAFETY: `error_name` stores null or a C string that is never freed, as `describe` requires.
        unsafe { describe(self.code, table::error_name) }.unwrap_or_else(|| "an unnamed error".into())
    }

    /// Returns the driver's description of the code.
    pub fn text(&self) -> String {
        if self.code == SYMBOL_NOT_FOUND {
            return "the driver lacks this call; update the NVIDIA driver".into();
        }
        // SAFETY: `error_text` stores null or a C string that is never freed, as `describe` requires.
        unsafe { describe(self.code, table::error_text) }.unwrap_or_else(|| "no description".into())
    }
}

/// Asks the driver for a description of a code.
///
/// # Safety
///
/// `ask` stores null or a C string that is never freed through its second argument.
unsafe fn describe(code: Code, ask: unsafe fn(Code, *mut *const c_char) -> Code) -> Option<String> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: `text` outlives the call.
    let answer = unsafe { ask(code, &mut text) };
    if answer != SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null, and the caller guarantees that `ask` then stored a C string that is never freed.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name(), self.code, self.text())
    }
}

impl std::error::Error for Failure {}
