//! Launches, and attributes of kernels.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use crate::call::{Code, INVALID_CONFIGURATION, INVALID_VALUE, MISSING_CONFIGURATION, functions, get, put};
use crate::driver::{Driver, ready};
use crate::registration::kernel;
use crate::types::{Dim3, Handle, Stream};

/// `cudaLaunchConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: Stream,
    attributes: *const c_void,
    attribute_count: c_uint,
}

/// `CUlaunchConfig`: the same fields with other types. The attributes have the same layout.
#[repr(C)]
struct DriverConfig {
    grid: Dim3,
    block: Dim3,
    shared_bytes: c_uint,
    stream: Stream,
    attributes: *const c_void,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute` of a cooperative launch.
#[repr(C)]
struct Cooperative {
    id: c_int,
    _padding: c_uint,
    value: [c_uint; 16],
}

impl LaunchConfig {
    fn plain(grid: Dim3, block: Dim3, shared_bytes: usize, stream: Stream) -> Self {
        Self { grid, block, shared_bytes, stream, attributes: ptr::null(), attribute_count: 0 }
    }

    fn for_driver(self) -> Result<DriverConfig, Code> {
        let Self { grid, block, shared_bytes, stream, attributes, attribute_count } = self;
        let shared_bytes = shared_bytes.try_into().map_err(|_| INVALID_VALUE)?;
        Ok(DriverConfig { grid, block, shared_bytes, stream, attributes, attribute_count })
    }
}

thread_local! {
    /// Configurations pushed by `<<< >>>`. A kernel's stub pops one.
    static CONFIGURATIONS: RefCell<Vec<LaunchConfig>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
///
/// `arguments` has a valid pointer per parameter of the kernel.
unsafe fn launch(
    driver: &Driver,
    kernel: Handle,
    config: LaunchConfig,
    arguments: *const *const c_void,
) -> Result<(), Code> {
    let Dim3 { x, y, z } = config.block;
    let sides = [config.grid.x, config.grid.y, config.grid.z, x, y, z];
    let threads = u64::from(x).saturating_mul(y.into()).saturating_mul(z.into());
    if sides.contains(&0) || threads > 1024 || z > 64 {
        return Err(INVALID_CONFIGURATION);
    }
    let config = config.for_driver()?;
    let config = ptr::from_ref(&config).cast();
    // SAFETY: `config` outlives the call, and the caller guarantees a valid pointer per parameter.
    unsafe { driver.cuLaunchKernelEx(config, kernel, arguments, ptr::null()) }
}

/// Attributes of a function, with the names of `CUfunction_attribute` in `cuda.h`.
mod attribute {
    use std::ffi::c_int;

    pub const MAX_THREADS_PER_BLOCK: c_int = 0;
    pub const SHARED_SIZE_BYTES: c_int = 1;
    pub const CONST_SIZE_BYTES: c_int = 2;
    pub const LOCAL_SIZE_BYTES: c_int = 3;
    pub const NUM_REGS: c_int = 4;
    pub const PTX_VERSION: c_int = 5;
    pub const BINARY_VERSION: c_int = 6;
    pub const CACHE_MODE_CA: c_int = 7;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;
    pub const CLUSTER_SIZE_MUST_BE_SET: c_int = 10;
    pub const REQUIRED_CLUSTER_WIDTH: c_int = 11;
    pub const REQUIRED_CLUSTER_HEIGHT: c_int = 12;
    pub const REQUIRED_CLUSTER_DEPTH: c_int = 13;
    pub const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: c_int = 14;
    pub const CLUSTER_SCHEDULING_POLICY_PREFERENCE: c_int = 15;
}

functions! {
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared_bytes: usize, stream: Stream) {
        CONFIGURATIONS.with_borrow_mut(|all| all.push(LaunchConfig::plain(grid, block, shared_bytes, stream)));
        Ok(())
    }
    fn __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared_bytes: *mut usize, stream: *mut Stream) {
        let config = CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(MISSING_CONFIGURATION)?;
        put(grid, config.grid)?;
        put(block, config.block)?;
        put(shared_bytes, config.shared_bytes)?;
        put(stream, config.stream)
    }
    fn __cudaLaunchKernel, __cudaLaunchKernel_ptsz(
        handle: Handle, grid: Dim3, block: Dim3, arguments: *const *const c_void, shared_bytes: usize, stream: Stream,
    ) {
        launch(ready()?, handle, LaunchConfig::plain(grid, block, shared_bytes, stream), arguments)
    }
    fn cudaLaunchKernel, cudaLaunchKernel_ptsz(
        function: *const c_void, grid: Dim3, block: Dim3, arguments: *const *const c_void, shared_bytes: usize,
        stream: Stream,
    ) {
        launch(ready()?, kernel(function)?, LaunchConfig::plain(grid, block, shared_bytes, stream), arguments)
    }
    fn cudaLaunchCooperativeKernel, cudaLaunchCooperativeKernel_ptsz(
        function: *const c_void, grid: Dim3, block: Dim3, arguments: *const *const c_void, shared_bytes: usize,
        stream: Stream,
    ) {
        let mut value = [0; 16];
        value[0] = 1;
        // cudaLaunchAttributeCooperative
        let attribute = Cooperative { id: 2, _padding: 0, value };
        let attributes = ptr::from_ref(&attribute).cast();
        let config = LaunchConfig::plain(grid, block, shared_bytes, stream);
        launch(ready()?, kernel(function)?, LaunchConfig { attributes, attribute_count: 1, ..config }, arguments)
    }
    fn cudaLaunchKernelExC, cudaLaunchKernelExC_ptsz(
        config: *const LaunchConfig, function: *const c_void, arguments: *const *const c_void,
    ) {
        launch(ready()?, kernel(function)?, get(config)?, arguments)
    }
    fn cudaLaunchHostFunc, cudaLaunchHostFunc_ptsz(stream: Stream, function: usize, data: usize) {
        ready()?.cuLaunchHostFunc(stream.0, function, data)
    }
    fn cudaStreamAddCallback, cudaStreamAddCallback_ptsz(stream: Stream, function: usize, data: usize, flags: c_uint) {
        ready()?.cuStreamAddCallback(stream.0, function, data, flags)
    }

    fn cudaFuncSetAttribute(function: *const c_void, attribute: c_int, value: c_int) {
        ready()?.cuKernelSetAttribute(attribute, value, kernel(function)?, 0)
    }
    fn cudaKernelSetAttributeForDevice(handle: Handle, attribute: c_int, value: c_int, device: c_int) {
        ready()?.cuKernelSetAttribute(attribute, value, handle, device)
    }
    fn cudaFuncGetAttributes(attributes: *mut FunctionAttributes, function: *const c_void) {
        let (driver, kernel) = (ready()?, kernel(function)?);
        let ask = |attribute: c_int| {
            let mut value = 0;
            driver.cuKernelGetAttribute(&mut value, attribute, kernel, 0).map(|()| value)
        };
        put(attributes, FunctionAttributes {
            shared_bytes: ask(attribute::SHARED_SIZE_BYTES)? as usize,
            const_bytes: ask(attribute::CONST_SIZE_BYTES)? as usize,
            local_bytes: ask(attribute::LOCAL_SIZE_BYTES)? as usize,
            max_threads: ask(attribute::MAX_THREADS_PER_BLOCK)?,
            registers: ask(attribute::NUM_REGS)?,
            ptx_version: ask(attribute::PTX_VERSION)?,
            binary_version: ask(attribute::BINARY_VERSION)?,
            cache_mode: ask(attribute::CACHE_MODE_CA)?,
            max_dynamic_shared_bytes: ask(attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES)?,
            carveout: ask(attribute::PREFERRED_SHARED_MEMORY_CARVEOUT)?,
            cluster_must_be_set: ask(attribute::CLUSTER_SIZE_MUST_BE_SET)?,
            cluster: [
                ask(attribute::REQUIRED_CLUSTER_WIDTH)?,
                ask(attribute::REQUIRED_CLUSTER_HEIGHT)?,
                ask(attribute::REQUIRED_CLUSTER_DEPTH)?,
            ],
            cluster_scheduling: ask(attribute::CLUSTER_SCHEDULING_POLICY_PREFERENCE)?,
            non_portable_cluster: ask(attribute::NON_PORTABLE_CLUSTER_SIZE_ALLOWED)?,
            reserved: [0; 16],
        })
    }
    fn cudaFuncSetCacheConfig(function: *const c_void, _config: c_int) { kernel(function).map(drop) }
    fn cudaFuncSetSharedMemConfig(function: *const c_void, _config: c_int) { kernel(function).map(drop) }
    fn cudaFuncGetName(name: *mut *const std::ffi::c_char, function: *const c_void) {
        ready()?.cuKernelGetName(name, kernel(function)?)
    }
    fn cudaFuncGetParamInfo(function: *const c_void, index: usize, offset: *mut usize, bytes: *mut usize) {
        ready()?.cuKernelGetParamInfo(kernel(function)?, index, offset, bytes)
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: *const c_void, threads: c_int, shared_bytes: usize,
    ) {
        let kernel = kernel(function)?;
        ready()?.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared_bytes, 0)
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: *const c_void, threads: c_int, shared_bytes: usize, flags: c_uint,
    ) {
        let kernel = kernel(function)?;
        ready()?.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared_bytes, flags)
    }
    fn cudaOccupancyAvailableDynamicSMemPerBlock(
        bytes: *mut usize, function: *const c_void, blocks: c_int, threads: c_int,
    ) {
        ready()?.cuOccupancyAvailableDynamicSMemPerBlock(bytes, kernel(function)?, blocks, threads)
    }
    fn cudaOccupancyMaxPotentialClusterSize(
        size: *mut c_int, function: *const c_void, config: *const LaunchConfig,
    ) {
        let config = get(config)?.for_driver()?;
        ready()?.cuOccupancyMaxPotentialClusterSize(size, kernel(function)?, ptr::from_ref(&config).cast())
    }
    fn cudaOccupancyMaxActiveClusters(clusters: *mut c_int, function: *const c_void, config: *const LaunchConfig) {
        let config = get(config)?.for_driver()?;
        ready()?.cuOccupancyMaxActiveClusters(clusters, kernel(function)?, ptr::from_ref(&config).cast())
    }
}

/// `cudaFuncAttributes`.
#[repr(C)]
pub struct FunctionAttributes {
    shared_bytes: usize,
    const_bytes: usize,
    local_bytes: usize,
    max_threads: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared_bytes: c_int,
    carveout: c_int,
    cluster_must_be_set: c_int,
    /// Width, height and depth that a launch must have, in CTAs.
    cluster: [c_int; 3],
    cluster_scheduling: c_int,
    non_portable_cluster: c_int,
    reserved: [c_int; 16],
}
