//! The GPU, its properties and limits; initialization, and driver functions by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::call::{Code, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, functions, put};
use crate::driver::{driver, ready};
use crate::refused;
use crate::types::Handle;

/// Version reported to programs, as in the library's name: 13.0.
const VERSION: c_int = 13_000;

/// `cudaDeviceProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    name: [u8; 256],
    uuid: [u8; 16],
    luid: [u8; 8],
    luidDeviceNodeMask: c_uint,
    totalGlobalMem: usize,
    sharedMemPerBlock: usize,
    regsPerBlock: c_int,
    warpSize: c_int,
    memPitch: usize,
    maxThreadsPerBlock: c_int,
    maxThreadsDim: [c_int; 3],
    maxGridSize: [c_int; 3],
    totalConstMem: usize,
    major: c_int,
    minor: c_int,
    textureAlignment: usize,
    texturePitchAlignment: usize,
    multiProcessorCount: c_int,
    integrated: c_int,
    canMapHostMemory: c_int,
    maxTexture1D: c_int,
    maxTexture1DMipmap: c_int,
    maxTexture2D: [c_int; 2],
    maxTexture2DMipmap: [c_int; 2],
    maxTexture2DLinear: [c_int; 3],
    maxTexture2DGather: [c_int; 2],
    maxTexture3D: [c_int; 3],
    maxTexture3DAlt: [c_int; 3],
    maxTextureCubemap: c_int,
    maxTexture1DLayered: [c_int; 2],
    maxTexture2DLayered: [c_int; 3],
    maxTextureCubemapLayered: [c_int; 2],
    maxSurface1D: c_int,
    maxSurface2D: [c_int; 2],
    maxSurface3D: [c_int; 3],
    maxSurface1DLayered: [c_int; 2],
    maxSurface2DLayered: [c_int; 3],
    maxSurfaceCubemap: c_int,
    maxSurfaceCubemapLayered: [c_int; 2],
    surfaceAlignment: usize,
    concurrentKernels: c_int,
    ECCEnabled: c_int,
    pciBusID: c_int,
    pciDeviceID: c_int,
    pciDomainID: c_int,
    tccDriver: c_int,
    asyncEngineCount: c_int,
    unifiedAddressing: c_int,
    memoryBusWidth: c_int,
    l2CacheSize: c_int,
    persistingL2CacheMaxSize: c_int,
    maxThreadsPerMultiProcessor: c_int,
    streamPrioritiesSupported: c_int,
    globalL1CacheSupported: c_int,
    localL1CacheSupported: c_int,
    sharedMemPerMultiprocessor: usize,
    regsPerMultiprocessor: c_int,
    managedMemory: c_int,
    isMultiGpuBoard: c_int,
    multiGpuBoardGroupID: c_int,
    hostNativeAtomicSupported: c_int,
    pageableMemoryAccess: c_int,
    concurrentManagedAccess: c_int,
    computePreemptionSupported: c_int,
    canUseHostPointerForRegisteredMem: c_int,
    cooperativeLaunch: c_int,
    sharedMemPerBlockOptin: usize,
    pageableMemoryAccessUsesHostPageTables: c_int,
    directManagedMemAccessFromHost: c_int,
    maxBlocksPerMultiProcessor: c_int,
    accessPolicyMaxWindowSize: c_int,
    reservedSharedMemPerBlock: usize,
    hostRegisterSupported: c_int,
    sparseCudaArraySupported: c_int,
    hostRegisterReadOnlySupported: c_int,
    timelineSemaphoreInteropSupported: c_int,
    memoryPoolsSupported: c_int,
    gpuDirectRDMASupported: c_int,
    gpuDirectRDMAFlushWritesOptions: c_uint,
    gpuDirectRDMAWritesOrdering: c_int,
    memoryPoolSupportedHandleTypes: c_uint,
    deferredMappingCudaArraySupported: c_int,
    ipcEventSupported: c_int,
    clusterLaunch: c_int,
    unifiedFunctionPointers: c_int,
    deviceNumaConfig: c_int,
    deviceNumaId: c_int,
    mpsEnabled: c_int,
    hostNumaId: c_int,
    gpuPciDeviceID: c_uint,
    gpuPciSubsystemID: c_uint,
    hostNumaMultinodeIpcSupported: c_int,
    reserved: [c_int; 56],
}

/// Succeeds if the device exists.
fn check(device: c_int) -> Result<(), Code> {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    unsafe { driver()?.cuDeviceGetCount(&mut count)? };
    if (0..count).contains(&device) { Ok(()) } else { Err(INVALID_DEVICE) }
}

/// Reads all properties of a device from the driver.
fn properties(device: c_int) -> Result<Properties, Code> {
    check(device)?;
    let driver = driver()?;
    let ask = |attribute: c_int| {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device).map(|()| value) }
    };
    // SAFETY: the fields are integers and arrays of integers, for which zero is valid.
    let mut properties: Properties = unsafe { std::mem::zeroed() };
    // SAFETY: each field outlives the call and has the given size.
    unsafe {
        driver.cuDeviceGetName(properties.name.as_mut_ptr().cast(), 256, device)?;
        driver.cuDeviceGetUuid_v2(&mut properties.uuid, device)?;
        driver.cuDeviceTotalMem_v2(&mut properties.totalGlobalMem, device)?;
    }
    properties.sharedMemPerBlock = ask(8)? as usize;
    properties.regsPerBlock = ask(12)?;
    properties.warpSize = ask(10)?;
    properties.memPitch = ask(11)? as usize;
    properties.maxThreadsPerBlock = ask(1)?;
    properties.maxThreadsDim = [ask(2)?, ask(3)?, ask(4)?];
    properties.maxGridSize = [ask(5)?, ask(6)?, ask(7)?];
    properties.totalConstMem = ask(9)? as usize;
    properties.major = ask(75)?;
    properties.minor = ask(76)?;
    properties.textureAlignment = ask(14)? as usize;
    properties.texturePitchAlignment = ask(51)? as usize;
    properties.multiProcessorCount = ask(16)?;
    properties.integrated = ask(18)?;
    properties.canMapHostMemory = ask(19)?;
    properties.maxTexture1D = ask(21)?;
    properties.maxTexture1DMipmap = ask(77)?;
    properties.maxTexture2D = [ask(22)?, ask(23)?];
    properties.maxTexture2DMipmap = [ask(73)?, ask(74)?];
    properties.maxTexture2DLinear = [ask(70)?, ask(71)?, ask(72)?];
    properties.maxTexture2DGather = [ask(45)?, ask(46)?];
    properties.maxTexture3D = [ask(24)?, ask(25)?, ask(26)?];
    properties.maxTexture3DAlt = [ask(47)?, ask(48)?, ask(49)?];
    properties.maxTextureCubemap = ask(52)?;
    properties.maxTexture1DLayered = [ask(42)?, ask(43)?];
    properties.maxTexture2DLayered = [ask(27)?, ask(28)?, ask(29)?];
    properties.maxTextureCubemapLayered = [ask(53)?, ask(54)?];
    properties.maxSurface1D = ask(55)?;
    properties.maxSurface2D = [ask(56)?, ask(57)?];
    properties.maxSurface3D = [ask(58)?, ask(59)?, ask(60)?];
    properties.maxSurface1DLayered = [ask(61)?, ask(62)?];
    properties.maxSurface2DLayered = [ask(63)?, ask(64)?, ask(65)?];
    properties.maxSurfaceCubemap = ask(66)?;
    properties.maxSurfaceCubemapLayered = [ask(67)?, ask(68)?];
    properties.surfaceAlignment = ask(30)? as usize;
    properties.concurrentKernels = ask(31)?;
    properties.ECCEnabled = ask(32)?;
    properties.pciBusID = ask(33)?;
    properties.pciDeviceID = ask(34)?;
    properties.pciDomainID = ask(50)?;
    properties.tccDriver = ask(35)?;
    properties.asyncEngineCount = ask(40)?;
    properties.unifiedAddressing = ask(41)?;
    properties.memoryBusWidth = ask(37)?;
    properties.l2CacheSize = ask(38)?;
    properties.persistingL2CacheMaxSize = ask(108)?;
    properties.maxThreadsPerMultiProcessor = ask(39)?;
    properties.streamPrioritiesSupported = ask(78)?;
    properties.globalL1CacheSupported = ask(79)?;
    properties.localL1CacheSupported = ask(80)?;
    properties.sharedMemPerMultiprocessor = ask(81)? as usize;
    properties.regsPerMultiprocessor = ask(82)?;
    properties.managedMemory = ask(83)?;
    properties.isMultiGpuBoard = ask(84)?;
    properties.multiGpuBoardGroupID = ask(85)?;
    properties.hostNativeAtomicSupported = ask(86)?;
    properties.pageableMemoryAccess = ask(88)?;
    properties.concurrentManagedAccess = ask(89)?;
    properties.computePreemptionSupported = ask(90)?;
    properties.canUseHostPointerForRegisteredMem = ask(91)?;
    properties.cooperativeLaunch = ask(95)?;
    properties.sharedMemPerBlockOptin = ask(97)? as usize;
    properties.pageableMemoryAccessUsesHostPageTables = ask(100)?;
    properties.directManagedMemAccessFromHost = ask(101)?;
    properties.maxBlocksPerMultiProcessor = ask(106)?;
    properties.accessPolicyMaxWindowSize = ask(109)?;
    properties.reservedSharedMemPerBlock = ask(111)? as usize;
    properties.hostRegisterSupported = ask(99)?;
    properties.sparseCudaArraySupported = ask(112)?;
    properties.hostRegisterReadOnlySupported = ask(113)?;
    properties.timelineSemaphoreInteropSupported = ask(114)?;
    properties.memoryPoolsSupported = ask(115)?;
    properties.gpuDirectRDMASupported = ask(116)?;
    properties.gpuDirectRDMAFlushWritesOptions = ask(117)? as c_uint;
    properties.gpuDirectRDMAWritesOrdering = ask(118)?;
    properties.memoryPoolSupportedHandleTypes = ask(119)? as c_uint;
    properties.deferredMappingCudaArraySupported = ask(121)?;
    properties.ipcEventSupported = ask(125)?;
    properties.clusterLaunch = ask(120)?;
    properties.unifiedFunctionPointers = ask(129)?;
    properties.deviceNumaConfig = ask(130)?;
    properties.deviceNumaId = ask(131)?;
    properties.mpsEnabled = ask(133)?;
    properties.hostNumaId = ask(134)?;
    Ok(properties)
}

functions! {
    fn cudaRuntimeGetVersion(version: *mut c_int) { put(version, VERSION) }
    fn cudaDriverGetVersion(version: *mut c_int) { driver()?.cuDriverGetVersion(version) }
    fn cudaGetDeviceCount(count: *mut c_int) { driver()?.cuDeviceGetCount(count) }
    fn cudaGetDevice(device: *mut c_int) {
        driver()?;
        put(device, 0)
    }
    fn cudaSetDevice(device: c_int) {
        check(device)?;
        ready().map(drop)
    }
    fn cudaInitDevice(device: c_int, _flags: c_uint, _device_flags: c_uint) {
        check(device)?;
        ready().map(drop)
    }
    fn cudaSetDeviceFlags(_flags: c_uint) { driver().map(drop) }
    fn cudaGetDeviceFlags(flags: *mut c_uint) { put(flags, 0) }
    fn cudaSetValidDevices(_devices: *mut c_int, _count: c_int) { driver().map(drop) }
    fn cudaChooseDevice(device: *mut c_int, _properties: *const Properties) { put(device, 0) }
    fn cudaGetDeviceProperties(to: *mut Properties, device: c_int) { put(to, properties(device)?) }
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        check(device)?;
        driver()?.cuDeviceGetAttribute(value, attribute, device)
    }
    fn cudaDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int) {
        driver()?.cuDeviceGetPCIBusId(text, len, device)
    }
    fn cudaDeviceSynchronize() { ready()?.cuCtxSynchronize() }
    fn cudaDeviceReset() { driver()?.cuDevicePrimaryCtxReset_v2(0) }
    fn cudaDeviceGetLimit(value: *mut usize, limit: c_uint) { ready()?.cuCtxGetLimit(value, limit) }
    fn cudaDeviceSetLimit(limit: c_uint, value: usize) { ready()?.cuCtxSetLimit(limit, value) }
    fn cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        ready()?.cuCtxGetStreamPriorityRange(least, greatest)
    }
    fn cudaDeviceGetCacheConfig(config: *mut c_int) { put(config, 0) }
    fn cudaDeviceSetCacheConfig(_config: c_int) { driver().map(drop) }
    fn cudaDeviceGetSharedMemConfig(config: *mut c_int) { put(config, 1) }
    fn cudaDeviceSetSharedMemConfig(_config: c_int) { driver().map(drop) }
    fn cudaCtxResetPersistingL2Cache() { driver().map(drop) }
    fn cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        driver()?.cuDeviceCanAccessPeer(can, device, peer)
    }
    fn cudaDeviceGetDefaultMemPool(pool: *mut Handle, device: c_int) {
        driver()?.cuDeviceGetDefaultMemPool(pool, device)
    }
    fn cudaDeviceGetMemPool(pool: *mut Handle, device: c_int) { driver()?.cuDeviceGetMemPool(pool, device) }
    fn cudaDeviceSetMemPool(device: c_int, pool: Handle) { driver()?.cuDeviceSetMemPool(device, pool) }
    fn cudaProfilerStart() { driver().map(drop) }
    fn cudaProfilerStop() { driver().map(drop) }

    fn cudaGetDriverEntryPoint, cudaGetDriverEntryPoint_ptsz(
        symbol: *const c_char, address: *mut *const c_void, flags: c_ulonglong, status: *mut c_int,
    ) {
        entry_point(symbol, address, VERSION, flags, status)
    }
    fn cudaGetDriverEntryPointByVersion, cudaGetDriverEntryPointByVersion_ptsz(
        symbol: *const c_char, address: *mut *const c_void, version: c_uint, flags: c_ulonglong, status: *mut c_int,
    ) {
        entry_point(symbol, address, version as c_int, flags, status)
    }
    fn cudaGetExportTable(_table: *mut *const c_void, _id: *const [u8; 16]) {
        refused::once("private tables (cudaGetExportTable) are not emulated");
        Err(NOT_SUPPORTED)
    }
}

/// Looks up a function of the driver. If there is none, the call succeeds, and `status` becomes 1.
///
/// # Safety
///
/// `symbol` is null or a C string. `address` and `status` are null or valid for a write.
unsafe fn entry_point(
    symbol: *const c_char,
    address: *mut *const c_void,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_int,
) -> Result<(), Code> {
    if symbol.is_null() || address.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller guarantees that `symbol` is a C string and that `address` and `status` are valid or null.
    unsafe {
        let mut found = std::ptr::null();
        let known = driver()?.cuGetProcAddress_v2(symbol, &mut found, version, flags, std::ptr::null_mut());
        put(address, found)?;
        if known.is_err() {
            let name = CStr::from_ptr(symbol).to_string_lossy();
            refused::once(&format!("{name}: the driver has no such function"));
        }
        // cudaDriverEntryPointSymbolNotFound is 1.
        if status.is_null() { Ok(()) } else { put(status, known.is_err().into()) }
    }
}
