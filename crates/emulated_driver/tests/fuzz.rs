//! Calls in any order with any handles return a code and never crash.

mod calls;

use std::sync::{Mutex, PoisonError};

use calls::Kind::{Fixed, Function, Handle, Host, Image, Name, Number, Ones, Out};
use calls::{Signature, make};
use proptest::prelude::*;

const CALLS: &[Signature] = &[
    ("cuInit", &[Number]),
    ("cuDeviceGet", &[Out, Number]),
    ("cuDeviceGetAttribute", &[Out, Number, Number]),
    ("cuDevicePrimaryCtxRetain", &[Out, Number]),
    ("cuDevicePrimaryCtxRelease_v2", &[Number]),
    ("cuDevicePrimaryCtxReset_v2", &[Number]),
    ("cuCtxCreate_v2", &[Out, Number, Number]),
    ("cuCtxDestroy_v2", &[Handle]),
    ("cuCtxSetCurrent", &[Handle]),
    ("cuCtxPushCurrent_v2", &[Handle]),
    ("cuCtxPopCurrent_v2", &[Out]),
    ("cuCtxSynchronize", &[]),
    ("cuModuleLoadData", &[Out, Image]),
    ("cuModuleUnload", &[Handle]),
    ("cuModuleGetFunction", &[Out, Handle, Name]),
    ("cuModuleGetGlobal_v2", &[Out, Out, Handle, Name]),
    ("cuLibraryGetKernel", &[Out, Handle, Name]),
    ("cuKernelGetFunction", &[Out, Handle]),
    ("cuFuncGetAttribute", &[Out, Number, Handle]),
    ("cuFuncSetAttribute", &[Handle, Number, Number]),
    ("cuOccupancyMaxActiveBlocksPerMultiprocessor", &[Out, Handle, Number, Number]),
    ("cuMemAlloc_v2", &[Out, Number]),
    ("cuMemAllocAsync", &[Out, Number, Handle]),
    ("cuMemFree_v2", &[Handle]),
    ("cuMemFreeAsync", &[Handle, Handle]),
    ("cuMemAllocHost_v2", &[Out, Number]),
    ("cuMemFreeHost", &[Handle]),
    ("cuMemHostUnregister", &[Handle]),
    ("cuMemGetInfo_v2", &[Out, Out]),
    ("cuMemGetAddressRange_v2", &[Out, Out, Handle]),
    ("cuPointerGetAttribute", &[Out, Number, Handle]),
    ("cuMemcpyHtoD_v2", &[Handle, Host, Number]),
    ("cuMemcpyDtoH_v2", &[Host, Handle, Number]),
    ("cuMemcpyDtoD_v2", &[Handle, Handle, Number]),
    ("cuMemcpyHtoDAsync_v2", &[Handle, Host, Number, Handle]),
    ("cuMemcpyDtoHAsync_v2", &[Host, Handle, Number, Handle]),
    ("cuMemcpyDtoDAsync_v2", &[Handle, Handle, Number, Handle]),
    ("cuMemcpy2D_v2", &[Host]),
    ("cuMemcpy3DAsync_v2", &[Host, Handle]),
    ("cuMemsetD8_v2", &[Handle, Number, Number]),
    ("cuMemsetD32Async", &[Handle, Number, Number, Handle]),
    ("cuMemsetD2D8_v2", &[Handle, Number, Number, Number, Number]),
    ("cuStreamCreate", &[Out, Number]),
    ("cuStreamDestroy_v2", &[Handle]),
    ("cuStreamSynchronize", &[Handle]),
    ("cuStreamQuery", &[Handle]),
    ("cuStreamWaitEvent", &[Handle, Handle, Number]),
    ("cuStreamIsCapturing", &[Handle, Out]),
    ("cuStreamBeginCapture_v2", &[Handle, Number]),
    ("cuStreamEndCapture", &[Handle, Out]),
    ("cuEventCreate", &[Out, Number]),
    ("cuEventDestroy_v2", &[Handle]),
    ("cuEventRecord", &[Handle, Handle]),
    ("cuEventQuery", &[Handle]),
    ("cuEventSynchronize", &[Handle]),
    ("cuEventElapsedTime", &[Out, Handle, Handle]),
    ("cuLaunchHostFunc", &[Handle, Function, Number]),
    ("cuLaunchKernelEx", &[Host, Handle, Host, Host]),
    ("cuGraphCreate", &[Out, Number]),
    ("cuGraphAddEmptyNode", &[Out, Handle, Out, Number]),
    ("cuGraphAddKernelNode_v2", &[Out, Handle, Out, Number, Host]),
    ("cuGraphAddMemcpyNode", &[Out, Handle, Out, Number, Host, Handle]),
    ("cuGraphAddMemsetNode", &[Out, Handle, Out, Number, Host, Handle]),
    ("cuGraphAddChildGraphNode", &[Out, Handle, Out, Number, Handle]),
    ("cuGraphAddDependencies", &[Handle, Out, Out, Number]),
    ("cuGraphGetNodes", &[Handle, Out, Out]),
    ("cuGraphInstantiateWithFlags", &[Out, Handle, Number]),
    ("cuGraphExecUpdate_v2", &[Handle, Handle, Out]),
    ("cuGraphLaunch", &[Handle, Handle]),
    ("cuGraphExecDestroy", &[Handle]),
    ("cuGraphDestroy", &[Handle]),
    ("cuTensorMapEncodeTiled", &[Host, Number, Number, Handle, Ones, Ones, Ones, Ones, Number, Number, Number, Number]),
    ("cuGetProcAddress_v2", &[Name, Out, Number, Number, Out]),
    ("cuGetErrorName", &[Number, Out]),
    ("cuMemAllocManaged", &[Out, Number, Number]),
    ("cuArrayCreate_v2", &[Out, Host]),
    ("cuStreamCreate", &[Out, Fixed(1)]),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn calls_in_any_order_return_a_code(calls in calls::calls(CALLS.len(), &[0, 3, 8, 12, 14, 42, 50])) {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = calls::library("libemulated_driver.so");
        let made = make(&library, CALLS, calls, &["cuDevicePrimaryCtxReset_v2", "cuCtxSynchronize"]);
        // The library's state is a static, so the library must stay open.
        std::mem::forget(library);
        made?;
    }
}
