//! Streams and events.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::call::{functions, put};
use crate::driver::ready;
use crate::types::{Handle, Stream};

functions! {
    fn cudaStreamCreate(stream: *mut Handle) { ready()?.cuStreamCreateWithPriority(stream, 0, 0) }
    fn cudaStreamCreateWithFlags(stream: *mut Handle, flags: c_uint) {
        ready()?.cuStreamCreateWithPriority(stream, flags, 0)
    }
    fn cudaStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int) {
        ready()?.cuStreamCreateWithPriority(stream, flags, priority)
    }
    fn cudaStreamDestroy(stream: Handle) { ready()?.cuStreamDestroy_v2(stream) }
    fn cudaStreamSynchronize, cudaStreamSynchronize_ptsz(stream: Stream) { ready()?.cuStreamSynchronize(stream.0) }
    fn cudaStreamQuery, cudaStreamQuery_ptsz(stream: Stream) { ready()?.cuStreamQuery(stream.0) }
    fn cudaStreamWaitEvent, cudaStreamWaitEvent_ptsz(stream: Stream, event: Handle, flags: c_uint) {
        ready()?.cuStreamWaitEvent(stream.0, event, flags)
    }
    fn cudaStreamGetFlags, cudaStreamGetFlags_ptsz(stream: Stream, flags: *mut c_uint) {
        ready()?.cuStreamGetFlags(stream.0, flags)
    }
    fn cudaStreamGetPriority, cudaStreamGetPriority_ptsz(stream: Stream, priority: *mut c_int) {
        ready()?.cuStreamGetPriority(stream.0, priority)
    }
    fn cudaStreamSetAttribute, cudaStreamSetAttribute_ptsz(stream: Stream, attribute: c_int, value: *const c_void) {
        ready()?.cuStreamSetAttribute(stream.0, attribute, value)
    }
    fn cudaStreamCopyAttributes, cudaStreamCopyAttributes_ptsz(to: Stream, from: Stream) {
        ready()?.cuStreamCopyAttributes(to.0, from.0)
    }
    fn cudaStreamGetId, cudaStreamGetId_ptsz(stream: Stream, id: *mut c_ulonglong) {
        ready()?.cuStreamGetId(stream.0, id)
    }
    fn cudaStreamGetDevice, cudaStreamGetDevice_ptsz(stream: Stream, device: *mut c_int) {
        let mut flags = 0;
        ready()?.cuStreamGetFlags(stream.0, &mut flags)?;
        put(device, 0)
    }

    fn cudaEventCreate(event: *mut Handle) { ready()?.cuEventCreate(event, 0) }
    fn cudaEventCreateWithFlags(event: *mut Handle, flags: c_uint) { ready()?.cuEventCreate(event, flags) }
    fn cudaEventDestroy(event: Handle) { ready()?.cuEventDestroy_v2(event) }
    fn cudaEventRecord, cudaEventRecord_ptsz(event: Handle, stream: Stream) {
        ready()?.cuEventRecordWithFlags(event, stream.0, 0)
    }
    fn cudaEventRecordWithFlags, cudaEventRecordWithFlags_ptsz(event: Handle, stream: Stream, flags: c_uint) {
        ready()?.cuEventRecordWithFlags(event, stream.0, flags)
    }
    fn cudaEventQuery(event: Handle) { ready()?.cuEventQuery(event) }
    fn cudaEventSynchronize(event: Handle) { ready()?.cuEventSynchronize(event) }
    fn cudaEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        ready()?.cuEventElapsedTime_v2(milliseconds, start, end)
    }
}
