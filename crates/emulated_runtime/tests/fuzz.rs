//! Runtime calls in any order with any handles return a code and never crash. The driver is the emulated one.

#[path = "../../emulated_driver/tests/calls/mod.rs"]
mod calls;

use std::sync::{Mutex, PoisonError};

use calls::Kind::{Fixed, Function, Handle, Host, Image, Name, Number, Ones, Out};
use calls::{Signature, make};
use proptest::prelude::*;

const CALLS: &[Signature] = &[
    ("cudaFree", &[Handle]),
    ("cudaLibraryLoadData", &[Out, Image, Fixed(0), Fixed(0), Fixed(0), Fixed(0), Fixed(0), Fixed(0)]),
    ("cudaLibraryGetKernel", &[Out, Handle, Name]),
    ("cudaStreamCreate", &[Out]),
    ("cudaEventCreate", &[Out]),
    ("cudaMalloc", &[Out, Number]),
    ("cudaGetDeviceCount", &[Out]),
    ("cudaGetDevice", &[Out]),
    ("cudaSetDevice", &[Number]),
    ("cudaGetDeviceProperties", &[Out, Number]),
    ("cudaDeviceGetAttribute", &[Out, Number, Number]),
    ("cudaDeviceSynchronize", &[]),
    ("cudaDeviceReset", &[]),
    ("cudaDeviceGetLimit", &[Out, Number]),
    ("cudaDeviceSetLimit", &[Number, Number]),
    ("cudaDeviceGetStreamPriorityRange", &[Out, Out]),
    ("cudaDeviceCanAccessPeer", &[Out, Number, Number]),
    ("cudaDeviceGetDefaultMemPool", &[Out, Number]),
    ("cudaDeviceGetMemPool", &[Out, Number]),
    ("cudaDeviceSetMemPool", &[Number, Handle]),
    ("cudaLibraryUnload", &[Handle]),
    ("cudaLibraryGetKernelCount", &[Out, Handle]),
    ("cudaLibraryEnumerateKernels", &[Out, Number, Handle]),
    ("cudaLibraryGetGlobal", &[Out, Out, Handle, Name]),
    ("cudaGetKernel", &[Out, Handle]),
    ("cudaGetFuncBySymbol", &[Out, Handle]),
    ("cudaGetSymbolAddress", &[Out, Handle]),
    ("cudaGetSymbolSize", &[Out, Handle]),
    ("cudaMallocPitch", &[Out, Out, Number, Number]),
    ("cudaMemGetInfo", &[Out, Out]),
    ("cudaMallocHost", &[Out, Number]),
    ("cudaHostAlloc", &[Out, Number, Number]),
    ("cudaFreeHost", &[Handle]),
    ("cudaHostUnregister", &[Handle]),
    ("cudaHostGetDevicePointer", &[Out, Handle, Number]),
    ("cudaHostGetFlags", &[Out, Handle]),
    ("cudaMallocManaged", &[Out, Number, Number]),
    ("cudaPointerGetAttributes", &[Out, Handle]),
    ("cudaMallocAsync", &[Out, Number, Handle]),
    ("cudaMallocFromPoolAsync", &[Out, Number, Handle, Handle]),
    ("cudaFreeAsync", &[Handle, Handle]),
    ("cudaMemPoolDestroy", &[Handle]),
    ("cudaMemPoolTrimTo", &[Handle, Number]),
    ("cudaMemPoolGetAttribute", &[Handle, Number, Out]),
    ("cudaStreamBeginCapture", &[Handle, Number]),
    ("cudaStreamEndCapture", &[Handle, Out]),
    ("cudaStreamIsCapturing", &[Handle, Out]),
    ("cudaGraphCreate", &[Out, Number]),
    ("cudaGraphClone", &[Out, Handle]),
    ("cudaGraphAddKernelNode", &[Out, Handle, Out, Number, Host]),
    ("cudaGraphAddMemcpyNode", &[Out, Handle, Out, Number, Host]),
    ("cudaGraphAddMemsetNode", &[Out, Handle, Out, Number, Host]),
    ("cudaGraphAddHostNode", &[Out, Handle, Out, Number, Host]),
    ("cudaGraphAddChildGraphNode", &[Out, Handle, Out, Number, Handle]),
    ("cudaGraphAddEmptyNode", &[Out, Handle, Out, Number]),
    ("cudaGraphKernelNodeSetParams", &[Handle, Host]),
    ("cudaGraphExecKernelNodeSetParams", &[Handle, Handle, Host]),
    ("cudaGraphGetNodes", &[Handle, Out, Out]),
    ("cudaGraphGetRootNodes", &[Handle, Out, Out]),
    ("cudaGraphNodeGetType", &[Handle, Out]),
    ("cudaGraphInstantiate", &[Out, Handle, Number]),
    ("cudaGraphExecUpdate", &[Handle, Handle, Out]),
    ("cudaGraphLaunch", &[Handle, Handle]),
    ("cudaGraphExecDestroy", &[Handle]),
    ("cudaGraphDestroy", &[Handle]),
    ("cudaGraphExecGetFlags", &[Handle, Out]),
    ("cudaStreamCreateWithFlags", &[Out, Number]),
    ("cudaStreamCreateWithPriority", &[Out, Number, Number]),
    ("cudaStreamDestroy", &[Handle]),
    ("cudaStreamSynchronize", &[Handle]),
    ("cudaStreamQuery", &[Handle]),
    ("cudaStreamWaitEvent", &[Handle, Handle, Number]),
    ("cudaStreamGetFlags", &[Handle, Out]),
    ("cudaStreamGetPriority", &[Handle, Out]),
    ("cudaStreamGetDevice", &[Handle, Out]),
    ("cudaEventCreateWithFlags", &[Out, Number]),
    ("cudaEventDestroy", &[Handle]),
    ("cudaEventRecord", &[Handle, Handle]),
    ("cudaEventRecord_ptsz", &[Handle, Handle]),
    ("cudaEventQuery", &[Handle]),
    ("cudaEventSynchronize", &[Handle]),
    ("cudaEventElapsedTime", &[Out, Handle, Handle]),
    ("cudaLaunchKernel", &[Handle, Number, Number, Number, Number, Host, Number, Handle]),
    ("cudaLaunchKernelExC", &[Host, Handle, Host]),
    ("cudaLaunchHostFunc", &[Handle, Function, Number]),
    ("cudaFuncGetAttributes", &[Out, Handle]),
    ("cudaFuncSetAttribute", &[Handle, Number, Number]),
    ("cudaFuncGetName", &[Out, Handle]),
    ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", &[Out, Handle, Number, Number]),
    ("cudaOccupancyMaxActiveClusters", &[Out, Handle, Host]),
    ("cudaMemcpyToSymbol", &[Handle, Ones, Number, Number, Number]),
    ("cudaMemcpyFromSymbol", &[Host, Handle, Number, Number, Number]),
    ("cudaMemcpy3D", &[Host]),
    ("cudaMemcpy3DAsync", &[Host, Handle]),
    ("cudaMemset", &[Handle, Number, Number]),
    ("cudaMemsetAsync", &[Handle, Number, Number, Handle]),
    ("cudaMemset2D", &[Handle, Number, Number, Number, Number]),
    ("cudaGetLastError", &[]),
    ("cudaRuntimeGetVersion", &[Out]),
    ("cudaDriverGetVersion", &[Out]),
    ("cudaGetDriverEntryPoint", &[Name, Out, Number, Out]),
    ("cudaMemcpy", &[Handle, Host, Number, Fixed(1)]),
    ("cudaMemcpy", &[Host, Handle, Number, Fixed(2)]),
    ("cudaMemcpy", &[Handle, Handle, Number, Fixed(3)]),
    ("cudaMemcpyAsync", &[Handle, Host, Number, Fixed(1), Handle]),
    ("cudaMemcpyAsync", &[Host, Handle, Number, Fixed(2), Handle]),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn calls_in_any_order_return_a_code(calls in calls::calls(CALLS.len(), &[0, 1, 2, 3, 4, 5])) {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // The runtime opens the driver by name. From here on the loader finds this library.
        let driver = calls::library("libemulated_driver.so");
        let runtime = calls::library("libemulated_runtime.so");
        let made = make(&runtime, CALLS, calls, &["cudaDeviceSynchronize", "cudaDeviceReset", "cudaGetLastError"]);
        // The state of the libraries is static, so they must stay open.
        std::mem::forget((driver, runtime));
        made?;
    }
}
