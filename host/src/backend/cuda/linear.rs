//! Linear layers on a GPU: prepared weights, and calls.

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
use crate::Error;
use crate::backend::{Layer, Linear};
use crate::bias::Bias;
use crate::linear::{LinearOutput, LinearSizes, LinearStep, LinearWeights};
use nvfp4_kernels::linear::LinearArguments;

/// Prepared weights of a linear layer; created by [`Cuda::prepare_linear_layer`](super::Cuda::prepare_linear_layer) or
/// [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
///
/// With 16-bit tokens a call is one launch, without a workspace. With FP8 or NVFP4 tokens it is two launches, with a workspace.
/// A call may be captured into a graph.
pub struct CudaLinear {
    launcher: LinearLauncher,
    layer: PackedLinear,
    /// Memory that `layer` points to.
    memory: DeviceBuffer<u8>,
    /// Name of the kernel that multiplies.
    kernel: &'static str,
    /// Whether a step from host memory runs as a graph.
    graph: bool,
    /// Operands of a step from host memory.
    arena: Arena,
    /// Workspace of a step from host memory.
    workspace: Room,
    /// Number of launches of the last step from host memory, and the time to queue them.
    cost: Option<(usize, Duration)>,
    stream: Stream,
    start: Event,
    end: Event,
    /// Last field, because all fields above live in its context.
    device: Arc<Device>,
}

impl CudaLinear {
    /// Prepares weights in host memory.
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
        // SAFETY: the tensor is in the two buffers, which live until the packing has ended.
        unsafe { Self::pack(device, sizes, &tensor, graph) }
    }

    /// Packs a tensor in device memory.
    ///
    /// # Safety
    ///
    /// The requirements of [`Cuda::pack_linear_layer`](super::Cuda::pack_linear_layer).
    pub(super) unsafe fn pack(
        device: Arc<Device>,
        sizes: LinearSizes,
        tensor: &LinearTensor<'_>,
        graph: bool,
    ) -> Result<Self, Error> {
        sizes.check()?;
        let launcher = LinearLauncher::new(device.clone())?;
        let kernel = launcher.load(sizes.token_format)?.name();
        device.make_current()?;
        // SAFETY: the packing writes every byte before a call reads it.
        let memory = device.check(unsafe { DeviceBuffer::uninitialized(LinearLauncher::weight_bytes(&sizes)) })?;
        let layer = PackedLinear { sizes, weights: memory.as_device_ptr().as_raw() };
        // A stream that waits for the null stream could not be captured while others use the null stream.
        let stream = device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?;
        // A copy from pageable memory may return before its last part has arrived (cuda.h, "API synchronization behavior").
        device.check(CurrentContext::synchronize())?;
        // SAFETY: the stream is of the current context and captures nothing, and the weights were allocated above. The caller
        // guarantees a readable tensor of these sizes. The stream is synchronized below, before anything is freed.
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
            kernel,
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

    /// Sizes of the layer.
    pub fn sizes(&self) -> LinearSizes {
        self.layer.sizes
    }

    /// Bytes of the layer's weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Bytes of workspace for a call with up to `max_tokens` tokens; see [`LinearLauncher::workspace_bytes`].
    pub fn workspace_bytes(&self, max_tokens: usize) -> usize {
        LinearLauncher::workspace_bytes(&self.layer.sizes, max_tokens)
    }

    /// Queues a call on the caller's stream, returns without waiting, and returns the number of launches: 1, 2 with FP8 or NVFP4
    /// tokens, or 0 without tokens. The call allocates and copies nothing, so the stream may be captured into a graph.
    ///
    /// The first launch may start before the previous kernel of the stream has ended. Until then it reads only weights, and
    /// writes nothing.
    ///
    /// # Errors
    /// If an address or the pitch is not aligned, or a driver call fails. Faults of a kernel appear when the stream is
    /// synchronized.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - The device can read the memory at every address of `arguments`, and write the output, with the sizes that
    ///   [`LinearArguments`] states. With FP8 or NVFP4 tokens, `workspace` is a multiple of 256, with
    ///   [`CudaLinear::workspace_bytes`] bytes of memory. Neither the output nor the workspace overlaps another operand.
    /// - The memory and the layer stay allocated, and nothing else writes the memory, until the stream has passed this call, or
    ///   the graph is not launched any more.
    pub unsafe fn launch(
        &self,
        arguments: &LinearArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        // SAFETY: the layer owns its weights, and their packing has ended. The caller guarantees the operands, the workspace and
        // the stream.
        unsafe { self.launcher.launch(&self.layer, arguments, workspace, stream) }
    }

    /// Queues a step with operands in the arena, between two events.
    ///
    /// # Safety
    ///
    /// `arguments` point into the arena. No queued work uses it, and nothing accesses it until the stream was synchronized.
    unsafe fn queue(&mut self, arguments: &LinearArguments) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        self.workspace.reserve(&self.device, self.workspace_bytes(arguments.token_count))?;
        let workspace = self.workspace.address();
        // SAFETY: the stream is this layer's own, in the current context, and captures nothing yet. The caller guarantees the arena,
        // and the workspace was reserved above.
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
            // The graph is dropped here and must not run then.
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
        // Freeing needs the context on this thread, and a step may still run. Another call reports a failure.
        if self.device.make_current().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

// SAFETY: any thread may use the driver's handles inside while the context is current, and every method makes it current first.
unsafe impl Send for CudaLinear {}

impl Layer<Linear> for CudaLinear {
    fn kernel(&self) -> &str {
        self.kernel
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
        // The bytes between tokens are NaN as numbers. The poisoned output is copied too, so that elements that the kernel does not
        // write stay poisoned.
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
        // SAFETY: the last step was waited for, so no queued work uses the arena. The arguments point into it, and it stays
        // allocated until the stream is synchronized below, also after an error.
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
