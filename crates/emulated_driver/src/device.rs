//! Initialization, the GPU and its attributes.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::call::{Needs, enter, functions, put};
use crate::code::{INVALID_VALUE, NO_DEVICE, PEER_ACCESS_UNSUPPORTED, describe};

/// Newest supported version of the API in the format of `CUDA_VERSION`: 13.0.
const VERSION: c_int = 13_000;

/// Handle of the default memory pool.
pub const DEFAULT_POOL: usize = 0xB0;

functions! {
    fn cuInit(_flags: c_uint) {
        let mut driver = enter(NAME, Needs::Nothing)?;
        if driver.cards == 0 { return Err(NO_DEVICE); }
        driver.initialized = true;
        if driver.test.is_none() { crate::run::at_exit(); }
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut c_int) { put(version, VERSION) }
    fn cuDeviceGetCount(count: *mut c_int) { put(count, enter(NAME, Needs::Init)?.cards) }
    fn cuDeviceGet(handle: *mut c_int, ordinal: c_int) {
        enter(NAME, Needs::Init)?.check_card(ordinal)?;
        put(handle, ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        let text = driver.card.name.as_bytes();
        if name.is_null() || len < 1 { return Err(INVALID_VALUE); }
        let count = text.len().min(len as usize - 1);
        ptr::copy_nonoverlapping(text.as_ptr().cast(), name, count);
        put(name.add(count), 0)
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        put(uuid, *b"ptx_emulator gpu")
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        put(uuid, *b"ptx_emulator gpu")
    }
    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        let id = c"0000:00:06.0".to_bytes_with_nul();
        if text.is_null() || (len as usize) < id.len() { return Err(INVALID_VALUE); }
        ptr::copy_nonoverlapping(id.as_ptr().cast(), text, id.len());
        Ok(())
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        put(bytes, driver.card.memory)
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        put(value, driver.card.attribute(attribute).ok_or(INVALID_VALUE)?)
    }
    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        let capability = driver.card.capability();
        put(major, capability.0 as c_int)?;
        put(minor, capability.1 as c_int)
    }
    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        put(pool, DEFAULT_POOL)
    }
    fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        put(pool, DEFAULT_POOL)
    }
    fn cuDeviceSetMemPool(device: c_int, pool: usize) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        if pool == DEFAULT_POOL || driver.pools.contains_key(&pool) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        driver.check_card(peer)?;
        put(can, 0)
    }
    fn cuCtxEnablePeerAccess(_peer: usize, _flags: c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        Err(PEER_ACCESS_UNSUPPORTED)
    }
    fn cuProfilerStart() { enter(NAME, Needs::Context).map(drop) }
    fn cuProfilerStop() { enter(NAME, Needs::Context).map(drop) }

    fn cuGetErrorName(code: c_int, text: *mut *const c_char) {
        let name = describe(code).map(|(name, _)| name);
        put(text, name.map_or(ptr::null(), std::ffi::CStr::as_ptr))?;
        name.map(drop).ok_or(INVALID_VALUE)
    }
    fn cuGetErrorString(code: c_int, text: *mut *const c_char) {
        let sentence = describe(code).map(|(_, sentence)| sentence);
        put(text, sentence.map_or(ptr::null(), std::ffi::CStr::as_ptr))?;
        sentence.map(drop).ok_or(INVALID_VALUE)
    }
    fn cuGetExportTable(table: *mut *const c_void, _id: *const [u8; 16]) {
        if !table.is_null() { put(table, ptr::null())?; }
        Err(crate::refusal::private_tables())
    }
}
