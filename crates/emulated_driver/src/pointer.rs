//! Values behind a caller's pointers; for the driver and the runtime alike (`emulated_runtime` includes this file).

use std::ffi::c_int;

/// `CUDA_ERROR_INVALID_VALUE`, `cudaErrorInvalidValue`.
const INVALID_VALUE: c_int = 1;

/// Writes a result through the caller's pointer.
///
/// # Safety
///
/// `to` is null or writable.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), c_int> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so writable, as this function's contract says.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads what the caller's pointer leads to.
///
/// # Safety
///
/// `from` is null or leads to a `T`.
pub unsafe fn get<T: Copy>(from: *const T) -> Result<T, c_int> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so a `T`, as this function's contract says.
    Ok(unsafe { from.read_unaligned() })
}
