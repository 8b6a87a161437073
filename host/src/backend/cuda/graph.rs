//! CUDA graphs, captured from a stream.

use std::ptr;

use cuda_driver::sys::{self, CUgraphExec, CUstream};

use super::device::Device;
use crate::error::Error;

/// A graph that can be launched again and again: the same kernels with the same parameters, in one call.
pub(super) struct Graph(CUgraphExec);

impl Graph {
    /// Captures what `queue` gives to `stream`, and to streams that it forks from there and joins again, without running it.
    ///
    /// # Errors
    /// Those of `queue`, or of the driver. The stream is none that captures afterwards either way.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context, not the null stream, and captures nothing. What `queue` gives to streams
    /// stays valid for as long as the graph is launched.
    pub unsafe fn capture(
        device: &Device,
        stream: CUstream,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Self, Error> {
        // Other threads may allocate meanwhile; this one will not.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller's promise.
        device.check_raw(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let queued = queue();
        let mut graph = ptr::null_mut();
        // SAFETY: the stream captures since the call above; `graph` outlives the call.
        let ended = device.check_raw(unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
        let captured = queued.and(ended);
        let mut executable = ptr::null_mut();
        let instantiated = captured.and_then(|()| {
            // SAFETY: a graph that was captured; no flags.
            device.check_raw(unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) })
        });
        if !graph.is_null() {
            // SAFETY: a graph that was captured; what was instantiated does not need it any more.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        instantiated?;
        Ok(Self(executable))
    }

    /// Queues all that was captured, as one piece of work of the stream.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context; what was captured may run there.
    pub unsafe fn launch(&self, device: &Device, stream: CUstream) -> Result<(), Error> {
        // SAFETY: alive; the rest is the caller's promise.
        device.check_raw(unsafe { sys::cuGraphLaunch(self.0, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: alive until now. A failure here has nobody to be told to.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
