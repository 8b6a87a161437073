//! Launches: their shapes, attributes and parameters.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::call::{Needs, array, enter, functions, get};
use crate::card::PORTABLE_CLUSTER;
use crate::code::{
    COOPERATIVE_LAUNCH_TOO_LARGE, Code, INVALID_CLUSTER_SIZE, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED,
};
use crate::handle::Handle;
use crate::refusal;
use crate::state::Driver;
use crate::work::{HostFunction, Launch, Work};

const MAX_THREADS: u64 = 1024;

/// `CUlaunchConfig` (cuda.h).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute` (cuda.h): a union of 64 bytes at byte 8.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    id: c_int,
    _padding: c_uint,
    value: [c_uint; 16],
}

/// `CUlaunchAttributeID` (cuda.h).
mod attributes {
    use std::ffi::c_int;

    pub const COOPERATIVE: c_int = 2;
    pub const CLUSTER_DIMENSION: c_int = 4;
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
    pub const PROGRAMMATIC_EVENT: c_int = 7;
    pub const LAUNCH_COMPLETION_EVENT: c_int = 12;
    pub const DEVICE_UPDATABLE_NODE: c_int = 13;
}

/// Requested properties of a launch.
#[derive(Clone, Copy)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Cluster size requested by an attribute. The entry itself may require one.
    pub cluster: Option<[u32; 3]>,
    pub shared_bytes: u32,
    pub stream: Handle,
    pub cooperative: bool,
    pub overlaps: bool,
}

impl Shape {
    pub fn plain(grid: [u32; 3], block: [u32; 3], shared_bytes: u32, stream: Handle) -> Self {
        Self { grid, block, cluster: None, shared_bytes, stream, cooperative: false, overlaps: false }
    }

    /// Reads a configuration.
    ///
    /// # Safety
    ///
    /// `config` is null, or valid for reads and has the number of attributes that it states.
    pub unsafe fn read(config: *const LaunchConfig) -> Result<Self, Code> {
        // SAFETY: the caller guarantees that `config` is null or valid for reads.
        let config = unsafe { get(config)? };
        let mut shape = Self::plain(config.grid, config.block, config.shared_bytes, config.stream);
        // SAFETY: the caller guarantees that the configuration has the number of attributes that it states.
        for attribute in unsafe { array(config.attributes, config.attribute_count as usize)? } {
            let [x, y, z] = [attribute.value[0], attribute.value[1], attribute.value[2]];
            match attribute.id {
                attributes::COOPERATIVE => shape.cooperative = x != 0,
                attributes::CLUSTER_DIMENSION => shape.cluster = Some([x, y, z]),
                attributes::PROGRAMMATIC_STREAM_SERIALIZATION => shape.overlaps = x != 0,
                attributes::PROGRAMMATIC_EVENT | attributes::LAUNCH_COMPLETION_EVENT => {
                    refusal::once("launch attributes that record events (7, 12) are not emulated");
                    return Err(NOT_SUPPORTED);
                }
                attributes::DEVICE_UPDATABLE_NODE => {
                    refusal::once("device-updatable graph nodes (launch attribute 13) are not emulated");
                    return Err(NOT_SUPPORTED);
                }
                // The other attributes affect speed or memory placement only.
                _ => {}
            }
        }
        Ok(shape)
    }
}

/// Copies the parameters of a launch, given as an array of addresses or as one buffer. `sizes`: offset and size of each
/// parameter that the entry declares.
///
/// # Safety
///
/// `parameters` has a pointer per entry of `sizes`, valid for reads of that many bytes, or `extra` is valid as cuda.h
/// requires.
unsafe fn copy_parameters(
    parameters: *const *const c_void,
    extra: *const *const c_void,
    sizes: &[(usize, usize)],
) -> Result<Vec<Vec<u8>>, Code> {
    if sizes.is_empty() {
        return Ok(Vec::new());
    }
    if !parameters.is_null() {
        // SAFETY: the caller guarantees a pointer per entry of `sizes`.
        let parameters = unsafe { array(parameters, sizes.len())? };
        // SAFETY: the caller guarantees that each pointer is valid for reads of `bytes` bytes.
        let copy = |(from, (_, bytes)): (&*const c_void, &(usize, usize))| unsafe { array(from.cast::<u8>(), *bytes) };
        return parameters.iter().zip(sizes).map(copy).collect();
    }
    if extra.is_null() {
        return Err(INVALID_VALUE);
    }
    // CU_LAUNCH_PARAM_BUFFER_POINTER 1, its size 2, then CU_LAUNCH_PARAM_END 0.
    let (mut buffer, mut length) = (std::ptr::null::<u8>(), 0);
    for at in (0..8).step_by(2) {
        // SAFETY: the caller guarantees a list that ends with CU_LAUNCH_PARAM_END, and the loop stops there.
        match unsafe { *extra.add(at) } as usize {
            // SAFETY: a key other than the end is followed by its value.
            1 => buffer = unsafe { *extra.add(at + 1) }.cast(),
            // SAFETY: a key other than the end is followed by its value, here the address of a size.
            2 => length = unsafe { get(*extra.add(at + 1).cast::<*const usize>())? },
            _ => break,
        }
    }
    // SAFETY: the caller guarantees that the buffer has the given length.
    let buffer = unsafe { array(buffer, length)? };
    let part = |(at, bytes): &(usize, usize)| Some(buffer.get(*at..at.checked_add(*bytes)?)?.to_vec());
    sizes.iter().map(|size| part(size).ok_or(INVALID_VALUE)).collect()
}

impl Driver {
    /// Prepares a launch that fits the GPU and the function. The cluster has the requested size, or the entry's size.
    ///
    /// # Safety
    ///
    /// `parameters` has a pointer per parameter of the function, valid for reads of the parameter's size, or `extra` is
    /// valid as cuda.h requires.
    pub unsafe fn prepare(
        &self,
        function: Handle,
        shape: &Shape,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) -> Result<Work, Code> {
        let Shape { grid, block, shared_bytes, stream, .. } = *shape;
        let known = self.functions.get(&function).ok_or(INVALID_HANDLE)?;
        let code = known.code.clone().ok_or(NOT_SUPPORTED)?;
        let entry = code.entries.get(known.name()).ok_or(INVALID_HANDLE)?;
        let cluster = shape.cluster.filter(|cluster| *cluster != [0; 3]).unwrap_or(entry.cluster);
        let size = [grid, block, cluster];
        let product =
            |sides: [u32; 3]| sides.iter().fold(1_u64, |product, side| product.saturating_mul((*side).into()));
        let fits = block[2] <= 64 && grid[0] <= i32::MAX as u32 && grid[1] <= 65535 && grid[2] <= 65535;
        let none = size.as_flattened().contains(&0);
        if none || !fits || product(block) > MAX_THREADS || shared_bytes > known.shared_bytes {
            return Err(INVALID_VALUE);
        }
        let most = if known.non_portable_cluster { self.card.largest_cluster() } else { PORTABLE_CLUSTER };
        let divides = (0..3).all(|axis| grid[axis].is_multiple_of(cluster[axis]));
        if !divides || product(cluster) > most.into() {
            return Err(INVALID_CLUSTER_SIZE);
        }
        if shape.cooperative && product(grid) > self.resident(function, product(block) as u32, shared_bytes)? {
            return Err(COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        let name = known.name().to_owned();
        // SAFETY: the caller guarantees a readable pointer per parameter, or an `extra` that is valid as in cuda.h.
        let parameters = unsafe { copy_parameters(parameters, extra, &entry.parameters)? };
        let Shape { overlaps, cooperative, .. } = *shape;
        let launch = Launch { code, name, size, shared_bytes, parameters, stream, overlaps, cooperative };
        Ok(Work::Launch(Arc::new(launch)))
    }
}

functions! {
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Handle, parameters: *const *const c_void, extra: *const *const c_void,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let shape = Shape::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes, stream);
        let work = driver.prepare(function, &shape, parameters, extra)?;
        driver.queue.push(stream, work)
    }
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: Handle, parameters: *const *const c_void, extra: *const *const c_void,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let shape = Shape::read(config)?;
        let work = driver.prepare(function, &shape, parameters, extra)?;
        driver.queue.push(shape.stream, work)
    }
    fn cuLaunchCooperativeKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Handle, parameters: *const *const c_void,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let shape = Shape::plain([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes, stream);
        let shape = Shape { cooperative: true, ..shape };
        let work = driver.prepare(function, &shape, parameters, std::ptr::null())?;
        driver.queue.push(stream, work)
    }
    fn cuLaunchHostFunc(stream: Handle, function: usize, data: usize) {
        let driver = enter(NAME, Needs::Context)?;
        if function == 0 { return Err(INVALID_VALUE); }
        crate::run::host_function(driver, stream, HostFunction { function, data, callback_of: None })
    }
    fn cuStreamAddCallback(stream: Handle, function: usize, data: usize, _flags: c_uint) {
        let driver = enter(NAME, Needs::Context)?;
        if function == 0 { return Err(INVALID_VALUE); }
        crate::run::host_function(driver, stream, HostFunction { function, data, callback_of: Some(stream) })
    }
}
