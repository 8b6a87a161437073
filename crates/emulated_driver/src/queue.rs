//! Work that was given to streams and has not run yet, its order, and what a stream captures.
//!
//! Nothing runs before something waits for it. Then only that runs which must come before it. Where an order is free, the
//! work of other streams runs first, so that a dependency which a program forgets shows in what it computes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::code::{
    CAPTURED_EVENT, Code, INVALID_HANDLE, NOT_READY, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_UNJOINED,
    STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED,
};
use crate::handle::{FIRST_HANDLE, Handle};
use crate::work::Work;

/// The number of an operation, in the queue or in a capture.
pub type Index = usize;

/// Work, and the operations that must come before it. They run in their order here, which is the one that a program expects
/// least.
#[derive(Clone)]
pub struct Operation {
    pub work: Work,
    pub after: Vec<Index>,
}

#[derive(Default)]
struct Stream {
    non_blocking: bool,
    priority: i32,
    last: Option<Index>,
    capture: Option<Part>,
}

/// A stream's part of a capture.
#[derive(Clone)]
struct Part {
    /// The stream where it began.
    origin: Handle,
    last: Option<Index>,
}

#[derive(Default)]
struct Event {
    recorded: Option<Recorded>,
    /// When it passed.
    time: Option<u64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Recorded {
    Queued(Index),
    /// In the capture that began on this stream, behind this operation if there is one.
    Captured(Handle, Option<Index>),
}

/// The null stream; `CU_STREAM_LEGACY` is another name for it.
pub const NULL: Handle = 0;
const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;
/// Threads' own streams have handles of their own here, which no program sees; created ones come behind.
const FIRST_PER_THREAD: Handle = 0x10;
const FIRST_CREATED: Handle = FIRST_HANDLE;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's number, for its own stream. Handles of created streams begin far above.
    static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % (FIRST_CREATED - FIRST_PER_THREAD);
}

#[derive(Default)]
pub struct Queue {
    /// What has not been forgotten: operation `first` and those after it. A `None` has run.
    operations: VecDeque<Option<Operation>>,
    first: Index,
    streams: BTreeMap<Handle, Stream>,
    events: BTreeMap<Handle, Event>,
    /// What is being captured, by the stream where it began.
    captures: BTreeMap<Handle, Capture>,
}

/// The operations that must run before `targets` are done, in order. `after` tells what comes directly before one, and
/// nothing for one that has run.
fn order<'q>(targets: impl IntoIterator<Item = Index>, after: impl Fn(Index) -> Option<&'q [Index]>) -> Vec<Index> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for target in targets {
        // Without recursion: a stream may have been given a million operations.
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

/// As [`order`], of a graph or a capture, where nothing has run.
fn order_of(operations: &[Operation], targets: impl IntoIterator<Item = Index>) -> Vec<Index> {
    order(targets, |index| operations.get(index).map(|operation| &operation.after[..]))
}

/// All operations of a graph, in order; the latest first where possible.
pub fn order_of_graph(operations: &[Operation]) -> Vec<Index> {
    order_of(operations, (0..operations.len()).rev())
}

/// A capture under way.
struct Capture {
    operations: Vec<Operation>,
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls that cannot be captured are not refused.
    relaxed: bool,
    id: u64,
}

impl Queue {
    /// A device's, with its null stream.
    pub fn new() -> Self {
        Self { streams: BTreeMap::from([(NULL, Stream::default())]), ..Self::default() }
    }

    /// Streams that were created, and events.
    pub fn live_objects(&self) -> usize {
        self.streams.keys().filter(|handle| **handle >= FIRST_CREATED).count() + self.events.len()
    }

    pub fn add_stream(&mut self, handle: Handle, non_blocking: bool, priority: i32) {
        self.streams.insert(handle, Stream { non_blocking, priority, ..Stream::default() });
    }

    /// Takes a stream away. What it was given still runs.
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
            // The null stream went behind it, and still does.
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

    /// The handle that a stream is known by here: the null stream's, a thread's own, or the one given.
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

    /// Whether a stream was created non-blocking, and its priority.
    pub fn properties(&mut self, handle: Handle) -> Result<(bool, i32), Code> {
        self.stream(handle).map(|stream| (stream.non_blocking, stream.priority))
    }

    /// The number of the capture that a stream takes part in.
    pub fn capture_of(&mut self, handle: Handle) -> Result<Option<u64>, Code> {
        let origin = self.stream(handle)?.capture.as_ref().map(|part| part.origin);
        Ok(origin.and_then(|origin| Some(self.captures.get(&origin)?.id)))
    }

    /// Fails if a stream captures. For calls that must not be made then, since they cannot be captured.
    pub fn check_nothing_captured(&self) -> Result<(), Code> {
        let strict = self.captures.values().any(|capture| !capture.relaxed);
        if strict { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Gives work to a stream, after the operations `others`. Those run before the stream's own earlier work where they can.
    /// The operation's number, in the stream's capture if it captures.
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
        // The null stream waits for all streams but the non-blocking ones, and those wait for it (CUDA driver API, "Stream
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

    /// Gives work to a stream.
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

    /// Has a stream wait for an event. One that waits for an event of a capture takes part in it from then on.
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

    /// When an event passed.
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

    /// Ends a capture. All of its streams must have been joined to the one where it began.
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

    /// What comes directly before an operation that has not run.
    fn waits(&self, index: Index) -> Option<&[Index]> {
        let operation = self.operations.get(index.checked_sub(self.first)?)?.as_ref()?;
        Some(&operation.after)
    }

    /// What must run before a stream is empty.
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

    /// What must run for an operation to be done, itself included.
    pub fn up_to(&self, index: Index) -> Vec<Index> {
        order([index], |index| self.waits(index))
    }

    /// What must run before an event has passed.
    pub fn before(&self, event: Handle) -> Result<Vec<Index>, Code> {
        match self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded {
            None => Ok(Vec::new()),
            Some(Recorded::Queued(index)) => Ok(self.up_to(index)),
            Some(Recorded::Captured(..)) => Err(CAPTURED_EVENT),
        }
    }

    /// All that has not run, the latest first where possible.
    pub fn all(&self) -> Vec<Index> {
        order((self.first..self.first + self.operations.len()).rev(), |index| self.waits(index))
    }

    /// An operation's work; it counts as done. Nothing where it has run.
    pub fn take(&mut self, index: Index) -> Option<Work> {
        let operation = self.operations.get_mut(index.checked_sub(self.first)?)?.take();
        while let Some(None) = self.operations.front() {
            self.operations.pop_front();
            self.first += 1;
        }
        operation.map(|operation| operation.work)
    }

    /// Forgets all that has not run: a kernel has faulted, and the context with it.
    pub fn clear(&mut self) {
        self.first += self.operations.len();
        self.operations.clear();
    }

    /// An event passes, unless it has been recorded again.
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
    fn what_a_stream_was_given_runs_though_the_stream_is_gone() {
        let mut queue = Queue::new();
        queue.add_stream(FIRST_CREATED, false, 0);
        let index = queue.push_after(FIRST_CREATED, Work::Join, Vec::new()).unwrap();
        queue.remove_stream(FIRST_CREATED).unwrap();
        assert_eq!(queue.before_end_of(FIRST_CREATED), Err(INVALID_HANDLE));
        assert!(queue.up_to(index).contains(&index));
    }
}
