//! The list of driver functions, and the forwarders generated from it.
//!
//! Every line becomes a field of [`Table`] (the address in the driver library) and a symbol of this crate (which `cust`
//! links against). The compiler checks the lines under `cust` against cust_raw's declarations. If cust's generic code
//! needs a function that is missing here, the linker reports an undefined symbol: add the function.

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::too_many_arguments, reason = "the driver's signatures")]

use std::error::Error;
use std::ffi::{CString, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use std::sync::OnceLock;

use cust::sys::*;
use libloading::Library;

use crate::abi::*;
use crate::record::{Code, NO_DEVICE, SUCCESS, SYMBOL_NOT_FOUND, record};
use crate::unavailable::Unavailable;

/// File name of the driver library.
const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// Returns the driver. The first call opens it; every later call returns the same result.
pub(crate) fn driver() -> Result<&'static Table, &'static Unavailable> {
    static DRIVER: OnceLock<Result<Table, Unavailable>> = OnceLock::new();
    DRIVER.get_or_init(Table::open).as_ref()
}

macro_rules! driver_table {
    (
        cust { $( fn $required:ident($($required_arg:ident: $required_ty:ty),* $(,)?); )* }
        added { $( $(#[$doc:meta])* fn $optional:ident($($arg:ident: $ty:ty),* $(,)?); )* }
    ) => {
        /// Addresses of the driver's functions. An older driver may lack functions under `added`.
        pub(crate) struct Table {
            cuGetErrorName: DescribeFn,
            cuGetErrorString: DescribeFn,
            /// `cuFuncSetAttribute` with a number for the attribute, because cust_raw's enum lacks some attributes.
            pub(crate) set_function_attribute: SetFunctionAttributeFn,
            $( $required: unsafe extern "C" fn($($required_ty),*) -> Code, )*
            $( $optional: Option<unsafe extern "C" fn($($ty),*) -> Code>, )*
        }

        impl Table {
            fn open() -> Result<Self, Unavailable> {
                // SAFETY: the loader runs the library's initializers, and NVIDIA's driver supports being opened this
                // way.
                let library = unsafe { Library::new(LIBRARY) }.map_err(|error| Unavailable::LibraryNotFound {
                    library: LIBRARY,
                    // libloading's own text is "dlopen failed"; its source is the loader's message.
                    reason: error.source().map_or_else(|| error.to_string(), |cause| cause.to_string()),
                })?;
                // The library is never closed, so the addresses stay valid for the life of the process.
                let library: &'static Library = Box::leak(Box::new(library));
                let missing = |symbol| Unavailable::MissingSymbol { library: LIBRARY, symbol };
                // SAFETY: each field has its function's signature in cuda.h (for functions under `cust`, compared with
                // cust_raw's below), and the library is never closed.
                unsafe {
                    Ok(Self {
                        cuGetErrorName: *library.get("cuGetErrorName").map_err(|_| missing("cuGetErrorName"))?,
                        cuGetErrorString: *library.get("cuGetErrorString").map_err(|_| missing("cuGetErrorString"))?,
                        set_function_attribute: *library
                            .get("cuFuncSetAttribute")
                            .map_err(|_| missing("cuFuncSetAttribute"))?,
                        $( $required: *library
                            .get(stringify!($required))
                            .map_err(|_| missing(stringify!($required)))?, )*
                        $( $optional: library.get(stringify!($optional)).ok().map(|symbol| *symbol), )*
                    })
                }
            }
        }

        $(
            const _: unsafe extern "C" fn($($required_ty),*) -> CUresult = cust::sys::$required;

            /// Definition of the symbol that `cust` links against.
            ///
            /// # Safety
            ///
            /// The caller fulfills the contract of the function of this name in cuda.h.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $required($($required_arg: $required_ty),*) -> CUresult {
                let code = match driver() {
                    // SAFETY: the caller fulfills the contract of the driver's function of this name.
                    Ok(table) => unsafe { (table.$required)($($required_arg),*) },
                    Err(_) => NO_DEVICE,
                };
                record(stringify!($required), code)
            }
        )*

        /// Functions that `cust` lacks.
        pub mod added {
            use super::*;
            $(
                $(#[$doc])*
                ///
                /// # Safety
                ///
                /// The caller fulfills the contract of the function of this name in cuda.h.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $optional($($arg: $ty),*) -> CUresult {
                    let code = match driver().map(|table| table.$optional) {
                        // SAFETY: the caller fulfills the contract of the driver's function of this name.
                        Ok(Some(function)) => unsafe { function($($arg),*) },
                        Ok(None) => SYMBOL_NOT_FOUND,
                        Err(_) => NO_DEVICE,
                    };
                    record(stringify!($optional), code)
                }
            )*
        }
    };
}

driver_table! {
    cust {
        // Driver and devices
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);

        // Contexts
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuDevicePrimaryCtxReset_v2(device: CUdevice);
        fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint);
        fn cuCtxGetApiVersion(context: CUcontext, version: *mut c_uint);
        fn cuCtxGetCurrent(context: *mut CUcontext);
        fn cuCtxSetCurrent(context: CUcontext);
        fn cuCtxGetDevice(device: *mut CUdevice);
        fn cuCtxSynchronize();

        // Modules and functions
        fn cuModuleLoad(module: *mut CUmodule, path: *const c_char);
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        fn cuModuleLoadDataEx(
            module: *mut CUmodule, image: *const c_void,
            count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void,
        );
        fn cuModuleUnload(module: CUmodule);
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn cuModuleGetGlobal_v2(address: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char);
        fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
        fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
        fn cuFuncSetCacheConfig(function: CUfunction, config: CUfunc_cache);
        fn cuFuncSetSharedMemConfig(function: CUfunction, config: CUsharedconfig);
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int, function: CUfunction, threads: c_int, shared_bytes: usize,
        );
        fn cuOccupancyMaxPotentialBlockSize(
            grid: *mut c_int, block: *mut c_int, function: CUfunction,
            shared_bytes_of_block: CUoccupancyB2DSize, shared_bytes: usize, limit: c_int,
        );
        fn cuOccupancyAvailableDynamicSMemPerBlock(
            bytes: *mut usize, function: CUfunction, blocks: c_int, threads: c_int,
        );

        // Streams, launches and events
        fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
        fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int);
        fn cuStreamSynchronize(stream: CUstream);
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
        fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventQuery(event: CUevent);
        fn cuEventSynchronize(event: CUevent);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);

        // Memory
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        fn cuMemFree_v2(address: CUdeviceptr);
        fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
        fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
        fn cuMemFreeHost(address: *mut c_void);
        fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
        fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
        fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize);
        fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize);
        fn cuMemsetD16_v2(to: CUdeviceptr, value: c_ushort, count: usize);
        fn cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize);
        fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
        fn cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
        fn cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);

        // Graphs captured from a stream
        fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
        fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
        fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        fn cuGraphExecDestroy(exec: CUgraphExec);
        fn cuGraphDestroy(graph: CUgraph);
    }
    added {
        /// Launches a kernel with attributes, such as the cluster dimensions (CUDA 11.8).
        fn cuLaunchKernelEx(
            config: *const CUlaunchConfig, function: CUfunction,
            parameters: *mut *mut c_void, extra: *mut *mut c_void,
        );
        /// Returns the number of clusters of a launch that run at once (CUDA 11.8).
        fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: CUfunction, config: *const CUlaunchConfig);
        /// Encodes a TMA descriptor of a tiled tensor on the host (CUDA 12.0).
        fn cuTensorMapEncodeTiled(
            map: *mut CUtensorMap, data_type: CUtensorMapDataType, rank: u32, address: *mut c_void,
            extents: *const u64, strides: *const u64, r#box: *const u32, element_strides: *const u32,
            interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle,
            l2_promotion: CUtensorMapL2promotion, outside: CUtensorMapFloatOOBfill,
        );
    }
}

// ---- Error descriptions: without a driver they are answered here, because cust's `Display` would panic. ----

type SetFunctionAttributeFn = unsafe extern "C" fn(CUfunction, c_int, c_int) -> Code;
type DescribeFn = unsafe extern "C" fn(Code, *mut *const c_char) -> Code;

/// `cuGetErrorName` for any code.
///
/// # Safety
///
/// `text` is valid for a write. The function stores null or a C string that is never freed.
pub(crate) unsafe fn error_name(code: Code, text: *mut *const c_char) -> Code {
    match driver() {
        // SAFETY: the caller guarantees that `text` is valid for a write.
        Ok(table) => unsafe { (table.cuGetErrorName)(code, text) },
        Err(_) => {
            let name = if code == NO_DEVICE { c"CUDA_ERROR_NO_DEVICE" } else { c"CUDA_ERROR_UNKNOWN" };
            // SAFETY: the caller guarantees that `text` is valid for a write; the literal is static.
            unsafe { *text = name.as_ptr() };
            SUCCESS
        }
    }
}

/// `cuGetErrorString` for any code.
///
/// # Safety
///
/// `text` is valid for a write. The function stores null or a C string that is never freed.
pub(crate) unsafe fn error_text(code: Code, text: *mut *const c_char) -> Code {
    static REASON: OnceLock<CString> = OnceLock::new();
    match driver() {
        // SAFETY: the caller guarantees that `text` is valid for a write.
        Ok(table) => unsafe { (table.cuGetErrorString)(code, text) },
        Err(reason) => {
            let reason = REASON.get_or_init(|| CString::new(format!("no CUDA device: {reason}")).unwrap_or_default());
            // SAFETY: the caller guarantees that `text` is valid for a write; the string is static.
            unsafe { *text = reason.as_ptr() };
            SUCCESS
        }
    }
}

const _: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult = cust::sys::cuGetErrorName;
const _: unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult = cust::sys::cuGetErrorString;

/// Definition of the symbol that `cust` links against.
///
/// # Safety
///
/// `text` is valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller guarantees that `text` is valid for a write.
    record("cuGetErrorName", unsafe { error_name(error as Code, text) })
}

/// Definition of the symbol that `cust` links against.
///
/// # Safety
///
/// `text` is valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller guarantees that `text` is valid for a write.
    record("cuGetErrorString", unsafe { error_text(error as Code, text) })
}
