//! Events, for time and for order. cust's `Event` works only with cust's own streams; this one also works with a
//! caller's streams.

use std::ptr;
use std::time::Duration;

use cuda_driver::sys;

use super::device::Device;
use crate::Error;

/// An event of a device's context.
pub(super) struct Event(sys::CUevent);

impl Event {
    /// Makes an event that has not been recorded, which counts as passed. A host thread that waits for it spins.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    /// Makes an event like [`Event::new`] that keeps order only. Without time it costs less.
    pub fn without_time(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(device: &Device, flags: sys::CUevent_flags_enum) -> Result<Self, Error> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` is a valid pointer for the duration of the call. Every caller has made the context current;
        // without a context the call returns an error.
        device.check_raw(unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(Self(event))
    }

    /// Records the event after all work that the stream has so far.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context.
    pub unsafe fn record(&self, device: &Device, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the event exists until `drop`. The caller guarantees that `stream` belongs to the current context.
        device.check_raw(unsafe { sys::cuEventRecord(self.0, stream) })
    }

    /// Makes another stream wait until the event has passed.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context.
    pub unsafe fn hold(&self, device: &Device, stream: sys::CUstream) -> Result<(), Error> {
        // The API defines no flags.
        let flags = 0;
        // SAFETY: the event exists until `drop`. The caller guarantees that `stream` belongs to the current context.
        device.check_raw(unsafe { sys::cuStreamWaitEvent(stream, self.0, flags) })
    }

    /// Blocks this thread until the event has passed.
    pub fn wait(&self, device: &Device) -> Result<(), Error> {
        // SAFETY: the event exists until `drop`.
        device.check_raw(unsafe { sys::cuEventSynchronize(self.0) })
    }

    /// Time on the device from `start` to this event. Both must have passed.
    pub fn since(&self, start: &Self, device: &Device) -> Result<Duration, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: both events exist until `drop`, and `milliseconds` is a valid pointer for the duration of the call.
        device.check_raw(unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.0, self.0) })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event exists until here, and no copy of its handle leaves this file. A failure cannot be reported
        // here.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
