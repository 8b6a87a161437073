//! Memory that only grows: a step no larger than one before finds its room already there.

use std::ops::Range;

use cuda_driver::cust::memory::{DeviceBuffer, LockedBuffer};
use cuda_driver::sys::{self, CUdeviceptr, CUstream};

use super::device::Device;
use crate::error::Error;

/// Room on the device alone.
#[derive(Default)]
pub(super) struct Room {
    memory: Option<DeviceBuffer<u8>>,
    allocations: usize,
}

impl Room {
    /// Makes room for `bytes`. What was in it is lost when it grows; nothing may be under way in it.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<(), Error> {
        let present = self.capacity();
        if bytes <= present {
            return Ok(());
        }
        self.memory = None;
        // SAFETY: kernels write what is there before they read it.
        self.memory = Some(device.check(unsafe { DeviceBuffer::uninitialized(grown(bytes, present)) })?);
        self.allocations += 1;
        Ok(())
    }

    /// Bytes that fit.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    /// How often it had to grow.
    pub fn allocations(&self) -> usize {
        self.allocations
    }

    /// Its address; 0 before the first [`Room::reserve`].
    pub fn address(&self) -> CUdeviceptr {
        self.memory.as_ref().map_or(0, |memory| memory.as_device_ptr().as_raw())
    }
}

/// How much to allocate for `bytes`, which are more than there are: at least a quarter more than now. So steps that grow by a
/// token each do not all allocate.
fn grown(bytes: usize, present: usize) -> usize {
    bytes.max(present + present / 4)
}

/// Equal room on the device and in page-locked memory of the host. Copies from there run at full speed and without the host.
#[derive(Default)]
pub(super) struct Arena {
    memory: Option<(DeviceBuffer<u8>, LockedBuffer<u8>)>,
    allocations: usize,
}

impl Arena {
    /// Makes room for `bytes`. What was in it is lost when it grows; nothing may be under way in it.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<(), Error> {
        let present = self.capacity();
        if bytes <= present {
            return Ok(());
        }
        let bytes = grown(bytes, present);
        // The old room is freed first, since there may not be memory for both.
        self.memory = None;
        // SAFETY: the bytes are written by a copy from the host before anything reads them.
        let on_device = device.check(unsafe { DeviceBuffer::uninitialized(bytes) })?;
        let on_host = device.check(LockedBuffer::new(&0, bytes))?;
        self.memory = Some((on_device, on_host));
        self.allocations += 1;
        Ok(())
    }

    /// Bytes that fit.
    pub fn capacity(&self) -> usize {
        self.memory.as_ref().map_or(0, |(on_device, _)| on_device.len())
    }

    /// How often it had to grow.
    pub fn allocations(&self) -> usize {
        self.allocations
    }

    /// The address on the device; 0 before the first [`Arena::reserve`].
    pub fn address(&self) -> CUdeviceptr {
        self.memory.as_ref().map_or(0, |(on_device, _)| on_device.as_device_ptr().as_raw())
    }

    /// The host's side.
    pub fn host(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |(_, on_host)| on_host.as_mut_slice())
    }

    /// Queues a copy of the first `bytes` from the host's side to the device.
    ///
    /// # Safety
    ///
    /// `stream` is one of the current context. Nobody writes the host's side until the stream has come past the copy.
    pub unsafe fn send(&self, device: &Device, bytes: usize, stream: CUstream) -> Result<(), Error> {
        let Some((on_device, on_host)) = &self.memory else { return Ok(()) };
        let (to, from) = (on_device.as_device_ptr().as_raw(), &on_host.as_slice()[..bytes]);
        // SAFETY: both sides have `bytes`: the slice is checked, and the device's side is as long. `# Safety` above asks for
        // a stream of the current context, and that the host's side stays as it is until the copy is done.
        device.check_raw(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, stream) })
    }

    /// Queues a copy of a range from the device to the same range of the host's side.
    ///
    /// # Safety
    ///
    /// `stream` is one of the current context. Nobody touches the host's side until the stream has come past the copy.
    pub unsafe fn fetch(&mut self, device: &Device, range: Range<usize>, stream: CUstream) -> Result<(), Error> {
        let Some((on_device, on_host)) = &mut self.memory else { return Ok(()) };
        let from = on_device.as_device_ptr().as_raw() + range.start as u64;
        let to = &mut on_host.as_mut_slice()[range];
        // SAFETY: both sides have the range: the slice is checked, and the device's side is as long. `# Safety` above asks
        // for a stream of the current context, and that nobody touches the host's side until the copy is done.
        device.check_raw(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) })
    }
}
