//! The status that functions return, and the text of the last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use nvfp4::Error;

/// Result of a function.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum nvfp4_status {
    /// The work is done or queued.
    OK = 0,
    /// An argument is wrong.
    INVALID = 1,
    /// The device does not exist, failed, or has no kernel for the layer.
    DEVICE = 2,
    /// A bug in the library.
    BUG = 3,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Returns the message of this thread's last failed call. The pointer is valid until the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn nvfp4_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(ptr::null())
}

/// Runs a call and keeps the message of its failure.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Error>) -> nvfp4_status {
    // After a panic only the message is used, so half-done work is never seen.
    let (status, text) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return nvfp4_status::OK,
        Ok(Err(error)) => {
            let of_device = matches!(error.code(), "driver" | "no-device" | "not-computed");
            (if of_device { nvfp4_status::DEVICE } else { nvfp4_status::INVALID }, error.to_string())
        }
        Err(_) => (nvfp4_status::BUG, "a bug in nvfp4; its message is on stderr".into()),
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending cannot store the message.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    status
}
