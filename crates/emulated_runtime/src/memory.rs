//! Device memory, host memory, pools, pointers.

use std::ffi::{c_int, c_uint, c_void};

use crate::call::{Code, INVALID_VALUE, NOT_SUPPORTED, functions, put};
use crate::driver::{Driver, ready};
use crate::refused;
use crate::types::{Extent, Handle, PitchedPointer, Stream};

/// `cudaPointerAttributes`.
#[repr(C)]
pub struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: u64,
    host_pointer: u64,
    reserved: [u64; 8],
}

/// `cudaMemoryType`: unregistered, host, device.
const UNREGISTERED: c_int = 0;
const DEVICE: c_int = 2;

/// Returns the kind of memory that a pointer refers to.
pub fn kind(driver: &Driver, pointer: u64) -> c_int {
    let mut kind: c_int = UNREGISTERED;
    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE. SAFETY: `kind` outlives the call.
    let known = unsafe { driver.cuPointerGetAttribute(std::ptr::from_mut(&mut kind).cast(), 2, pointer) };
    if known.is_ok() { kind } else { UNREGISTERED }
}

/// Allocates device memory. For 0 bytes, stores a null pointer.
///
/// # Safety
///
/// `address` is null or valid for a write.
unsafe fn allocate(address: *mut u64, bytes: usize) -> Result<(), Code> {
    if address.is_null() {
        return Err(INVALID_VALUE);
    }
    let driver = ready()?;
    // SAFETY: `address` is not null, so the caller guarantees that it is valid for a write.
    unsafe { if bytes == 0 { put(address, 0) } else { driver.cuMemAlloc_v2(address, bytes) } }
}

functions! {
    fn cudaMalloc(address: *mut u64, bytes: usize) { allocate(address, bytes) }
    fn cudaMallocPitch(address: *mut u64, pitch: *mut usize, width: usize, height: usize) {
        ready()?.cuMemAllocPitch_v2(address, pitch, width, height, 4)
    }
    fn cudaMalloc3D(pointer: *mut PitchedPointer, extent: Extent) {
        let (mut address, mut pitch) = (0, 0);
        let rows = extent.height.checked_mul(extent.depth).ok_or(INVALID_VALUE)?;
        ready()?.cuMemAllocPitch_v2(&mut address, &mut pitch, extent.width, rows, 4)?;
        put(pointer, PitchedPointer { address, pitch, width: extent.width, height: extent.height })
    }
    fn cudaFree(address: u64) { ready()?.cuMemFree_v2(address) }
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) { ready()?.cuMemGetInfo_v2(free, total) }
    fn cudaMallocHost(address: *mut usize, bytes: usize) { ready()?.cuMemHostAlloc(address, bytes, 0) }
    fn cudaHostAlloc(address: *mut usize, bytes: usize, flags: c_uint) { ready()?.cuMemHostAlloc(address, bytes, flags) }
    fn cudaFreeHost(address: usize) {
        if address == 0 { return Ok(()); }
        ready()?.cuMemFreeHost(address)
    }
    fn cudaHostRegister(address: usize, bytes: usize, flags: c_uint) {
        ready()?.cuMemHostRegister_v2(address, bytes, flags)
    }
    fn cudaHostUnregister(address: usize) { ready()?.cuMemHostUnregister(address) }
    fn cudaHostGetDevicePointer(pointer: *mut u64, address: usize, flags: c_uint) {
        ready()?.cuMemHostGetDevicePointer_v2(pointer, address, flags)
    }
    fn cudaHostGetFlags(flags: *mut c_uint, address: usize) { ready()?.cuMemHostGetFlags(flags, address) }
    fn cudaMallocManaged(_address: *mut u64, _bytes: usize, _flags: c_uint) {
        refused::managed_memory();
        Err(NOT_SUPPORTED)
    }
    fn cudaPointerGetAttributes(attributes: *mut PointerAttributes, pointer: u64) {
        let kind = kind(ready()?, pointer);
        let (known, of_host) = (kind != UNREGISTERED, kind != UNREGISTERED && kind != DEVICE);
        put(attributes, PointerAttributes {
            kind,
            device: if known { 0 } else { -2 },
            device_pointer: if known { pointer } else { 0 },
            host_pointer: if of_host || !known { pointer } else { 0 },
            reserved: [0; 8],
        })
    }

    fn cudaMallocAsync, cudaMallocAsync_ptsz(address: *mut u64, bytes: usize, stream: Stream) {
        if bytes == 0 { return put(address, 0); }
        ready()?.cuMemAllocAsync(address, bytes, stream.0)
    }
    fn cudaMallocFromPoolAsync, cudaMallocFromPoolAsync_ptsz(
        address: *mut u64, bytes: usize, pool: Handle, stream: Stream,
    ) {
        ready()?.cuMemAllocFromPoolAsync(address, bytes, pool, stream.0)
    }
    fn cudaFreeAsync, cudaFreeAsync_ptsz(address: u64, stream: Stream) {
        if address == 0 { return Ok(()); }
        ready()?.cuMemFreeAsync(address, stream.0)
    }
    fn cudaMemPoolCreate(pool: *mut Handle, properties: *const c_void) { ready()?.cuMemPoolCreate(pool, properties) }
    fn cudaMemPoolDestroy(pool: Handle) { ready()?.cuMemPoolDestroy(pool) }
    fn cudaMemPoolTrimTo(pool: Handle, bytes: usize) { ready()?.cuMemPoolTrimTo(pool, bytes) }
    fn cudaMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *const c_void) {
        ready()?.cuMemPoolSetAttribute(pool, attribute, value)
    }
    fn cudaMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void) {
        ready()?.cuMemPoolGetAttribute(pool, attribute, value)
    }
    fn cudaMemPoolSetAccess(pool: Handle, map: *const c_void, count: usize) {
        ready()?.cuMemPoolSetAccess(pool, map, count)
    }
}
