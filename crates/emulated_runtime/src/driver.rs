//! Driver functions, looked up by name in `libcuda.so.1` at the first call.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::call::{Code, INSUFFICIENT_DRIVER, SUCCESS};
use crate::types::Handle;

macro_rules! driver {
    ($( fn $name:ident($($arg:ident: $ty:ty),* $(,)?); )*) => {
        /// The driver's functions.
        pub struct Driver {
            $( $name: unsafe extern "C" fn($($ty),*) -> Code, )*
        }

        impl Driver {
            fn open() -> Option<Self> {
                // SAFETY: the loader runs the library's initializers, and a driver supports being opened this way.
                let library: &'static Library = Box::leak(Box::new(unsafe { Library::new("libcuda.so.1") }.ok()?));
                // SAFETY: each field's type is its function's signature in cuda.h, and the library is never closed.
                unsafe {
                    Some(Self { $( $name: *library.get(stringify!($name)).ok()?, )* })
                }
            }

            $(
                /// # Safety
                ///
                /// The caller fulfills the contract of the function of this name in cuda.h.
                pub unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), Code> {
                    // SAFETY: the caller fulfills the contract of the driver's function of this name.
                    match unsafe { (self.$name)($($arg),*) } {
                        SUCCESS => Ok(()),
                        code => Err(code),
                    }
                }
            )*
        }
    };
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorString(code: c_int, text: *mut *const c_char);
    fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *const c_void, version: c_int, flags: c_ulonglong, status: *mut c_int,
    );
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: c_int);
    fn cuDeviceGetMemPool(pool: *mut Handle, device: c_int);
    fn cuDeviceSetMemPool(device: c_int, pool: Handle);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn cuDevicePrimaryCtxReset_v2(device: c_int);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxSynchronize();
    fn cuCtxGetLimit(value: *mut usize, limit: c_uint);
    fn cuCtxSetLimit(limit: c_uint, value: usize);
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);

    fn cuLibraryLoadData(
        library: *mut Handle, image: *const c_void, options: *const c_int, values: *const *mut c_void, count: c_uint,
        library_options: *const c_int, library_values: *const *mut c_void, library_count: c_uint,
    );
    fn cuLibraryUnload(library: Handle);
    fn cuLibraryGetKernel(kernel: *mut Handle, library: Handle, name: *const c_char);
    fn cuLibraryGetKernelCount(count: *mut c_uint, library: Handle);
    fn cuLibraryEnumerateKernels(kernels: *mut Handle, count: c_uint, library: Handle);
    fn cuLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char);
    fn cuKernelGetFunction(function: *mut Handle, kernel: Handle);
    fn cuKernelGetName(name: *mut *const c_char, kernel: Handle);
    fn cuKernelGetParamInfo(kernel: Handle, index: usize, offset: *mut usize, bytes: *mut usize);
    fn cuKernelGetAttribute(value: *mut c_int, attribute: c_int, kernel: Handle, device: c_int);
    fn cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, device: c_int);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: Handle, threads: c_int, shared_bytes: usize, flags: c_uint,
    );
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, function: Handle, blocks: c_int, threads: c_int);
    fn cuOccupancyMaxPotentialClusterSize(size: *mut c_int, function: Handle, config: *const c_void);
    fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: Handle, config: *const c_void);
    fn cuLaunchKernelEx(
        config: *const c_void, function: Handle, parameters: *const *const c_void, extra: *const *const c_void,
    );
    fn cuLaunchHostFunc(stream: Handle, function: usize, data: usize);
    fn cuStreamAddCallback(stream: Handle, function: usize, data: usize, flags: c_uint);

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint);
    fn cuMemFree_v2(address: u64);
    fn cuMemHostAlloc(address: *mut usize, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(address: usize);
    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(address: usize);
    fn cuMemHostGetDevicePointer_v2(pointer: *mut u64, address: usize, flags: c_uint);
    fn cuMemHostGetFlags(flags: *mut c_uint, address: usize);
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Handle);
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: Handle, stream: Handle);
    fn cuMemFreeAsync(address: u64, stream: Handle);
    fn cuMemPoolCreate(pool: *mut Handle, properties: *const c_void);
    fn cuMemPoolDestroy(pool: Handle);
    fn cuMemPoolTrimTo(pool: Handle, bytes: usize);
    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *const c_void);
    fn cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: *mut c_void);
    fn cuMemPoolSetAccess(pool: Handle, map: *const c_void, count: usize);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, pointer: u64);
    fn cuMemcpy(to: u64, from: u64, bytes: usize);
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Handle);
    fn cuMemcpy2DUnaligned_v2(description: *const c_void);
    fn cuMemcpy2DAsync_v2(description: *const c_void, stream: Handle);
    fn cuMemcpy3D_v2(description: *const c_void);
    fn cuMemcpy3DAsync_v2(description: *const c_void, stream: Handle);
    fn cuMemsetD8_v2(to: u64, value: u8, count: usize);
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle);
    fn cuMemsetD2D8_v2(to: u64, pitch: usize, value: u8, width: usize, rows: usize);
    fn cuMemsetD2D8Async(to: u64, pitch: usize, value: u8, width: usize, rows: usize, stream: Handle);

    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuStreamGetFlags(stream: Handle, flags: *mut c_uint);
    fn cuStreamGetPriority(stream: Handle, priority: *mut c_int);
    fn cuStreamSetAttribute(stream: Handle, attribute: c_int, value: *const c_void);
    fn cuStreamCopyAttributes(to: Handle, from: Handle);
    fn cuStreamGetId(stream: Handle, id: *mut c_ulonglong);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: c_uint);
    fn cuEventQuery(event: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: Handle, end: Handle);

    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int);
    fn cuStreamGetCaptureInfo_v3(
        stream: Handle, status: *mut c_int, id: *mut u64, graph: *mut Handle, nodes: *mut *const Handle,
        edges: *mut *const c_void, count: *mut usize,
    );
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn cuGraphCreate(graph: *mut Handle, flags: c_uint);
    fn cuGraphClone(clone: *mut Handle, graph: Handle);
    fn cuGraphAddKernelNode_v2(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void,
    );
    fn cuGraphAddMemcpyNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void, context: Handle,
    );
    fn cuGraphAddMemsetNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void, context: Handle,
    );
    fn cuGraphAddHostNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void,
    );
    fn cuGraphAddChildGraphNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, child: Handle,
    );
    fn cuGraphAddEmptyNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize);
    fn cuGraphKernelNodeSetParams_v2(node: Handle, parameters: *const c_void);
    fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: *const c_void);
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
    fn cuGraphGetRootNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
    fn cuGraphNodeGetType(node: Handle, kind: *mut c_int);
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: c_ulonglong);
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut c_void);
    fn cuGraphUpload(executable: Handle, stream: Handle);
    fn cuGraphLaunch(executable: Handle, stream: Handle);
    fn cuGraphExecDestroy(executable: Handle);
    fn cuGraphDestroy(graph: Handle);
}

/// Returns the initialized driver.
pub fn driver() -> Result<&'static Driver, Code> {
    static DRIVER: OnceLock<Result<Driver, Code>> = OnceLock::new();
    let open = || {
        let driver = Driver::open().ok_or(INSUFFICIENT_DRIVER)?;
        // SAFETY: cuInit may be called at any time.
        unsafe { driver.cuInit(0)? };
        Ok(driver)
    };
    DRIVER.get_or_init(open).as_ref().map_err(|code| *code)
}

/// Returns the driver with a current context on this thread: the primary one, unless the program has set another.
pub fn ready() -> Result<&'static Driver, Code> {
    static PRIMARY: OnceLock<Result<Handle, Code>> = OnceLock::new();
    let driver = driver()?;
    let mut current = 0;
    // SAFETY: `current` outlives the call.
    unsafe { driver.cuCtxGetCurrent(&mut current)? };
    if current == 0 {
        let retain = || {
            let mut primary = 0;
            // SAFETY: `primary` outlives the call.
            unsafe { driver.cuDevicePrimaryCtxRetain(&mut primary, 0).map(|()| primary) }
        };
        let primary = (*PRIMARY.get_or_init(retain))?;
        // SAFETY: the driver has just returned this context.
        unsafe { driver.cuCtxSetCurrent(primary)? };
    }
    Ok(driver)
}
