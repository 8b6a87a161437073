//! Times of consecutive runs: the device's time, and the host's time to queue them.

use std::time::Instant;

use anyhow::ensure;
use cuda_driver::cust::event::{Event, EventFlags};
use cuda_driver::cust::memory::DeviceBuffer;
use cuda_driver::cust::stream::Stream;
use cuda_driver::sys;

/// Queues about a millisecond of other work: writes to memory that no call in flight uses. The host then is ahead of
/// the device, and a short run's time contains no host time.
fn keep_busy(stream: &Stream, memory: &DeviceBuffer<u8>) -> anyhow::Result<()> {
    const BYTES: usize = 4 << 30;
    let (address, bytes) = (memory.as_device_ptr().as_raw(), memory.len());
    for _ in 0..BYTES.div_ceil(bytes).min(64) {
        // SAFETY: `bytes` bytes are at `address`, no call in flight uses them, and the stream belongs to the current
        // context.
        let code = unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream.as_inner()) };
        ensure!(code == sys::CUresult::CUDA_SUCCESS, "cuMemsetD8Async: {code:?}");
    }
    Ok(())
}

/// Returns the device time of each of `runs` runs, in µs: the time between an event before the run and an event after
/// the run. All runs are queued without waiting, after other work if there is memory for that ([`keep_busy`]).
pub fn device_times(
    stream: &Stream,
    busy: Option<&DeviceBuffer<u8>>,
    runs: usize,
    mut queue: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<f64>> {
    let event = || Event::new(EventFlags::DEFAULT);
    let events = (0..runs).map(|_| Ok([event()?, event()?])).collect::<anyhow::Result<Vec<_>>>()?;
    if let Some(memory) = busy {
        keep_busy(stream, memory)?;
    }
    for [start, end] in &events {
        start.record(stream)?;
        queue()?;
        end.record(stream)?;
    }
    stream.synchronize()?;
    events.iter().map(|[start, end]| Ok(f64::from(end.elapsed_time_f32(start)?) * 1e3)).collect()
}

/// Returns the host time to queue each of `runs` runs, in µs, and the launches per run.
pub fn host_times(
    stream: &Stream,
    runs: usize,
    mut queue: impl FnMut() -> anyhow::Result<usize>,
) -> anyhow::Result<(Vec<f64>, usize)> {
    let (mut times, mut launches) = (Vec::new(), 0);
    for _ in 0..runs {
        let begin = Instant::now();
        launches = queue()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        stream.synchronize()?;
    }
    Ok((times, launches))
}
