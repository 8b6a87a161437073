//! Copies and fills, including copies to and from variables.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::call::{Code, INVALID_MEMCPY_DIRECTION, INVALID_VALUE, functions, get};
use crate::driver::{Driver, ready};
use crate::memory;
use crate::registration::variable;
use crate::types::{Extent, PitchedPointer, Stream};

/// `cudaMemcpyKind`.
mod kinds {
    use std::ffi::c_int;

    pub const HOST_TO_DEVICE: c_int = 1;
    pub const DEVICE_TO_HOST: c_int = 2;
    pub const DEVICE_TO_DEVICE: c_int = 3;
    pub const DEFAULT: c_int = 4;
}

/// Fails if an end that must be accessible to the GPU is neither allocated there nor page-locked.
fn check(driver: &Driver, to: u64, from: u64, kind: c_int) -> Result<(), Code> {
    let known = |pointer| memory::kind(driver, pointer) != 0;
    let fits = match kind {
        0 | kinds::DEFAULT => true,
        kinds::HOST_TO_DEVICE => known(to),
        kinds::DEVICE_TO_HOST => known(from),
        kinds::DEVICE_TO_DEVICE => known(to) && known(from),
        _ => return Err(INVALID_MEMCPY_DIRECTION),
    };
    if fits { Ok(()) } else { Err(INVALID_VALUE) }
}

/// `CUDA_MEMCPY2D` with unified addresses.
#[repr(C)]
struct Copy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

#[repr(C)]
struct End2d {
    x: usize,
    y: usize,
    kind: c_int,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: c_int = 4;

impl End2d {
    fn new(device: u64, pitch: usize) -> Self {
        Self { x: 0, y: 0, kind: UNIFIED, host: 0, device, array: 0, pitch }
    }
}

fn copy_2d(to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize) -> Copy2d {
    Copy2d { from: End2d::new(from, from_pitch), to: End2d::new(to, to_pitch), width, height }
}

/// `CUDA_MEMCPY3D` with unified addresses.
#[repr(C)]
pub struct Copy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
struct End3d {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_int,
    host: usize,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    height: usize,
}

/// `cudaMemcpy3DParms`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy3dParameters {
    from_array: usize,
    from_at: [usize; 3],
    from: PitchedPointer,
    to_array: usize,
    to_at: [usize; 3],
    to: PitchedPointer,
    extent: Extent,
    kind: c_int,
}

impl Copy3d {
    pub fn new(parameters: &Copy3dParameters) -> Result<Self, Code> {
        if parameters.from_array != 0 || parameters.to_array != 0 {
            crate::refused::once("CUDA arrays and textures are not emulated");
            return Err(crate::call::NOT_SUPPORTED);
        }
        let end = |pointer: &PitchedPointer, [x, y, z]: [usize; 3]| End3d {
            x,
            y,
            z,
            level: 0,
            kind: UNIFIED,
            host: 0,
            device: pointer.address,
            array: 0,
            reserved: 0,
            pitch: pointer.pitch,
            height: pointer.height,
        };
        let Extent { width, height, depth } = parameters.extent;
        let from = end(&parameters.from, parameters.from_at);
        let to = end(&parameters.to, parameters.to_at);
        Ok(Self { from, to, width, height, depth })
    }

    /// Creates a copy of consecutive bytes.
    pub fn linear(to: u64, from: u64, bytes: usize) -> Self {
        let end = |device| End3d {
            x: 0,
            y: 0,
            z: 0,
            level: 0,
            kind: UNIFIED,
            host: 0,
            device,
            array: 0,
            reserved: 0,
            pitch: bytes,
            height: 1,
        };
        Self { from: end(from), to: end(to), width: bytes, height: 1, depth: 1 }
    }
}

/// Returns the address of a part of a variable.
fn part(symbol: *const c_void, offset: usize, bytes: usize) -> Result<u64, Code> {
    let (address, size) = variable(symbol)?;
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= size);
    if fits { Ok(address + offset as u64) } else { Err(INVALID_VALUE) }
}

functions! {
    fn cudaMemcpy, cudaMemcpy_ptds(to: u64, from: u64, bytes: usize, kind: c_int) {
        let driver = ready()?;
        if bytes == 0 { return Ok(()); }
        check(driver, to, from, kind)?;
        driver.cuMemcpy(to, from, bytes)
    }
    fn cudaMemcpyAsync, cudaMemcpyAsync_ptsz(to: u64, from: u64, bytes: usize, kind: c_int, stream: Stream) {
        let driver = ready()?;
        if bytes == 0 { return Ok(()); }
        check(driver, to, from, kind)?;
        driver.cuMemcpyAsync(to, from, bytes, stream.0)
    }
    fn cudaMemcpy2D, cudaMemcpy2D_ptds(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize, kind: c_int,
    ) {
        let driver = ready()?;
        check(driver, to, from, kind)?;
        let copy = copy_2d(to, to_pitch, from, from_pitch, width, height);
        driver.cuMemcpy2DUnaligned_v2(ptr::from_ref(&copy).cast())
    }
    fn cudaMemcpy2DAsync, cudaMemcpy2DAsync_ptsz(
        to: u64, to_pitch: usize, from: u64, from_pitch: usize, width: usize, height: usize, kind: c_int, stream: Stream,
    ) {
        let driver = ready()?;
        check(driver, to, from, kind)?;
        let copy = copy_2d(to, to_pitch, from, from_pitch, width, height);
        driver.cuMemcpy2DAsync_v2(ptr::from_ref(&copy).cast(), stream.0)
    }
    fn cudaMemcpy3D, cudaMemcpy3D_ptds(parameters: *const Copy3dParameters) {
        let copy = Copy3d::new(&get(parameters)?)?;
        ready()?.cuMemcpy3D_v2(ptr::from_ref(&copy).cast())
    }
    fn cudaMemcpy3DAsync, cudaMemcpy3DAsync_ptsz(parameters: *const Copy3dParameters, stream: Stream) {
        let copy = Copy3d::new(&get(parameters)?)?;
        ready()?.cuMemcpy3DAsync_v2(ptr::from_ref(&copy).cast(), stream.0)
    }
    fn cudaMemcpyPeer(to: u64, _to_device: c_int, from: u64, _from_device: c_int, bytes: usize) {
        ready()?.cuMemcpy(to, from, bytes)
    }
    fn cudaMemcpyPeerAsync(
        to: u64, _to_device: c_int, from: u64, _from_device: c_int, bytes: usize, stream: Stream,
    ) {
        ready()?.cuMemcpyAsync(to, from, bytes, stream.0)
    }
    fn cudaMemcpyToSymbol, cudaMemcpyToSymbol_ptds(
        symbol: *const c_void, from: u64, bytes: usize, offset: usize, _kind: c_int,
    ) {
        ready()?.cuMemcpy(part(symbol, offset, bytes)?, from, bytes)
    }
    fn cudaMemcpyFromSymbol, cudaMemcpyFromSymbol_ptds(
        to: u64, symbol: *const c_void, bytes: usize, offset: usize, _kind: c_int,
    ) {
        ready()?.cuMemcpy(to, part(symbol, offset, bytes)?, bytes)
    }
    fn cudaMemcpyToSymbolAsync, cudaMemcpyToSymbolAsync_ptsz(
        symbol: *const c_void, from: u64, bytes: usize, offset: usize, _kind: c_int, stream: Stream,
    ) {
        ready()?.cuMemcpyAsync(part(symbol, offset, bytes)?, from, bytes, stream.0)
    }
    fn cudaMemcpyFromSymbolAsync, cudaMemcpyFromSymbolAsync_ptsz(
        to: u64, symbol: *const c_void, bytes: usize, offset: usize, _kind: c_int, stream: Stream,
    ) {
        ready()?.cuMemcpyAsync(to, part(symbol, offset, bytes)?, bytes, stream.0)
    }

    fn cudaMemset, cudaMemset_ptds(to: u64, value: c_int, bytes: usize) {
        let driver = ready()?;
        if bytes == 0 { Ok(()) } else { driver.cuMemsetD8_v2(to, value as u8, bytes) }
    }
    fn cudaMemsetAsync, cudaMemsetAsync_ptsz(to: u64, value: c_int, bytes: usize, stream: Stream) {
        let driver = ready()?;
        if bytes == 0 { Ok(()) } else { driver.cuMemsetD8Async(to, value as u8, bytes, stream.0) }
    }
    fn cudaMemset2D, cudaMemset2D_ptds(to: u64, pitch: usize, value: c_int, width: usize, rows: usize) {
        ready()?.cuMemsetD2D8_v2(to, pitch, value as u8, width, rows)
    }
    fn cudaMemset2DAsync, cudaMemset2DAsync_ptsz(
        to: u64, pitch: usize, value: c_int, width: usize, rows: usize, stream: Stream,
    ) {
        ready()?.cuMemsetD2D8Async(to, pitch, value as u8, width, rows, stream.0)
    }
    fn cudaMemset3D, cudaMemset3D_ptds(pointer: PitchedPointer, value: c_int, extent: Extent) {
        let driver = ready()?;
        for plane in 0..extent.depth {
            let to = pointer.address + (plane * pointer.pitch * pointer.height) as u64;
            driver.cuMemsetD2D8_v2(to, pointer.pitch, value as u8, extent.width, extent.height)?;
        }
        Ok(())
    }
}
