//! Device memory, page-locked memory, pools, and attributes of pointers.

use std::ffi::{c_int, c_uint, c_void};

use crate::call::{Needs, array, enter, functions, put};
use crate::code::{
    Code, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED,
};
use crate::current;
use crate::device::DEFAULT_POOL;
use crate::handle::Handle;
use crate::refusal;
use crate::run;
use crate::state::{Driver, driver};
use crate::work::Work;

impl Driver {
    fn check_pool(&self, pool: Handle) -> Result<(), Code> {
        if pool == DEFAULT_POOL || self.pools.contains_key(&pool) { Ok(()) } else { Err(INVALID_HANDLE) }
    }

    /// Allocates memory in stream order. The caller gets the address at once, so the memory exists at once.
    fn allocate_in(&mut self, bytes: usize, stream: Handle) -> Result<u64, Code> {
        if self.queue.capture_of(stream)?.is_some() {
            refusal::once("graphs that allocate memory (cuMemAllocAsync in a capture) are not emulated");
            return Err(NOT_SUPPORTED);
        }
        self.memory.allocate(bytes)
    }

    /// Returns a pointer's attribute as the bytes for the caller.
    fn pointer_attribute(&self, attribute: c_int, pointer: u64) -> Result<Vec<u8>, Code> {
        let allocation = self.memory.allocation_of(pointer);
        let locked = self.memory.locked(pointer as usize).map(|(base, locked)| (base as u64, locked.bytes));
        let (base, bytes) = allocation.or(locked).ok_or(INVALID_VALUE)?;
        let on_device = allocation.is_some();
        Ok(match attribute {
            // CONTEXT, MEMORY_TYPE (1 host, 2 device), DEVICE_POINTER, HOST_POINTER
            1 => (current::current() as u64).to_le_bytes().into(),
            2 => if on_device { 2_u32 } else { 1 }.to_le_bytes().into(),
            3 => pointer.to_le_bytes().into(),
            4 if on_device => return Err(INVALID_VALUE),
            4 => pointer.to_le_bytes().into(),
            // SYNC_MEMOPS, BUFFER_ID, IS_MANAGED, DEVICE_ORDINAL
            6 | 8 | 9 => 0_u32.to_le_bytes().into(),
            7 => base.to_le_bytes().into(),
            // IS_LEGACY_IPC_CAPABLE, RANGE_START_ADDR, RANGE_SIZE, MAPPED
            10 => vec![0],
            11 => base.to_le_bytes().into(),
            12 => (bytes as u64).to_le_bytes().into(),
            13 => vec![1],
            // ALLOWED_HANDLE_TYPES, IS_GPU_DIRECT_RDMA_CAPABLE, ACCESS_FLAGS (read and write), MEMPOOL_HANDLE
            14 | 17 => 0_u64.to_le_bytes().into(),
            15 => vec![0],
            16 => 3_u32.to_le_bytes().into(),
            _ => return Err(INVALID_VALUE),
        })
    }
}

/// Size of an attribute in bytes, for a pointer that belongs to no allocation.
fn attribute_bytes(attribute: c_int) -> usize {
    match attribute {
        2 | 6 | 8 | 9 | 16 => 4,
        10 | 13 | 15 => 1,
        _ => 8,
    }
}

functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let driver = enter(NAME, Needs::Context)?;
        let (left, all) = driver.memory.free_and_total();
        put(free, left)?;
        put(total, all)
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() { return Err(INVALID_VALUE); }
        driver.queue.check_nothing_captured()?;
        put(address, driver.memory.allocate(bytes)?)
    }
    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() || ![4, 8, 16].contains(&element) { return Err(INVALID_VALUE); }
        driver.queue.check_nothing_captured()?;
        let row = width.checked_next_multiple_of(512).ok_or(INVALID_VALUE)?;
        put(pitch, row)?;
        put(address, driver.memory.allocate(row.checked_mul(height).ok_or(INVALID_VALUE)?)?)
    }
    fn cuMemFree_v2(address: u64) {
        // The driver waits for all work that may still use the memory.
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        if address == 0 { return Ok(()); }
        run::everything()?;
        driver().memory.free(address)
    }
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) {
        let driver = enter(NAME, Needs::Context)?;
        let found = driver.memory.allocation_of(address).ok_or(INVALID_VALUE)?;
        if !base.is_null() { put(base, found.0)?; }
        if !bytes.is_null() { put(bytes, found.1)?; }
        Ok(())
    }
    fn cuMemAllocManaged(_address: *mut u64, _bytes: usize, _flags: c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        refusal::managed_memory();
        Err(NOT_SUPPORTED)
    }

    fn cuMemAllocHost_v2(address: *mut usize, bytes: usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() { return Err(INVALID_VALUE); }
        driver.queue.check_nothing_captured()?;
        put(address, driver.memory.allocate_locked(bytes, 0)?)
    }
    fn cuMemHostAlloc(address: *mut usize, bytes: usize, flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() || flags > 7 { return Err(INVALID_VALUE); }
        driver.queue.check_nothing_captured()?;
        put(address, driver.memory.allocate_locked(bytes, flags)?)
    }
    fn cuMemFreeHost(address: usize) {
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        run::everything()?;
        driver().memory.remove_locked(address, true)
    }
    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address == 0 || bytes == 0 { return Err(INVALID_VALUE); }
        let registered = driver.memory.register(address, bytes, flags);
        if registered { Ok(()) } else { Err(HOST_MEMORY_ALREADY_REGISTERED) }
    }
    fn cuMemHostUnregister(address: usize) {
        drop(enter(NAME, Needs::Context)?);
        run::everything()?;
        driver().memory.remove_locked(address, false).map_err(|_| HOST_MEMORY_NOT_REGISTERED)
    }
    fn cuMemHostGetDevicePointer_v2(pointer: *mut u64, address: usize, _flags: c_uint) {
        let driver = enter(NAME, Needs::Context)?;
        driver.memory.locked(address).ok_or(INVALID_VALUE)?;
        put(pointer, address as u64)
    }
    fn cuMemHostGetFlags(flags: *mut c_uint, address: usize) {
        let driver = enter(NAME, Needs::Context)?;
        put(flags, driver.memory.locked(address).ok_or(INVALID_VALUE)?.1.flags)
    }

    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() { return Err(INVALID_VALUE); }
        put(address, driver.allocate_in(bytes, stream)?)
    }
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: Handle, stream: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        if address.is_null() { return Err(INVALID_VALUE); }
        driver.check_pool(pool)?;
        put(address, driver.allocate_in(bytes, stream)?)
    }
    fn cuMemFreeAsync(address: u64, stream: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        let known = driver.memory.allocation_of(address).is_some_and(|(base, _)| base == address);
        if !known { return Err(INVALID_VALUE); }
        driver.queue.push(stream, Work::Free(address))
    }
    fn cuMemPoolCreate(pool: *mut Handle, _properties: *const c_void) {
        let mut driver = enter(NAME, Needs::Init)?;
        if pool.is_null() { return Err(INVALID_VALUE); }
        let handle = driver.handle();
        driver.pools.insert(handle, ());
        put(pool, handle)
    }
    fn cuMemPoolDestroy(pool: Handle) {
        enter(NAME, Needs::Init)?.pools.remove(&pool).ok_or(INVALID_HANDLE)
    }
    fn cuMemPoolTrimTo(pool: Handle, _bytes: usize) { enter(NAME, Needs::Init)?.check_pool(pool) }
    fn cuMemPoolSetAttribute(pool: Handle, _attribute: c_int, _value: *const c_void) {
        enter(NAME, Needs::Init)?.check_pool(pool)
    }
    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut u64) {
        enter(NAME, Needs::Init)?.check_pool(pool)?;
        // The first three attributes have 4 bytes and are on by default. The others are sizes.
        if (1..=3).contains(&attribute) { put(value.cast::<c_int>(), 1) } else { put(value, 0) }
    }
    fn cuMemPoolSetAccess(pool: Handle, _map: *const c_void, _count: usize) {
        enter(NAME, Needs::Init)?.check_pool(pool)
    }

    fn cuPointerGetAttribute(data: *mut u8, attribute: c_int, pointer: u64) {
        let driver = enter(NAME, Needs::Init)?;
        if data.is_null() { return Err(INVALID_VALUE); }
        let bytes = driver.pointer_attribute(attribute, pointer)?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len());
        Ok(())
    }
    // For a pointer that belongs to no allocation, all attributes are 0 without an error.
    fn cuPointerGetAttributes(count: c_uint, attributes: *const c_int, data: *const *mut u8, pointer: u64) {
        let driver = enter(NAME, Needs::Init)?;
        let attributes = array(attributes, count as usize)?;
        for (attribute, to) in attributes.into_iter().zip(array(data, count as usize)?) {
            let bytes = driver.pointer_attribute(attribute, pointer);
            let mut bytes = bytes.unwrap_or_else(|_| vec![0; attribute_bytes(attribute)]);
            // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            if attribute == 9 && driver.memory.within(pointer, 0).is_err() { bytes = (-2_i32).to_le_bytes().into(); }
            if to.is_null() { return Err(INVALID_VALUE); }
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }
    fn cuPointerSetAttribute(_value: *const c_void, _attribute: c_int, pointer: u64) {
        let driver = enter(NAME, Needs::Init)?;
        driver.memory.allocation_of(pointer).map(drop).ok_or(INVALID_VALUE)
    }
}
