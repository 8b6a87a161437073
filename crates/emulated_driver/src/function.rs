//! Functions and kernels, which share one kind of handle here: attributes and occupancy.

use std::ffi::{CString, c_char, c_int, c_uint};

use crate::call::{Needs, enter, functions, put, text};
use crate::card::{PORTABLE_CLUSTER, attribute};
use crate::code::{Code as ErrorCode, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND};
use crate::handle::Handle;
use crate::launch::{LaunchConfig, Shape};
use crate::objects::{Facts, Function};
use crate::state::Driver;

/// Dynamic shared memory of a launch without cuFuncSetAttribute, in bytes.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// `CUfunction_attribute` (cuda.h).
mod attributes {
    use std::ffi::c_int;

    pub const MAX_THREADS: c_int = 0;
    pub const SHARED_BYTES: c_int = 1;
    pub const CONST_BYTES: c_int = 2;
    pub const LOCAL_BYTES: c_int = 3;
    pub const REGISTERS: c_int = 4;
    pub const PTX_VERSION: c_int = 5;
    pub const BINARY_VERSION: c_int = 6;
    pub const CACHE_MODE: c_int = 7;
    pub const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
    pub const CARVEOUT: c_int = 9;
    pub const CLUSTER_MUST_BE_SET: c_int = 10;
    pub const CLUSTER_WIDTH: c_int = 11;
    pub const CLUSTER_DEPTH: c_int = 13;
    pub const NON_PORTABLE_CLUSTER: c_int = 14;
    pub const CLUSTER_SCHEDULING: c_int = 15;
}

impl Driver {
    fn function_of(&mut self, module: Handle, name: &str) -> Result<Handle, ErrorCode> {
        let code = self.modules.get(&module).ok_or(INVALID_HANDLE)?.code.clone();
        if code.as_ref().is_some_and(|code| !code.entries.contains_key(name)) {
            return Err(NOT_FOUND);
        }
        let known = self.functions.iter().find(|(_, function)| function.module == module && function.name() == name);
        if let Some((handle, _)) = known {
            return Ok(*handle);
        }
        let handle = self.handle();
        let name = CString::new(name).map_err(|_| INVALID_VALUE)?;
        let function = Function {
            module,
            name,
            code,
            shared_bytes: SHARED_BYTES_UNASKED,
            non_portable_cluster: false,
            hints: [-1, 0],
        };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    fn function(&self, function: Handle) -> Result<&Function, ErrorCode> {
        self.functions.get(&function).ok_or(INVALID_HANDLE)
    }

    fn facts(&self, function: Handle) -> Result<Facts, ErrorCode> {
        self.function(function)?.facts(self.test.is_some())
    }

    fn function_attribute(&self, function: Handle, attribute: c_int) -> Result<c_int, ErrorCode> {
        let (facts, function) = (self.facts(function)?, self.function(function)?);
        let (major, minor) = self.card.capability();
        Ok(match attribute {
            attributes::MAX_THREADS => facts.max_threads as c_int,
            attributes::SHARED_BYTES => facts.static_shared as c_int,
            attributes::CONST_BYTES | attributes::CACHE_MODE => 0,
            attributes::LOCAL_BYTES => facts.local_bytes as c_int,
            attributes::REGISTERS => facts.registers as c_int,
            attributes::PTX_VERSION | attributes::BINARY_VERSION => (major * 10 + minor) as c_int,
            attributes::MAX_DYNAMIC_SHARED_BYTES => function.shared_bytes as c_int,
            attributes::CARVEOUT => function.hints[0],
            attributes::CLUSTER_MUST_BE_SET => facts.cluster.is_some().into(),
            attributes::CLUSTER_WIDTH..=attributes::CLUSTER_DEPTH => {
                facts.cluster.map_or(0, |cluster| cluster[(attribute - attributes::CLUSTER_WIDTH) as usize] as c_int)
            }
            attributes::NON_PORTABLE_CLUSTER => function.non_portable_cluster.into(),
            attributes::CLUSTER_SCHEDULING => function.hints[1],
            _ => return Err(INVALID_VALUE),
        })
    }

    fn set_function_attribute(&mut self, function: Handle, attribute: c_int, value: c_int) -> Result<(), ErrorCode> {
        let static_shared = self.facts(function)?.static_shared;
        let most = self.card.count(attribute::SHARED_BYTES_OF_A_BLOCK_BY_OPT_IN) as u32;
        let function = self.functions.get_mut(&function).ok_or(INVALID_HANDLE)?;
        match attribute {
            attributes::MAX_DYNAMIC_SHARED_BYTES => {
                let bytes = u32::try_from(value).map_err(|_| INVALID_VALUE)?;
                if bytes.saturating_add(static_shared) > most {
                    return Err(INVALID_VALUE);
                }
                function.shared_bytes = bytes;
            }
            attributes::CARVEOUT => function.hints[0] = value,
            attributes::NON_PORTABLE_CLUSTER => function.non_portable_cluster = value != 0,
            attributes::CLUSTER_SCHEDULING => function.hints[1] = value,
            attributes::CLUSTER_WIDTH..=attributes::CLUSTER_DEPTH => {}
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// Number of CTAs that fit an SM, by threads, by registers if the PTX states them, and by shared memory.
    fn blocks(&self, function: Handle, threads: u32, shared_bytes: u64) -> Result<u32, ErrorCode> {
        let facts = self.facts(function)?;
        let count = |attribute| self.card.count(attribute);
        if threads == 0 {
            return Err(INVALID_VALUE);
        }
        if threads > facts.max_threads {
            return Ok(0);
        }
        let warps = u64::from(threads.div_ceil(32));
        let shared = u64::from(facts.static_shared) + shared_bytes + count(attribute::SHARED_BYTES_RESERVED);
        let registers = count(attribute::REGISTERS_OF_A_MULTIPROCESSOR);
        let by_registers = match registers {
            0 => u64::MAX,
            registers => registers / (u64::from(facts.registers.max(1)) * warps * 32),
        };
        let by_threads = count(attribute::THREADS_OF_A_MULTIPROCESSOR) / (warps * 32);
        let by_shared = count(attribute::SHARED_BYTES_OF_A_MULTIPROCESSOR) / shared.max(1);
        let blocks = by_threads.min(by_shared).min(by_registers).min(count(attribute::BLOCKS_OF_A_MULTIPROCESSOR));
        Ok(blocks as u32)
    }

    /// Maximum number of CTAs of a cooperative launch.
    pub fn resident(&self, function: Handle, threads: u32, shared_bytes: u32) -> Result<u64, ErrorCode> {
        let blocks = self.blocks(function, threads, shared_bytes.into())?;
        Ok(u64::from(blocks) * self.card.count(attribute::MULTIPROCESSORS))
    }
}

functions! {
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(function, 0)?;
        let handle = driver.function_of(module, &text(name)?)?;
        put(function, handle)
    }
    fn cuModuleGetFunctionCount(count: *mut c_uint, module: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        let module = driver.modules.get(&module).ok_or(INVALID_HANDLE)?;
        put(count, module.code.as_ref().map_or(0, |code| code.entries.len() as c_uint))
    }
    fn cuModuleEnumerateFunctions(functions: *mut Handle, count: c_uint, module: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        let names = driver.modules.get(&module).ok_or(INVALID_HANDLE)?.code.clone().ok_or(NOT_FOUND)?;
        if functions.is_null() { return Err(INVALID_VALUE); }
        for (at, name) in names.entries.keys().take(count as usize).enumerate() {
            put(functions.add(at), driver.function_of(module, name)?)?;
        }
        Ok(())
    }
    fn cuLibraryGetKernel(kernel: *mut Handle, library: Handle, name: *const c_char) {
        let mut driver = enter(NAME, Needs::Init)?;
        put(kernel, 0)?;
        let handle = driver.function_of(library, &text(name)?)?;
        put(kernel, handle)
    }
    fn cuLibraryGetKernelCount(count: *mut c_uint, library: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        let module = driver.modules.get(&library).ok_or(INVALID_HANDLE)?;
        put(count, module.code.as_ref().map_or(0, |code| code.entries.len() as c_uint))
    }
    fn cuLibraryEnumerateKernels(kernels: *mut Handle, count: c_uint, library: Handle) {
        let mut driver = enter(NAME, Needs::Init)?;
        let names = driver.modules.get(&library).ok_or(INVALID_HANDLE)?.code.clone().ok_or(NOT_FOUND)?;
        if kernels.is_null() { return Err(INVALID_VALUE); }
        for (at, name) in names.entries.keys().take(count as usize).enumerate() {
            put(kernels.add(at), driver.function_of(library, name)?)?;
        }
        Ok(())
    }
    fn cuKernelGetFunction(function: *mut Handle, kernel: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        driver.function(kernel)?;
        put(function, kernel)
    }
    fn cuKernelGetLibrary(library: *mut Handle, kernel: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        put(library, driver.function(kernel)?.module)
    }
    fn cuKernelGetName(name: *mut *const c_char, kernel: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        put(name, driver.function(kernel)?.name.as_ptr())
    }
    fn cuFuncGetName(name: *mut *const c_char, function: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        put(name, driver.function(function)?.name.as_ptr())
    }
    fn cuFuncGetModule(module: *mut Handle, function: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        put(module, driver.function(function)?.module)
    }
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        put(value, driver.function_attribute(function, attribute)?)
    }
    fn cuKernelGetAttribute(value: *mut c_int, attribute: c_int, kernel: Handle, _device: c_int) {
        let driver = enter(NAME, Needs::Init)?;
        put(value, driver.function_attribute(kernel, attribute)?)
    }
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) {
        enter(NAME, Needs::Context)?.set_function_attribute(function, attribute, value)
    }
    fn cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, _device: c_int) {
        enter(NAME, Needs::Init)?.set_function_attribute(kernel, attribute, value)
    }
    fn cuFuncSetCacheConfig(function: Handle, _config: c_int) {
        enter(NAME, Needs::Context)?.function(function).map(drop)
    }
    fn cuKernelSetCacheConfig(kernel: Handle, _config: c_int, _device: c_int) {
        enter(NAME, Needs::Init)?.function(kernel).map(drop)
    }
    fn cuFuncSetSharedMemConfig(function: Handle, _config: c_int) {
        enter(NAME, Needs::Context)?.function(function).map(drop)
    }
    fn cuFuncLoad(function: Handle) { enter(NAME, Needs::Context)?.function(function).map(drop) }
    fn cuFuncIsLoaded(state: *mut c_int, function: Handle) {
        enter(NAME, Needs::Context)?.function(function)?;
        put(state, 1)
    }
    fn cuFuncGetParamInfo(function: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        let driver = enter(NAME, Needs::Context)?;
        let (at, size) = *driver.facts(function)?.parameters.get(index).ok_or(INVALID_VALUE)?;
        put(offset, at)?;
        if bytes.is_null() { Ok(()) } else { put(bytes, size) }
    }
    fn cuKernelGetParamInfo(kernel: Handle, index: usize, offset: *mut usize, bytes: *mut usize) {
        let driver = enter(NAME, Needs::Init)?;
        let (at, size) = *driver.facts(kernel)?.parameters.get(index).ok_or(INVALID_VALUE)?;
        put(offset, at)?;
        if bytes.is_null() { Ok(()) } else { put(bytes, size) }
    }
    fn cuFuncGetParamCount(function: Handle, count: *mut usize) {
        let driver = enter(NAME, Needs::Context)?;
        put(count, driver.facts(function)?.parameters.len())
    }
    fn cuKernelGetParamCount(kernel: Handle, count: *mut usize) {
        let driver = enter(NAME, Needs::Init)?;
        put(count, driver.facts(kernel)?.parameters.len())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: Handle, threads: c_int, shared_bytes: usize,
    ) {
        let driver = enter(NAME, Needs::Context)?;
        let threads = u32::try_from(threads).map_err(|_| INVALID_VALUE)?;
        put(blocks, driver.blocks(function, threads, shared_bytes as u64)? as c_int)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: Handle, threads: c_int, shared_bytes: usize, _flags: c_uint,
    ) {
        let driver = enter(NAME, Needs::Context)?;
        let threads = u32::try_from(threads).map_err(|_| INVALID_VALUE)?;
        put(blocks, driver.blocks(function, threads, shared_bytes as u64)? as c_int)
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: *mut c_int, block: *mut c_int, function: Handle, shared_bytes_of: Option<extern "C" fn(c_int) -> usize>,
        shared_bytes: usize, limit: c_int,
    ) {
        let driver = enter(NAME, Needs::Context)?;
        let most = driver.facts(function)?.max_threads;
        let most = u32::try_from(limit).ok().filter(|limit| *limit > 0).map_or(most, |limit| limit.min(most));
        let mut best = (0, 0);
        for threads in (1..=most / 32).rev().map(|warps| warps * 32) {
            let shared = shared_bytes_of.map_or(shared_bytes, |of| of(threads as c_int));
            let blocks = driver.blocks(function, threads, shared as u64)?;
            if blocks * threads > best.0 { best = (blocks * threads, threads); }
        }
        let blocks = best.0 / best.1.max(1) * driver.card.count(attribute::MULTIPROCESSORS) as u32;
        put(grid, blocks as c_int)?;
        put(block, best.1 as c_int)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, function: Handle, blocks: c_int, _threads: c_int) {
        let driver = enter(NAME, Needs::Context)?;
        let facts = driver.facts(function)?;
        if blocks < 1 { return Err(INVALID_VALUE); }
        let share = driver.card.count(attribute::SHARED_BYTES_OF_A_MULTIPROCESSOR) / blocks as u64;
        let most = driver.card.count(attribute::SHARED_BYTES_OF_A_BLOCK_BY_OPT_IN);
        let own = u64::from(facts.static_shared);
        let reserved = driver.card.count(attribute::SHARED_BYTES_RESERVED);
        put(bytes, share.saturating_sub(reserved).min(most).saturating_sub(own) as usize)
    }
    fn cuOccupancyMaxPotentialClusterSize(size: *mut c_int, function: Handle, _config: *const LaunchConfig) {
        let driver = enter(NAME, Needs::Context)?;
        let portable = !driver.function(function)?.non_portable_cluster;
        put(size, if portable { PORTABLE_CLUSTER } else { driver.card.largest_cluster() } as c_int)
    }
    fn cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: Handle, config: *const LaunchConfig) {
        let driver = enter(NAME, Needs::Context)?;
        let config = Shape::read(config)?;
        let threads = config.block.iter().fold(1_u32, |product, side| product.saturating_mul(*side));
        let blocks = driver.resident(function, threads, config.shared_bytes)?;
        let cluster = config.cluster.or(driver.facts(function)?.cluster).unwrap_or([1; 3]);
        let cluster = cluster.iter().fold(1_u32, |product, side| product.saturating_mul(*side));
        put(clusters, (blocks / u64::from(cluster.max(1))) as c_int)
    }
}
