//! CUDA graphs, captured from a stream.

use std::ptr;

use cuda_driver::sys::{self, CUgraphExec, CUstream};

use super::device::Device;
use crate::error::Error;

/// A graph that can be launched again and again: the same kernels with the same parameters, in one call.
pub(super) struct Graph(CUgraphExec);

impl Graph {
    /// Captures, without running it, what `queue` gives to `stream` and to streams that it forks from there and joins again.
    ///
    /// # Errors
    /// Those of `queue`, or of the driver. Either way the stream captures nothing afterwards.
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
        // SAFETY: `# Safety` above asks for a stream of the current context, not the null stream, that captures nothing.
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
    /// `stream` is a stream of the current context, and what was captured may run there.
    pub unsafe fn launch(&self, device: &Device, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the graph is alive. `# Safety` above asks for a stream of the current context on which the work may run.
        device.check_raw(unsafe { sys::cuGraphLaunch(self.0, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: alive until now. Nobody can be told of a failure here.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
