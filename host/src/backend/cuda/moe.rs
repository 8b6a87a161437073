//! MoE layers on a GPU: prepared weights, and calls.

mod launcher;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::cust::context::CurrentContext;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{self, CUdeviceptr, CUstream};

use super::buffer::{Arena, Room};
use super::device::Device;
use super::event::Event;
use super::graph::Graph;
use super::layout::Cursor;
use crate::Error;
use crate::backend::{Layer, Moe};
use crate::bias::Bias;
use crate::format::Matrix;
use crate::moe::{MoeExpert, MoeOutput, MoeSizes, MoeStep, MoeWeights, Stages};
pub use launcher::{MoeLauncher, MoeTensor, MoeTensors, PackedMoe};
use nvfp4_kernels::moe::{
    self, MoeArguments, PROJECTIONS, PackedWeights, PlacedMoe, StageParts, Workspace, weight_bytes, workspace_bytes,
};

/// Prepared weights of an MoE layer; created by [`Cuda::prepare_moe_layer`](super::Cuda::prepare_moe_layer) or
/// [`Cuda::pack_moe_layer`](super::Cuda::pack_moe_layer).
///
/// Calls depend on each other only by the order of the stream. So layers can share a workspace, and a call can be captured
/// into a graph, by this library or by the caller. The launches of a call depend on T and on addresses, never on the experts
/// that the tokens choose.
pub struct CudaMoeLayer {
    launcher: MoeLauncher,
    placed: PlacedMoe,
    /// Memory that `placed` points into.
    weights: DeviceBuffer<u8>,
    map: Option<DeviceBuffer<i32>>,
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

impl CudaMoeLayer {
    /// Creates a layer with room for its weights.
    fn new(device: Arc<Device>, sizes: MoeSizes, expert_map: Option<&[i32]>, graph: bool) -> Result<Self, Error> {
        sizes.check()?;
        device.make_current()?;
        let launcher = MoeLauncher::new(device.clone())?;
        let kernel = launcher.load(sizes.token_format)?.name();
        launcher.check_left(&sizes)?;
        // SAFETY: every byte is written before a call reads it.
        let weights = device.check(unsafe { DeviceBuffer::uninitialized(weight_bytes(&sizes)) })?;
        let map = expert_map.map(|map| device.check(DeviceBuffer::from_slice(map))).transpose()?;
        let PackedWeights { experts, shared, .. } = PackedWeights::at(&sizes, weights.as_device_ptr().as_raw());
        let layer = Self {
            launcher,
            placed: PlacedMoe {
                sizes,
                experts,
                shared,
                map: map.as_ref().map_or(0, |map| map.as_device_ptr().as_raw()),
                keeps_stages: false,
            },
            weights,
            map,
            kernel,
            graph,
            arena: Arena::default(),
            workspace: Room::default(),
            cost: None,
            // A stream that waits for the null stream could not be captured while others use the null stream.
            stream: device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            device,
        };
        layer.wait_for_copies()?;
        Ok(layer)
    }

    /// Prepares weights in host memory: copies and packs one projection after the other.
    pub(super) fn prepare(device: Arc<Device>, weights: &MoeWeights<'_>, graph: bool) -> Result<Self, Error> {
        weights.check_no_transforms("a GPU")?;
        let layer = Self::new(device, weights.sizes(), weights.expert_map(), graph)?;
        // SAFETY: the stream is the layer's own, in the current context, and the layer has allocated room for the weights.
        unsafe { layer.launcher.clear(&layer.placed.sizes, &layer.packed(), layer.stream.as_inner())? };
        layer.upload_experts(weights.experts(), false)?;
        if let Some(shared) = weights.shared() {
            layer.upload_experts(std::slice::from_ref(shared), true)?;
        }
        if layer.placed.sizes.has_input_scales() {
            layer.upload_input_scales(weights)?;
        }
        Ok(layer)
    }

    /// Packs tensors in device memory.
    ///
    /// # Safety
    ///
    /// The requirements of [`Cuda::pack_moe_layer`](super::Cuda::pack_moe_layer).
    pub(super) unsafe fn pack(
        device: Arc<Device>,
        sizes: MoeSizes,
        experts: &MoeTensors<'_>,
        shared: Option<&MoeTensors<'_>>,
        expert_map: Option<&[i32]>,
        graph: bool,
    ) -> Result<Self, Error> {
        let named = expert_map.map_or(sizes.experts, <[i32]>::len);
        if named != sizes.named_experts {
            return Err(Error::Mismatch {
                what: "entries of the expert map",
                got: named,
                expected: sizes.named_experts,
            });
        }
        let layer = Self::new(device, sizes, expert_map, graph)?;
        let (weights, stream) = (layer.weights.as_device_ptr().as_raw(), layer.stream.as_inner());
        // SAFETY: the stream is the layer's own and captures nothing, and the layer has allocated room for the weights. The caller
        // guarantees readable tensors of these sizes. The stream is synchronized below, before anything is freed.
        let queued = unsafe { layer.launcher.pack(&sizes, experts, shared, weights, stream) };
        let finished = layer.device.check(layer.stream.synchronize());
        queued.and(finished)?;
        let mut head = [0; MoeLauncher::HEAD_BYTES];
        layer.device.check(layer.weights.index(..head.len()).copy_to(&mut head))?;
        MoeLauncher::check_packed(&sizes, &head)?;
        Ok(layer)
    }

    fn packed(&self) -> PackedWeights {
        PackedWeights::at(&self.placed.sizes, self.weights.as_device_ptr().as_raw())
    }

    /// Waits for copies from pageable memory. A copy may return before its last part has arrived (cuda.h, "API
    /// synchronization behavior"), and neither this layer's stream nor a caller's stream would wait for it.
    fn wait_for_copies(&self) -> Result<(), Error> {
        self.device.check(CurrentContext::synchronize())
    }

    /// Copies the routed experts or the shared one to the device, and packs them.
    fn upload_experts(&self, experts: &[MoeExpert<'_>], of_shared: bool) -> Result<(), Error> {
        type Projection = for<'e, 'm> fn(&'e MoeExpert<'m>) -> (Option<&'e Matrix<'m>>, &'e Option<Bias<'m>>);
        let projections: [Projection; PROJECTIONS] = [
            |expert| (expert.gate.as_ref(), &expert.biases.gate),
            |expert| (Some(&expert.up), &expert.biases.up),
            |expert| (Some(&expert.down), &expert.biases.down),
        ];
        let sizes = &self.placed.sizes;
        for (projection, of_expert) in projections.into_iter().enumerate() {
            let Some(matrices) = experts.iter().map(|expert| of_expert(expert).0).collect::<Option<Vec<_>>>() else {
                continue; // The activation has no gate.
            };
            let zeros = || vec![0.0; matrices[0].rows()].into();
            let numbers = |expert| of_expert(expert).1.as_ref().map_or_else(zeros, |bias| bias.numbers(sizes.dtype));
            let bias =
                sizes.biases.then(|| Bias::F32(experts.iter().flat_map(|expert| numbers(expert).to_vec()).collect()));
            // At most one projection exists twice at a time.
            let (values, scales) = (matrices[0].values().len(), matrices[0].scales().len());
            // SAFETY: the loop below writes every byte before a kernel reads it.
            let [raw_values, raw_scales] = [values, scales]
                .map(|bytes| unsafe { self.device.check(DeviceBuffer::<u8>::uninitialized(bytes * experts.len())) });
            let (raw_values, raw_scales) = (raw_values?, raw_scales?);
            for (expert, matrix) in matrices.iter().enumerate() {
                let part = |bytes: usize| expert * bytes..(expert + 1) * bytes;
                self.device.check(raw_values.index(part(values)).copy_from(matrix.values()))?;
                self.device.check(raw_scales.index(part(scales)).copy_from(matrix.scales()))?;
            }
            self.wait_for_copies()?;
            let tensor = MoeTensor {
                values: raw_values.as_device_ptr().as_raw(),
                values_stride: values,
                scales: raw_scales.as_device_ptr().as_raw(),
                scales_stride: scales,
                global_scales: &matrices.iter().map(|matrix| matrix.global_scale()).collect::<Vec<_>>(),
                bias: bias.as_ref(),
            };
            let (packed, stream) = (self.packed(), self.stream.as_inner());
            // SAFETY: the context is current and the stream is the layer's own. The tensor is in the two buffers, which live until
            // the stream was synchronized.
            let queued =
                unsafe { self.launcher.pack_projection(sizes, &packed, of_shared, projection, &tensor, stream) };
            let finished = self.device.check(self.stream.synchronize());
            queued.and(finished)?;
        }
        Ok(())
    }

    /// Copies the input scales to the device.
    fn upload_input_scales(&self, weights: &MoeWeights<'_>) -> Result<(), Error> {
        let all: Vec<_> = (0..=self.placed.sizes.experts).map_while(|expert| weights.input_scales(expert)).collect();
        let (experts, shared) = all.split_at(self.placed.sizes.experts);
        let stream = self.stream.as_inner();
        // SAFETY: the context is current, the stream is the layer's own and captures nothing, and no call has used the weights yet.
        let queued = unsafe { self.launcher.set_input_scales(&self.packed(), [experts, shared], stream) };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)
    }

    /// Copies the layer to other addresses, so that measurements can avoid weights in a cache.
    ///
    /// # Errors
    /// [`Error::Driver`], for example if the device's memory is too small.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let map = self.map.as_ref().map(|map| self.device.check(map.as_host_vec())).transpose()?;
        let clone = Self::new(self.device.clone(), self.placed.sizes, map.as_deref(), self.graph)?;
        let [to, from] = [&clone, self].map(|layer| layer.weights.as_device_ptr().as_raw());
        // SAFETY: both buffers have `self.weights.len()` bytes, and nothing writes them meanwhile.
        self.device.check_raw(unsafe { sys::cuMemcpyDtoD_v2(to, from, self.weights.len()) })?;
        clone.wait_for_copies()?;
        Ok(clone)
    }

    /// Sizes of the layer.
    pub fn sizes(&self) -> MoeSizes {
        self.placed.sizes
    }

    /// Bytes of the layer's weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len() + self.map.as_ref().map_or(0, |map| size_of::<i32>() * map.len())
    }

    /// Bytes of workspace for a call with up to `max_tokens` tokens; see [`workspace_bytes`].
    pub fn workspace_bytes(&self, max_tokens: usize) -> usize {
        workspace_bytes(&self.placed.sizes, max_tokens)
    }

    /// Queues a call on the caller's stream, returns without waiting, and returns the number of launches. The call allocates,
    /// copies and reads nothing on the device, and no launch waits for the host. So the stream may be captured into a graph,
    /// which is correct for the ids and weights that the memory holds when the graph runs.
    ///
    /// The first launch may start before the previous kernel of the stream has ended, but accesses no memory until then.
    ///
    /// # Errors
    /// If an address or a pitch is not aligned, weights are on the input of a layer with more than one expert per token, or a
    /// driver call fails. Faults of a kernel appear when the stream is synchronized.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - The device can read the memory at every address of `arguments`, and write the output, with the sizes that
    ///   [`MoeArguments`] states. `workspace` is a multiple of 256, with [`CudaMoeLayer::workspace_bytes`] bytes of memory.
    ///   Neither the output nor the workspace overlaps another operand.
    /// - The memory and the layer stay allocated, and nothing else writes the memory, until the stream has passed this call, or
    ///   the graph is not launched any more. Calls that share a workspace are ordered, for example by one stream.
    pub unsafe fn launch(
        &self,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        self.device.make_current()?;
        // SAFETY: the context is current, and the layer owns its weights. The caller guarantees the operands, the workspace and the
        // stream.
        unsafe { self.launcher.queue(&self.placed, arguments, workspace, stream) }
    }

    /// Captures a call as a graph, which is launched at once and is correct for the ids and weights that the memory then holds.
    ///
    /// # Errors
    /// Errors of [`CudaMoeLayer::launch`].
    ///
    /// # Safety
    ///
    /// The requirements of [`CudaMoeLayer::launch`], as long as the graph is launched.
    pub unsafe fn capture(&self, arguments: &MoeArguments, workspace: CUdeviceptr) -> Result<MoeGraph, Error> {
        self.device.make_current()?;
        // SAFETY: the context is current. The caller guarantees the operands and the workspace while the graph is launched.
        unsafe { self.capture_of(&self.placed, arguments, workspace) }
    }

    /// Does the same as [`CudaMoeLayer::capture`] for this layer's weights with the options of `placed`.
    ///
    /// # Safety
    ///
    /// The requirements of [`CudaMoeLayer::capture`]; the context is current.
    unsafe fn capture_of(
        &self,
        placed: &PlacedMoe,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
    ) -> Result<MoeGraph, Error> {
        let stream = self.stream.as_inner();
        // SAFETY: the context is current, and the stream is the layer's own. The caller guarantees the operands and the workspace.
        let queue = || unsafe { self.launcher.queue(placed, arguments, workspace, stream).map(|_| ()) };
        // SAFETY: the stream is the layer's own and captures nothing else.
        let graph = unsafe { Graph::capture(&self.device, stream, queue)? };
        Ok(MoeGraph { graph, device: self.device.clone() })
    }

    /// Queues a step with operands in the arena, between two events. `with_stages`: keeps the stages in the workspace.
    ///
    /// # Safety
    ///
    /// `arguments` point into the arena, and the workspace is large enough. No queued work uses either, and nothing accesses them
    /// until the stream was synchronized.
    unsafe fn queue(&mut self, arguments: &MoeArguments, with_stages: bool) -> Result<(), Error> {
        let (stream, workspace) = (self.stream.as_inner(), self.workspace.address());
        let placed = PlacedMoe { keeps_stages: with_stages, ..self.placed };
        // SAFETY: the stream is this layer's own, in the current context. The caller guarantees arena and workspace.
        unsafe {
            let graph = if self.graph { Some(self.capture_of(&placed, arguments, workspace)?) } else { None };
            self.start.record(&self.device, stream)?;
            let begin = Instant::now();
            let launches = match &graph {
                Some(graph) => graph.launch(stream).map(|()| 1)?,
                None => self.launcher.queue(&placed, arguments, workspace, stream)?,
            };
            let cost = (launches, begin.elapsed());
            self.end.record(&self.device, stream)?;
            // The graph is dropped here and must not run then.
            if graph.is_some() {
                self.device.check(self.stream.synchronize())?;
            }
            drop(graph);
            self.cost = Some(cost);
        }
        Ok(())
    }

    /// Reads the stages that a finished chunk has left in the workspace.
    fn read_stages(
        &self,
        step: &MoeStep<'_>,
        first: usize,
        chunk: &MoeArguments,
        stages: &mut Stages,
    ) -> Result<(), Error> {
        let workspace = Workspace::at(&self.placed.sizes, chunk.token_count, self.workspace.address());
        let kernels = &self.launcher.kernels;
        let parts = StageParts::read(&self.placed.sizes, chunk, &workspace, kernels, |address, bytes| {
            let mut read = vec![0u8; bytes];
            if bytes > 0 {
                // SAFETY: the part is in the workspace, which no queued work uses any more, and `read` has `bytes` bytes.
                self.device.check_raw(unsafe { sys::cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), address, bytes) })?;
            }
            Ok(read)
        })?;
        parts.write(step, first, stages);
        Ok(())
    }
}

impl Drop for CudaMoeLayer {
    fn drop(&mut self) {
        // Freeing needs the context on this thread, and packing or a step may still run. Another call reports a failure.
        if self.device.make_current().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

// SAFETY: any thread may use the driver's handles inside while the context is current, and every method makes it current first.
unsafe impl Send for CudaMoeLayer {}

impl Layer<Moe> for CudaMoeLayer {
    fn kernel(&self) -> &str {
        self.kernel
    }

    fn execute(&mut self, step: &MoeStep<'_>, output: &mut MoeOutput) -> Result<Duration, Error> {
        let sizes = self.placed.sizes;
        step.check_fits(sizes)?;
        self.cost = None;
        if step.tokens() == 0 {
            return Ok(Duration::ZERO);
        }
        self.device.make_current()?;
        let layout = HostStep::new(step);
        self.arena.reserve(&self.device, layout.bytes)?;
        self.workspace.reserve(&self.device, self.workspace_bytes(step.tokens()))?;
        layout.write(step, &output.hidden, self.arena.host());
        let arguments = layout.arguments(step, self.arena.address());
        let stream = self.stream.as_inner();
        // Stages are read back after each chunk, because chunks share the workspace.
        let parts = match output.stages {
            Some(_) => moe::chunks(&sizes, &arguments)?.collect(),
            None => vec![(0, arguments)],
        };
        let mut time = Duration::ZERO;
        for (index, (first, part)) in parts.iter().enumerate() {
            // SAFETY: the last step was waited for, so no queued work uses the arena. The arguments point into it, and the workspace
            // is large enough. Both stay allocated until the stream is synchronized below, also after an error.
            let queued = unsafe {
                let sent = if index == 0 { self.arena.send(&self.device, layout.bytes, stream) } else { Ok(()) };
                sent.and_then(|()| self.queue(part, output.stages.is_some()))
            };
            let finished = self.device.check(self.stream.synchronize());
            queued.and(finished)?;
            time += self.end.since(&self.start, &self.device)?;
            if let Some(stages) = &mut output.stages {
                self.read_stages(step, *first, part, stages)?;
            }
        }
        // SAFETY: no queued work uses the arena, and the stream is synchronized before the host memory is accessed.
        unsafe { self.arena.fetch(&self.device, layout.output.clone(), stream)? };
        self.device.check(self.stream.synchronize())?;
        output.hidden.copy_from_slice(bytemuck::cast_slice(&self.arena.host()[layout.output]));
        Ok(time)
    }

    fn launches(&self) -> Option<usize> {
        self.cost.map(|(launches, _)| launches)
    }

    fn host_time(&self) -> Option<Duration> {
        self.cost.map(|(_, time)| time)
    }
}

/// A captured call of a layer; created by [`CudaMoeLayer::capture`].
pub struct MoeGraph {
    graph: Graph,
    device: Arc<Device>,
}

impl MoeGraph {
    /// Queues the call on a stream, and returns without waiting.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Safety
    ///
    /// The requirements of [`CudaMoeLayer::launch`]; the graph lives until the stream has passed it.
    pub unsafe fn launch(&self, stream: CUstream) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: the context is current. The caller guarantees the stream, and the memory that the graph uses.
        unsafe { self.graph.launch(&self.device, stream) }
    }
}

/// Places of a step's operands in one piece of memory.
struct HostStep {
    tokens: Range<usize>,
    /// Bytes from one token to the next: the step's own stride, rounded up to a multiple of 16.
    pitch: usize,
    ids: Range<usize>,
    weights: Range<usize>,
    shared_weights: Option<Range<usize>>,
    output: Range<usize>,
    bytes: usize,
}

impl HostStep {
    fn new(step: &MoeStep<'_>) -> Self {
        let (inputs, mut cursor) = (step.inputs(), Cursor::default());
        // The stride of a single token has no meaning.
        let stride = if inputs.tokens == 1 { step.sizes().hidden } else { inputs.stride };
        let pitch = (size_of::<u16>() * stride).next_multiple_of(16);
        let mut layout = Self {
            tokens: cursor.take(inputs.tokens * pitch),
            pitch,
            ids: cursor.take(size_of_val(&*inputs.ids)),
            weights: cursor.take(size_of_val(&*inputs.weights)),
            shared_weights: inputs.shared_weights.as_ref().map(|weights| cursor.take(size_of_val(&**weights))),
            output: cursor.take(size_of::<u16>() * inputs.tokens * step.sizes().hidden),
            bytes: 0,
        };
        layout.bytes = cursor.0;
        layout
    }

    /// Writes tokens, ids and weights, and the poisoned output, so that elements that a kernel does not write stay poisoned. The
    /// bytes between tokens are NaN as numbers.
    fn write(&self, step: &MoeStep<'_>, output: &[u16], to: &mut [u8]) {
        let inputs = step.inputs();
        to[self.tokens.clone()].fill(0xFF);
        for token in 0..inputs.tokens {
            let from = bytemuck::cast_slice(step.token(token));
            to[self.tokens.start + token * self.pitch..][..from.len()].copy_from_slice(from);
        }
        to[self.ids.clone()].copy_from_slice(bytemuck::cast_slice(&inputs.ids));
        to[self.weights.clone()].copy_from_slice(bytemuck::cast_slice(&inputs.weights));
        if let (Some(place), Some(weights)) = (&self.shared_weights, &inputs.shared_weights) {
            to[place.clone()].copy_from_slice(bytemuck::cast_slice(weights));
        }
        to[self.output.clone()].copy_from_slice(bytemuck::cast_slice(output));
    }

    /// Returns the arguments of the call for memory that starts at an address.
    fn arguments(&self, step: &MoeStep<'_>, address: CUdeviceptr) -> MoeArguments {
        let at = |place: &Range<usize>| address + place.start as u64;
        MoeArguments {
            token_count: step.tokens(),
            tokens: at(&self.tokens),
            token_pitch: self.pitch,
            topk_ids: at(&self.ids),
            topk_weights: at(&self.weights),
            weights_on_input: step.inputs().weights_on_input,
            shared_weights: self.shared_weights.as_ref().map_or(0, at),
            output: at(&self.output),
            output_pitch: size_of::<u16>() * step.sizes().hidden,
        }
    }
}

#[cfg(test)]
mod tests;
