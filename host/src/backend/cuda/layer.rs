//! A layer's weights on a device, and the steps run on them.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::cust::context::CurrentContext;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{self, CUdeviceptr, CUfunction, CUstream};
use kernels_gpu::abi;

use super::buffer::Arena;
use super::device::Device;
use super::event::{Event, Timer};
use super::maps::MapCache;
use crate::backend::Layer;
use crate::backend::descriptors::{DeviceGroup, DeviceWeights, Placed};
use crate::backend::launch::{self, Launcher, Parameter};
use crate::error::Error;
use crate::format::{BLOCK, Matrix, blocked};
use crate::output::Output;
use crate::plan::Grid;
use crate::problem::{OutDtype, Step, Weights};

/// Every operand starts at a multiple of this: what `cuMemAlloc` promises, more than any kernel asks for.
const ALIGNMENT: usize = 256;

/// Launches on callers' streams whose descriptors may be on their way at once; one more waits for the oldest.
const SLOTS: usize = 4;

/// Descriptors that a stream may still read.
struct Slot {
    arena: Arena,
    /// Recorded behind the launch that reads them.
    read: Event,
}

/// Prepared weights; made by [`Cuda::prepare_layer`](super::Cuda::prepare_layer).
///
/// Holds its memory on the device, and buffers that have grown to the largest step seen.
pub struct CudaLayer {
    weights: DeviceWeights,
    /// How the kernel is launched.
    launcher: Launcher,
    /// Its tensor maps.
    maps: MapCache,
    /// The entries of the kernel for this operation.
    functions: Vec<(&'static str, CUfunction)>,
    /// The groups of the step at hand, as the kernel reads them.
    groups: Vec<abi::Group>,
    /// What `weights` points into.
    _memory: Option<DeviceBuffer<u8>>,
    /// Descriptors, activations and output of a step from host memory.
    arena: Arena,
    /// Descriptors of launches on callers' streams, used in turn.
    slots: [Slot; SLOTS],
    next_slot: usize,
    stream: Stream,
    start: Event,
    end: Event,
    /// Last, since all above lives in its context.
    device: Arc<Device>,
}

/// Hands out aligned ranges, one after the other.
#[derive(Default)]
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.0;
        self.0 = (start + bytes).next_multiple_of(ALIGNMENT);
        start..start + bytes
    }

    /// Room for a matrix: its values, and its scales in the blocked layout.
    fn take_matrix(&mut self, matrix: &Matrix<'_>) -> (Range<usize>, Range<usize>) {
        (self.take(matrix.values().len()), self.take(blocked::len(matrix.rows(), matrix.k() / BLOCK)))
    }
}

impl CudaLayer {
    pub(super) fn new(device: Arc<Device>, weights: &Weights<'_>) -> Result<Self, Error> {
        device.make_current()?;
        // First, so that a kernel which does not load says so before gigabytes are copied.
        let (launcher, kernel) = match Launcher::new(device.kernel, weights) {
            Some(launcher) => (launcher, device.kernel),
            None => {
                let portable = launch::portable_kernel(device.info.capability);
                (Launcher::Simt, portable.expect("the portable kernel runs wherever another does"))
            }
        };
        let function = |(entry, shared_bytes)| Ok((entry, device.function(kernel, entry, shared_bytes)?));
        let entries = launcher.entries(weights.op()).into_iter();
        let functions = entries.map(function).collect::<Result<_, Error>>()?;

        let mut total = Cursor::default();
        for matrix in weights.experts().iter().flat_map(|expert| expert.projections()) {
            total.take_matrix(matrix);
        }
        let buffer = match total.0 {
            0 => None,
            // SAFETY: every byte that a kernel reads is copied there below.
            bytes => Some(device.check(unsafe { DeviceBuffer::<u8>::uninitialized(bytes) })?),
        };
        let upload = |to: Range<usize>, bytes: &[u8]| -> Result<CUdeviceptr, Error> {
            let buffer = buffer.as_ref().expect("an expert has weights, so there is a buffer");
            let address = buffer.as_device_ptr().as_raw() + to.start as u64;
            device.check(buffer.index(to).copy_from(bytes))?;
            Ok(address)
        };
        let mut cursor = Cursor::default();
        let placed = DeviceWeights::new(weights, |matrix| {
            let (values, scales) = cursor.take_matrix(matrix);
            let values = upload(values, matrix.values())?;
            Ok(Placed { values, scales: upload(scales, matrix.blocked_scales().bytes())? })
        })?;
        // A copy from pageable memory may return with its last part still on the way (cuda.h, "API synchronization
        // behavior"), and a caller's stream would not wait for it.
        device.check(CurrentContext::synchronize())?;

        let slot = || Ok::<_, Error>(Slot { arena: Arena::default(), read: Event::new(&device)? });
        Ok(Self {
            weights: placed,
            launcher,
            functions,
            maps: MapCache::default(),
            groups: Vec::new(),
            _memory: buffer,
            arena: Arena::default(),
            slots: [slot()?, slot()?, slot()?, slot()?],
            next_slot: 0,
            stream: device.check(Stream::new(StreamFlags::DEFAULT, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            device,
        })
    }

    /// How often this layer has had to allocate memory for steps, on the device or page-locked. Stays the same when a
    /// step is no larger than one before.
    pub fn allocations(&self) -> usize {
        self.arena.allocations() + self.slots.iter().map(|slot| slot.arena.allocations()).sum::<usize>()
    }

    /// Queues a step whose activations and output lie in device memory on the caller's stream, and returns without
    /// waiting: `groups` has an entry for each expert, in order.
    ///
    /// Copies the descriptors on that stream and launches once. Allocates nothing when there were
    /// as many groups before; waits for nothing unless four earlier launches are still queued.
    ///
    /// # Errors
    /// If there are not as many groups as experts, global scales are too large, or a driver call fails. What the kernel
    /// itself does wrong shows when the stream is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is null or a stream of this device's primary context, is not being captured into a graph, and is not
    ///   destroyed before this layer is dropped or has come past this launch.
    /// - Of every group with rows, `values`, `scales` and `output` are addresses that this device can read (the last:
    ///   write), aligned and of the sizes that [`DeviceGroup`] says; outputs overlap nothing.
    /// - That memory stays allocated, and is written by nobody else, until the stream has come past this launch.
    /// - The scales are e4m3 without sign and no NaN (0x00 to 0x7e), the padding's too.
    pub unsafe fn launch(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: OutDtype,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(groups, out_dtype, stream, None) }
    }

    /// As [`CudaLayer::launch`], with the time between the arrival of the descriptors and the end of the kernel.
    ///
    /// # Errors
    /// As [`CudaLayer::launch`].
    ///
    /// # Safety
    ///
    /// As for [`CudaLayer::launch`]; the timer is of the same [`Cuda`](super::Cuda).
    pub unsafe fn launch_timed(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: OutDtype,
        stream: CUstream,
        timer: &Timer,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(groups, out_dtype, stream, Some(timer)) }
    }

    /// # Safety
    ///
    /// As for [`CudaLayer::launch_timed`].
    unsafe fn launch_with(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: OutDtype,
        stream: CUstream,
        timer: Option<&Timer>,
    ) -> Result<(), Error> {
        if groups.len() != self.weights.len() {
            let (got, expected) = (groups.len(), self.weights.len());
            return Err(Error::Mismatch { what: "groups of tokens (one for each expert)", got, expected });
        }
        self.device.make_current()?;
        self.groups.clear();
        for (index, group) in groups.iter().enumerate() {
            self.groups.push(self.weights.describe(index, group)?);
        }
        let planned = self.launcher.plan(self.weights.op(), None, &mut self.groups, self.device.info.sms)?;
        if planned.grid().blocks == 0 {
            return Ok(());
        }

        let index = self.next_slot;
        self.next_slot = (index + 1) % SLOTS;
        let bytes = planned.bytes(&self.groups);
        let slot = &mut self.slots[index];
        slot.read.wait(&self.device)?;
        slot.arena.reserve(&self.device, bytes)?;
        let address = slot.arena.address();
        let to = &mut slot.arena.host()[..bytes];
        let encode = |arguments: &_| self.maps.get(&self.device, arguments);
        let parameter = planned.write(&self.groups, out_dtype, address, to, encode)?;
        // SAFETY: nothing is under way in the slot, since its event has passed; the stream and what the descriptors
        // point to are the caller's promise.
        unsafe {
            slot.arena.send(&self.device, bytes, stream)?;
            if let Some(timer) = timer {
                timer.start.record(&self.device, stream)?;
            }
            self.start_kernel(planned.grid(), &parameter, stream)?;
            if let Some(timer) = timer {
                timer.end.record(&self.device, stream)?;
            }
            self.slots[index].read.record(&self.device, stream)
        }
    }

    /// Queues a step that lies in the arena, `bytes` from its start, and the way back of the output, `out`.
    ///
    /// # Safety
    ///
    /// As for [`Self::start_kernel`]; nothing else is under way in the arena or touches it until the stream is waited for.
    unsafe fn queue(
        &mut self,
        grid: Grid,
        parameter: &Parameter,
        bytes: usize,
        out: Range<usize>,
    ) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        // SAFETY: the caller's promise; the stream is this layer's own.
        unsafe {
            self.arena.send(&self.device, bytes, stream)?;
            self.start.record(&self.device, stream)?;
            self.start_kernel(grid, parameter, stream)?;
            self.end.record(&self.device, stream)?;
            self.arena.fetch(&self.device, out, stream)
        }
    }

    /// Queues the kernel.
    ///
    /// # Safety
    ///
    /// `stream` is one of this context, on which the descriptors that `parameter` leads to arrive before; `grid` was planned
    /// for them, and what they point to is valid until the kernel has run.
    unsafe fn start_kernel(&self, grid: Grid, parameter: &Parameter, stream: CUstream) -> Result<(), Error> {
        let (_, function) = self.functions.iter().find(|(entry, _)| *entry == grid.entry).expect("entries are loaded");
        let mut parameters = [parameter.bytes().as_ptr().cast::<c_void>().cast_mut()];
        // SAFETY: the function is of a module that `self.device` keeps loaded; it has one parameter, of this kernel's type,
        // which the driver copies; the rest is the caller's promise.
        self.device.check_raw(unsafe {
            sys::cuLaunchKernel(
                *function,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for CudaLayer {
    fn drop(&mut self) {
        // Freeing needs the context on this thread, and streams may still read descriptors. A failure here has shown, or
        // will show, in a call that can tell of it.
        if self.device.make_current().is_ok() {
            for slot in &self.slots {
                let _ = slot.read.wait(&self.device);
            }
        }
    }
}

// SAFETY: the handles inside are the driver's, which any thread may use with the context current; every method makes it
// current first. `&self` methods use none of them.
unsafe impl Send for CudaLayer {}

impl Layer for CudaLayer {
    fn kernel(&self) -> &str {
        self.launcher.name(self.weights.op())
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        self.weights.check_fits(step)?;
        output.check_fits(step.problem())?;
        if output.bits().is_empty() {
            return Ok(Duration::ZERO);
        }
        self.device.make_current()?;

        // Everything in one piece of memory, filled on the host and sent in one copy: tokens, the output as the caller left
        // it, so that an element which the kernel forgets keeps its poison, and descriptors. Addresses count from its
        // start until that is known.
        let mut total = Cursor::default();
        let mut tokens_at = Vec::with_capacity(self.weights.len());
        for tokens in step.activations() {
            tokens_at.push(total.take_matrix(tokens));
        }
        let out = total.take(size_of_val(output.bits()));
        let mut next_output = out.start;
        self.groups.clear();
        let sizes = step.activations().iter().zip(step.problem().groups()).zip(&tokens_at);
        for (index, ((tokens, sizes), (values, scales))) in sizes.enumerate() {
            let group = DeviceGroup {
                rows: tokens.rows(),
                values: values.start as u64,
                scales: scales.start as u64,
                global_scale: tokens.global_scale(),
                output: next_output as u64,
            };
            next_output += size_of::<u16>() * sizes.m * sizes.n;
            self.groups.push(self.weights.describe(index, &group)?);
        }
        let planned = self.launcher.plan(self.weights.op(), None, &mut self.groups, self.device.info.sms)?;
        let descriptors = total.take(planned.bytes(&self.groups));
        self.arena.reserve(&self.device, total.0)?;

        let address = self.arena.address();
        for group in &mut self.groups {
            group.a += address;
            group.a_scales += address;
            group.c += address;
        }
        let host = self.arena.host();
        for (tokens, (values, scales)) in step.activations().iter().zip(tokens_at) {
            host[values].copy_from_slice(tokens.values());
            blocked::write_linear(tokens.rows(), tokens.k() / BLOCK, tokens.scales(), &mut host[scales]);
        }
        host[out.clone()].copy_from_slice(bytemuck::cast_slice(output.bits()));
        let at = address + descriptors.start as u64;
        let encode = |arguments: &_| self.maps.get(&self.device, arguments);
        let parameter = planned.write(&self.groups, output.dtype(), at, &mut host[descriptors], encode)?;

        // SAFETY: the last step was waited for, so nothing is under way in the arena; the descriptors point into it and
        // into the weights, both alive until the stream is waited for below, whatever happens.
        let queued = unsafe { self.queue(planned.grid(), &parameter, total.0, out.clone()) };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)?;
        output.bits_mut().copy_from_slice(bytemuck::cast_slice(&self.arena.host()[out]));
        self.end.since(&self.start, &self.device)
    }
}
