//! A planned step: descriptors on the device, launches, and a graph of the launches. A step that occurs again runs
//! without planning.

use std::ffi::c_void;
use std::ptr;

use cuda_driver::abi::{
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CUlaunchAttribute, CUlaunchAttributeValue,
};
use cuda_driver::sys::{self, CUfunction, CUstream};

use super::buffer::{Arena, Room};
use super::config::{cluster_attribute, launch_config};
use super::device::Device;
use super::event::Event;
use super::graph::Graph;
use super::streams::StreamPool;
use crate::Error;
use crate::problem::TokenDtype;
use nvfp4_kernels::group::DeviceGroup;
use nvfp4_kernels::launch::{Grid, Parameter};

/// A launch that is ready to be queued.
pub(super) struct ReadyLaunch {
    pub function: CUfunction,
    pub grid: Grid,
    pub parameter: Parameter,
}

impl ReadyLaunch {
    /// Queues the kernel.
    ///
    /// # Safety
    ///
    /// - `stream` belongs to the current context.
    /// - `function` is the entry of `grid`, in a module that stays loaded.
    /// - The descriptors that the parameter points to are written before this launch runs, in the order of the stream.
    /// - The memory that the descriptors point to is valid until the kernel has run.
    pub unsafe fn queue(&self, device: &Device, stream: CUstream) -> Result<(), Error> {
        let Grid { blocks, cluster, threads, shared_bytes, overlaps, .. } = self.grid;
        let mut parameters = [self.parameter.bytes().as_ptr().cast::<c_void>().cast_mut()];
        let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
        if overlaps {
            let mut attributes = [
                CUlaunchAttribute {
                    id: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                    value: CUlaunchAttributeValue { programmatic_stream_serialization_allowed: 1 },
                },
                cluster_attribute(cluster),
            ];
            let attributes = if cluster > 1 { &mut attributes[..] } else { &mut attributes[..1] };
            let config = launch_config(&self.grid, stream, attributes);
            // SAFETY: the function has one parameter of this type, and the driver copies the parameter and the
            // configuration. The caller guarantees that `stream` belongs to the current context, that the function is
            // loaded, and that descriptors and their memory are valid until the kernel has run.
            return device.check_raw(unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters, extra) });
        }
        // Older drivers have this call too. SAFETY: the function has one parameter of this type, and the driver copies
        // it. The caller guarantees that `stream` belongs to the current context, that the function is loaded, and that
        // descriptors and their memory are valid until the kernel has run.
        device.check_raw(unsafe {
            sys::cuLaunchKernel(self.function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, extra)
        })
    }
}

/// Memory for one planned step.
pub(super) struct PlannedStep {
    /// Key of the planned step: everything that its launches depend on. `None` until planning is complete.
    key: Option<(Vec<DeviceGroup>, TokenDtype)>,
    /// Descriptors that the launches read.
    pub descriptors: Arena,
    /// Device memory in which launches pass data to later launches.
    pub scratch: Room,
    /// Chains of launches. A launch depends on earlier launches of its chain and on no other chain.
    pub chains: Vec<Vec<ReadyLaunch>>,
    /// All launches as a graph, if the variant uses a graph.
    pub graph: Option<Graph>,
    /// Last stream that received the step, and the event recorded there after the step.
    pub stream: CUstream,
    pub used: Event,
}

impl PlannedStep {
    /// Makes memory without a step.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self {
            key: None,
            descriptors: Arena::default(),
            scratch: Room::default(),
            chains: Vec::new(),
            graph: None,
            stream: ptr::null_mut(),
            used: Event::without_time(device)?,
        })
    }

    /// Whether this step is the planned one.
    pub fn is_of(&self, groups: &[DeviceGroup], out_dtype: TokenDtype) -> bool {
        self.key.as_ref().is_some_and(|(planned, dtype)| (&**planned, *dtype) == (groups, out_dtype))
    }

    /// Whether descriptors and scratch of these numbers of bytes fit.
    pub fn has_room(&self, descriptors: usize, scratch: usize) -> bool {
        descriptors <= self.descriptors.capacity() && scratch <= self.scratch.capacity()
    }

    /// Waits until no work uses the step, then forgets the step. The memory stays allocated.
    pub fn clear(&mut self, device: &Device) -> Result<(), Error> {
        self.key = None;
        self.used.wait(device)?;
        self.graph = None;
        self.chains.clear();
        Ok(())
    }

    /// Marks the planning as complete, so that the step can run.
    pub fn complete(&mut self, groups: &[DeviceGroup], out_dtype: TokenDtype) {
        self.key = Some((groups.to_vec(), out_dtype));
    }

    /// Number of allocations for steps so far.
    pub fn allocations(&self) -> usize {
        self.descriptors.allocations() + self.scratch.allocations()
    }

    /// Queues the step: its graph, or its launches one by one.
    ///
    /// # Safety
    ///
    /// The requirements of [`PlannedStep::queue_launches`].
    pub unsafe fn queue(&self, device: &Device, pool: Option<&StreamPool>, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller guarantees that `stream` belongs to the current context, that the descriptors are there or
        // on their way on `stream`, and that their memory is valid until the launches are done. The graph holds the
        // same launches.
        unsafe {
            match &self.graph {
                Some(graph) => graph.launch(device, stream),
                None => self.queue_launches(device, pool, stream),
            }
        }
    }

    /// Queues the launches. If there is a pool, the chains are distributed over its streams.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context, and the descriptors are on the device or on their way on `stream`. The
    /// memory that they point to is valid until the stream has passed the launches.
    pub unsafe fn queue_launches(
        &self,
        device: &Device,
        pool: Option<&StreamPool>,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: the caller guarantees that `stream` belongs to the current context, and that the descriptors and
        // their memory are valid until the launches are done. Streams of the pool run after the copy of the descriptors
        // on `stream`, and before later work of `stream`. The device keeps the functions' modules loaded.
        unsafe {
            match pool {
                None => self.chains.iter().flatten().try_for_each(|launch| launch.queue(device, stream)),
                Some(pool) => pool.deal(device, stream, self.chains.len(), |index, stream| {
                    self.chains[index].iter().try_for_each(|launch| launch.queue(device, stream))
                }),
            }
        }
    }
}
