//! A pool of streams that fork from a caller's stream and join it again.

use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::CUstream;

use super::device::Device;
use super::event::Event;
use crate::Error;

/// Streams over which work is distributed. The work runs after all earlier work of the caller's stream and before all
/// later work.
pub(super) struct StreamPool {
    streams: Vec<(Stream, Event)>,
    fork: Event,
}

impl StreamPool {
    /// Makes a pool of `count` streams.
    pub fn new(device: &Device, count: u32) -> Result<Self, Error> {
        let stream = |_| {
            let stream = device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?;
            Ok((stream, Event::without_time(device)?))
        };
        Ok(Self { streams: (0..count).map(stream).collect::<Result<_, Error>>()?, fork: Event::without_time(device)? })
    }

    /// Distributes `works` pieces of work over the streams. `queue` is called with the number of each piece and its
    /// stream.
    ///
    /// # Errors
    /// The errors of `queue` and of the driver. Work that was queued before the error still joins the caller's stream.
    ///
    /// # Safety
    ///
    /// `from` is a stream of the current context.
    pub unsafe fn deal(
        &self,
        device: &Device,
        from: CUstream,
        works: usize,
        mut queue: impl FnMut(usize, CUstream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let streams = &self.streams[..works.min(self.streams.len())];
        // SAFETY: the caller guarantees that `from` belongs to the current context. The other streams belong to this
        // pool, which was made in the same context.
        unsafe {
            self.fork.record(device, from)?;
            for (stream, _) in streams {
                self.fork.hold(device, stream.as_inner())?;
            }
            let queued = (0..works).try_for_each(|work| queue(work, streams[work % streams.len()].0.as_inner()));
            for (stream, done) in streams {
                done.record(device, stream.as_inner())?;
                done.hold(device, from)?;
            }
            queued
        }
    }
}
