//! Weights of a grouped problem on a device, and the steps that use them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::cust::context::CurrentContext;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{CUdeviceptr, CUfunction, CUstream};

use super::buffer::{Arena, Room};
use super::device::Device;
use super::event::Event;
use super::graph::Graph;
use super::layout::{Cursor, StepLayout};
use super::maps::MapCache;
use super::planned::{PlannedStep, ReadyLaunch};
use super::streams::StreamPool;
use crate::Error;
use crate::Output;
use crate::backend::Layer;
use crate::problem::{Step, TokenDtype, Weights};
use nvfp4_kernels::GroupedKernel;
use nvfp4_kernels::group::{DeviceGroup, PlacedLayer, PlacedMatrix};
use nvfp4_kernels::launch::Scratch;
use nvfp4_kernels::schedule::Launcher;
use nvfp4_kernels::variant::{LaunchSchedule, Variant};

/// Number of planned steps that are kept, and that may be in flight at once. One more step waits for the oldest and
/// takes its place.
const PLANNED_STEPS: usize = 4;

/// Prepared weights, made by [`Cuda::prepare_layer`](super::Cuda::prepare_layer).
///
/// Owns its device memory, and buffers that grow to the largest step so far. The last four different steps stay
/// planned: a step with the same sizes, addresses and scales is queued again without planning.
pub struct CudaLayer {
    weights: PlacedLayer,
    /// Plans the launches of steps.
    launcher: Launcher,
    variant: Variant,
    /// Tensor maps of this layer's steps.
    maps: MapCache,
    /// Functions that may be launched, by kernel and entry.
    functions: Vec<(&'static str, &'static str, CUfunction)>,
    /// Memory that `weights` points into.
    _memory: Option<DeviceBuffer<u8>>,
    /// Activations and output of a step from host memory.
    arena: Arena,
    /// Used in round-robin order.
    planned: [PlannedStep; PLANNED_STEPS],
    next: usize,
    /// Pool for launch schedules with several streams.
    pool: Option<StreamPool>,
    /// Number of launches of the last step, and time of the host to queue them.
    cost: Option<(usize, Duration)>,
    pub(super) stream: Stream,
    pub(super) start: Event,
    pub(super) end: Event,
    /// Memory that is overwritten to flush the L2 cache.
    pub(super) flush: Room,
    /// Last field, since all fields above live in its context.
    pub(super) device: Arc<Device>,
}

impl CudaLayer {
    pub(super) fn new(device: Arc<Device>, variant: Variant, weights: &Weights<'_>) -> Result<Self, Error> {
        device.make_current()?;
        // Load first, so that a kernel that cannot be loaded is reported before gigabytes are copied.
        let launcher = Launcher::new(variant, device.default, weights)?.without(device.refused.clone());
        let kernel = GroupedKernel::named(launcher.kernel().name()).expect("the launcher's kernel computes groups");
        device.standing.check_groups(kernel, launcher.op(), variant, &device.refused)?;
        let mut functions = Vec::new();
        for kernel in launcher.kernels() {
            for entry in kernel.entries().into_iter().filter(|entry| entry.serves(launcher.op())) {
                functions.push((kernel.name(), entry.name, device.function(kernel.name(), &entry)?));
            }
        }

        let mut total = Cursor::default();
        for matrix in weights.experts().iter().flat_map(|expert| expert.projections()) {
            for bytes in launcher.kernel().packed_bytes(matrix.rows(), matrix.k()) {
                total.take(bytes);
            }
        }
        let buffer = match total.0 {
            0 => None,
            // SAFETY: copies below write every byte that a kernel reads.
            bytes => Some(device.check(unsafe { DeviceBuffer::<u8>::uninitialized(bytes) })?),
        };
        let mut cursor = Cursor::default();
        let mut upload = |bytes: &[u8]| -> Result<CUdeviceptr, Error> {
            let to = cursor.take(bytes.len());
            let buffer = buffer.as_ref().expect("the buffer exists, since an expert has weights");
            let address = buffer.as_device_ptr().as_raw() + to.start as u64;
            if !bytes.is_empty() {
                device.check(buffer.index(to).copy_from(bytes))?;
            }
            Ok(address)
        };
        let placed = PlacedLayer::new(weights, |matrix| {
            let [values, scales] = launcher.kernel().pack(matrix);
            Ok(PlacedMatrix { values: upload(&values)?, scales: upload(&scales)? })
        })?;
        // A copy from pageable memory may return before its last part has arrived (cuda.h, "API synchronization
        // behavior"), and a caller's stream would not wait for that part.
        device.check(CurrentContext::synchronize())?;

        let pool = match variant.schedule {
            LaunchSchedule::Streams(count) => Some(StreamPool::new(&device, count)?),
            _ => None,
        };
        let room = || PlannedStep::new(&device);
        Ok(Self {
            weights: placed,
            launcher,
            variant,
            functions,
            maps: MapCache::default(),
            _memory: buffer,
            arena: Arena::default(),
            planned: [room()?, room()?, room()?, room()?],
            next: 0,
            pool,
            cost: None,
            // A stream that does not wait for the null stream. Otherwise it could not be captured while others use the
            // null stream.
            stream: device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            flush: Room::default(),
            device,
        })
    }

    /// Number of allocations for steps so far, on the device and page-locked. A step no larger than an earlier step
    /// allocates nothing.
    pub fn allocations(&self) -> usize {
        self.arena.allocations() + self.planned.iter().map(PlannedStep::allocations).sum::<usize>()
    }

    /// Checks that a step was made for these weights.
    pub(super) fn check_fits(&self, step: &Step<'_>) -> Result<(), Error> {
        self.weights.check_fits(step)
    }

    /// Queues a step with activations and output in device memory on the caller's stream, and returns without waiting.
    /// `groups` has one entry per expert, in order.
    ///
    /// If the step is one of the last four, it is queued without planning: nothing is allocated, encoded or copied, and
    /// a variant with a graph makes one launch. Any other step is planned, and its descriptors are copied on `stream`.
    /// Planning allocates nothing if an earlier step had at least the same number of groups and tiles. It waits only if
    /// four earlier steps are still queued.
    ///
    /// # Errors
    /// If the number of groups is not the number of experts, global scales are too large, or a driver call fails. An
    /// error inside of the kernel is reported when the stream is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is null or a stream of this device's primary context, and is not being captured into a graph. It is
    ///   destroyed only after it has passed this launch, or after this layer was dropped.
    /// - For every group with rows, `values` and `scales` are addresses that this device can read, and `output` is an
    ///   address that it can write. They have the alignments and sizes that [`DeviceGroup`] documents. Outputs overlap
    ///   nothing.
    /// - This memory stays allocated, and nobody else writes it, until the stream has passed this launch.
    /// - All scales, including padding, are e4m3 codes without sign and not NaN (0x00 to 0x7e).
    pub unsafe fn launch(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
        stream: CUstream,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        self.device.make_current()?;
        // SAFETY: the context was made current, and the caller guarantees that `stream` belongs to it. `plan` has
        // queued the copy of the descriptors on that stream, and the caller keeps the operands valid until the stream
        // has passed the launches.
        let launches = unsafe {
            let index = self.plan(groups, out_dtype, stream)?;
            let step = &self.planned[index];
            step.queue(&self.device, self.pool.as_ref(), stream)?;
            step.used.record(&self.device, stream)?;
            if step.graph.is_some() { 1 } else { step.chains.iter().map(Vec::len).sum() }
        };
        self.cost = Some((launches, begin.elapsed()));
        Ok(())
    }

    /// Finds the step among the planned steps, or plans it. Afterwards its descriptors are on the device, or on their
    /// way on the stream.
    ///
    /// # Safety
    ///
    /// `stream` is null or a stream of the device's primary context that is not being captured, and this context is
    /// current. The operands of `groups` stay valid as [`CudaLayer::launch`] requires.
    pub(super) unsafe fn plan(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
        stream: CUstream,
    ) -> Result<usize, Error> {
        if let Some(index) = self.planned.iter().position(|step| step.is_of(groups, out_dtype)) {
            let step = &mut self.planned[index];
            if step.stream != stream {
                // Until its event has passed, the other stream may still use the descriptors and the scratch. SAFETY:
                // the caller guarantees that `stream` belongs to the current context.
                unsafe { step.used.hold(&self.device, stream)? };
                step.stream = stream;
            }
            return Ok(index);
        }

        if groups.len() != self.weights.expert_count() {
            let (got, expected) = (groups.len(), self.weights.expert_count());
            return Err(Error::Mismatch { what: "groups of tokens (one per expert)", got, expected });
        }
        let placed = groups.iter().enumerate().map(|(index, group)| self.weights.group(index, group));
        let placed = placed.collect::<Result<Vec<_>, Error>>()?;
        let index = self.next;
        self.next = (index + 1) % PLANNED_STEPS;
        self.planned[index].clear(&self.device)?;
        let scratch = self.launcher.scratch_bytes(&placed)?.try_into().map_err(|_| Error::TooLarge)?;
        self.reserve(0, scratch)?;
        let scratch = Scratch::new(self.planned[index].scratch.address());
        let chains = self.launcher.plan(&placed, out_dtype, self.device.info.sms, scratch)?;
        let bytes = chains.iter().flatten().map(|launch| launch.bytes()).sum();
        self.reserve(bytes, 0)?;

        let step = &mut self.planned[index];
        let mut at = 0;
        for chain in &chains {
            let mut launches = Vec::with_capacity(chain.len());
            for launch in chain {
                let (grid, address) = (launch.grid, step.descriptors.address() + at as u64);
                let to = &mut step.descriptors.host()[at..][..launch.bytes()];
                let parameter = launch.write(address, to, &mut |arguments| self.maps.get(&self.device, arguments))?;
                let is_of = |&&(kernel, entry, _): &&(_, _, _)| (kernel, entry) == (launch.kernel, grid.entry);
                let &(.., function) =
                    self.functions.iter().find(is_of).expect("the entries of the launcher's kernels are loaded");
                launches.push(ReadyLaunch { function, grid, parameter });
                at += launch.bytes();
            }
            step.chains.push(launches);
        }
        // SAFETY: the caller guarantees that `stream` belongs to the current context. The step was cleared, so no work
        // uses its memory. This layer's own stream is not capturing, and the captured work is queued only while this
        // step is planned.
        unsafe {
            step.descriptors.send(&self.device, bytes, stream)?;
            step.used.record(&self.device, stream)?;
            if self.variant.graph && !step.chains.is_empty() {
                let own = self.stream.as_inner();
                let queue = || step.queue_launches(&self.device, self.pool.as_ref(), own);
                step.graph = Some(Graph::capture(&self.device, own, queue)?);
            }
        }
        step.stream = stream;
        step.complete(groups, out_dtype);
        Ok(index)
    }

    /// Reserves memory in every planned step for these numbers of bytes of descriptors and scratch, so that a later
    /// step no larger than this one allocates nothing.
    fn reserve(&mut self, descriptors: usize, scratch: usize) -> Result<(), Error> {
        for step in &mut self.planned {
            if !step.has_room(descriptors, scratch) {
                step.clear(&self.device)?;
                step.descriptors.reserve(&self.device, descriptors)?;
                step.scratch.reserve(&self.device, scratch)?;
            }
        }
        Ok(())
    }

    /// Queues a step with operands in the arena, and the copy of its output to the host.
    ///
    /// # Safety
    ///
    /// `groups` point into the arena as `layout` defines. No other work uses the arena, and nobody accesses it until
    /// the stream has been waited for. The device's context is current.
    unsafe fn queue(
        &mut self,
        layout: &StepLayout,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
    ) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        // SAFETY: the caller guarantees that only this step uses the arena. The stream belongs to this layer, and its
        // context is current.
        unsafe {
            self.arena.send(&self.device, layout.bytes, stream)?;
            self.plan(groups, out_dtype, stream)?;
            self.start.record(&self.device, stream)?;
            self.launch(groups, out_dtype, stream)?;
            self.end.record(&self.device, stream)?;
            self.arena.fetch(&self.device, layout.output.clone(), stream)
        }
    }
}

impl Drop for CudaLayer {
    fn drop(&mut self) {
        // Freeing memory requires the context on this thread, and streams may still read descriptors. A failure here
        // occurs again in another call, which reports it.
        if self.device.make_current().is_ok() {
            for step in &self.planned {
                let _ = step.used.wait(&self.device);
            }
        }
    }
}

// SAFETY: the fields are handles of the driver, which any thread may use while the context is current. Every `&mut`
// method makes it current first, and `&self` methods use no handle.
unsafe impl Send for CudaLayer {}

impl Layer for CudaLayer {
    fn kernel(&self) -> &str {
        self.launcher.title()
    }

    fn launches(&self) -> Option<usize> {
        self.cost.map(|(launches, _)| launches)
    }

    fn host_time(&self) -> Option<Duration> {
        self.cost.map(|(_, time)| time)
    }

    fn execute(&mut self, step: &Step<'_>, output: &mut Output) -> Result<Duration, Error> {
        self.weights.check_fits(step)?;
        output.check_fits(step.problem())?;
        self.cost = None;
        if output.bits().is_empty() {
            return Ok(Duration::ZERO);
        }
        self.device.make_current()?;

        // One allocation holds the tokens and the caller's output. It is filled on the host and sent in one copy. An
        // element that the kernel does not write therefore keeps its poison.
        let layout = StepLayout::new(step);
        self.arena.reserve(&self.device, layout.bytes)?;
        layout.write(step, output, self.arena.host());
        let groups = layout.groups(step, self.arena.address());
        // SAFETY: the context is current. The last step was waited for, so no work uses the arena. The groups point
        // into the arena and the weights, which live until the stream is waited for below, also after an error.
        let queued = unsafe { self.queue(&layout, &groups, output.dtype()) };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)?;
        output.bits_mut().copy_from_slice(bytemuck::cast_slice(&self.arena.host()[layout.output]));
        self.end.since(&self.start, &self.device)
    }
}
