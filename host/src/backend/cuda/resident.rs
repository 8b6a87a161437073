//! Steps that stay in device memory, and their timing.

use std::ops::Range;
use std::time::Duration;

use cuda_driver::cust::device::{Device as CustDevice, DeviceAttribute};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::sys;

use super::layer::CudaLayer;
use super::layout::StepLayout;
use crate::Error;
use crate::Output;
use crate::backend::Layer;
use crate::problem::{Step, TokenDtype};
use nvfp4_kernels::group::DeviceGroup;

/// Content of the L2 cache when a step starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Data left by a run of the same step.
    Warm,
    /// Other data, written immediately before the step.
    Flushed,
}

/// Times of one run of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time on the device, between two events.
    pub device: Duration,
    /// Time of the host to queue the step.
    pub host: Duration,
}

/// A step with activations and output in device memory, made by [`CudaLayer::upload`]. It borrows the layer.
pub struct ResidentStep<'l> {
    layer: &'l mut CudaLayer,
    memory: DeviceBuffer<u8>,
    groups: Vec<DeviceGroup>,
    output: Range<usize>,
    out_dtype: TokenDtype,
}

impl CudaLayer {
    /// Copies a step's activations, and an output of NaN, to the device, where the step can run many times.
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

    /// Queues writes to more memory than the L2 cache holds.
    fn queue_flush(&mut self) -> Result<(), Error> {
        let device = self.device.check(CustDevice::get_device(self.device.info.ordinal))?;
        let cache = self.device.check(device.get_attribute(DeviceAttribute::L2CacheSize))? as usize;
        let bytes = 2 * cache;
        self.flush.reserve(&self.device, bytes)?;
        // SAFETY: `flush` has at least `bytes` bytes, which only this layer uses. The stream belongs to this layer.
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
        // Other work goes first, so that the device is busy while the step is queued. The measured time then contains
        // no time of the host.
        match cache {
            Cache::Warm => self.queue()?,
            Cache::Flushed => self.layer.queue_flush()?,
        }
        // SAFETY: the stream and the events belong to this layer and its context, which is current. The groups point
        // into `memory`, which this step owns.
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

    /// Number of launches per run, like [`Layer::launches`].
    pub fn launches(&self) -> Option<usize> {
        self.layer.launches()
    }

    /// Copies the output of the last run to the host.
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
        // SAFETY: the stream is the layer's own, and the layer waits for it before it is dropped. The operands were
        // laid out for the layer's weights. They live until then, since `drop` of this step waits too.
        unsafe { self.layer.launch(&self.groups, self.out_dtype, stream) }
    }
}

impl Drop for ResidentStep<'_> {
    fn drop(&mut self) {
        // Freeing memory requires the context on this thread, and no work in flight. A failure cannot be reported here.
        if self.layer.device.make_current().is_ok() {
            let _ = self.layer.stream.synchronize();
        }
    }
}
