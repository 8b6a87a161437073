//! `cuGetProcAddress`: functions by name.

use std::ffi::{c_char, c_int, c_ulonglong, c_void};

use crate::call::{functions, put, text};
use crate::code::{INVALID_VALUE, NOT_FOUND};
use crate::{alloc, context, control, copy, device, function, graph, launch, module, refused, stream, tensor_map};

/// Returns the address of an exported function.
fn exported(name: &str) -> Option<*const c_void> {
    let files: [fn(&str) -> Option<*const c_void>; 14] = [
        alloc::find,
        context::find,
        control::find,
        copy::find,
        device::find,
        find,
        function::find,
        graph::find,
        launch::find,
        module::find,
        refused::find,
        stream::find,
        tensor_map::find,
        |_| None,
    ];
    files.into_iter().find_map(|find| find(name))
}

/// Returns the newest form of a function that a program of `version` may call. Most forms after the first are for
/// larger addresses, and only those exist here.
fn newest(name: &str, version: c_int) -> Option<*const c_void> {
    match (name, version) {
        ("cuCtxCreate", ..13_000) => return exported("cuCtxCreate_v2"),
        // CUDA 13 added forms that take a context.
        ("cuCtxSynchronize" | "cuCtxGetDevice", ..13_000) => return exported(name),
        ("cuGraphInstantiate", 12_000..) => return exported("cuGraphInstantiateWithFlags"),
        ("cuStreamGetCaptureInfo", ..12_030) => return exported("cuStreamGetCaptureInfo_v2"),
        _ => {}
    }
    ["_v4", "_v3", "_v2", ""].into_iter().find_map(|form| exported(&format!("{name}{form}")))
}

/// Looks up a function. Stores `CU_GET_PROC_ADDRESS_SUCCESS` or `_SYMBOL_NOT_FOUND` in `status`.
///
/// # Safety
///
/// `symbol` is null or a C string. `address` and `status` are null or valid for a write.
unsafe fn look_up(
    symbol: *const c_char,
    address: *mut *const c_void,
    version: c_int,
    status: *mut c_int,
) -> Result<(), crate::code::Code> {
    // SAFETY: the caller guarantees that each pointer is null or valid.
    unsafe {
        let found = newest(&text(symbol)?, version);
        if address.is_null() {
            return Err(INVALID_VALUE);
        }
        put(address, found.unwrap_or(std::ptr::null()))?;
        if !status.is_null() {
            put(status, found.is_none().into())?;
        }
        found.map(drop).ok_or(NOT_FOUND)
    }
}

functions! {
    fn cuGetProcAddress(symbol: *const c_char, address: *mut *const c_void, version: c_int, _flags: c_ulonglong) {
        look_up(symbol, address, version, std::ptr::null_mut())
    }
    fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *const c_void, version: c_int, _flags: c_ulonglong, status: *mut c_int,
    ) {
        look_up(symbol, address, version, status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_selects_the_form_of_a_call() {
        for name in ["cuCtxSynchronize", "cuCtxGetDevice"] {
            assert!(exported(name).is_some());
            assert_eq!(newest(name, 2_000), exported(name));
            assert_eq!(newest(name, 13_000), exported(&format!("{name}_v2")));
        }
    }
}
