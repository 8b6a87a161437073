//! What calls answer, and the text of the last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use nvfp4::Error;

/// What a call answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_status {
    /// It was done, or queued.
    OK = 0,
    /// An argument is wrong.
    INVALID = 1,
    /// There is no such device, it failed, or it computes no such layer.
    DEVICE = 2,
    /// A bug of the library.
    BUG = 3,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What went wrong in this thread's last call that failed, in words. Good until the next one fails.
#[unsafe(no_mangle)]
pub extern "C" fn nvfp4_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(ptr::null())
}

/// Runs a call, and keeps the text of its failure.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Error>) -> nvfp4_status {
    // Nothing is used again that a panic may have left half done: its text alone.
    let (status, text) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return nvfp4_status::OK,
        Ok(Err(error)) => {
            let of_device = matches!(error.code(), "driver" | "no-device" | "not-computed");
            (if of_device { nvfp4_status::DEVICE } else { nvfp4_status::INVALID }, error.to_string())
        }
        Err(_) => (nvfp4_status::BUG, "a bug of nvfp4: see what it wrote to stderr".into()),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has no place for it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    status
}
