//! The GPU, its properties and limits; initialization, and driver functions by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::call::{Code, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, functions, put};
use crate::device_attributes as attribute;
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
    ask_limits(&mut properties, ask)?;
    ask_textures(&mut properties, ask)?;
    ask_features(&mut properties, ask)?;
    Ok(properties)
}

/// Reads the sizes of launches, memories and the GPU.
fn ask_limits(properties: &mut Properties, ask: impl Fn(c_int) -> Result<c_int, Code>) -> Result<(), Code> {
    properties.sharedMemPerBlock = ask(attribute::MAX_SHARED_MEMORY_PER_BLOCK)? as usize;
    properties.regsPerBlock = ask(attribute::MAX_REGISTERS_PER_BLOCK)?;
    properties.warpSize = ask(attribute::WARP_SIZE)?;
    properties.memPitch = ask(attribute::MAX_PITCH)? as usize;
    properties.maxThreadsPerBlock = ask(attribute::MAX_THREADS_PER_BLOCK)?;
    properties.maxThreadsDim =
        [ask(attribute::MAX_BLOCK_DIM_X)?, ask(attribute::MAX_BLOCK_DIM_Y)?, ask(attribute::MAX_BLOCK_DIM_Z)?];
    properties.maxGridSize =
        [ask(attribute::MAX_GRID_DIM_X)?, ask(attribute::MAX_GRID_DIM_Y)?, ask(attribute::MAX_GRID_DIM_Z)?];
    properties.totalConstMem = ask(attribute::TOTAL_CONSTANT_MEMORY)? as usize;
    properties.major = ask(attribute::COMPUTE_CAPABILITY_MAJOR)?;
    properties.minor = ask(attribute::COMPUTE_CAPABILITY_MINOR)?;
    properties.textureAlignment = ask(attribute::TEXTURE_ALIGNMENT)? as usize;
    properties.texturePitchAlignment = ask(attribute::TEXTURE_PITCH_ALIGNMENT)? as usize;
    properties.multiProcessorCount = ask(attribute::MULTIPROCESSOR_COUNT)?;
    properties.integrated = ask(attribute::INTEGRATED)?;
    properties.canMapHostMemory = ask(attribute::CAN_MAP_HOST_MEMORY)?;
    properties.surfaceAlignment = ask(attribute::SURFACE_ALIGNMENT)? as usize;
    Ok(())
}

/// Reads the largest sizes of textures and surfaces.
fn ask_textures(properties: &mut Properties, ask: impl Fn(c_int) -> Result<c_int, Code>) -> Result<(), Code> {
    properties.maxTexture1D = ask(attribute::MAXIMUM_TEXTURE1D_WIDTH)?;
    properties.maxTexture1DMipmap = ask(attribute::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH)?;
    properties.maxTexture2D = [ask(attribute::MAXIMUM_TEXTURE2D_WIDTH)?, ask(attribute::MAXIMUM_TEXTURE2D_HEIGHT)?];
    properties.maxTexture2DMipmap =
        [ask(attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH)?, ask(attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT)?];
    properties.maxTexture2DLinear = [
        ask(attribute::MAXIMUM_TEXTURE2D_LINEAR_WIDTH)?,
        ask(attribute::MAXIMUM_TEXTURE2D_LINEAR_HEIGHT)?,
        ask(attribute::MAXIMUM_TEXTURE2D_LINEAR_PITCH)?,
    ];
    properties.maxTexture2DGather =
        [ask(attribute::MAXIMUM_TEXTURE2D_GATHER_WIDTH)?, ask(attribute::MAXIMUM_TEXTURE2D_GATHER_HEIGHT)?];
    properties.maxTexture3D = [
        ask(attribute::MAXIMUM_TEXTURE3D_WIDTH)?,
        ask(attribute::MAXIMUM_TEXTURE3D_HEIGHT)?,
        ask(attribute::MAXIMUM_TEXTURE3D_DEPTH)?,
    ];
    properties.maxTexture3DAlt = [
        ask(attribute::MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE)?,
        ask(attribute::MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE)?,
        ask(attribute::MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE)?,
    ];
    properties.maxTextureCubemap = ask(attribute::MAXIMUM_TEXTURECUBEMAP_WIDTH)?;
    properties.maxTexture1DLayered =
        [ask(attribute::MAXIMUM_TEXTURE1D_LAYERED_WIDTH)?, ask(attribute::MAXIMUM_TEXTURE1D_LAYERED_LAYERS)?];
    properties.maxTexture2DLayered = [
        ask(attribute::MAXIMUM_TEXTURE2D_LAYERED_WIDTH)?,
        ask(attribute::MAXIMUM_TEXTURE2D_LAYERED_HEIGHT)?,
        ask(attribute::MAXIMUM_TEXTURE2D_LAYERED_LAYERS)?,
    ];
    properties.maxTextureCubemapLayered =
        [ask(attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH)?, ask(attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS)?];
    properties.maxSurface1D = ask(attribute::MAXIMUM_SURFACE1D_WIDTH)?;
    properties.maxSurface2D = [ask(attribute::MAXIMUM_SURFACE2D_WIDTH)?, ask(attribute::MAXIMUM_SURFACE2D_HEIGHT)?];
    properties.maxSurface3D = [
        ask(attribute::MAXIMUM_SURFACE3D_WIDTH)?,
        ask(attribute::MAXIMUM_SURFACE3D_HEIGHT)?,
        ask(attribute::MAXIMUM_SURFACE3D_DEPTH)?,
    ];
    properties.maxSurface1DLayered =
        [ask(attribute::MAXIMUM_SURFACE1D_LAYERED_WIDTH)?, ask(attribute::MAXIMUM_SURFACE1D_LAYERED_LAYERS)?];
    properties.maxSurface2DLayered = [
        ask(attribute::MAXIMUM_SURFACE2D_LAYERED_WIDTH)?,
        ask(attribute::MAXIMUM_SURFACE2D_LAYERED_HEIGHT)?,
        ask(attribute::MAXIMUM_SURFACE2D_LAYERED_LAYERS)?,
    ];
    properties.maxSurfaceCubemap = ask(attribute::MAXIMUM_SURFACECUBEMAP_WIDTH)?;
    properties.maxSurfaceCubemapLayered =
        [ask(attribute::MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH)?, ask(attribute::MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS)?];
    Ok(())
}

/// Reads the supported features, and where the GPU is attached.
fn ask_features(properties: &mut Properties, ask: impl Fn(c_int) -> Result<c_int, Code>) -> Result<(), Code> {
    properties.concurrentKernels = ask(attribute::CONCURRENT_KERNELS)?;
    properties.ECCEnabled = ask(attribute::ECC_ENABLED)?;
    properties.pciBusID = ask(attribute::PCI_BUS_ID)?;
    properties.pciDeviceID = ask(attribute::PCI_DEVICE_ID)?;
    properties.pciDomainID = ask(attribute::PCI_DOMAIN_ID)?;
    properties.tccDriver = ask(attribute::TCC_DRIVER)?;
    properties.asyncEngineCount = ask(attribute::ASYNC_ENGINE_COUNT)?;
    properties.unifiedAddressing = ask(attribute::UNIFIED_ADDRESSING)?;
    properties.memoryBusWidth = ask(attribute::GLOBAL_MEMORY_BUS_WIDTH)?;
    properties.l2CacheSize = ask(attribute::L2_CACHE_SIZE)?;
    properties.persistingL2CacheMaxSize = ask(attribute::MAX_PERSISTING_L2_CACHE_SIZE)?;
    properties.maxThreadsPerMultiProcessor = ask(attribute::MAX_THREADS_PER_MULTIPROCESSOR)?;
    properties.streamPrioritiesSupported = ask(attribute::STREAM_PRIORITIES_SUPPORTED)?;
    properties.globalL1CacheSupported = ask(attribute::GLOBAL_L1_CACHE_SUPPORTED)?;
    properties.localL1CacheSupported = ask(attribute::LOCAL_L1_CACHE_SUPPORTED)?;
    properties.sharedMemPerMultiprocessor = ask(attribute::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as usize;
    properties.regsPerMultiprocessor = ask(attribute::MAX_REGISTERS_PER_MULTIPROCESSOR)?;
    properties.managedMemory = ask(attribute::MANAGED_MEMORY)?;
    properties.isMultiGpuBoard = ask(attribute::MULTI_GPU_BOARD)?;
    properties.multiGpuBoardGroupID = ask(attribute::MULTI_GPU_BOARD_GROUP_ID)?;
    properties.hostNativeAtomicSupported = ask(attribute::HOST_NATIVE_ATOMIC_SUPPORTED)?;
    properties.pageableMemoryAccess = ask(attribute::PAGEABLE_MEMORY_ACCESS)?;
    properties.concurrentManagedAccess = ask(attribute::CONCURRENT_MANAGED_ACCESS)?;
    properties.computePreemptionSupported = ask(attribute::COMPUTE_PREEMPTION_SUPPORTED)?;
    properties.canUseHostPointerForRegisteredMem = ask(attribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)?;
    properties.cooperativeLaunch = ask(attribute::COOPERATIVE_LAUNCH)?;
    properties.sharedMemPerBlockOptin = ask(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
    properties.pageableMemoryAccessUsesHostPageTables = ask(attribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?;
    properties.directManagedMemAccessFromHost = ask(attribute::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST)?;
    properties.maxBlocksPerMultiProcessor = ask(attribute::MAX_BLOCKS_PER_MULTIPROCESSOR)?;
    properties.accessPolicyMaxWindowSize = ask(attribute::MAX_ACCESS_POLICY_WINDOW_SIZE)?;
    properties.reservedSharedMemPerBlock = ask(attribute::RESERVED_SHARED_MEMORY_PER_BLOCK)? as usize;
    properties.hostRegisterSupported = ask(attribute::HOST_REGISTER_SUPPORTED)?;
    properties.sparseCudaArraySupported = ask(attribute::SPARSE_CUDA_ARRAY_SUPPORTED)?;
    properties.hostRegisterReadOnlySupported = ask(attribute::READ_ONLY_HOST_REGISTER_SUPPORTED)?;
    properties.timelineSemaphoreInteropSupported = ask(attribute::TIMELINE_SEMAPHORE_INTEROP_SUPPORTED)?;
    properties.memoryPoolsSupported = ask(attribute::MEMORY_POOLS_SUPPORTED)?;
    properties.gpuDirectRDMASupported = ask(attribute::GPU_DIRECT_RDMA_SUPPORTED)?;
    properties.gpuDirectRDMAFlushWritesOptions = ask(attribute::GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)? as c_uint;
    properties.gpuDirectRDMAWritesOrdering = ask(attribute::GPU_DIRECT_RDMA_WRITES_ORDERING)?;
    properties.memoryPoolSupportedHandleTypes = ask(attribute::MEMPOOL_SUPPORTED_HANDLE_TYPES)? as c_uint;
    properties.deferredMappingCudaArraySupported = ask(attribute::DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED)?;
    properties.ipcEventSupported = ask(attribute::IPC_EVENT_SUPPORTED)?;
    properties.clusterLaunch = ask(attribute::CLUSTER_LAUNCH)?;
    properties.unifiedFunctionPointers = ask(attribute::UNIFIED_FUNCTION_POINTERS)?;
    properties.deviceNumaConfig = ask(attribute::NUMA_CONFIG)?;
    properties.deviceNumaId = ask(attribute::NUMA_ID)?;
    properties.mpsEnabled = ask(attribute::MPS_ENABLED)?;
    properties.hostNumaId = ask(attribute::HOST_NUMA_ID)?;
    Ok(())
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
