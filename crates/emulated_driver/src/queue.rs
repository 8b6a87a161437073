//! Work that was given to streams and has not run yet, its order, and what a stream captures.
//!
//! Nothing runs before something waits for it. Then only that runs which must come before it. Where an order is free, the
//! work of other streams runs first, so that a dependency which a program forgets shows in what it computes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::sync::Arc;

use crate::{
    CAPTURE_ISOLATION, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURED_EVENT, Code, Handle,
    INVALID_HANDLE, INVALID_VALUE, NOT_READY,
};

/// The number of an operation, in the queue or in a capture.
type Index = usize;

/// What is to be done.
#[derive(Clone)]
pub enum Work {
    Copy {
        to: usize,
        from: usize,
        bytes: usize,
    },
    Fill {
        to: usize,
        value: u8,
        bytes: usize,
    },
    Launch(Arc<Launch>),
    Graph(Arc<Vec<Operation>>),
    /// An event passes.
    Pass(Handle),
    /// Nothing: it only has a place in the order.
    Join,
}

/// A kernel with its parameters, as they were when it was queued.
pub struct Launch {
    pub name: CString,
    pub size: [[u32; 3]; 3],
    pub shared_bytes: u32,
    pub parameters: Vec<Vec<u8>>,
    pub stream: Handle,
}

/// Work, and the operations that must come before it. They run in their order here, which is the one that a program expects
/// least.
#[derive(Clone)]
pub struct Operation {
    pub work: Work,
    after: Vec<Index>,
}

#[derive(Default)]
struct Stream {
    non_blocking: bool,
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

/// The null stream.
const NULL: Handle = 0;

#[derive(Default)]
pub struct Queue {
    operations: Vec<Operation>,
    done: BTreeSet<Index>,
    streams: BTreeMap<Handle, Stream>,
    events: BTreeMap<Handle, Event>,
    /// What is being captured, by the stream where it began.
    captures: BTreeMap<Handle, Vec<Operation>>,
}

/// The operations that must run before `targets` are done, in order.
fn order(operations: &[Operation], targets: impl IntoIterator<Item = Index>, done: &BTreeSet<Index>) -> Vec<Index> {
    fn visit(operations: &[Operation], index: Index, seen: &mut BTreeSet<Index>, order: &mut Vec<Index>) {
        if seen.insert(index) {
            operations[index].after.iter().for_each(|&before| visit(operations, before, seen, order));
            order.push(index);
        }
    }
    let (mut seen, mut found) = (done.clone(), Vec::new());
    targets.into_iter().for_each(|target| visit(operations, target, &mut seen, &mut found));
    found
}

/// The operations of a graph, in order.
pub fn order_of_graph(operations: &[Operation]) -> Vec<Index> {
    order(operations, (0..operations.len()).rev(), &BTreeSet::new())
}

impl Queue {
    /// A device's, with its null stream.
    pub fn new() -> Self {
        Self { streams: BTreeMap::from([(NULL, Stream::default())]), ..Self::default() }
    }

    /// Streams, without the null stream, and events.
    pub fn live_objects(&self) -> usize {
        self.streams.len() - 1 + self.events.len()
    }

    pub fn add_stream(&mut self, handle: Handle, non_blocking: bool) {
        self.streams.insert(handle, Stream { non_blocking, ..Stream::default() });
    }

    pub fn remove_stream(&mut self, handle: Handle) -> Result<(), Code> {
        if handle == NULL { Err(INVALID_HANDLE) } else { self.streams.remove(&handle).map(drop).ok_or(INVALID_HANDLE) }
    }

    pub fn add_event(&mut self, handle: Handle) {
        self.events.insert(handle, Event::default());
    }

    pub fn remove_event(&mut self, handle: Handle) -> Result<(), Code> {
        self.events.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
    }

    fn stream(&mut self, handle: Handle) -> Result<&mut Stream, Code> {
        self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Fails if a stream captures. For calls that must not be made then, since they cannot be captured.
    pub fn check_nothing_captured(&self) -> Result<(), Code> {
        if self.captures.is_empty() { Ok(()) } else { Err(CAPTURE_UNSUPPORTED) }
    }

    /// Gives work to a stream, after the operations `others`. Those run before the stream's own earlier work where they can.
    fn push_after(&mut self, handle: Handle, work: Work, others: Vec<Index>) -> Result<Index, Code> {
        let mut after = others;
        let stream = self.stream(handle)?;
        if let Some(part) = &mut stream.capture {
            let origin = part.origin;
            after.extend(part.last);
            let operations = self.captures.get_mut(&origin).expect("a capture has not ended");
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
        self.operations.push(Operation { work, after });
        let index = self.operations.len() - 1;
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
                    return Err(CAPTURE_ISOLATION);
                }
                self.stream(stream)?.capture.get_or_insert(Part { origin, last: None });
                self.push_after(stream, Work::Join, index.into_iter().collect()).map(drop)
            }
            (_, Some(_)) => Err(CAPTURE_ISOLATION),
        }
    }

    /// When an event passed.
    pub fn time(&self, event: Handle) -> Result<u64, Code> {
        let event = self.events.get(&event).ok_or(INVALID_HANDLE)?;
        event.recorded.ok_or(INVALID_HANDLE)?;
        event.time.ok_or(NOT_READY)
    }

    pub fn begin_capture(&mut self, stream: Handle) -> Result<(), Code> {
        if stream == NULL || self.stream(stream)?.capture.is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.stream(stream)?.capture = Some(Part { origin: stream, last: None });
        self.captures.insert(stream, Vec::new());
        Ok(())
    }

    /// Ends a capture. All of its streams must have been joined to the one where it began.
    pub fn end_capture(&mut self, origin: Handle) -> Result<Vec<Operation>, Code> {
        let operations = self.captures.remove(&origin).ok_or(CAPTURE_UNMATCHED)?;
        let mut last = BTreeMap::new();
        for (handle, stream) in &mut self.streams {
            if stream.capture.as_ref().is_some_and(|part| part.origin == origin) {
                last.insert(*handle, stream.capture.take().and_then(|part| part.last));
            }
        }
        let joined = order(&operations, last.remove(&origin).flatten(), &BTreeSet::new());
        let all_joined = last.into_values().flatten().all(|index| joined.contains(&index));
        if all_joined { Ok(operations) } else { Err(CAPTURE_UNJOINED) }
    }

    /// What must run before a stream is empty.
    pub fn before_end_of(&self, handle: Handle) -> Result<Vec<Index>, Code> {
        let stream = self.streams.get(&handle).ok_or(INVALID_HANDLE)?;
        if stream.capture.is_some() {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let with_it = self.streams.values().filter(|other| handle == NULL && !other.non_blocking);
        let last = with_it.filter_map(|stream| stream.last).chain(stream.last);
        Ok(order(&self.operations, last, &self.done))
    }

    /// What must run before an event has passed.
    pub fn before(&self, event: Handle) -> Result<Vec<Index>, Code> {
        match self.events.get(&event).ok_or(INVALID_HANDLE)?.recorded {
            None => Ok(Vec::new()),
            Some(Recorded::Queued(index)) => Ok(order(&self.operations, [index], &self.done)),
            Some(Recorded::Captured(..)) => Err(CAPTURED_EVENT),
        }
    }

    /// All that has not run, the latest first where possible.
    pub fn all(&self) -> Vec<Index> {
        order(&self.operations, (0..self.operations.len()).rev(), &self.done)
    }

    /// An operation's work; it counts as done.
    pub fn take(&mut self, index: Index) -> Work {
        self.done.insert(index);
        self.operations[index].work.clone()
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

/// The parameters of a launch, of sizes that the entry declares.
///
/// # Safety
///
/// `parameters` has as many pointers, each to as many bytes.
pub unsafe fn copy_parameters(
    parameters: *const *const std::ffi::c_void,
    sizes: &[usize],
) -> Result<Vec<Vec<u8>>, Code> {
    if !sizes.is_empty() && parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    let copy = |(index, &bytes): (usize, &usize)| {
        // SAFETY: `# Safety` above asks for this pointer and its bytes.
        unsafe { std::slice::from_raw_parts((*parameters.add(index)).cast::<u8>(), bytes) }.to_vec()
    };
    Ok(sizes.iter().enumerate().map(copy).collect())
}
