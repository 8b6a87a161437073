//! A linear layer's weights on a device, and calls of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::cust::context::CurrentContext;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{CUdeviceptr, CUfunction, CUstream};
use kernels_gpu::linear_sm90::abi::matrix_bytes;

use super::buffer::Arena;
use super::device::Device;
use super::event::Event;
use super::graph::Graph;
use super::layout::Cursor;
use super::planned::ReadyLaunch;
use crate::backend::LinearLayer;
use crate::error::Error;
use crate::format::BLOCK;
use crate::kernels::builds;
use crate::kernels::kernel::Kernel as _;
use crate::kernels::launch::Launch;
use crate::kernels::linear_sm90::{self, LinearArguments, LinearSm90, PlacedLinear};
use crate::linear::{LinearOutput, LinearSizes, LinearStep, LinearWeights};

/// A weight in device memory as a checkpoint has it.
#[derive(Clone, Copy, Debug)]
pub struct LinearTensor {
    /// Address of the packed values, at a multiple of 8: `[N, K/2]`, the even element of K in the low nibble of a byte.
    pub values: CUdeviceptr,
    /// Address of the scales, `[N, K/16]`, e4m3.
    pub scales: CUdeviceptr,
    /// The factor of the whole tensor.
    pub global_scale: f32,
}

/// The prepared weights of a linear layer; made by [`Cuda::prepare_linear_layer`](super::Cuda::prepare_linear_layer) or
/// [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
///
/// A call is one launch, which needs no memory besides its operands, and may be captured into a graph.
pub struct CudaLinear {
    placed: PlacedLinear,
    /// The entries, by name.
    functions: Vec<(&'static str, CUfunction)>,
    /// What `placed` points into.
    memory: Vec<DeviceBuffer<u8>>,
    /// Whether a step from host memory runs as a graph.
    graph: bool,
    /// A step from host memory.
    arena: Arena,
    /// Launches of the last step from host memory, and the time that it took to queue it.
    cost: Option<(usize, Duration)>,
    stream: Stream,
    start: Event,
    end: Event,
    /// Last, since all above lives in its context.
    device: Arc<Device>,
}

impl CudaLinear {
    /// A layer of weights in host memory.
    pub(super) fn prepare(device: Arc<Device>, weights: &LinearWeights<'_>, graph: bool) -> Result<Self, Error> {
        let (mut layer, matrix) = (Self::new(device, weights.sizes(), graph)?, weights.matrix());
        let [values, scales] =
            [matrix.values(), matrix.scales()].map(|bytes| layer.device.check(DeviceBuffer::from_slice(bytes)));
        let (values, scales) = (values?, scales?);
        let tensor = LinearTensor {
            values: values.as_device_ptr().as_raw(),
            scales: scales.as_device_ptr().as_raw(),
            global_scale: matrix.global_scale(),
        };
        // SAFETY: the tensor lies in the two buffers, which live until the packing was waited for.
        unsafe { layer.pack_matrix(&tensor)? };
        layer.upload_bias(weights.bias().as_deref())?;
        Ok(layer)
    }

    /// A layer of a tensor in device memory.
    ///
    /// # Safety
    ///
    /// As [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
    pub(super) unsafe fn pack(
        device: Arc<Device>,
        sizes: LinearSizes,
        tensor: &LinearTensor,
        bias: Option<&[f32]>,
        graph: bool,
    ) -> Result<Self, Error> {
        let LinearTensor { values, global_scale, .. } = *tensor;
        if !global_scale.is_finite() || global_scale < 0.0 {
            return Err(Error::GlobalScale { value: global_scale });
        }
        if !values.is_multiple_of(8) {
            return Err(Error::Invalid(format!("values at {values:#x}; they must be at a multiple of 8")));
        }
        let biases = bias.map_or(0, <[f32]>::len);
        if biases != if sizes.bias { sizes.n } else { 0 } {
            return Err(Error::Mismatch { what: "biases", got: biases, expected: sizes.n });
        }
        let mut layer = Self::new(device, sizes, graph)?;
        // SAFETY: `# Safety` above.
        unsafe { layer.pack_matrix(tensor)? };
        layer.upload_bias(bias)?;
        Ok(layer)
    }

    /// A layer without weights.
    fn new(device: Arc<Device>, sizes: LinearSizes, graph: bool) -> Result<Self, Error> {
        sizes.check()?;
        device.make_current()?;
        let (major, minor) = device.info.capability;
        if builds::find(LinearSm90.name(), (major, minor)).is_none() {
            let text = format!("there is no linear layer for compute capability {major}.{minor} yet; take the CPU");
            return Err(Error::NotComputed(text));
        }
        let mut functions = Vec::new();
        for entry in LinearSm90.entries() {
            functions.push((entry.name, device.function(LinearSm90.name(), &entry)?));
        }
        Ok(Self {
            placed: PlacedLinear { sizes, panels: 0, alpha: 0, bias: 0 },
            functions,
            memory: Vec::new(),
            graph,
            arena: Arena::default(),
            cost: None,
            // Not a stream that waits for the null stream: it could not be captured while others use the null stream.
            stream: device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            device,
        })
    }

    /// Packs the matrix, and waits for it.
    ///
    /// # Safety
    ///
    /// It lies where the tensor says.
    unsafe fn pack_matrix(&mut self, tensor: &LinearTensor) -> Result<(), Error> {
        let sizes = self.placed.sizes;
        let bytes = usize::try_from(matrix_bytes(sizes.n as u32, sizes.k as u32)).map_err(|_| Error::TooLarge)?;
        // SAFETY: the packing writes every byte.
        let panels = self.device.check(unsafe { DeviceBuffer::uninitialized(bytes) })?;
        let invalid = self.device.check(DeviceBuffer::from_slice(&[u64::MAX]))?;
        let (to, place) = (panels.as_device_ptr().as_raw(), invalid.as_device_ptr().as_raw());
        // A copy from pageable memory may return with its last part still on the way (cuda.h, "API synchronization behavior").
        self.device.check(CurrentContext::synchronize())?;
        let launch = linear_sm90::pack(&sizes, [tensor.values, tensor.scales], to, place)?;
        let stream = self.stream.as_inner();
        // SAFETY: the stream is this layer's own, of the current context; `# Safety` above asks for the tensor, and the panels were
        // allocated. All of it is waited for before anything is freed.
        let queued = self.ready(&launch).and_then(|launch| unsafe { launch.queue(&self.device, stream) });
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)?;
        let mut found = [u64::MAX];
        self.device.check(invalid.copy_to(&mut found))?;
        if found[0] < u64::MAX {
            let (place, blocks) = (found[0] as usize, sizes.k / BLOCK);
            let (row, block) = (place / blocks, place % blocks);
            return Err(Error::Invalid(format!("the scale of row {row}, block {block} is negative or NaN")));
        }
        (self.placed.panels, self.placed.alpha) = (to, tensor.global_scale.to_bits());
        self.memory.push(panels);
        Ok(())
    }

    /// Keeps the bias.
    fn upload_bias(&mut self, bias: Option<&[f32]>) -> Result<(), Error> {
        let Some(bias) = bias else { return Ok(()) };
        let memory = self.device.check(DeviceBuffer::from_slice(bytemuck::cast_slice::<f32, u8>(bias)))?;
        self.placed.bias = memory.as_device_ptr().as_raw();
        self.memory.push(memory);
        // As in `pack_matrix`.
        self.device.check(CurrentContext::synchronize())
    }

    /// A launch with its entry.
    fn ready(&self, launch: &Launch) -> Result<ReadyLaunch, Error> {
        let is_it = |(entry, _): &&(&str, CUfunction)| *entry == launch.grid.entry;
        let &(_, function) = self.functions.iter().find(is_it).expect("entries are loaded");
        let parameter = launch.write(0, &mut [], &mut |_| unreachable!("the parameter says everything"))?;
        Ok(ReadyLaunch { function, grid: launch.grid, parameter })
    }

    /// The sizes.
    pub fn sizes(&self) -> LinearSizes {
        self.placed.sizes
    }

    /// Bytes of the layer's weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.memory.iter().map(|memory| memory.len()).sum()
    }

    /// Queues a call on the caller's stream and returns without waiting: how many launches it was given, one or, without tokens,
    /// none. Nothing is allocated or copied, so the stream may be captured into a graph.
    ///
    /// The launch may begin before the stream has come to the end of the kernel before it, but until then reads nothing except
    /// weights, and writes nothing.
    ///
    /// # Errors
    /// If an address or the pitch is not aligned, or a driver call fails. What the kernel itself does wrong shows when the stream
    /// is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - Every address of `arguments` is one of memory that this device can read, or for the output write, of the sizes that
    ///   [`LinearArguments`] says. The output overlaps nothing.
    /// - All of it stays allocated, and is written by nobody else, until the stream has come past this call, or the graph is
    ///   not launched any more. So does the layer.
    pub unsafe fn launch(&self, arguments: &LinearArguments, stream: CUstream) -> Result<usize, Error> {
        if arguments.token_count == 0 {
            return Ok(0);
        }
        self.device.make_current()?;
        let launch = linear_sm90::launch(&self.placed, arguments, self.device.info.sms)?;
        // SAFETY: `# Safety` above asks for the stream and for all that the parameter points to; the layer keeps its weights, and
        // the device the functions' modules.
        unsafe { self.ready(&launch)?.queue(&self.device, stream)? };
        Ok(1)
    }

    /// Queues a step whose operands lie in the arena, between two events.
    ///
    /// # Safety
    ///
    /// `arguments` point into the arena. Nothing else is under way in it, and nobody touches it until the stream was waited for.
    unsafe fn queue(&mut self, arguments: &LinearArguments) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        // SAFETY: `# Safety` above; the stream is this layer's own, in the current context, and captures nothing yet.
        unsafe {
            let capture = || Graph::capture(&self.device, stream, || self.launch(arguments, stream).map(|_| ()));
            let graph = if self.graph { Some(capture()?) } else { None };
            self.start.record(&self.device, stream)?;
            let begin = Instant::now();
            let launches = match &graph {
                Some(graph) => graph.launch(&self.device, stream).map(|()| 1)?,
                None => self.launch(arguments, stream)?,
            };
            let cost = (launches, begin.elapsed());
            self.end.record(&self.device, stream)?;
            // The graph goes here, and must not be under way then.
            if graph.is_some() {
                self.device.check(self.stream.synchronize())?;
            }
            self.cost = Some(cost);
        }
        Ok(())
    }
}

impl Drop for CudaLinear {
    fn drop(&mut self) {
        // Freeing needs the context on this thread, and a step may be under way. A failure here shows in another call.
        if self.device.make_current().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

// SAFETY: the handles inside are the driver's, which any thread may use with the context current; every method makes it
// current first.
unsafe impl Send for CudaLinear {}

impl LinearLayer for CudaLinear {
    fn kernel(&self) -> &str {
        "linear_sm90"
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        let sizes = self.placed.sizes;
        step.check_fits(sizes)?;
        output.check_fits(step)?;
        self.cost = None;
        if step.tokens() == 0 {
            return Ok(Duration::ZERO);
        }
        self.device.make_current()?;
        let mut cursor = Cursor::default();
        let pitch = (size_of::<u16>() * step.stride()).next_multiple_of(16);
        let tokens = cursor.take(step.tokens() * pitch);
        let out = cursor.take(size_of_val(&*output.out));
        self.arena.reserve(&self.device, cursor.0)?;
        let host = self.arena.host();
        // Between tokens are bytes that are NaN as numbers. The output is as the caller left it, so that an element which the kernel
        // forgets keeps its poison.
        host[tokens.clone()].fill(0xFF);
        for token in 0..step.tokens() {
            let from = bytemuck::cast_slice(step.token(token));
            host[tokens.start + token * pitch..][..from.len()].copy_from_slice(from);
        }
        host[out.clone()].copy_from_slice(bytemuck::cast_slice(&output.out));
        let at = |place: usize| self.arena.address() + place as u64;
        let arguments = LinearArguments {
            token_count: step.tokens(),
            tokens: at(tokens.start),
            token_pitch: pitch,
            output: at(out.start),
        };
        let stream = self.stream.as_inner();
        // SAFETY: the last step was waited for, so nothing is under way in the arena. The arguments point into it, and it stays until
        // the stream was waited for below, whatever happens.
        let queued = unsafe {
            let sent = self.arena.send(&self.device, cursor.0, stream);
            let queued = sent.and_then(|()| self.queue(&arguments));
            queued.and_then(|()| self.arena.fetch(&self.device, out.clone(), stream))
        };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)?;
        output.out.copy_from_slice(bytemuck::cast_slice(&self.arena.host()[out]));
        self.end.since(&self.start, &self.device)
    }

    fn launches(&self) -> Option<usize> {
        self.cost.map(|(launches, _)| launches)
    }

    fn host_time(&self) -> Option<Duration> {
        self.cost.map(|(_, time)| time)
    }
}

#[cfg(test)]
mod tests;
