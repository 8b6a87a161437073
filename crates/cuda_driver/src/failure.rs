//! A failure in the driver's own words.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr;

use crate::record::{Code, Failure, SUCCESS, SYMBOL_NOT_FOUND};
use crate::table;

impl Failure {
    /// The code's name, for instance `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn name(&self) -> String {
        // SAFETY: `error_name` is the driver's `cuGetErrorName` or our own answer, as `describe` asks.
        unsafe { describe(self.code, table::error_name) }.unwrap_or_else(|| "an unnamed error".into())
    }

    /// The driver's sentence for the code.
    pub fn text(&self) -> String {
        if self.code == SYMBOL_NOT_FOUND {
            return "the driver lacks this call; update the NVIDIA driver".into();
        }
        // SAFETY: `error_text` is the driver's `cuGetErrorString` or our own answer, as `describe` asks.
        unsafe { describe(self.code, table::error_text) }.unwrap_or_else(|| "no description".into())
    }
}

/// Asks for a static string of the driver's.
///
/// # Safety
///
/// `ask` leaves in its second argument null, or a C string that is never freed.
unsafe fn describe(code: Code, ask: unsafe fn(Code, *mut *const c_char) -> Code) -> Option<String> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: `text` outlives the call.
    let answer = unsafe { ask(code, &mut text) };
    if answer != SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: not null, so a C string that is never freed, as this function's contract says.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name(), self.code, self.text())
    }
}

impl std::error::Error for Failure {}
