//! Shared parts of all runtime calls: declaration, and the thread's last error.

use std::cell::Cell;
use std::ffi::c_int;

pub use crate::pointer::{get, put};

/// A `cudaError_t`. Errors that also exist in the driver have the same number.
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const INVALID_CONFIGURATION: Code = 9;
pub const INVALID_SYMBOL: Code = 13;
pub const INVALID_MEMCPY_DIRECTION: Code = 21;
pub const INSUFFICIENT_DRIVER: Code = 35;
pub const MISSING_CONFIGURATION: Code = 52;
pub const INVALID_DEVICE_FUNCTION: Code = 98;
pub const INVALID_DEVICE: Code = 101;
pub const NOT_READY: Code = 600;
pub const NOT_SUPPORTED: Code = 801;
pub const UNKNOWN: Code = 999;

thread_local! {
    static LAST: Cell<Code> = const { Cell::new(SUCCESS) };
}

/// Returns the thread's last error.
pub fn last() -> Code {
    LAST.try_with(Cell::get).unwrap_or(SUCCESS)
}

pub fn set_last(code: Code) {
    // A thread that is ending does not read its error.
    let _ = LAST.try_with(|last| last.set(code));
}

/// Runs a body and records its error. A panic must not unwind into the caller's C code, so it becomes an error.
pub fn finish(body: impl FnOnce() -> Result<(), Code>) -> Code {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    match result.unwrap_or(Err(UNKNOWN)) {
        Ok(()) => SUCCESS,
        Err(NOT_READY) => NOT_READY,
        Err(code) => {
            set_last(code);
            code
        }
    }
}

/// Defines functions of the C ABI whose bodies may use `?`. A second name defines the variant for `--default-stream
/// per-thread`, in which stream 0 is the thread's own.
macro_rules! functions {
    () => {};
    (fn $name:ident $arguments:tt $body:block $($rest:tt)*) => {
        $crate::call::function!(fn $name $arguments $body);
        $crate::call::functions!($($rest)*);
    };
    (fn $name:ident, $per_thread:ident $arguments:tt $body:block $($rest:tt)*) => {
        $crate::call::function!(fn $name $arguments $body);
        $crate::call::per_thread!(fn $per_thread $arguments $body);
        $crate::call::functions!($($rest)*);
    };
}

macro_rules! function {
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        /// # Safety
        ///
        /// Every pointer is null or valid as cuda_runtime_api.h requires for the function of this name. Handles may be
        /// any number.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::call::Code {
            #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "the function's caller guarantees valid pointers")]
            $crate::call::finish(|| unsafe { $body })
        }
    };
}

macro_rules! per_thread {
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $crate::call::function!(fn $name($($arg: $ty),*) {
            $( let $arg = $crate::types::PerThread::own($arg); )*
            $body
        });
    };
}
pub(crate) use {function, functions, per_thread};
