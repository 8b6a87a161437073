//! Steps that stay on the device, and how they are timed.

use std::ops::Range;
use std::time::Duration;

use cuda_driver::cust::device::{Device as CustDevice, DeviceAttribute};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::sys;

use super::layer::CudaLayer;
use super::layout::StepLayout;
use crate::backend::Layer;
use crate::error::Error;
use crate::kernels::group::DeviceGroup;
use crate::output::Output;
use crate::problem::{Step, TokenDtype};

/// What the second-level cache holds when a step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// What a run of the same step has left there.
    Warm,
    /// Other data, written there just before.
    Flushed,
}

/// What a run of a step took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// On the device, between two events.
    pub device: Duration,
    /// On the host, to queue it.
    pub host: Duration,
}

/// A step whose activations and output lie on the device; made by [`CudaLayer::upload`], which it borrows.
pub struct ResidentStep<'l> {
    layer: &'l mut CudaLayer,
    memory: DeviceBuffer<u8>,
    groups: Vec<DeviceGroup>,
    output: Range<usize>,
    out_dtype: TokenDtype,
}

impl CudaLayer {
    /// Brings a step's activations, and an output of NaN, to the device, to run there many times.
    ///
    /// # Errors
    /// If the step was made for other weights, or the device fails.
    pub fn upload(&mut self, step: &Step<'_>) -> Result<ResidentStep<'_>, Error> {
        self.check_fits(step)?;
        self.device.make_current()?;
        let layout = StepLayout::new(step);
        let mut host = vec![0; layout.bytes.max(1)];
        layout.write(step, &Output::new(step.problem()), &mut host);
        let memory = self.device.check(DeviceBuffer::from_slice(&host))?;
        let groups = layout.groups(step, memory.as_device_ptr().as_raw());
        Ok(ResidentStep { layer: self, memory, groups, output: layout.output, out_dtype: step.problem().out_dtype() })
    }

    /// Queues writes over more memory than the second-level cache holds.
    fn queue_flush(&mut self) -> Result<(), Error> {
        let device = self.device.check(CustDevice::get_device(self.device.info.ordinal))?;
        let cache = self.device.check(device.get_attribute(DeviceAttribute::L2CacheSize))? as usize;
        let bytes = 2 * cache;
        self.flush.reserve(&self.device, bytes)?;
        // SAFETY: so many bytes lie there, which nobody else uses; the stream is this layer's.
        self.device.check_raw(unsafe { sys::cuMemsetD8Async(self.flush.address(), 0, bytes, self.stream.as_inner()) })
    }
}

impl ResidentStep<'_> {
    /// Runs the step and waits for it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn time(&mut self, cache: Cache) -> Result<Timing, Error> {
        self.layer.device.make_current()?;
        // The device gets other work first, so that it is busy while the step is queued: the step's time has none of the
        // host's in it.
        match cache {
            Cache::Warm => self.queue()?,
            Cache::Flushed => self.layer.queue_flush()?,
        }
        // SAFETY: the layer's stream and events, in its context.
        unsafe {
            let stream = self.layer.stream.as_inner();
            self.layer.plan(&self.groups, self.out_dtype, stream)?;
            self.layer.start.record(&self.layer.device, stream)?;
            self.queue()?;
            self.layer.end.record(&self.layer.device, stream)?;
        }
        self.layer.device.check(self.layer.stream.synchronize())?;
        let device = self.layer.end.since(&self.layer.start, &self.layer.device)?;
        Ok(Timing { device, host: self.layer.host_time().unwrap_or_default() })
    }

    /// Launches of a run, as [`Layer::launches`].
    pub fn launches(&self) -> Option<usize> {
        self.layer.launches()
    }

    /// Fetches what the last run has left.
    ///
    /// # Errors
    /// If the output was made for another step, or the device fails.
    pub fn download(&self, output: &mut Output) -> Result<(), Error> {
        let to = bytemuck::cast_slice_mut(output.bits_mut());
        if self.output.len() != to.len() {
            let (got, expected) = (to.len(), self.output.len());
            return Err(Error::Length { what: "output", got, expected });
        }
        if to.is_empty() {
            return Ok(());
        }
        self.layer.device.make_current()?;
        self.layer.device.check(self.memory.index(self.output.clone()).copy_to(to))
    }

    fn queue(&mut self) -> Result<(), Error> {
        let stream = self.layer.stream.as_inner();
        // SAFETY: a stream of the layer's own, which it waits for before it goes; the operands were laid out for the layer's
        // weights and stay until then, since `drop` waits too.
        unsafe { self.layer.launch(&self.groups, self.out_dtype, stream) }
    }
}

impl Drop for ResidentStep<'_> {
    fn drop(&mut self) {
        // Freeing needs the context on this thread, and nothing may be under way. Nobody can be told of a failure here.
        if self.layer.device.make_current().is_ok() {
            let _ = self.layer.stream.synchronize();
        }
    }
}
