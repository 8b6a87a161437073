//! Memory that only grows, so that a step no larger than an earlier step allocates nothing.

use std::ops::Range;

use cuda_driver::cust::memory::{DeviceBuffer, LockedBuffer};
use cuda_driver::sys::{self, CUdeviceptr, CUstream};

use super::device::Device;
use crate::Error;

/// Memory on the device.
#[derive(Default)]
pub(super) struct Room {
    memory: Option<DeviceBuffer<u8>>,
    allocations: usize,
}

impl Room {
    /// Ensures a capacity of `bytes`. If the memory grows, its content is lost. No work may be using it.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<(), Error> {
        let present = self.capacity();
        if bytes <= present {
            return Ok(());
        }
        self.memory = None;
        // SAFETY: kernels write the bytes before they read them.
        self.memory = Some(device.check(unsafe { DeviceBuffer::uninitialized(grown(bytes, present)) })?);
        self.allocations += 1;
        Ok(())
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    /// Number of allocations so far.
    pub fn allocations(&self) -> usize {
        self.allocations
    }

    /// Address on the device. 0 before the first [`Room::reserve`].
    pub fn address(&self) -> CUdeviceptr {
        self.memory.as_ref().map_or(0, |memory| memory.as_device_ptr().as_raw())
    }
}

/// Number of bytes to allocate if `bytes` are needed and `present` bytes are too few: at least a quarter more than
/// present, so that steps that grow by one token each do not allocate every time.
fn grown(bytes: usize, present: usize) -> usize {
    bytes.max(present + present / 4)
}

/// Equal amounts of memory on the device and in page-locked memory of the host. Copies from page-locked memory run at
/// full speed and without the host.
#[derive(Default)]
pub(super) struct Arena {
    memory: Option<(DeviceBuffer<u8>, LockedBuffer<u8>)>,
    allocations: usize,
}

impl Arena {
    /// Ensures a capacity of `bytes`. If the memory grows, its content is lost. No work may be using it.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<(), Error> {
        let present = self.capacity();
        if bytes <= present {
            return Ok(());
        }
        let bytes = grown(bytes, present);
        // Free the old memory first, since there may not be enough for both.
        self.memory = None;
        // SAFETY: a copy from the host writes the bytes before anything reads them.
        let on_device = device.check(unsafe { DeviceBuffer::uninitialized(bytes) })?;
        let on_host = device.check(LockedBuffer::new(&0, bytes))?;
        self.memory = Some((on_device, on_host));
        self.allocations += 1;
        Ok(())
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |(on_device, _)| on_device.len())
    }

    /// Number of allocations so far.
    pub fn allocations(&self) -> usize {
        self.allocations
    }

    /// Address on the device. 0 before the first [`Arena::reserve`].
    pub fn address(&self) -> CUdeviceptr {
        self.memory.as_ref().map_or(0, |(on_device, _)| on_device.as_device_ptr().as_raw())
    }

    /// Memory of the host.
    pub fn host(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |(_, on_host)| on_host.as_mut_slice())
    }

    /// Queues a copy of the first `bytes` from the host to the device.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context. Nobody writes the host's memory until the stream has passed the copy.
    pub unsafe fn send(&self, device: &Device, bytes: usize, stream: CUstream) -> Result<(), Error> {
        let Some((on_device, on_host)) = &self.memory else { return Ok(()) };
        let (to, from) = (on_device.as_device_ptr().as_raw(), &on_host.as_slice()[..bytes]);
        // SAFETY: the slice checks that the host has `bytes`, and the device's memory has the same size. The caller
        // guarantees that `stream` belongs to the current context and that nobody writes the host's memory until the
        // copy is done.
        device.check_raw(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, stream) })
    }

    /// Queues a copy of a range from the device to the same range on the host.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context. Nobody accesses the host's memory until the stream has passed the copy.
    pub unsafe fn fetch(&mut self, device: &Device, range: Range<usize>, stream: CUstream) -> Result<(), Error> {
        let Some((on_device, on_host)) = &mut self.memory else { return Ok(()) };
        let from = on_device.as_device_ptr().as_raw() + range.start as u64;
        let to = &mut on_host.as_mut_slice()[range];
        // SAFETY: the slice checks that the host has the range, and the device's memory has the same size. The caller
        // guarantees that `stream` belongs to the current context and that nobody accesses the host's memory until the
        // copy is done.
        device.check_raw(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) })
    }
}
