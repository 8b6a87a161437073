//! Shared parts of all driver calls: declaration, preconditions, and access through the caller's pointers.

use std::ffi::{CStr, c_char};
use std::sync::MutexGuard;

use crate::code::{Code, DEINITIALIZED, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED};
use crate::current;
pub use crate::pointer::{get, put};
use crate::state::{Driver, driver};

/// What must precede a call: nothing, `cuInit`, or `cuInit` and a current context.
#[derive(PartialEq, Clone, Copy)]
pub enum Needs {
    Nothing,
    Init,
    Context,
}

/// Records the call. Fails it if the test requests that, if a precondition is missing, or if a kernel has faulted.
pub fn enter(name: &str, needs: Needs) -> Result<MutexGuard<'static, Driver>, Code> {
    let mut driver = driver();
    if let Some(test) = &mut driver.test {
        test.note(name)?;
    }
    if needs != Needs::Nothing && !driver.initialized {
        return Err(NOT_INITIALIZED);
    }
    if needs == Needs::Context {
        let known = driver.contexts.get(&current::current()).is_some_and(|context| context.users > 0);
        if !known {
            return Err(INVALID_CONTEXT);
        }
        if let Some(code) = driver.lost {
            return Err(code);
        }
        if crate::run::inside_host_function() {
            return Err(DEINITIALIZED);
        }
    }
    Ok(driver)
}

/// Reads an array of the caller.
///
/// # Safety
///
/// `from` is null or valid for reads of `count` values of `T`.
pub unsafe fn array<T: Copy>(from: *const T, count: usize) -> Result<Vec<T>, Code> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from.is_null() || count > 1 << 24 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `from` is not null, so the caller guarantees `count` readable values of `T`.
    Ok((0..count).map(|index| unsafe { from.add(index).read_unaligned() }).collect())
}

/// Reads a string of the caller.
///
/// # Safety
///
/// `text` is null or a C string.
pub unsafe fn text(text: *const c_char) -> Result<String, Code> {
    if text.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `text` is not null, so the caller guarantees a C string.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Defines functions of the C ABI whose bodies may use `?`. `NAME` is the name of the function.
macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block )*) => {
        $(
            /// # Safety
            ///
            /// Every pointer is null or valid as cuda.h requires for the function of this name. Handles may be any
            /// number.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::code::Code {
                #[allow(dead_code)]
                const NAME: &str = stringify!($name);
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "the function's caller guarantees valid pointers")]
                let body = || -> Result<(), $crate::code::Code> { unsafe { $body } };
                $crate::call::finish(NAME, body)
            }
        )*

        /// Returns the address of a function of this file.
        pub fn find(name: &str) -> Option<*const std::ffi::c_void> {
            match name {
                $(stringify!($name) => Some($name as *const std::ffi::c_void),)*
                _ => None,
            }
        }
    };
}
pub(crate) use functions;

/// Runs a body. A panic must not unwind into the caller's C code, so it becomes an error.
pub fn finish(name: &str, body: impl FnOnce() -> Result<(), Code>) -> Code {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => crate::code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            eprintln!("ptx-emulator: {name} failed inside the emulator; please report it");
            crate::code::UNKNOWN
        }
    }
}
