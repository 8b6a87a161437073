//! A layer's weights on a device, and the steps run on them.

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
use crate::backend::Layer;
use crate::error::Error;
use crate::kernels::GroupedKernel;
use crate::kernels::group::{DeviceGroup, PlacedLayer, PlacedMatrix};
use crate::kernels::launch::Scratch;
use crate::kernels::schedule::Launcher;
use crate::output::Output;
use crate::plan::variant::{LaunchSchedule, Variant};
use crate::problem::{Step, TokenDtype, Weights};

/// How many steps stay planned, and may be under way at once. One more waits for the oldest and takes its room.
const PLANNED_STEPS: usize = 4;

/// Prepared weights; made by [`Cuda::prepare_layer`](super::Cuda::prepare_layer).
///
/// Holds its memory on the device, and buffers that have grown to the largest step seen. The last four different steps stay
/// planned: one that comes again, with the same sizes, addresses and scales, is queued as it is.
pub struct CudaLayer {
    weights: PlacedLayer,
    /// How steps are launched.
    launcher: Launcher,
    variant: Variant,
    /// Tensor maps.
    maps: MapCache,
    /// The entries that may be launched, by kernel and name.
    functions: Vec<(&'static str, &'static str, CUfunction)>,
    /// What `weights` points into.
    _memory: Option<DeviceBuffer<u8>>,
    /// Activations and output of a step from host memory.
    arena: Arena,
    /// Used in turn.
    planned: [PlannedStep; PLANNED_STEPS],
    next: usize,
    /// For schedules of several streams.
    pool: Option<StreamPool>,
    /// Launches of the last step, and the time that it took to queue it.
    cost: Option<(usize, Duration)>,
    pub(super) stream: Stream,
    pub(super) start: Event,
    pub(super) end: Event,
    /// What is written over to flush the second-level cache.
    pub(super) flush: Room,
    /// Last, since all above lives in its context.
    pub(super) device: Arc<Device>,
}

impl CudaLayer {
    pub(super) fn new(device: Arc<Device>, variant: Variant, weights: &Weights<'_>) -> Result<Self, Error> {
        device.make_current()?;
        // First, so that a kernel which does not load says so before gigabytes are copied.
        let launcher = Launcher::new(variant, device.default, weights)?;
        let kernel = GroupedKernel::named(launcher.kernel().name()).expect("it computes groups");
        device.standing.check_groups(kernel, launcher.op(), variant)?;
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
            // SAFETY: every byte that a kernel reads is copied there below.
            bytes => Some(device.check(unsafe { DeviceBuffer::<u8>::uninitialized(bytes) })?),
        };
        let mut cursor = Cursor::default();
        let mut upload = |bytes: &[u8]| -> Result<CUdeviceptr, Error> {
            let to = cursor.take(bytes.len());
            let buffer = buffer.as_ref().expect("an expert has weights, so there is a buffer");
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
        // A copy from pageable memory may return with its last part still on the way (cuda.h, "API synchronization
        // behavior"), and a caller's stream would not wait for it.
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
            // Not a stream that waits for the null stream: it could not be captured while others use the null stream.
            stream: device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?,
            start: Event::new(&device)?,
            end: Event::new(&device)?,
            flush: Room::default(),
            device,
        })
    }

    /// How often this layer has had to allocate memory for steps, on the device or page-locked. Stays the same when a
    /// step is no larger than one before.
    pub fn allocations(&self) -> usize {
        self.arena.allocations() + self.planned.iter().map(PlannedStep::allocations).sum::<usize>()
    }

    /// Checks that a step was made for these weights.
    pub(super) fn check_fits(&self, step: &Step<'_>) -> Result<(), Error> {
        self.weights.check_fits(step)
    }

    /// Queues a step whose activations and output lie in device memory on the caller's stream, and returns without
    /// waiting: `groups` has an entry for each expert, in order.
    ///
    /// A step that is one of the last four is queued as it was planned: nothing is allocated, encoded or copied, and where
    /// the variant asks for a graph there is one launch. Any other step is planned, and its descriptors are copied on that
    /// stream. That allocates nothing if an earlier step had as many groups and tiles, and waits for nothing unless four
    /// earlier steps are still queued.
    ///
    /// # Errors
    /// If there are not as many groups as experts, global scales are too large, or a driver call fails. What the kernel
    /// itself does wrong shows when the stream is waited for.
    ///
    /// # Safety
    ///
    /// - `stream` is null or a stream of this device's primary context, and is not being captured into a graph. It is not
    ///   destroyed before it has come past this launch, or this layer is dropped.
    /// - For every group with rows, `values` and `scales` are addresses that this device can read, and `output` is one that
    ///   it can write. They are aligned and of the sizes that [`DeviceGroup`] says; outputs overlap nothing.
    /// - That memory stays allocated, and is written by nobody else, until the stream has come past this launch.
    /// - The scales are e4m3 without sign and no NaN (0x00 to 0x7e), the padding's too.
    pub unsafe fn launch(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
        stream: CUstream,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        self.device.make_current()?;
        // SAFETY: the context was made current, and `# Safety` above asks for a stream of it. `plan` has given the
        // descriptors to that stream; `# Safety` keeps what they point to until the stream has come past the launches.
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

    /// Finds the step among the planned ones, or plans it. Afterwards its descriptors are on the device, or on their way
    /// there on the stream.
    ///
    /// # Safety
    ///
    /// `stream` is as for [`CudaLayer::launch`], and the device's context is current.
    pub(super) unsafe fn plan(
        &mut self,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
        stream: CUstream,
    ) -> Result<usize, Error> {
        if let Some(index) = self.planned.iter().position(|step| step.is_of(groups, out_dtype)) {
            let step = &mut self.planned[index];
            if step.stream != stream {
                // Until then the other stream may still use the descriptors, and the scratch that launches leave to
                // each other. SAFETY: `# Safety` above asks for a stream of the current context.
                unsafe { step.used.hold(&self.device, stream)? };
                step.stream = stream;
            }
            return Ok(index);
        }

        if groups.len() != self.weights.len() {
            let (got, expected) = (groups.len(), self.weights.len());
            return Err(Error::Mismatch { what: "groups of tokens (one for each expert)", got, expected });
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
                let &(.., function) = self.functions.iter().find(is_of).expect("entries are loaded");
                launches.push(ReadyLaunch { function, grid, parameter });
                at += launch.bytes();
            }
            step.chains.push(launches);
        }
        // SAFETY: `# Safety` above asks for a stream of the current context. Nothing reads or writes the room, which was
        // cleared. This layer's own stream captures nothing, and what is captured is queued only as long as this step is
        // planned.
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

    /// Makes room in every planned step for so many bytes of descriptors and scratch. A later step that is no larger finds
    /// it.
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

    /// Queues a step whose operands lie in the arena, and the copy of its output to the host.
    ///
    /// # Safety
    ///
    /// `groups` point into the arena, where `layout` says. Nothing else is under way there, and nobody touches it until the
    /// stream has been waited for. The device's context is current.
    unsafe fn queue(
        &mut self,
        layout: &StepLayout,
        groups: &[DeviceGroup],
        out_dtype: TokenDtype,
    ) -> Result<(), Error> {
        let stream = self.stream.as_inner();
        // SAFETY: `# Safety` above keeps the arena for this step alone. The stream is this layer's own, in the current
        // context.
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
        // Freeing needs the context on this thread, and streams may still read descriptors. A failure here shows in another
        // call, which can tell of it.
        if self.device.make_current().is_ok() {
            for step in &self.planned {
                let _ = step.used.wait(&self.device);
            }
        }
    }
}

// SAFETY: the handles inside are the driver's, which any thread may use with the context current; every method makes it
// current first. `&self` methods use none of them.
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

        // Everything lies in one piece of memory that is filled on the host and sent in one copy: tokens, and the output as
        // the caller left it. So an element which the kernel forgets keeps its poison.
        let layout = StepLayout::new(step);
        self.arena.reserve(&self.device, layout.bytes)?;
        layout.write(step, output, self.arena.host());
        let groups = layout.groups(step, self.arena.address());
        // SAFETY: the context is current. The last step was waited for, so nothing is under way in the arena. The groups point
        // into it and into the weights, both alive until the stream is waited for below, whatever happens.
        let queued = unsafe { self.queue(&layout, &groups, output.dtype()) };
        let finished = self.device.check(self.stream.synchronize());
        queued.and(finished)?;
        output.bits_mut().copy_from_slice(bytemuck::cast_slice(&self.arena.host()[layout.output]));
        self.end.since(&self.start, &self.device)
    }
}
