//! A step as it was planned: descriptors on the device, launches, and the graph that holds them. A step that comes again
//! runs as it is.

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
use crate::error::Error;
use crate::kernels::group::DeviceGroup;
use crate::kernels::launch::{Grid, Parameter};
use crate::problem::TokenDtype;

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
    /// `stream` is one of the current context. The descriptors that the parameter leads to arrive there before this launch.
    /// The function is the grid's entry, of a module that is loaded. What the descriptors point to is valid until the kernel
    /// has run.
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
            // SAFETY: the function has one parameter, of this type; the driver copies it and the configuration. `# Safety`
            // above asks for the stream, the function, the descriptors and what they point to.
            return device.check_raw(unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters, extra) });
        }
        // Older drivers have this call too. SAFETY: as for the call above.
        device.check_raw(unsafe {
            sys::cuLaunchKernel(self.function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, extra)
        })
    }
}

/// Room for a planned step.
pub(super) struct PlannedStep {
    /// The step that was planned: all that its launches depend on. `None` until planning has come to its end.
    key: Option<(Vec<DeviceGroup>, TokenDtype)>,
    /// What launches read.
    pub descriptors: Arena,
    /// The device memory in which launches leave something to each other.
    pub scratch: Room,
    /// Chains of launches. A launch needs what earlier ones of its chain leave, and nothing of other chains.
    pub chains: Vec<Vec<ReadyLaunch>>,
    /// All launches as one, if the variant asks for a graph.
    pub graph: Option<Graph>,
    /// The stream that was given the step last, and the mark behind it there.
    pub stream: CUstream,
    pub used: Event,
}

impl PlannedStep {
    /// Room without a step.
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

    /// Whether this step was planned.
    pub fn is_of(&self, groups: &[DeviceGroup], out_dtype: TokenDtype) -> bool {
        self.key.as_ref().is_some_and(|(planned, dtype)| (&**planned, *dtype) == (groups, out_dtype))
    }

    /// Whether so many bytes of descriptors and scratch fit.
    pub fn has_room(&self, descriptors: usize, scratch: usize) -> bool {
        descriptors <= self.descriptors.capacity() && scratch <= self.scratch.capacity()
    }

    /// Waits until nothing reads the step any more, and forgets it; its room stays.
    pub fn clear(&mut self, device: &Device) -> Result<(), Error> {
        self.key = None;
        self.used.wait(device)?;
        self.graph = None;
        self.chains.clear();
        Ok(())
    }

    /// Notes that planning has come to its end: the step can run.
    pub fn complete(&mut self, groups: &[DeviceGroup], out_dtype: TokenDtype) {
        self.key = Some((groups.to_vec(), out_dtype));
    }

    /// How often memory was allocated for steps.
    pub fn allocations(&self) -> usize {
        self.descriptors.allocations() + self.scratch.allocations()
    }

    /// Queues the step: its graph, or its launches one by one.
    ///
    /// # Safety
    ///
    /// As for [`PlannedStep::queue_launches`].
    pub unsafe fn queue(&self, device: &Device, pool: Option<&StreamPool>, stream: CUstream) -> Result<(), Error> {
        // SAFETY: `# Safety` above is what a launch of the graph asks too, which holds the same launches.
        unsafe {
            match &self.graph {
                Some(graph) => graph.launch(device, stream),
                None => self.queue_launches(device, pool, stream),
            }
        }
    }

    /// Queues the launches, their chains dealt out to the streams of a pool if there is one.
    ///
    /// # Safety
    ///
    /// `stream` is one of the current context, on which the descriptors have arrived or are on their way. What they point to
    /// is valid until the stream has come past the launches.
    pub unsafe fn queue_launches(
        &self,
        device: &Device,
        pool: Option<&StreamPool>,
        stream: CUstream,
    ) -> Result<(), Error> {
        // SAFETY: `# Safety` above asks for the stream, the descriptors and what they point to. A stream of the pool comes
        // after `stream`'s descriptors, and before what follows there. The device keeps the functions' modules loaded.
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
