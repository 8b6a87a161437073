//! Marks in a stream, for time and for order. cust's `Event` takes cust's own streams only; these take a caller's too.

use std::ptr;
use std::time::Duration;

use cuda_driver::sys;

use super::device::Device;
use crate::error::Error;

/// An event of a device's context.
pub(super) struct Event(sys::CUevent);

impl Event {
    /// An event that has not been recorded, which counts as passed. A host that waits for it spins.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    /// As [`Event::new`], an event that keeps order and no time, which costs less.
    pub fn without_time(device: &Device) -> Result<Self, Error> {
        Self::with_flags(device, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(device: &Device, flags: sys::CUevent_flags_enum) -> Result<Self, Error> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` outlives the call. Every caller has made the context current; without one the call fails.
        device.check_raw(unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
        Ok(Self(event))
    }

    /// Puts the mark behind what the stream has been given so far.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context.
    pub unsafe fn record(&self, device: &Device, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: the event is alive, and `# Safety` above asks for a stream of the current context.
        device.check_raw(unsafe { sys::cuEventRecord(self.0, stream) })
    }

    /// Makes another stream wait until the mark's stream has come past the mark.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context.
    pub unsafe fn hold(&self, device: &Device, stream: sys::CUstream) -> Result<(), Error> {
        // No flags are defined.
        let flags = 0;
        // SAFETY: the event is alive, and `# Safety` above asks for a stream of the current context.
        device.check_raw(unsafe { sys::cuStreamWaitEvent(stream, self.0, flags) })
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

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: alive until now, and no handle to it leaves this file. Nobody can be told of a failure here.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
