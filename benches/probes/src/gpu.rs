//! The GPU: its modules, launches, and events around them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use anyhow::{Context as _, Result, anyhow, ensure};
use cuda_driver::cust::context::Context;
use cuda_driver::cust::device::{Device, DeviceAttribute};
use cuda_driver::cust::module::Module;
use cuda_driver::{last_failure, sys};
use gpu_arch::{Arch, Capability};

/// Name, architecture and PTX of every build of every module.
const KERNELS: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Bytes of the buffer for results.
const RESULT_BYTES: usize = 1 << 16;

/// Bytes of a row of a tensor.
pub const ROW_BYTES: u64 = 128;

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub enum Value {
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Long(u64),
    /// Parameter of `tensor_copies`.
    Tensor(Tensor),
}

/// Parameter of `tensor_copies`. The kernel's `Tensor` documents the fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub map: sys::CUtensorMap,
    pub out: u64,
    pub rows: u32,
    pub stages: u32,
    pub times: u32,
    pub wrap: u32,
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Value::Word(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Value::Long(value)
    }
}

/// Configuration of a launch.
#[derive(Clone, Copy, Default)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The grid may start before the previous grid has ended.
    pub overlaps: bool,
}

impl Grid {
    /// Makes a grid without shared memory.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, ..Self::default() }
    }

    /// Sets the bytes of dynamic shared memory.
    pub fn shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }
}

/// A GPU, prepared for probes.
pub struct Gpu {
    pub name: String,
    pub capability: Capability,
    pub multiprocessors: u32,
    /// Address of the kernels' results.
    pub out: u64,
    stream: sys::CUstream,
    events: [sys::CUevent; 2],
    /// Launched entries, each with its maximum of dynamic shared memory.
    functions: RefCell<HashMap<String, (sys::CUfunction, u32)>>,
    /// Loaded modules. Declared before the context, so that they are dropped first.
    modules: RefCell<HashMap<&'static str, Module>>,
    _context: Context,
}

/// Converts a driver's result.
fn check(result: sys::CUresult) -> Result<()> {
    ensure!(
        result == sys::CUresult::CUDA_SUCCESS,
        "{}",
        last_failure().map_or_else(|| format!("driver error {result:?}"), |failure| failure.to_string())
    );
    Ok(())
}

/// Returns name and PTX of a module for a GPU. `None`: the GPU does not run the module.
fn ptx(module: &str, capability: Capability) -> Option<(&'static str, &'static str)> {
    let runs = |arch: &str| arch.parse::<Arch>().is_ok_and(|arch| arch.runs_on(capability));
    // No GPU runs two of a module's architectures, so the first match is the only one.
    KERNELS.iter().find(|(name, arch, _)| *name == module && runs(arch)).map(|&(name, _, ptx)| (name, ptx))
}

impl Gpu {
    /// Opens the first GPU.
    pub fn open() -> Result<Self> {
        cuda_driver::probe().map_err(|reason| anyhow!("no CUDA device: {reason}"))?;
        let device = Device::get_device(0)?;
        let attribute = |which| device.get_attribute(which).map(|value| value as u32);
        let capability =
            (attribute(DeviceAttribute::ComputeCapabilityMajor)?, attribute(DeviceAttribute::ComputeCapabilityMinor)?);
        let context = Context::new(device)?;
        let (mut stream, mut events, mut out) = (ptr::null_mut(), [ptr::null_mut(); 2], 0);
        // SAFETY: the context is current, and the outputs outlive the calls.
        unsafe {
            check(sys::cuStreamCreateWithPriority(&mut stream, 0, 0))?;
            for event in &mut events {
                check(sys::cuEventCreate(event, 0))?;
            }
            check(sys::cuMemAlloc_v2(&mut out, RESULT_BYTES))?;
        }
        Ok(Self {
            name: device.name()?,
            capability,
            multiprocessors: attribute(DeviceAttribute::MultiprocessorCount)?,
            out,
            stream,
            events,
            functions: RefCell::default(),
            modules: RefCell::default(),
            _context: context,
        })
    }

    /// `true` if the GPU runs the module.
    pub fn runs(&self, module: &str) -> bool {
        ptx(module, self.capability).is_some()
    }

    /// Allocates zeroed memory.
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the context is current; `address` outlives the call.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut address, bytes as usize)).with_context(|| format!("{bytes} bytes"))?;
            check(sys::cuMemsetD8_v2(address, 0, bytes as usize))?;
        }
        Ok(address)
    }

    /// Returns an entry, named `module::entry`, for launches with up to `shared` bytes of shared memory.
    fn function(&self, kernel: &str, shared: u32) -> Result<sys::CUfunction> {
        let mut functions = self.functions.borrow_mut();
        if let Some(known) = functions.get(kernel).filter(|known| known.1 >= shared) {
            return Ok(known.0);
        }
        let (module, entry) = kernel.split_once("::").context("expected `module::entry`")?;
        let mut modules = self.modules.borrow_mut();
        let (name, ptx) = ptx(module, self.capability).context("the GPU does not run this module")?;
        if !modules.contains_key(name) {
            modules.insert(name, Module::from_ptx(ptx, &[]).with_context(|| format!("loading `{name}`"))?);
        }
        let function = modules[name].get_function(entry)?.to_raw();
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module, and the value is a number of bytes.
        check(unsafe { sys::cuFuncSetAttribute(function, attribute, shared as i32) })?;
        functions.insert(kernel.to_owned(), (function, shared));
        Ok(function)
    }

    /// Queues a kernel, named `module::entry`.
    pub fn launch(&self, kernel: &str, grid: Grid, values: &[Value]) -> Result<()> {
        let function = self.function(kernel, grid.shared)?;
        let pointer = |value: &Value| match value {
            Value::Word(word) => ptr::from_ref(word).cast_mut().cast::<c_void>(),
            Value::Long(long) => ptr::from_ref(long).cast_mut().cast(),
            Value::Tensor(tensor) => ptr::from_ref(tensor).cast_mut().cast(),
        };
        let mut parameters: Vec<*mut c_void> = values.iter().map(pointer).collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            value: sys::CUlaunchAttributeValue { programmatic_stream_serialization_allowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: `values` match the kernel's parameters, and the pointers to them outlive the call. The kernels access
        // only memory of the probes, which lives until the end.
        let launched = unsafe {
            if grid.overlaps {
                sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), ptr::null_mut())
            } else {
                let [blocks, threads] = [grid.blocks, grid.threads].map(|along_x| [along_x, 1, 1]);
                sys::cuLaunchKernel(
                    function,
                    blocks[0],
                    blocks[1],
                    blocks[2],
                    threads[0],
                    threads[1],
                    threads[2],
                    grid.shared,
                    self.stream,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
        };
        check(launched).with_context(|| format!("launching {kernel}"))
    }

    /// Waits for all queued work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream belongs to the current context.
        check(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Launches a kernel, waits, and returns its first `numbers` results.
    pub fn ask(&self, kernel: &str, grid: Grid, values: &[Value], numbers: usize) -> Result<Vec<u64>> {
        self.launch(kernel, grid, values)?;
        self.synchronize().with_context(|| kernel.to_owned())?;
        self.results(numbers)
    }

    /// Returns the first `numbers` results. The kernels must be complete.
    pub fn results(&self, numbers: usize) -> Result<Vec<u64>> {
        let mut results = vec![0_u64; numbers];
        ensure!(numbers * 8 <= RESULT_BYTES, "{numbers} results do not fit {RESULT_BYTES} bytes");
        // SAFETY: both sides have `numbers * 8` bytes.
        check(unsafe { sys::cuMemcpyDtoH_v2(results.as_mut_ptr().cast(), self.out, numbers * 8) })?;
        Ok(results)
    }

    /// Returns the nanoseconds between two events around the queued work.
    pub fn timed(&self, queue: impl FnOnce() -> Result<()>) -> Result<f64> {
        let [before, behind] = self.events;
        // SAFETY: the events and the stream belong to the current context.
        check(unsafe { sys::cuEventRecord(before, self.stream) })?;
        queue()?;
        let mut milliseconds = 0.0;
        // SAFETY: the events and the stream belong to the current context, and `milliseconds` outlives the call.
        unsafe {
            check(sys::cuEventRecord(behind, self.stream))?;
            check(sys::cuEventSynchronize(behind))?;
            check(sys::cuEventElapsedTime(&mut milliseconds, before, behind))?;
        }
        Ok(f64::from(milliseconds) * 1e6)
    }

    /// Captures the queued work in a graph, without running it.
    pub fn graph(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph<'_>> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream belongs to the current context and captures nothing else. The captured graph is destroyed
        // once.
        unsafe {
            check(sys::cuStreamBeginCapture_v2(self.stream, mode))?;
            let queued = queue();
            check(sys::cuStreamEndCapture(self.stream, &mut graph))?;
            queued?;
            let instantiated = check(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            check(sys::cuGraphDestroy(graph))?;
            instantiated?;
        }
        Ok(Graph { gpu: self, executable })
    }

    /// Makes the tensor map of `rows` rows of 128 bytes, in boxes of `box_rows` rows.
    pub fn tensor_map(&self, address: u64, rows: u64, box_rows: u32) -> Result<sys::CUtensorMap> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (extents, strides, boxes, steps) = ([ROW_BYTES, rows], [ROW_BYTES], [ROW_BYTES as u32, box_rows], [1, 1]);
        // SAFETY: the arrays have the length that rank two needs, and the call only stores the address.
        check(unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2,
                address as *mut c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CU_TENSOR_MAP_SWIZZLE_NONE,
                sys::CU_TENSOR_MAP_L2_PROMOTION_NONE,
                sys::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map)
    }
}

/// A graph of launches.
pub struct Graph<'g> {
    gpu: &'g Gpu,
    executable: sys::CUgraphExec,
}

impl Graph<'_> {
    /// Queues the graph.
    pub fn launch(&self) -> Result<()> {
        // SAFETY: the graph is alive and belongs to the stream's context.
        check(unsafe { sys::cuGraphLaunch(self.executable, self.gpu.stream) })
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // SAFETY: the graph is destroyed once. A failure cannot be reported from `drop`.
        unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
