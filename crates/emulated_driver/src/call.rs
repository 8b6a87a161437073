//! What every call of the driver has in common: how it is declared, what it needs first, how it reads and writes through
//! the caller's pointers.

use std::ffi::{CStr, c_char};
use std::sync::MutexGuard;

use crate::code::{Code, DEINITIALIZED, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED};
use crate::current;
pub use crate::pointer::{get, put};
use crate::state::{Driver, driver};

/// Whether a function needs `cuInit` or a current context first.
#[derive(PartialEq, Clone, Copy)]
pub enum Needs {
    Nothing,
    Init,
    Context,
}

/// Writes the call down. Then fails it if the test wants that, if it comes too early, or if a kernel has faulted.
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

/// Reads the caller's array.
///
/// # Safety
///
/// `from` is null or leads to `count` of `T`.
pub unsafe fn array<T: Copy>(from: *const T, count: usize) -> Result<Vec<T>, Code> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if from.is_null() || count > 1 << 24 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so `count` of `T`, as this function's contract says.
    Ok((0..count).map(|index| unsafe { from.add(index).read_unaligned() }).collect())
}

/// Reads the caller's string.
///
/// # Safety
///
/// `text` is null or a C string.
pub unsafe fn text(text: *const c_char) -> Result<String, Code> {
    if text.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so a C string, as this function's contract says.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Functions of the C ABI from bodies that may use `?`; `NAME` is the function's own.
macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block )*) => {
        $(
            /// # Safety
            ///
            /// Pointers are null, or lead to what cuda.h says of the function of this name. Handles may be any number.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::code::Code {
                #[allow(dead_code)]
                const NAME: &str = stringify!($name);
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "as this function's `# Safety` says")]
                let body = || -> Result<(), $crate::code::Code> { unsafe { $body } };
                $crate::call::finish(NAME, body)
            }
        )*

        /// The address of a function of this file.
        pub fn find(name: &str) -> Option<*const std::ffi::c_void> {
            match name {
                $(stringify!($name) => Some($name as *const std::ffi::c_void),)*
                _ => None,
            }
        }
    };
}
pub(crate) use functions;

/// Runs a body. A panic must not cross into the caller's C: it becomes an error.
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
