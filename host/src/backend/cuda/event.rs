//! Marks in a stream, for time and for order. cust's `Event` takes cust's own streams only; these take a caller's too.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::sys;

use super::device::Device;
use crate::error::Error;

/// An event of a device's context.
pub(super) struct Event(sys::CUevent);

impl Event {
    /// An event that has not been recorded, which counts as passed.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let mut event = ptr::null_mut();
        // CU_EVENT_DEFAULT: with timing, and a host that waits for it spins.
        let flags = 0;
        // SAFETY: the context is current, as Device::make_current's callers see to; `event` outlives the call.
        device.check_raw(unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Self(event))
    }

    /// Puts the mark behind what the stream has been given so far.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context.
    pub unsafe fn record(&self, device: &Device, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the event is alive, the stream the caller's promise.
        device.check_raw(unsafe { sys::cuEventRecord(self.0, stream) })
    }

    /// Waits until the stream has come past the mark.
    pub fn wait(&self, device: &Device) -> Result<(), Error> {
        // SAFETY: the event is alive.
        device.check_raw(unsafe { sys::cuEventSynchronize(self.0) })
    }

    /// The device's time from `start` to here; both must have passed.
    pub fn since(&self, start: &Self, device: &Device) -> Result<Duration, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, `milliseconds` outlives the call.
        device.check_raw(unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.0, self.0) })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

/// Marks right before and behind a kernel, made by [`Cuda::timer`](super::Cuda::timer) for
/// [`CudaLayer::launch_timed`](super::CudaLayer::launch_timed).
pub struct Timer {
    pub(super) start: Event,
    pub(super) end: Event,
    /// Last, since events live in its context.
    device: Arc<Device>,
}

impl Timer {
    pub(super) fn new(device: Arc<Device>) -> Result<Self, Error> {
        device.make_current()?;
        Ok(Self { start: Event::new(&device)?, end: Event::new(&device)?, device })
    }

    /// Waits until the kernel launched last with this timer is done, and returns the device's time for it.
    ///
    /// # Errors
    /// [`Error::Driver`] if there was no such launch, or the kernel failed.
    pub fn elapsed(&self) -> Result<Duration, Error> {
        self.device.make_current()?;
        self.end.wait(&self.device)?;
        self.end.since(&self.start, &self.device)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: alive until now, and no handle to it leaves this file. A failure here has nobody to be told to.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
