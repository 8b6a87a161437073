//! An MoE layer's weights on a device, and calls of it.

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
use crate::backend::MoeLayer;
use crate::bias::Bias;
use crate::error::Error;
use crate::format::Matrix;
use crate::kernels::moe::{
    self, MoeArguments, PROJECTIONS, PackedWeights, PlacedMoe, StageParts, Workspace, weight_bytes, workspace_bytes,
};
use crate::moe::{MoeExpert, MoeOutput, MoeSizes, MoeStep, MoeWeights, Stages};
pub use launcher::{MoeLauncher, MoeTensor, MoeTensors, PackedMoe};

/// The prepared weights of an MoE layer; made by [`Cuda::prepare_moe_layer`](super::Cuda::prepare_moe_layer) or
/// [`Cuda::pack_moe_layer`](super::Cuda::pack_moe_layer).
///
/// Calls need nothing of each other but the order of the stream: any number of layers can share a workspace, and a call may be
/// captured into a graph, ours or the caller's. What a call launches depends on T and on addresses, never on what the tokens
/// chose.
pub struct CudaMoeLayer {
    launcher: MoeLauncher,
    placed: PlacedMoe,
    /// What `placed` points into.
    weights: DeviceBuffer<u8>,
    map: Option<DeviceBuffer<i32>>,
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

impl CudaMoeLayer {
    /// A layer with room for its weights.
    fn new(device: Arc<Device>, sizes: MoeSizes, expert_map: Option<&[i32]>, graph: bool) -> Result<Self, Error> {
        sizes.check()?;
        device.make_current()?;
        let launcher = MoeLauncher::new(device.clone())?;
        launcher.load(sizes.token_format)?;
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
            graph,
            arena: Arena::default(),
            workspace: Room::default(),
            cost: None,
            // Not a stream that waits for the null stream: it could not be captured while others use the null stream.
            stream: device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            device,
        };
        layer.wait_for_copies()?;
        Ok(layer)
    }

    /// A layer of weights in host memory. They are brought over a projection at a time, and packed there.
    pub(super) fn prepare(device: Arc<Device>, weights: &MoeWeights<'_>, graph: bool) -> Result<Self, Error> {
        let layer = Self::new(device, weights.sizes(), weights.expert_map(), graph)?;
        // SAFETY: the stream is the layer's own, of the current context, and the weights have room.
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

    /// A layer of tensors in device memory.
    ///
    /// # Safety
    ///
    /// As [`Cuda::pack_moe_layer`](super::Cuda::pack_moe_layer).
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
        // SAFETY: the stream is the layer's own and captures nothing, and the weights have room. `# Safety` above asks for the
        // tensors, and all is waited for before anything is freed.
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

    /// A copy from pageable memory may return with its last part still on the way (cuda.h, "API synchronization behavior"), and
    /// neither this layer's stream nor a caller's would wait for it.
    fn wait_for_copies(&self) -> Result<(), Error> {
        self.device.check(CurrentContext::synchronize())
    }

    /// Brings over the routed experts, or the shared one, and packs them.
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
            // No more of the layer than a projection is there twice.
            let (values, scales) = (matrices[0].values().len(), matrices[0].scales().len());
            // SAFETY: every byte that is read is copied there in the loop below.
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
            // SAFETY: the context is current and the stream is the layer's own. The tensor lies in the two buffers, which live until
            // the packing was waited for.
            let queued =
                unsafe { self.launcher.pack_projection(sizes, &packed, of_shared, projection, &tensor, stream) };
            let finished = self.device.check(self.stream.synchronize());
            queued.and(finished)?;
        }
        Ok(())
    }

    /// Brings over the input scales.
    fn upload_input_scales(&self, weights: &MoeWeights<'_>) -> Result<(), Error> {
        let all: Vec<_> = (0..=self.placed.sizes.experts).map_while(|expert| weights.input_scales(expert)).collect();
        let (experts, shared) = all.split_at(self.placed.sizes.experts);
        let stream = self.stream.as_inner();
        // SAFETY: the context is current, the stream is the layer's own and captures nothing, and no call has been made of its weights.
        let queued = unsafe { self.launcher.set_input_scales(&self.packed(), [experts, shared], stream) };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)
    }

    /// The same layer at other addresses, so that measurements need not find its weights in a cache.
    ///
    /// # Errors
    /// [`Error::Driver`], for instance when the device's memory does not hold it.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let map = self.map.as_ref().map(|map| self.device.check(map.as_host_vec())).transpose()?;
        let clone = Self::new(self.device.clone(), self.placed.sizes, map.as_deref(), self.graph)?;
        let [to, from] = [&clone, self].map(|layer| layer.weights.as_device_ptr().as_raw());
        // SAFETY: both have so many bytes, and nothing writes either meanwhile.
        self.device.check_raw(unsafe { sys::cuMemcpyDtoD_v2(to, from, self.weights.len()) })?;
        clone.wait_for_copies()?;
        Ok(clone)
    }

    /// The sizes.
    pub fn sizes(&self) -> MoeSizes {
        self.placed.sizes
    }

    /// Bytes of the layer's weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.len() + self.map.as_ref().map_or(0, |map| size_of::<i32>() * map.len())
    }

    /// Bytes of workspace that a call needs with up to so many tokens; see [`workspace_bytes`].
    pub fn workspace_bytes(&self, max_tokens: usize) -> usize {
        workspace_bytes(&self.placed.sizes, max_tokens)
    }

    /// Queues a call on the caller's stream and returns without waiting: how many launches it was given. Nothing is allocated
    /// on the device, copied or read there, and no launch waits for the host, so the stream may be captured into a graph. That
    /// graph is right for whatever ids and weights lie there when it runs.
    ///
    /// The first launch may begin before the stream has come to the end of the kernel before it, but touches nothing until
    /// then.
    ///
    /// # Errors
    /// If an address or a pitch is not aligned, weights are on the input where that cannot be, or a driver call fails. What a
    /// kernel itself does wrong shows when the stream is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is a stream of this device's primary context, or null.
    /// - Every address of `arguments` is one of memory that this device can read, or for the output write, of the sizes that
    ///   [`MoeArguments`] says; and [`CudaMoeLayer::workspace_bytes`] lie at `workspace`, a multiple of 256. The output and the
    ///   workspace overlap nothing.
    /// - All of it stays allocated, and is written by nobody else, until the stream has come past this call, or the graph is
    ///   not launched any more. So does the layer. Calls that share a workspace are on one stream, or in an order otherwise.
    pub unsafe fn launch(
        &self,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<usize, Error> {
        self.device.make_current()?;
        // SAFETY: the context is current, and the layer keeps its weights. `# Safety` above asks for the rest.
        unsafe { self.launcher.queue(&self.placed, arguments, workspace, stream) }
    }

    /// A call as a graph, which is launched in one go, and is right for whatever ids and weights lie there then.
    ///
    /// # Errors
    /// As [`CudaMoeLayer::launch`].
    ///
    /// # Safety
    ///
    /// As [`CudaMoeLayer::launch`], for as long as the graph is launched.
    pub unsafe fn capture(&self, arguments: &MoeArguments, workspace: CUdeviceptr) -> Result<MoeGraph, Error> {
        self.device.make_current()?;
        // SAFETY: the context is current; `# Safety` above asks for the rest.
        unsafe { self.capture_of(&self.placed, arguments, workspace) }
    }

    /// As [`CudaMoeLayer::capture`], of this layer's weights as `placed` says.
    ///
    /// # Safety
    ///
    /// As [`CudaMoeLayer::capture`]; the context is current.
    unsafe fn capture_of(
        &self,
        placed: &PlacedMoe,
        arguments: &MoeArguments,
        workspace: CUdeviceptr,
    ) -> Result<MoeGraph, Error> {
        let stream = self.stream.as_inner();
        // SAFETY: the layer's own stream captures nothing. `# Safety` above asks for what the launches touch.
        let queue = || unsafe { self.launcher.queue(placed, arguments, workspace, stream).map(|_| ()) };
        // SAFETY: as above.
        let graph = unsafe { Graph::capture(&self.device, stream, queue)? };
        Ok(MoeGraph { graph, device: self.device.clone() })
    }

    /// Queues a step whose operands lie in the arena, between two events; its stages stay in the workspace if they are wanted.
    ///
    /// # Safety
    ///
    /// `arguments` point into the arena, and the workspace is large enough. Nothing else is under way in either, and nobody
    /// touches them until the stream was waited for.
    unsafe fn queue(&mut self, arguments: &MoeArguments, with_stages: bool) -> Result<(), Error> {
        let (stream, workspace) = (self.stream.as_inner(), self.workspace.address());
        let placed = PlacedMoe { keeps_stages: with_stages, ..self.placed };
        // SAFETY: `# Safety` above; the stream is this layer's own, in the current context.
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
            // The graph goes here, and must not be under way then.
            if graph.is_some() {
                self.device.check(self.stream.synchronize())?;
            }
            drop(graph);
            self.cost = Some(cost);
        }
        Ok(())
    }

    /// Reads what a chunk that has run has left in the workspace.
    fn read_stages(
        &self,
        step: &MoeStep<'_>,
        first: usize,
        chunk: &MoeArguments,
        stages: &mut Stages,
    ) -> Result<(), Error> {
        let workspace = Workspace::at(&self.placed.sizes, chunk.token_count, self.workspace.address());
        let kernels = self.launcher.kernels;
        let parts = StageParts::read(&self.placed.sizes, chunk, &workspace, kernels, |address, bytes| {
            let mut read = vec![0u8; bytes];
            if bytes > 0 {
                // SAFETY: the part lies in the workspace, where nothing is under way any more; `read` has as many bytes.
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
        // Freeing needs the context on this thread, and packing or a step may be under way. A failure here shows in another call.
        if self.device.make_current().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

// SAFETY: the handles inside are the driver's, which any thread may use with the context current; every method makes it
// current first.
unsafe impl Send for CudaMoeLayer {}

impl MoeLayer for CudaMoeLayer {
    fn kernel(&self) -> &str {
        self.launcher.kernels.product_kernel(self.placed.sizes.token_format)
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
        // What lies between is read back chunk by chunk, since chunks share the workspace.
        let parts = match output.stages {
            Some(_) => moe::chunks(&sizes, &arguments)?.collect(),
            None => vec![(0, arguments)],
        };
        let mut time = Duration::ZERO;
        for (index, (first, part)) in parts.iter().enumerate() {
            // SAFETY: the last step was waited for, so nothing is under way in the arena. The arguments point into it, and the
            // workspace is large enough; both stay until the stream was waited for below, whatever happens.
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
        // SAFETY: nothing is under way, and the stream is waited for before the host's side is touched.
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

/// A call of a layer that was captured; made by [`CudaMoeLayer::capture`].
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
    /// As [`CudaMoeLayer::launch`]; the graph stays until the stream has come past it.
    pub unsafe fn launch(&self, stream: CUstream) -> Result<(), Error> {
        self.device.make_current()?;
        // SAFETY: the context is current, and `# Safety` above asks for the rest.
        unsafe { self.graph.launch(&self.device, stream) }
    }
}

/// Where a step's operands lie in one piece of memory.
struct HostStep {
    tokens: Range<usize>,
    /// Bytes from one token to the next: the step's own stride, rounded up to what kernels take.
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
        // A single token has no next one, whatever its stride.
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

    /// Writes tokens, ids and weights, and the output as it is: so an element which a kernel forgets keeps its poison. Between
    /// tokens are bytes that are NaN as numbers.
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

    /// The arguments of the call, the memory beginning at an address.
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
