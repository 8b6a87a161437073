//! The driver functions of the fake device. Compiled alone into `libcuda.so.1` by this package's `install`.
//!
//! Stricter than the driver where a program's mistake can be seen: handles must be alive, copies must lie within an
//! allocation, a context must be current, PTX must be for this device, nothing is allocated while a stream captures. Work in
//! a stream runs as late as it may (`queue.rs`). Copies and launches advance a clock, which is an event's time. So the time
//! between two events tells what lies between them.

#![allow(non_snake_case, clippy::missing_safety_doc)]
#![allow(unexpected_cfgs, reason = "a driver function is left out by the cfg of its name")]

mod ptx;
mod queue;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use ptx::{Entries, Entry};
use queue::{Launch, Operation, Queue, Work, copy_parameters, order_of_graph};

type Code = c_int;
type Handle = usize;
type Kernel = extern "C" fn(*const c_char, *const c_uint, c_uint, Handle, *const *const c_void);

const SUCCESS: Code = 0;
const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
const NOT_INITIALIZED: Code = 3;
const NO_DEVICE: Code = 100;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
const NO_BINARY_FOR_GPU: Code = 209;
const INVALID_PTX: Code = 218;
const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const NOT_SUPPORTED: Code = 801;
const CAPTURE_UNSUPPORTED: Code = 900;
const CAPTURE_UNMATCHED: Code = 903;
const CAPTURE_UNJOINED: Code = 904;
const CAPTURE_ISOLATION: Code = 905;
const CAPTURED_EVENT: Code = 907;
const INVALID_CLUSTER_SIZE: Code = 912;

const MEMORY_BYTES: usize = 8 << 30;
/// What a device promises for a base address (CUDA programming guide, "Device memory accesses").
const ALIGNMENT: usize = 256;
/// Fresh memory holds no zeros to rely on.
const FRESH: u8 = 0xCD;
/// Dynamic shared memory that a launch may ask for without cuFuncSetAttribute.
const SHARED_BYTES_UNASKED: c_uint = 48 << 10;
/// Time on the device's clock, microseconds.
const COPY_TIME: u64 = 1000;
const LAUNCH_TIME: u64 = 250;

struct Function {
    name: CString,
    shared_bytes: c_uint,
    /// What the PTX says of it; unknown for machine code.
    entry: Option<Entry>,
}

#[derive(Default)]
struct Device {
    count: c_int,
    major: c_int,
    minor: c_int,
    sms: c_int,
    initialised: bool,
    calls: Vec<String>,
    failures: HashMap<String, Code>,
    kernel: Option<Kernel>,
    clock: u64,
    next_handle: Handle,
    contexts: usize,
    modules: BTreeMap<Handle, Option<Entries>>,
    functions: BTreeMap<Handle, Function>,
    queue: Queue,
    /// Captured and instantiated graphs.
    graphs: BTreeMap<Handle, Arc<Vec<Operation>>>,
    /// Device memory by base address.
    device: BTreeMap<usize, Box<[u128]>>,
    /// Page-locked host memory by base address.
    locked: BTreeMap<usize, Box<[u128]>>,
    device_bytes: usize,
}

static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: Cell<Handle> = const { Cell::new(0) };
}

const CONTEXT: Handle = 0xC0;

fn device() -> MutexGuard<'static, Device> {
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---- For the test ----

#[unsafe(no_mangle)]
extern "C" fn fake_reset() {
    let mut device = device();
    let queue = Queue::new();
    *device = Device { count: 1, major: 8, minor: 0, sms: 4, next_handle: 0x1000, queue, ..Device::default() };
    CURRENT.set(0);
}

#[unsafe(no_mangle)]
extern "C" fn fake_set_device(major: c_int, minor: c_int, sms: c_int) {
    let mut device = device();
    (device.major, device.minor, device.sms) = (major, minor, sms);
}

#[unsafe(no_mangle)]
extern "C" fn fake_set_device_count(count: c_int) {
    device().count = count;
}

/// # Safety
///
/// `function` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_fail_next(function: *const c_char, code: Code) {
    let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
    device().failures.insert(function, code);
}

#[unsafe(no_mangle)]
extern "C" fn fake_on_launch(kernel: Kernel) {
    device().kernel = Some(kernel);
}

#[unsafe(no_mangle)]
extern "C" fn fake_take_calls() -> *mut c_char {
    let calls = std::mem::take(&mut device().calls).join("\n");
    CString::new(calls).unwrap().into_raw()
}

/// # Safety
///
/// `text` came from `fake_take_calls`, and is freed once.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_free_text(text: *mut c_char) {
    drop(unsafe { CString::from_raw(text) });
}

#[unsafe(no_mangle)]
extern "C" fn fake_live_objects() -> usize {
    let device = device();
    device.contexts
        + device.modules.len()
        + device.queue.live_objects()
        + device.graphs.len()
        + device.device.len()
        + device.locked.len()
}

// ---- The driver ----

/// Whether a function needs `cuInit` or a current context first.
#[derive(PartialEq, Clone, Copy)]
enum Needs {
    Nothing,
    Init,
    Context,
}

/// Writes the call down. Then fails it if the test wants that or if it comes too early.
fn enter(name: &str, needs: Needs) -> Result<MutexGuard<'static, Device>, Code> {
    let mut device = device();
    let question = ["cuDeviceGet", "cuDeviceTotalMem", "cuDriverGet", "cuCtxGet"].iter().any(|q| name.starts_with(q));
    if !question {
        device.calls.push(name.to_owned());
    }
    if let Some(code) = device.failures.remove(name) {
        return Err(code);
    }
    if needs != Needs::Nothing && !device.initialised {
        return Err(NOT_INITIALIZED);
    }
    if needs == Needs::Context && (CURRENT.get() != CONTEXT || device.contexts == 0) {
        return Err(INVALID_CONTEXT);
    }
    Ok(device)
}

impl Device {
    fn handle(&mut self) -> Handle {
        self.next_handle += 0x10;
        self.next_handle
    }

    fn add_graph(&mut self, operations: Arc<Vec<Operation>>) -> Handle {
        let handle = self.handle();
        self.graphs.insert(handle, operations);
        handle
    }

    fn remove_graph(&mut self, graph: Handle) -> Result<(), Code> {
        self.graphs.remove(&graph).map(drop).ok_or(INVALID_HANDLE)
    }

    /// Succeeds where `bytes` from `address` lie within one allocation of the device's.
    fn within(&self, address: u64, bytes: usize) -> Result<usize, Code> {
        let address = address as usize;
        let (base, memory) = self.device.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let end = base + size_of_val(&**memory);
        if address.checked_add(bytes).is_some_and(|last| last <= end) { Ok(address) } else { Err(INVALID_VALUE) }
    }
}

/// `bytes` at a multiple of [`ALIGNMENT`], as the base address and the memory to keep.
fn allocate(bytes: usize) -> (usize, Box<[u128]>) {
    // Over-aligned by hand: the map's key is the aligned address, the box the memory behind it.
    let words = bytes.div_ceil(16) + ALIGNMENT / 16;
    let mut memory = vec![u128::from_ne_bytes([FRESH; 16]); words].into_boxed_slice();
    let base = (memory.as_mut_ptr() as usize).next_multiple_of(ALIGNMENT);
    (base, memory)
}

/// Queues a copy.
fn copy(
    name: &str,
    stream: Handle,
    bytes: usize,
    ends: impl FnOnce(&Device) -> Result<(usize, usize), Code>,
) -> Result<(), Code> {
    let mut device = enter(name, Needs::Context)?;
    let (to, from) = ends(&device)?;
    device.queue.push(stream, Work::Copy { to, from, bytes })
}

/// A copy that the caller waits for.
fn copy_now(name: &str, bytes: usize, ends: impl FnOnce(&Device) -> Result<(usize, usize), Code>) -> Result<(), Code> {
    device().queue.check_nothing_captured()?;
    copy(name, 0, bytes, ends)?;
    run(|queue| queue.before_end_of(0))
}

/// Runs queued operations in an order.
fn run(order: impl FnOnce(&Queue) -> Result<Vec<usize>, Code>) -> Result<(), Code> {
    let order = order(&device().queue)?;
    for index in order {
        let work = device().queue.take(index);
        match work {
            Work::Pass(event) => {
                let mut device = device();
                let now = device.clock;
                device.queue.pass(event, index, now);
            }
            Work::Graph(operations) => {
                order_of_graph(&operations).into_iter().for_each(|index| work_off(&operations[index].work));
            }
            work => work_off(&work),
        }
    }
    Ok(())
}

/// Does the work of one operation, but for graphs and events, which `run` does.
fn work_off(work: &Work) {
    match work {
        Work::Copy { to, from, bytes } => {
            device().clock += COPY_TIME;
            unsafe { ptr::copy(*from as *const u8, *to as *mut u8, *bytes) };
        }
        Work::Fill { to, value, bytes } => unsafe { ptr::write_bytes(*to as *mut u8, *value, *bytes) },
        Work::Launch(launch) => {
            let kernel = {
                let mut device = device();
                device.clock += LAUNCH_TIME;
                device.kernel
            };
            // The kernel is the test's, and must not run under a lock of ours.
            if let Some(kernel) = kernel {
                let parameters: Vec<_> = launch.parameters.iter().map(|bytes| bytes.as_ptr().cast()).collect();
                let Launch { name, size, shared_bytes, stream, .. } = &**launch;
                kernel(name.as_ptr(), size.as_ptr().cast(), *shared_bytes, *stream, parameters.as_ptr());
            }
        }
        Work::Graph(_) | Work::Pass(_) | Work::Join => {}
    }
}

/// `CUlaunchConfig` (cuda.h).
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute` (cuda.h) of a cluster's extent, in its union of 64 bytes at byte 8.
#[repr(C)]
struct LaunchAttribute {
    id: c_int,
    _padding: c_uint,
    cluster: [c_uint; 3],
    _rest: [c_uint; 13],
}

/// A launch, of clusters of the size that is asked for or else the entry's.
fn launch(
    name: &str,
    function: Handle,
    [grid, block]: [[c_uint; 3]; 2],
    cluster: Option<[c_uint; 3]>,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *const *const c_void,
) -> Result<(), Code> {
    let mut device = enter(name, Needs::Context)?;
    let function = device.functions.get(&function).ok_or(INVALID_HANDLE)?;
    let entry = function.entry.as_ref().ok_or(NOT_SUPPORTED)?;
    let cluster = cluster.unwrap_or(entry.cluster);
    let size = [grid, block, cluster];
    let threads = block.iter().product::<c_uint>();
    if size.as_flattened().contains(&0) || threads > 1024 || shared_bytes > function.shared_bytes {
        return Err(INVALID_VALUE);
    }
    if (0..3).any(|axis| grid[axis] % cluster[axis] != 0) {
        return Err(INVALID_CLUSTER_SIZE);
    }
    let name = function.name.clone();
    let parameters = unsafe { copy_parameters(parameters, &entry.parameters)? };
    device.queue.push(stream, Work::Launch(Arc::new(Launch { name, size, shared_bytes, parameters, stream })))
}

/// Functions of the C ABI from bodies that may use `?`; `NAME` is the function's own.
macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block )*) => {
        $(
            /// # Safety
            ///
            /// As cuda.h says of the function of this name.
            #[cfg(not($name))]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> Code {
                #[allow(dead_code)]
                const NAME: &str = stringify!($name);
                #[allow(unused_unsafe)]
                let body = || -> Result<(), Code> { unsafe { $body } };
                body().map_or_else(|code| code, |()| SUCCESS)
            }
        )*
    };
}

/// Functions that the fake device lacks. Every program that links the driver looks for them, but no test here calls one.
macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> Code {
                enter(stringify!($name), Needs::Nothing).map_or_else(|code| code, |_| NOT_SUPPORTED)
            }
        )*
    };
}

unsupported! {
    cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxSetFlags_v2 cuCtxGetApiVersion cuCtxGetDevice
    cuModuleLoad cuModuleLoadData cuModuleGetGlobal_v2
    cuFuncGetAttribute cuFuncSetCacheConfig cuFuncSetSharedMemConfig
    cuOccupancyMaxPotentialBlockSize cuOccupancyAvailableDynamicSMemPerBlock
    cuStreamGetFlags cuStreamGetPriority cuLaunchHostFunc
    cuMemAllocAsync cuMemFreeAsync
    cuMemsetD8_v2 cuMemsetD16_v2 cuMemsetD32_v2 cuMemsetD16Async cuMemsetD32Async
}

functions! {
    fn cuInit(_flags: c_uint) {
        let mut device = enter(NAME, Needs::Nothing)?;
        if device.count == 0 { return Err(NO_DEVICE); }
        device.initialised = true;
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut c_int) { *version = 12090; Ok(()) }
    fn cuDeviceGetCount(count: *mut c_int) {
        *count = enter(NAME, Needs::Init)?.count;
        Ok(())
    }
    fn cuDeviceGet(handle: *mut c_int, ordinal: c_int) {
        let device = enter(NAME, Needs::Init)?;
        if !(0..device.count).contains(&ordinal) { return Err(INVALID_DEVICE); }
        *handle = ordinal;
        Ok(())
    }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) {
        let _device = enter(NAME, Needs::Init)?;
        let text = c"Fake GPU".to_bytes_with_nul();
        if text.len() > len as usize { return Err(INVALID_VALUE); }
        ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        Ok(())
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) {
        let _device = enter(NAME, Needs::Init)?;
        *bytes = MEMORY_BYTES;
        Ok(())
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let device = enter(NAME, Needs::Init)?;
        *value = match attribute {
            16 => device.sms,
            75 => device.major,
            76 => device.minor,
            81 | 97 => 227 << 10,
            _ => 1,
        };
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) {
        let mut device = enter(NAME, Needs::Init)?;
        device.contexts += 1;
        *context = CONTEXT;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) {
        let mut device = enter(NAME, Needs::Init)?;
        device.contexts = device.contexts.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }
    fn cuCtxSetCurrent(context: Handle) {
        let _device = enter(NAME, Needs::Init)?;
        CURRENT.set(context);
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut Handle) { *context = CURRENT.get(); Ok(()) }
    fn cuCtxSynchronize() {
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        run(|queue| Ok(queue.all()))
    }

    fn cuModuleLoadDataEx(
        module: *mut Handle, image: *const c_char, count: c_uint, options: *const c_int, values: *const *mut c_char,
    ) {
        let mut device = enter(NAME, Needs::Context)?;
        let image = CStr::from_ptr(image).to_bytes();
        let entries = if image.starts_with(b"\x7fELF") { None } else {
            let result = ptx::entries(&String::from_utf8_lossy(image), device.major, device.minor);
            if let Err((_, complaint)) = &result {
                for option in 0..count as usize {
                    // CU_JIT_ERROR_LOG_BUFFER
                    if *options.add(option) == 5 {
                        let text = CString::new(*complaint).unwrap();
                        ptr::copy_nonoverlapping(text.as_ptr(), *values.add(option), text.as_bytes_with_nul().len());
                    }
                }
            }
            Some(result.map_err(|(code, _)| code)?)
        };
        *module = device.handle();
        device.modules.insert(*module, entries);
        Ok(())
    }
    fn cuModuleUnload(module: Handle) {
        let mut device = enter(NAME, Needs::Context)?;
        device.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE)
    }
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        let mut device = enter(NAME, Needs::Context)?;
        let name = CStr::from_ptr(name).to_owned();
        let entry = match device.modules.get(&module).ok_or(INVALID_HANDLE)? {
            Some(entries) => Some(entries.get(&*name.to_string_lossy()).ok_or(NOT_FOUND)?.clone()),
            None => None,
        };
        *function = device.handle();
        device.functions.insert(*function, Function { name, shared_bytes: SHARED_BYTES_UNASKED, entry });
        Ok(())
    }
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) {
        let mut device = enter(NAME, Needs::Context)?;
        let function = device.functions.get_mut(&function).ok_or(INVALID_HANDLE)?;
        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if attribute == 8 { function.shared_bytes = value as c_uint; }
        Ok(())
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, function: Handle, _threads: c_int, _shared_bytes: usize,
    ) {
        let device = enter(NAME, Needs::Context)?;
        *blocks = 2;
        device.functions.contains_key(&function).then_some(()).ok_or(INVALID_HANDLE)
    }
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Handle, parameters: *const *const c_void, _extra: *const c_void,
    ) {
        let size = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]];
        launch(NAME, function, size, None, shared_bytes, stream, parameters)
    }
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: Handle, parameters: *const *const c_void, _extra: *const c_void,
    ) {
        let config = &*config;
        let mut cluster = None;
        for at in 0..config.attribute_count as usize {
            let attribute = &*config.attributes.add(at);
            match attribute.id {
                // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                4 => cluster = Some(attribute.cluster),
                // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a grid may begin early, but need not.
                6 => {}
                _ => return Err(NOT_SUPPORTED),
            }
        }
        launch(NAME, function, [config.grid, config.block], cluster, config.shared_bytes, config.stream, parameters)
    }

    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, _priority: c_int) {
        let mut device = enter(NAME, Needs::Context)?;
        let handle = device.handle();
        // CU_STREAM_NON_BLOCKING
        device.queue.add_stream(handle, flags & 1 != 0);
        *stream = handle;
        Ok(())
    }
    fn cuStreamDestroy_v2(stream: Handle) { enter(NAME, Needs::Context)?.queue.remove_stream(stream) }
    fn cuStreamSynchronize(stream: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run(|queue| queue.before_end_of(stream))
    }
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        enter(NAME, Needs::Context)?.queue.wait(stream, event)
    }
    fn cuEventCreate(event: *mut Handle, _flags: c_uint) {
        let mut device = enter(NAME, Needs::Context)?;
        let handle = device.handle();
        device.queue.add_event(handle);
        *event = handle;
        Ok(())
    }
    fn cuEventDestroy_v2(event: Handle) { enter(NAME, Needs::Context)?.queue.remove_event(event) }
    fn cuEventRecord(event: Handle, stream: Handle) { enter(NAME, Needs::Context)?.queue.record(event, stream) }
    fn cuEventQuery(event: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run(|queue| queue.before(event))
    }
    fn cuEventSynchronize(event: Handle) {
        drop(enter(NAME, Needs::Context)?);
        run(|queue| queue.before(event))
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let device = enter(NAME, Needs::Context)?;
        let microseconds = device.queue.time(end)? - device.queue.time(start)?;
        *milliseconds = microseconds as f32 / 1000.0;
        Ok(())
    }

    fn cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) {
        enter(NAME, Needs::Context)?.queue.begin_capture(stream)
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let mut device = enter(NAME, Needs::Context)?;
        *graph = 0;
        let operations = device.queue.end_capture(stream)?;
        *graph = device.add_graph(Arc::new(operations));
        Ok(())
    }
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: c_ulonglong) {
        let mut device = enter(NAME, Needs::Context)?;
        let operations = device.graphs.get(&graph).ok_or(INVALID_HANDLE)?.clone();
        *executable = device.add_graph(operations);
        Ok(())
    }
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let mut device = enter(NAME, Needs::Context)?;
        let operations = device.graphs.get(&executable).ok_or(INVALID_HANDLE)?.clone();
        device.queue.push(stream, Work::Graph(operations))
    }
    fn cuGraphExecDestroy(executable: Handle) { enter(NAME, Needs::Context)?.remove_graph(executable) }
    fn cuGraphDestroy(graph: Handle) { enter(NAME, Needs::Context)?.remove_graph(graph) }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let device = enter(NAME, Needs::Context)?;
        (*free, *total) = (MEMORY_BYTES - device.device_bytes, MEMORY_BYTES);
        Ok(())
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let mut device = enter(NAME, Needs::Context)?;
        if bytes == 0 { return Err(INVALID_VALUE); }
        device.queue.check_nothing_captured()?;
        if device.device_bytes.saturating_add(bytes) > MEMORY_BYTES { return Err(OUT_OF_MEMORY); }
        let (base, memory) = allocate(bytes);
        device.device_bytes += size_of_val(&*memory);
        device.device.insert(base, memory);
        *address = base as u64;
        Ok(())
    }
    fn cuMemFree_v2(address: u64) {
        // The driver waits for all that may still use the memory.
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        run(|queue| Ok(queue.all()))?;
        let mut device = device();
        let memory = device.device.remove(&(address as usize)).ok_or(INVALID_VALUE)?;
        device.device_bytes -= size_of_val(&*memory);
        Ok(())
    }
    fn cuMemAllocHost_v2(address: *mut usize, bytes: usize) {
        let mut device = enter(NAME, Needs::Context)?;
        device.queue.check_nothing_captured()?;
        let (base, memory) = allocate(bytes);
        device.locked.insert(base, memory);
        *address = base;
        Ok(())
    }
    fn cuMemFreeHost(address: usize) {
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        run(|queue| Ok(queue.all()))?;
        let mut device = device();
        device.locked.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }
    fn cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize) {
        copy_now(NAME, bytes, |device| Ok((device.within(to, bytes)?, from)))
    }
    fn cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize) {
        copy_now(NAME, bytes, |device| Ok((to, device.within(from, bytes)?)))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now(NAME, bytes, |device| Ok((device.within(to, bytes)?, device.within(from, bytes)?)))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: Handle) {
        copy(NAME, stream, bytes, |device| Ok((device.within(to, bytes)?, from)))
    }
    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: Handle) {
        copy(NAME, stream, bytes, |device| Ok((to, device.within(from, bytes)?)))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy(NAME, stream, bytes, |device| {
            Ok((device.within(to, bytes)?, device.within(from, bytes)?))
        })
    }
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) {
        let mut device = enter(NAME, Needs::Context)?;
        let to = device.within(to, count)?;
        device.queue.push(stream, Work::Fill { to, value, bytes: count })
    }

    // Writes its arguments down instead of encoding them: address, the two extents, the two sides of the box.
    fn cuTensorMapEncodeTiled(
        map: *mut [u64; 16], data_type: c_int, rank: c_uint, address: u64, extents: *const [u64; 2], strides: *const u64,
        r#box: *const [c_uint; 2], element_strides: *const [c_uint; 2], interleave: c_int, swizzle: c_int,
        _l2_promotion: c_int, outside: c_int,
    ) {
        let device = enter(NAME, Needs::Context)?;
        let (extents, sides) = (*extents, *r#box);
        let bytes = (extents[1] - 1) * *strides + extents[0];
        device.within(address, bytes as usize)?;
        // Of the rules of cuda.h, those that can be broken here: rows are multiples of 16 bytes, a box is no wider than the
        // 128-byte swizzle.
        let fits = (data_type, rank, interleave, swizzle, outside) == (0, 2, 0, 3, 0)
            && *element_strides == [1, 1]
            && address % 16 == 0
            && *strides % 16 == 0
            && sides[0] <= 128
            && (1..=256).contains(&sides[1]);
        let mut bits = [0; 16];
        bits[..5].copy_from_slice(&[address, extents[0], extents[1], sides[0].into(), sides[1].into()]);
        *map = bits;
        fits.then_some(()).ok_or(INVALID_VALUE)
    }

    fn cuGetErrorName(code: Code, text: *mut *const c_char) {
        let name = describe(code).map(|(name, _)| name);
        *text = name.map_or(ptr::null(), CStr::as_ptr);
        name.map(drop).ok_or(INVALID_VALUE)
    }
    fn cuGetErrorString(code: Code, text: *mut *const c_char) {
        let sentence = describe(code).map(|(_, sentence)| sentence);
        *text = sentence.map_or(ptr::null(), CStr::as_ptr);
        sentence.map(drop).ok_or(INVALID_VALUE)
    }
}

fn describe(code: Code) -> Option<(&'static CStr, &'static CStr)> {
    Some(match code {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        NO_BINARY_FOR_GPU => {
            (c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device")
        }
        INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        222 => (c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain."),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        700 => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing")
        }
        CAPTURE_UNMATCHED => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            c"the operation is not permitted on a stream which is not the origin of the capture",
        ),
        CAPTURE_UNJOINED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capture contains forked work that was not joined")
        }
        CAPTURE_ISOLATION => {
            (c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream")
        }
        CAPTURED_EVENT => {
            (c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream")
        }
        INVALID_CLUSTER_SIZE => (c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"cluster misconfiguration"),
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}
