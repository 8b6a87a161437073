//! The card: its modules, launches, and events around them.

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

/// PTX of every module and architecture.
const KERNELS: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Bytes for what kernels write.
const RESULT_BYTES: usize = 1 << 16;

/// Bytes of a row of a tensor.
pub const ROW_BYTES: u64 = 128;

/// What a kernel is given.
#[derive(Clone, Copy)]
pub enum Value {
    /// 32 bits.
    Word(u32),
    /// 64 bits.
    Long(u64),
    /// What `tensor_copies` takes.
    Tensor(Tensor),
}

/// What `tensor_copies` is told; the kernel's `Tensor` explains it.
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

/// How a kernel is launched.
#[derive(Clone, Copy, Default)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// It may begin before the grid before it has ended.
    pub overlaps: bool,
}

impl Grid {
    /// So many blocks.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, ..Self::default() }
    }

    /// With so many bytes of shared memory.
    pub fn shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }
}

/// A card with what probes need.
pub struct Gpu {
    pub name: String,
    pub capability: Capability,
    pub multiprocessors: u32,
    /// Where kernels write results.
    pub out: u64,
    stream: sys::CUstream,
    events: [sys::CUevent; 2],
    /// Entries that were launched, each with the shared memory that it may have.
    functions: RefCell<HashMap<String, (sys::CUfunction, u32)>>,
    /// Loaded modules; before the context, so that they go first.
    modules: RefCell<HashMap<&'static str, Module>>,
    _context: Context,
}

/// The driver's answer.
fn check(result: sys::CUresult) -> Result<()> {
    ensure!(
        result == sys::CUresult::CUDA_SUCCESS,
        "{}",
        last_failure().map_or_else(|| format!("the driver said {result:?}"), |failure| failure.to_string())
    );
    Ok(())
}

/// PTX of a module for a card, if there is one.
fn ptx(module: &str, capability: Capability) -> Option<(&'static str, &'static str)> {
    let runs = |arch: &str| arch.parse::<Arch>().is_ok_and(|arch| arch.runs_on(capability));
    // Those that a module is compiled for run on no card in common.
    KERNELS.iter().find(|(name, arch, _)| *name == module && runs(arch)).map(|&(name, _, ptx)| (name, ptx))
}

impl Gpu {
    /// Opens the first card.
    pub fn open() -> Result<Self> {
        cuda_driver::probe().map_err(|reason| anyhow!("no CUDA device: {reason}"))?;
        let device = Device::get_device(0)?;
        let attribute = |which| device.get_attribute(which).map(|value| value as u32);
        let capability =
            (attribute(DeviceAttribute::ComputeCapabilityMajor)?, attribute(DeviceAttribute::ComputeCapabilityMinor)?);
        let context = Context::new(device)?;
        let (mut stream, mut events, mut out) = (ptr::null_mut(), [ptr::null_mut(); 2], 0);
        // SAFETY: the context is current; what is written to outlives the calls.
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

    /// Whether the card runs a module.
    pub fn runs(&self, module: &str) -> bool {
        ptx(module, self.capability).is_some()
    }

    /// Memory of its own, zeros.
    pub fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the context is current; `address` outlives the call.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut address, bytes as usize)).with_context(|| format!("{bytes} bytes"))?;
            check(sys::cuMemsetD8_v2(address, 0, bytes as usize))?;
        }
        Ok(address)
    }

    /// An entry, given as `module::entry`, for launches with so much shared memory.
    fn function(&self, kernel: &str, shared: u32) -> Result<sys::CUfunction> {
        let mut functions = self.functions.borrow_mut();
        if let Some(known) = functions.get(kernel).filter(|known| known.1 >= shared) {
            return Ok(known.0);
        }
        let (module, entry) = kernel.split_once("::").context("a module and an entry")?;
        let mut modules = self.modules.borrow_mut();
        let (name, ptx) = ptx(module, self.capability).context("the card does not run it")?;
        if !modules.contains_key(name) {
            modules.insert(name, Module::from_ptx(ptx, &[]).with_context(|| format!("loading `{name}`"))?);
        }
        let function = modules[name].get_function(entry)?.to_raw();
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of a loaded module, and a number of bytes.
        check(unsafe { sys::cuFuncSetAttribute(function, attribute, shared as i32) })?;
        functions.insert(kernel.to_owned(), (function, shared));
        Ok(function)
    }

    /// Queues a kernel, given as `module::entry`.
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
        // SAFETY: `values` are what the kernel takes, each at the address of its parameter; all outlives the call. What kernels access is
        // memory of the probes, which lives to the end.
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

    /// Waits for all that was queued.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: a stream of the current context.
        check(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Launches, waits, and returns the first numbers that the kernel has written.
    pub fn ask(&self, kernel: &str, grid: Grid, values: &[Value], numbers: usize) -> Result<Vec<u64>> {
        self.launch(kernel, grid, values)?;
        self.synchronize().with_context(|| kernel.to_owned())?;
        self.results(numbers)
    }

    /// What kernels have written, when they are done.
    pub fn results(&self, numbers: usize) -> Result<Vec<u64>> {
        let mut results = vec![0_u64; numbers];
        ensure!(numbers * 8 <= RESULT_BYTES, "{numbers} results");
        // SAFETY: both sides have so many bytes.
        check(unsafe { sys::cuMemcpyDtoH_v2(results.as_mut_ptr().cast(), self.out, numbers * 8) })?;
        Ok(results)
    }

    /// Nanoseconds between two events around what is queued.
    pub fn timed(&self, queue: impl FnOnce() -> Result<()>) -> Result<f64> {
        let [before, behind] = self.events;
        // SAFETY: events and stream of the current context.
        check(unsafe { sys::cuEventRecord(before, self.stream) })?;
        queue()?;
        let mut milliseconds = 0.0;
        // SAFETY: as above; `milliseconds` outlives the call.
        unsafe {
            check(sys::cuEventRecord(behind, self.stream))?;
            check(sys::cuEventSynchronize(behind))?;
            check(sys::cuEventElapsedTime(&mut milliseconds, before, behind))?;
        }
        Ok(f64::from(milliseconds) * 1e6)
    }

    /// Makes a graph of what is queued, which does not run.
    pub fn graph(&self, queue: impl FnOnce() -> Result<()>) -> Result<Graph<'_>> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a stream of the current context that captures nothing; a captured graph is destroyed once.
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

    /// A tensor of so many rows of 128 bytes, in boxes of so many rows.
    pub fn tensor_map(&self, address: u64, rows: u64, box_rows: u32) -> Result<sys::CUtensorMap> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (extents, strides, boxes, steps) = ([ROW_BYTES, rows], [ROW_BYTES], [ROW_BYTES as u32, box_rows], [1, 1]);
        // SAFETY: arrays as long as the rank of two asks; the address is only written down.
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
    /// Queues all of it.
    pub fn launch(&self) -> Result<()> {
        // SAFETY: a graph of the stream's context, alive.
        check(unsafe { sys::cuGraphLaunch(self.executable, self.gpu.stream) })
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // SAFETY: alive until now. Nobody can be told of a failure here.
        unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
