//! CUDA graphs, captured from a stream.

use std::ptr;

use cuda_driver::sys::{self, CUgraphExec, CUstream};

use super::device::Device;
use crate::Error;

/// An executable graph: the same kernels with the same parameters, launched again in one call.
pub(super) struct Graph(CUgraphExec);

impl Graph {
    /// Captures the work that `queue` gives to `stream`, and to streams that fork from it and join it again. The work
    /// does not run.
    ///
    /// # Errors
    /// The errors of `queue` and of the driver. After an error, too, the stream no longer captures.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context, is not the null stream and is not capturing. All memory that the
    /// captured work uses stays valid while the graph is launched.
    pub unsafe fn capture(
        device: &Device,
        stream: CUstream,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Self, Error> {
        // Other threads may allocate during the capture. This thread does not.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller guarantees that `stream` belongs to the current context, is not the null stream and is not
        // capturing.
        device.check_raw(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })?;
        let queued = queue();
        let mut graph = ptr::null_mut();
        // SAFETY: the call above started the capture, and `graph` is a valid pointer for the duration of the call.
        let ended = device.check_raw(unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
        let captured = queued.and(ended);
        let mut executable = ptr::null_mut();
        let instantiated = captured.and_then(|()| {
            // SAFETY: the capture succeeded, so `graph` is a graph. No flags are set.
            device.check_raw(unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) })
        });
        if !graph.is_null() {
            // SAFETY: `graph` is a captured graph that only this function uses. The executable graph does not depend on
            // it.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        instantiated?;
        Ok(Self(executable))
    }

    /// Queues the captured work as one item of the stream.
    ///
    /// # Safety
    ///
    /// `stream` belongs to the current context, and the captured work may run there.
    pub unsafe fn launch(&self, device: &Device, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the executable graph exists until `drop`. The caller guarantees that `stream` belongs to the current
        // context and that the work may run there.
        device.check_raw(unsafe { sys::cuGraphLaunch(self.0, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the executable graph exists until here. A failure cannot be reported here.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
