//! A linear layer's weights on a device, and calls of it.

mod launcher;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::cust::context::CurrentContext;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{CUdeviceptr, CUstream};
pub use launcher::{LinearLauncher, LinearTensor, PackedLinear};

use super::buffer::{Arena, Room};
use super::device::Device;
use super::event::Event;
use super::graph::Graph;
use super::layout::Cursor;
use crate::backend::LinearLayer;
use crate::bias::Bias;
use crate::error::Error;
use crate::kernels::linear::LinearArguments;
use crate::linear::{LinearOutput, LinearSizes, LinearStep, LinearWeights};

/// The prepared weights of a linear layer; made by [`Cuda::prepare_linear_layer`](super::Cuda::prepare_linear_layer) or
/// [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
///
/// A call is one launch, which needs no memory besides its operands, or with tokens in FP8 or NVFP4 two, which need a workspace. It may be captured
/// into a graph.
pub struct CudaLinear {
    launcher: LinearLauncher,
    layer: PackedLinear,
    /// What `layer` points to.
    memory: DeviceBuffer<u8>,
    /// Whether a step from host memory runs as a graph.
    graph: bool,
    /// A step from host memory, and its workspace.
    arena: Arena,
    workspace: Room,
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
        let (sizes, matrix) = (weights.sizes(), weights.matrix());
        device.make_current()?;
        let [values, scales] =
            [matrix.values(), matrix.scales()].map(|bytes| device.check(DeviceBuffer::from_slice(bytes)));
        let (values, scales) = (values?, scales?);
        let bias = weights.bias().map(Bias::F32);
        let tensor = LinearTensor {
            values: values.as_device_ptr().as_raw(),
            scales: scales.as_device_ptr().as_raw(),
            global_scales: &[(sizes.n, matrix.global_scale())],
            bias: bias.as_ref(),
            input_scale: weights.input_scale(),
        };
        // SAFETY: the tensor lies in the two buffers, which live until the packing was waited for.
        unsafe { Self::pack(device, sizes, &tensor, graph) }
    }

    /// A layer of a tensor in device memory.
    ///
    /// # Safety
    ///
    /// As [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
    pub(super) unsafe fn pack(
        device: Arc<Device>,
        sizes: LinearSizes,
        tensor: &LinearTensor<'_>,
        graph: bool,
    ) -> Result<Self, Error> {
        sizes.check()?;
        let launcher = LinearLauncher::new(device.clone())?;
        device.make_current()?;
        // SAFETY: the packing writes every byte that is read.
        let memory = device.check(unsafe { DeviceBuffer::uninitialized(LinearLauncher::weight_bytes(&sizes)) })?;
        let layer = PackedLinear { sizes, weights: memory.as_device_ptr().as_raw() };
        // Not a stream that waits for the null stream: it could not be captured while others use the null stream.
        let stream = device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?;
        // A copy from pageable memory may return with its last part still on the way (cuda.h, "API synchronization behavior").
        device.check(CurrentContext::synchronize())?;
        // SAFETY: the stream is of the current context; `# Safety` above asks for the tensor, and the weights were allocated. All of it
        // is waited for before anything is freed.
        let queued = unsafe { launcher.pack(&sizes, tensor, layer.weights, stream.as_inner()) };
        let finished = device.check(stream.synchronize());
        queued.and(finished)?;
        let mut head = [0; LinearLauncher::HEAD_BYTES];
        device.check(memory.index(..head.len()).copy_to(&mut head))?;
        LinearLauncher::check_packed(&sizes, &head)?;
        let (start, end) = (Event::new(&device)?, Event::new(&device)?);
        Ok(Self {
            launcher,
            layer,
            memory,
            graph,
            arena: Arena::default(),
            workspace: Room::default(),
            cost: None,
            stream,
            start,
            end,
            device,
        })
    }

    /// The sizes.
    pub fn sizes(&self) -> LinearSizes {
        self.layer.sizes
    }

    /// Bytes of the layer's weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Bytes of workspace that a call needs with up to so many tokens; see [`LinearLauncher::workspace_bytes`].
    pub fn workspace_bytes(&self, max_tokens: usize) -> usize {
        LinearLauncher::workspace_bytes(&self.layer.sizes, max_tokens)
    }

    /// Queues a call on the caller's stream and returns without waiting: how many launches it was given, one, with tokens in FP8 or NVFP4
    /// two, or without tokens none. Nothing is allocated or copied, so the stream may be captured into a graph.
    ///
    /// The first launch may begin before the stream has come to the end of the kernel before it, but until then reads nothing except
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
    ///   [`LinearArguments`] says. With tokens in FP8 or NVFP4, [`CudaLinear::workspace_bytes`] lie at `workspace`, a multiple of 256. The
    ///   output and the workspace overlap nothing.
    /// - All of it stays allocated, and is written by nobody else, until the stream has come past this call, or the graph is
    ///   not launched any more. So does the layer.
    pub unsafe fn launch(
        &self,
        arguments: &LinearArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        // SAFETY: `# Safety` above; the layer keeps its weights, and their packing was waited for.
        unsafe { self.launcher.launch(&self.layer, arguments, workspace, stream) }
    }

    /// Queues a step whose operands lie in the arena, between two events.
    ///
    /// # Safety
    ///
    /// `arguments` point into the arena. Nothing else is under way in it, and nobody touches it until the stream was waited for.
    unsafe fn queue(&mut self, arguments: &LinearArguments) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        self.workspace.reserve(&self.device, self.workspace_bytes(arguments.token_count))?;
        let workspace = self.workspace.address();
        // SAFETY: `# Safety` above; the stream is this layer's own, in the current context, and captures nothing yet.
        unsafe {
            let capture =
                || Graph::capture(&self.device, stream, || self.launch(arguments, workspace, stream).map(|_| ()));
            let graph = if self.graph { Some(capture()?) } else { None };
            self.start.record(&self.device, stream)?;
            let begin = Instant::now();
            let launches = match &graph {
                Some(graph) => graph.launch(&self.device, stream).map(|()| 1)?,
                None => self.launch(arguments, workspace, stream)?,
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
        self.launcher.product_kernel(self.layer.sizes.token_format)
    }

    fn execute(&mut self, step: &LinearStep<'_>, output: &mut LinearOutput) -> Result<Duration, Error> {
        let sizes = self.layer.sizes;
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
