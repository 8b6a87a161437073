//! C's pointers as references and slices, or an error with the argument's name.

use std::slice;

use nvfp4::Error;

/// A pointer's value, or an error with its name.
///
/// # Safety
///
/// Null, or a valid value for as long as the reference lives.
pub(crate) unsafe fn value<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Error> {
    // SAFETY: `# Safety` above.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::Invalid(format!("{name} is null")))
}

/// The elements at a pointer.
///
/// # Safety
///
/// Null, or at so many elements for as long as the slice lives.
pub(crate) unsafe fn elements<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T], Error> {
    if len == 0 {
        return Ok(&[]);
    }
    check(pointer, name)?;
    // SAFETY: not null and aligned; `# Safety` above.
    Ok(unsafe { slice::from_raw_parts(pointer, len) })
}

/// As [`elements`], to be written.
///
/// # Safety
///
/// As [`elements`], and nobody else touches them.
pub(crate) unsafe fn elements_mut<'a, T>(pointer: *mut T, len: usize, name: &str) -> Result<&'a mut [T], Error> {
    if len == 0 {
        return Ok(&mut []);
    }
    check(pointer, name)?;
    // SAFETY: not null and aligned; `# Safety` above.
    Ok(unsafe { slice::from_raw_parts_mut(pointer, len) })
}

/// That a pointer is not null and aligned; the error has its name.
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Result<(), Error> {
    match pointer {
        pointer if pointer.is_null() => Err(Error::Invalid(format!("{name} is null"))),
        pointer if !pointer.is_aligned() => Err(Error::Invalid(format!("{name} is not aligned"))),
        _ => Ok(()),
    }
}

/// An address in the GPU's memory.
pub(crate) fn address<T>(pointer: *const T, name: &str) -> Result<u64, Error> {
    if pointer.is_null() { Err(Error::Invalid(format!("{name} is null"))) } else { Ok(pointer.addr() as u64) }
}
