//! Streams and events.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::call::{Needs, enter, functions, put};
use crate::code::{INVALID_VALUE, NOT_SUPPORTED};
use crate::handle::Handle;
use crate::refusal;
use crate::run;

const NON_BLOCKING: c_uint = 1;

functions! {
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if stream.is_null() { return Err(INVALID_VALUE); }
        let handle = driver.handle();
        driver.queue.add_stream(handle, flags & NON_BLOCKING != 0, 0);
        put(stream, handle)
    }
    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int) {
        let mut driver = enter(NAME, Needs::Context)?;
        if stream.is_null() { return Err(INVALID_VALUE); }
        let handle = driver.handle();
        driver.queue.add_stream(handle, flags & NON_BLOCKING != 0, priority.clamp(-5, 0));
        put(stream, handle)
    }
    fn cuStreamDestroy_v2(stream: Handle) { enter(NAME, Needs::Context)?.queue.remove_stream(stream) }
    fn cuStreamSynchronize(stream: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run::run(|queue| queue.before_end_of(stream))
    }
    // Work never runs in the background here, so a query first runs the stream's work.
    fn cuStreamQuery(stream: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run::run(|queue| queue.before_end_of(stream))
    }
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        enter(NAME, Needs::Context)?.queue.wait(stream, event)
    }
    fn cuStreamGetFlags(stream: Handle, flags: *mut c_uint) {
        let (non_blocking, _) = enter(NAME, Needs::Context)?.queue.properties(stream)?;
        put(flags, non_blocking.into())
    }
    fn cuStreamGetPriority(stream: Handle, priority: *mut c_int) {
        let (_, of_stream) = enter(NAME, Needs::Context)?.queue.properties(stream)?;
        put(priority, of_stream)
    }
    fn cuStreamGetId(stream: Handle, id: *mut c_ulonglong) {
        enter(NAME, Needs::Context)?.queue.properties(stream)?;
        put(id, stream as c_ulonglong)
    }
    fn cuStreamGetCtx(stream: Handle, context: *mut Handle) {
        enter(NAME, Needs::Context)?.queue.properties(stream)?;
        put(context, crate::current::current())
    }
    fn cuStreamGetDevice(stream: Handle, device: *mut c_int) {
        enter(NAME, Needs::Context)?.queue.properties(stream)?;
        put(device, 0)
    }
    // Attributes of streams affect caches and scheduling only.
    fn cuStreamSetAttribute(stream: Handle, _attribute: c_int, _value: *const c_void) {
        enter(NAME, Needs::Context)?.queue.properties(stream).map(drop)
    }
    fn cuStreamCopyAttributes(to: Handle, from: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        driver.queue.properties(to)?;
        driver.queue.properties(from).map(drop)
    }
    fn cuStreamAttachMemAsync(_stream: Handle, _address: u64, _bytes: usize, _flags: c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        refusal::managed_memory();
        Err(NOT_SUPPORTED)
    }

    fn cuEventCreate(event: *mut Handle, _flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if event.is_null() { return Err(INVALID_VALUE); }
        let handle = driver.handle();
        driver.queue.add_event(handle);
        put(event, handle)
    }
    fn cuEventDestroy_v2(event: Handle) { enter(NAME, Needs::Context)?.queue.remove_event(event) }
    fn cuEventRecord(event: Handle, stream: Handle) { enter(NAME, Needs::Context)?.queue.record(event, stream) }
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) {
        enter(NAME, Needs::Context)?.queue.record(event, stream)
    }
    fn cuEventQuery(event: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run::run(|queue| queue.before(event))
    }
    fn cuEventSynchronize(event: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run::run(|queue| queue.before(event))
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        let nanoseconds = driver.queue.time(end)? as f64 - driver.queue.time(start)? as f64;
        put(milliseconds, (nanoseconds / 1e6) as f32)
    }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: Handle, end: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        let nanoseconds = driver.queue.time(end)? as f64 - driver.queue.time(start)? as f64;
        put(milliseconds, (nanoseconds / 1e6) as f32)
    }
}
