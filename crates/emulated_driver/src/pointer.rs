//! Access through a caller's pointers. `emulated_runtime` includes this file too.

use std::ffi::c_int;

/// `CUDA_ERROR_INVALID_VALUE`, `cudaErrorInvalidValue`.
const INVALID_VALUE: c_int = 1;

/// Writes a result through the caller's pointer.
///
/// # Safety
///
/// `to` is null or valid for a write.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), c_int> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `to` is not null, so the caller guarantees that it is valid for a write.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads a value through the caller's pointer.
///
/// # Safety
///
/// `from` is null or valid for a read of a `T`.
pub unsafe fn get<T: Copy>(from: *const T) -> Result<T, c_int> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `from` is not null, so the caller guarantees that it is valid for a read of a `T`.
    Ok(unsafe { from.read_unaligned() })
}
