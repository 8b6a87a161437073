//! A pool of streams, forked from a stream of the caller's and joined to it again.

use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::CUstream;

use super::device::Device;
use super::event::Event;
use crate::error::Error;

/// Streams that work is dealt out to. The work runs after all that the caller's stream was given before, and before all that
/// it is given later.
pub(super) struct StreamPool {
    streams: Vec<(Stream, Event)>,
    fork: Event,
}

impl StreamPool {
    /// A pool of `count` streams.
    pub fn new(device: &Device, count: u32) -> Result<Self, Error> {
        let stream = |_| {
            let stream = device.check(Stream::new(StreamFlags::NON_BLOCKING, None))?;
            Ok((stream, Event::without_time(device)?))
        };
        Ok(Self { streams: (0..count).map(stream).collect::<Result<_, Error>>()?, fork: Event::without_time(device)? })
    }

    /// Deals out `works` pieces of work, each queued by a call of `queue` with its number and its stream.
    ///
    /// # Errors
    /// Those of `queue`, or of the driver. What was queued before is joined to the caller's stream all the same.
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
        // SAFETY: `# Safety` above asks for a stream of the current context; the others are this pool's own.
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
