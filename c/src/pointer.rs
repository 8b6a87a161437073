//! Conversion of C's pointers to references and slices, or to an error with the argument's name.

use std::slice;

use nvfp4::Error;

/// Returns a pointer's value, or an error with its name for null.
///
/// # Safety
///
/// The pointer is null, or points to a valid value for as long as the reference lives.
pub(crate) unsafe fn value<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Error> {
    // SAFETY: the caller guarantees that the pointer is null or valid for the reference's lifetime.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::Invalid(format!("{name} is null")))
}

/// Returns the elements at a pointer, or an error with its name for a null or misaligned pointer.
///
/// # Safety
///
/// The pointer is null, or points to `len` initialized elements for as long as the slice lives.
pub(crate) unsafe fn elements<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T], Error> {
    if len == 0 {
        return Ok(&[]);
    }
    check(pointer, name)?;
    // SAFETY: the pointer is aligned and not null, so the caller guarantees `len` initialized elements.
    Ok(unsafe { slice::from_raw_parts(pointer, len) })
}

/// Like [`elements`], for writing.
///
/// # Safety
///
/// The requirements of [`elements`]. Nothing else accesses the elements while the slice lives.
pub(crate) unsafe fn elements_mut<'a, T>(pointer: *mut T, len: usize, name: &str) -> Result<&'a mut [T], Error> {
    if len == 0 {
        return Ok(&mut []);
    }
    check(pointer, name)?;
    // SAFETY: the pointer is aligned and not null, so the caller guarantees `len` elements that nothing else accesses.
    Ok(unsafe { slice::from_raw_parts_mut(pointer, len) })
}

/// Checks that a pointer is aligned and not null. The error has its name.
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Result<(), Error> {
    match pointer {
        pointer if pointer.is_null() => Err(Error::Invalid(format!("{name} is null"))),
        pointer if !pointer.is_aligned() => {
            Err(Error::Invalid(format!("{name} is not aligned to {} bytes", align_of::<T>())))
        }
        _ => Ok(()),
    }
}

/// Returns the address of a pointer to GPU memory, or an error with its name for null.
pub(crate) fn address<T>(pointer: *const T, name: &str) -> Result<u64, Error> {
    if pointer.is_null() { Err(Error::Invalid(format!("{name} is null"))) } else { Ok(pointer.addr() as u64) }
}
