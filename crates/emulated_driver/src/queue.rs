//! Queued work of streams, its order, and captures.
//!
//! Nothing runs before something waits for it. Then only the work that must precede it runs. If an order is free, work
//! of other streams runs first, so that a dependency which a program forgot changes the results.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::code::{
    CAPTURED_EVENT, Code, INVALID_HANDLE, NOT_READY, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_UNJOINED,
    STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED,
};
use crate::handle::{FIRST_HANDLE, Handle};
use crate::work::{Index, Operation, Work};

#[derive(Default)]
struct Stream {
    non_blocking: bool,
    priority: i32,
    last: Option<Index>,
    capture: Option<Part>,
}

/// Part that a stream has in a capture.
#[derive(Clone)]
struct Part {
    /// The stream on which the capture began.
    origin: Handle,
    last: Option<Index>,
}

#[derive(Default)]
struct Event {
    recorded: Option<Recorded>,
    /// Time at which the event passed. `None`: it has not passed.
    time: Option<u64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Recorded {
    Queued(Index),
    /// Place in a capture: the stream on which the capture began, and the operation before this place, if there is one.
    Captured(Handle, Option<Index>),
}

/// The null stream. `CU_STREAM_LEGACY` is another handle of it.
pub const NULL: Handle = 0;
const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;
/// Per-thread streams have internal handles here, which no program sees. Handles of created streams are larger.
const FIRST_PER_THREAD: Handle = 0x10;
const FIRST_CREATED: Handle = FIRST_HANDLE;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Number of the thread, for its own stream. It stays below the handles of created streams.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % (FIRST_CREATED - FIRST_PER_THREAD);
}

#[derive(Default)]
pub struct Queue {
    /// Operations from number `first` on. `None`: the operation has run.
    operations: VecDeque<Option<Operation>>,
    first: Index,
    streams: BTreeMap<Handle, Stream>,
    events: BTreeMap<Handle, Event>,
    /// Captures by the stream on which they began.
    captures: BTreeMap<Handle, Capture>,
}

/// Returns the operations that must run for `targets` to be done, in order. `after` returns the direct predecessors of
/// an operation, or `None` if it has run.
fn order<'q>(targets: impl IntoIterator<Item = Index>, after: impl Fn(Index) -> Option<&'q [Index]>) -> Vec<Index> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for target in targets {
        // No recursion: a stream may hold a million operations.
        let mut path: Vec<(Index, &[Index])> = Vec::new();
        let enter = |index, seen: &mut BTreeSet<Index>| {
            after(index).filter(|_| seen.insert(index)).map(|before| (index, before))
        };
        path.extend(enter(target, &mut seen));
        while let Some((index, before)) = path.last_mut() {
            if let Some((&next, rest)) = before.split_first() {
                *before = rest;
                path.extend(enter(next, &mut seen));
            } else {
                found.push(*index);
                path.pop();
            }
        }
    }
    found
}

/// Returns the order for operations of a graph or a capture, where nothing has run.
fn order_of(operations: &[Operation], targets: impl IntoIterator<Item = Index>) -> Vec<Index> {
    order(targets, |index| operations.get(index).map(|operation| &operation.after[..]))
}

/// Returns all operations of a graph in order, the latest first if possible.
pub fn order_of_graph(operations: &[Operation]) -> Vec<Index> {
    order_of(operations, (0..operations.len()).rev())
}

/// A capture in progress.
struct Capture {
    operations: Vec<Operation>,
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls that cannot be captured are allowed during the capture.
    relaxed: bool,
    id: u64,
}

impl Queue {
    /// Creates the queue of a device with its null stream.
    pub fn new() -> Self {
        Self { streams: BTreeMap::from([(NULL, Stream::default())]), ..Self::default() }
    }

    /// Number of created streams and events.
    pub fn live_objects(&self) -> usize {
        self.streams.keys().filter(|handle| **handle >= FIRST_CREATED).count() + self.events.len()
    }

    pub fn add_stream(&mut self, handle: Handle, non_blocking: bool, priority: i32) {
        self.streams.insert(handle, Stream { non_blocking, priority, ..Stream::default() });
    }

    /// Removes a stream. Its queued work still runs.
    pub fn remove_stream(&mut self, handle: Handle) -> Result<(), Code> {
        if handle < FIRST_CREATED {
            return Err(INVALID_HANDLE);
        }
        let stream = self.streams.remove(&handle).ok_or(INVALID_HANDLE)?;
        if stream.capture.is_some() && self.captures.remove(&handle).is_some() {
            let parts = self.streams.values_mut();
            parts
                .filter(|other| other.capture.as_ref().is_some_and(|part| part.origin == handle))
                .for_each(|other| other.capture = None);
        }
        if let (false, Some(last)) = (stream.non_blocking, stream.last) {
            // The null stream had to wait for this stream's work, and still has to.
            self.push_after(NULL, Work::Join, vec![last])?;
        }
        Ok(())
    }

    pub fn add_event(&mut self, handle: Handle) {
        self.events.insert(handle, Event::default());
    }

    pub fn remove_event(&mut self, handle: Handle) -> Result<(), Code> {
        self.events.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Returns the internal handle of a stream: the null stream's, a per-thread stream's, or the given one.
    fn resolve(&mut self, handle: Handle) -> Handle {
        match handle {
            LEGACY => NULL,
            PER_THREAD => {
                let own = FIRST_PER_THREAD + THREAD.with(|number| *number);
                self.streams.entry(own).or_default();
                own
            }
            other => other,
        }
    }

    fn stream(&mut self, handle: Handle) -> Result<&mut Stream, Code> {
        let handle = self.resolve(handle);
        self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Returns whether a stream is non-blocking, and its priority.
    pub fn properties(&mut self, handle: Handle) -> Result<(bool, i32), Code> {
        self.stream(handle).map(|stream| (stream.non_blocking, stream.priority))
    }

    /// Returns the number of the capture that a stream takes part in.
    pub fn capture_of(&mut self, handle: Handle) -> Result<Option<u64>, Code> {
        let origin = self.stream(handle)?.capture.as_ref().map(|part| part.origin);
        Ok(origin.and_then(|origin| Some(self.captures.get(&origin)?.id)))
    }

    /// Fails if a stream captures. For calls that cannot be captured.
    pub fn check_nothing_captured(&self) -> Result<(), Code> {
        let strict = self.captures.values().any(|capture| !capture.relaxed);
        if strict { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Queues work on a stream, after the operations `others`. These run before the stream's earlier work if possible.
    /// Returns the operation's number, in the stream's capture if the stream captures.
    pub fn push_after(&mut self, handle: Handle, work: Work, others: Vec<Index>) -> Result<Index, Code> {
        let handle = self.resolve(handle);
        let mut after = others;
        let stream = self.stream(handle)?;
        if let Some(part) = &mut stream.capture {
            let origin = part.origin;
            after.extend(part.last);
            let operations = &mut self.captures.get_mut(&origin).ok_or(INVALID_HANDLE)?.operations;
            operations.push(Operation { work, after });
            let index = operations.len() - 1;
            self.stream(handle)?.capture = Some(Part { origin, last: Some(index) });
            return Ok(index);
        }
        after.extend(stream.last);
        // The null stream waits for all blocking streams, and they wait for it (CUDA driver API, "Stream
        // synchronization behavior").
        let non_blocking = stream.non_blocking;
        let implied = self.streams.iter().filter(|(other, stream)| match handle {
            NULL => !stream.non_blocking,
            _ => !non_blocking && **other == NULL,
        });
        after.extend(implied.filter_map(|(_, stream)| stream.last));
        after.retain(|index| self.waits(*index).is_some());
        self.operations.push_back(Some(Operation { work, after }));
        let index = self.first + self.operations.len() - 1;
        self.stream(handle)?.last = Some(index);
        Ok(index)
    }

    /// Queues work on a stream.
    pub fn push(&mut self, handle: Handle, work: Work) -> Result<(), Code> {
        self.push_after(handle, work, Vec::new()).map(drop)
    }

    pub fn record(&mut self, event: Handle, stream: Handle) -> Result<(), Code> {
        if !self.events.contains_key(&event) {
            return Err(INVALID_HANDLE);
        }
        let recorded = match &self.stream(stream)?.capture {
            Some(part) => Recorded::Captured(part.origin, part.last),
            None => Recorded::Queued(self.push_after(stream, Work::Pass(event), Vec::new())?),
        };
        self.events.insert(event, Event { recorded: Some(recorded), time: None });
        Ok(())
    }

    /// Makes a stream wait for an event. A stream that waits for an event of a capture joins the capture.
    pub fn wait(&mut self, stream: Handle, event: Handle) -> Result<(), Code> {
        let recorded = self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded;
        let captures = self.stream(stream)?.capture.as_ref().map(|part| part.origin);
        match (recorded, captures) {
            (None, None) => Ok(()),
            (Some(Recorded::Queued(index)), None) => self.push_after(stream, Work::Join, vec![index]).map(drop),
            (Some(Recorded::Captured(origin, index)), _) => {
                if !self.captures.contains_key(&origin) || captures.is_some_and(|own| own != origin) {
                    return Err(STREAM_CAPTURE_ISOLATION);
                }
                self.stream(stream)?.capture.get_or_insert(Part { origin, last: None });
                self.push_after(stream, Work::Join, index.into_iter().collect()).map(drop)
            }
            (_, Some(_)) => Err(STREAM_CAPTURE_ISOLATION),
        }
    }

    /// Returns the time at which an event passed.
    pub fn time(&self, event: Handle) -> Result<u64, Code> {
        let event = self.events.get(&event).ok_or(INVALID_HANDLE)?;
        event.recorded.ok_or(INVALID_HANDLE)?;
        event.time.ok_or(NOT_READY)
    }

    pub fn begin_capture(&mut self, stream: Handle, relaxed: bool, id: u64) -> Result<(), Code> {
        let stream = self.resolve(stream);
        if stream == NULL || self.stream(stream)?.capture.is_some() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        self.stream(stream)?.capture = Some(Part { origin: stream, last: None });
        self.captures.insert(stream, Capture { operations: Vec::new(), relaxed, id });
        Ok(())
    }

    /// Ends a capture. All of its streams must have been joined to the stream on which it began.
    pub fn end_capture(&mut self, origin: Handle) -> Result<Vec<Operation>, Code> {
        let origin = self.resolve(origin);
        let operations = self.captures.remove(&origin).ok_or(STREAM_CAPTURE_UNMATCHED)?.operations;
        let mut last = BTreeMap::new();
        for (handle, stream) in &mut self.streams {
            if stream.capture.as_ref().is_some_and(|part| part.origin == origin) {
                last.insert(*handle, stream.capture.take().and_then(|part| part.last));
            }
        }
        let joined = order_of(&operations, last.remove(&origin).flatten());
        let all_joined = last.into_values().flatten().all(|index| joined.contains(&index));
        if all_joined { Ok(operations) } else { Err(STREAM_CAPTURE_UNJOINED) }
    }

    /// Returns the direct predecessors of an operation. `None`: the operation has run.
    fn waits(&self, index: Index) -> Option<&[Index]> {
        let operation = self.operations.get(index.checked_sub(self.first)?)?.as_ref()?;
        Some(&operation.after)
    }

    /// Returns the operations that must run before a stream is empty.
    pub fn before_end_of(&mut self, handle: Handle) -> Result<Vec<Index>, Code> {
        let handle = self.resolve(handle);
        let stream = self.streams.get(&handle).ok_or(INVALID_HANDLE)?;
        if stream.capture.is_some() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let with_it = self.streams.values().filter(|other| handle == NULL && !other.non_blocking);
        let last: Vec<_> = with_it.filter_map(|stream| stream.last).chain(stream.last).collect();
        Ok(order(last, |index| self.waits(index)))
    }

    /// Returns the operations that must run for an operation to be done, including itself.
    pub fn up_to(&self, index: Index) -> Vec<Index> {
        order([index], |index| self.waits(index))
    }

    /// Returns the operations that must run before an event has passed.
    pub fn before(&self, event: Handle) -> Result<Vec<Index>, Code> {
        match self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded {
            None => Ok(Vec::new()),
            Some(Recorded::Queued(index)) => Ok(self.up_to(index)),
            Some(Recorded::Captured(..)) => Err(CAPTURED_EVENT),
        }
    }

    /// Returns all operations that have not run, the latest first if possible.
    pub fn all(&self) -> Vec<Index> {
        order((self.first..self.first + self.operations.len()).rev(), |index| self.waits(index))
    }

    /// Takes the work of an operation, which then counts as done. `None`: it has run.
    pub fn take(&mut self, index: Index) -> Option<Work> {
        let operation = self.operations.get_mut(index.checked_sub(self.first)?)?.take();
        while let Some(None) = self.operations.front() {
            self.operations.pop_front();
            self.first += 1;
        }
        operation.map(|operation| operation.work)
    }

    /// Drops all queued operations, after a kernel's fault.
    pub fn clear(&mut self) {
        self.first += self.operations.len();
        self.operations.clear();
    }

    /// Sets the time of an event, unless it has been recorded again.
    pub fn pass(&mut self, event: Handle, index: Index, now: u64) {
        if let Some(event) = self.events.get_mut(&event)
            && event.recorded == Some(Recorded::Queued(index))
        {
            event.time = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_a_removed_stream_still_runs() {
        let mut queue = Queue::new();
        queue.add_stream(FIRST_CREATED, false, 0);
        let index = queue.push_after(FIRST_CREATED, Work::Join, Vec::new()).unwrap();
        queue.remove_stream(FIRST_CREATED).unwrap();
        assert_eq!(queue.before_end_of(FIRST_CREATED), Err(INVALID_HANDLE));
        assert!(queue.up_to(index).contains(&index));
    }
}
