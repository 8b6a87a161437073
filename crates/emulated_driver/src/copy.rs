//! Copies and fills.

use std::ffi::{c_int, c_uchar, c_uint, c_ushort};
use std::sync::Arc;

use crate::call::{Needs, enter, functions, get};
use crate::code::{Code, INVALID_VALUE, NOT_SUPPORTED};
use crate::handle::Handle;
use crate::refusal;
use crate::run;
use crate::state::{Driver, driver};
use crate::work::{Copy, End, Fill, Work};

/// Queues a copy. A copy to pageable memory is complete when the call returns.
fn copy(name: &str, stream: Handle, make: impl FnOnce(&Driver) -> Result<Copy, Code>) -> Result<(), Code> {
    let mut driver = enter(name, Needs::Context)?;
    let mut copy = make(&driver)?;
    copy.check(&driver.memory)?;
    let of_a_program = driver.test.is_none();
    let now = of_a_program && copy.to_pageable() && driver.queue.capture_of(stream)?.is_none();
    if driver.queue.capture_of(stream)?.is_none() {
        copy.take_pageable();
    }
    driver.queue.push(stream, Work::Copy(Arc::new(copy)))?;
    drop(driver);
    if now { run::run(|queue| queue.before_end_of(stream)) } else { Ok(()) }
}

/// Queues a copy and waits for it.
fn copy_now(name: &str, make: impl FnOnce(&Driver) -> Result<Copy, Code>) -> Result<(), Code> {
    driver().queue.check_nothing_captured()?;
    copy(name, 0, make)?;
    run::run(|queue| queue.before_end_of(0))
}

fn fill(name: &str, stream: Handle, make: impl FnOnce(&Driver) -> Fill) -> Result<(), Code> {
    let mut driver = enter(name, Needs::Context)?;
    let mut fill = make(&driver);
    fill.check(&driver.memory)?;
    driver.queue.push(stream, Work::Fill(Arc::new(fill)))
}

fn fill_now(name: &str, make: impl FnOnce(&Driver) -> Fill) -> Result<(), Code> {
    driver().queue.check_nothing_captured()?;
    fill(name, 0, make)
}

fn row(driver: &Driver, to: u64, value: &[u8], width: usize) -> Fill {
    Fill { to: driver.end(to), value: value.to_vec(), width, rows: 1, pitch: 0 }
}

impl Driver {
    /// Returns the end of a copy that a pointer of the unified address space refers to.
    pub fn end(&self, pointer: u64) -> End {
        match self.memory.allocation_of(pointer) {
            Some(_) => End::Device(pointer),
            // A pointer to the end of an allocation, as in an empty copy, also belongs to the device.
            None if self.memory.within(pointer, 0).is_ok() || self.memory.was_device(pointer) => End::Device(pointer),
            None => End::Host(pointer as usize),
        }
    }
}

/// `CUDA_MEMCPY2D` (cuda.h).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct End2d {
    x: usize,
    y: usize,
    kind: c_int,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY3D` (cuda.h).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
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

impl Driver {
    /// Returns the end of a copy of kind `CUmemorytype` at an offset.
    fn typed_end(&self, kind: c_int, host: usize, device: u64, offset: Option<usize>) -> Result<End, Code> {
        let offset = offset.ok_or(INVALID_VALUE)?;
        match kind {
            1 => host.checked_add(offset).filter(|_| host != 0).map(End::Host).ok_or(INVALID_VALUE),
            2 => device.checked_add(offset as u64).map(End::Device).ok_or(INVALID_VALUE),
            4 => device.checked_add(offset as u64).map(|pointer| self.end(pointer)).ok_or(INVALID_VALUE),
            3 => {
                refusal::once("CUDA arrays and textures are not emulated");
                Err(NOT_SUPPORTED)
            }
            _ => Err(INVALID_VALUE),
        }
    }

    pub fn copy_2d(&self, copy: &Copy2d) -> Result<Copy, Code> {
        let end = |end: &End2d| {
            let pitch = if end.pitch == 0 { copy.width } else { end.pitch };
            let offset = end.y.checked_mul(pitch).and_then(|rows| rows.checked_add(end.x));
            let whole = pitch.checked_mul(copy.height).ok_or(INVALID_VALUE)?;
            Ok::<_, Code>((self.typed_end(end.kind, end.host, end.device, offset)?, [pitch, whole]))
        };
        let ((from, from_pitch), (to, to_pitch)) = (end(&copy.from)?, end(&copy.to)?);
        Ok(Copy { to, from, extent: [copy.width, copy.height, 1], to_pitch, from_pitch })
    }

    pub fn copy_3d(&self, copy: &Copy3d) -> Result<Copy, Code> {
        let end = |end: &End3d| {
            let pitch = if end.pitch == 0 { copy.width } else { end.pitch };
            let rows = if end.height == 0 { copy.height } else { end.height };
            let plane = pitch.checked_mul(rows).ok_or(INVALID_VALUE)?;
            let offset = end.z.checked_mul(plane).zip(end.y.checked_mul(pitch));
            let offset = offset.and_then(|(planes, rows)| planes.checked_add(rows)?.checked_add(end.x));
            Ok::<_, Code>((self.typed_end(end.kind, end.host, end.device, offset)?, [pitch, plane]))
        };
        let ((from, from_pitch), (to, to_pitch)) = (end(&copy.from)?, end(&copy.to)?);
        Ok(Copy { to, from, extent: [copy.width, copy.height, copy.depth], to_pitch, from_pitch })
    }
}

fn plain(to: End, from: End, bytes: usize) -> Result<Copy, Code> {
    Ok(Copy::plain(to, from, bytes))
}

functions! {
    fn cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize) {
        copy_now(NAME, |_| plain(End::Device(to), End::Host(from), bytes))
    }
    fn cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize) {
        copy_now(NAME, |_| plain(End::Host(to), End::Device(from), bytes))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now(NAME, |_| plain(End::Device(to), End::Device(from), bytes))
    }
    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        copy_now(NAME, |driver| plain(driver.end(to), driver.end(from), bytes))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: Handle) {
        copy(NAME, stream, |_| plain(End::Device(to), End::Host(from), bytes))
    }
    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: Handle) {
        copy(NAME, stream, |_| plain(End::Host(to), End::Device(from), bytes))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy(NAME, stream, |_| plain(End::Device(to), End::Device(from), bytes))
    }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy(NAME, stream, |driver| plain(driver.end(to), driver.end(from), bytes))
    }
    fn cuMemcpy2D_v2(description: *const Copy2d) {
        let description = get(description)?;
        copy_now(NAME, |driver| driver.copy_2d(&description))
    }
    fn cuMemcpy2DUnaligned_v2(description: *const Copy2d) {
        let description = get(description)?;
        copy_now(NAME, |driver| driver.copy_2d(&description))
    }
    fn cuMemcpy2DAsync_v2(description: *const Copy2d, stream: Handle) {
        let description = get(description)?;
        copy(NAME, stream, |driver| driver.copy_2d(&description))
    }
    fn cuMemcpy3D_v2(description: *const Copy3d) {
        let description = get(description)?;
        copy_now(NAME, |driver| driver.copy_3d(&description))
    }
    fn cuMemcpy3DAsync_v2(description: *const Copy3d, stream: Handle) {
        let description = get(description)?;
        copy(NAME, stream, |driver| driver.copy_3d(&description))
    }

    fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) {
        fill_now(NAME, |driver| row(driver, to, &[value], count))
    }
    fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) {
        fill_now(NAME, |driver| row(driver, to, &value.to_le_bytes(), count))
    }
    fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) {
        fill_now(NAME, |driver| row(driver, to, &value.to_le_bytes(), count))
    }
    fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: Handle) {
        fill(NAME, stream, |driver| row(driver, to, &[value], count))
    }
    fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: Handle) {
        fill(NAME, stream, |driver| row(driver, to, &value.to_le_bytes(), count))
    }
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: Handle) {
        fill(NAME, stream, |driver| row(driver, to, &value.to_le_bytes(), count))
    }
    fn cuMemsetD2D8_v2(to: u64, pitch: usize, value: c_uchar, width: usize, rows: usize) {
        fill_now(NAME, |driver| Fill { rows, pitch, ..row(driver, to, &[value], width) })
    }
    fn cuMemsetD2D16_v2(to: u64, pitch: usize, value: c_ushort, width: usize, rows: usize) {
        fill_now(NAME, |driver| Fill { rows, pitch, ..row(driver, to, &value.to_le_bytes(), width) })
    }
    fn cuMemsetD2D32_v2(to: u64, pitch: usize, value: c_uint, width: usize, rows: usize) {
        fill_now(NAME, |driver| Fill { rows, pitch, ..row(driver, to, &value.to_le_bytes(), width) })
    }
    fn cuMemsetD2D8Async(to: u64, pitch: usize, value: c_uchar, width: usize, rows: usize, stream: Handle) {
        fill(NAME, stream, |driver| Fill { rows, pitch, ..row(driver, to, &[value], width) })
    }
    fn cuMemsetD2D16Async(to: u64, pitch: usize, value: c_ushort, width: usize, rows: usize, stream: Handle) {
        fill(NAME, stream, |driver| Fill { rows, pitch, ..row(driver, to, &value.to_le_bytes(), width) })
    }
    fn cuMemsetD2D32Async(to: u64, pitch: usize, value: c_uint, width: usize, rows: usize, stream: Handle) {
        fill(NAME, stream, |driver| Fill { rows, pitch, ..row(driver, to, &value.to_le_bytes(), width) })
    }
}
