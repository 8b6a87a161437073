//! Objects behind handles, and a test's settings of the driver.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::code::{Code as ErrorCode, INVALID_PTX, NOT_FOUND};
use crate::handle::Handle;
use crate::image::Code;
use crate::refusal;
use crate::work::{Launch, Operation};

/// Registers per thread if the PTX does not state them; only `ptxas` knows the number. An SM full of threads has 32
/// each.
const REGISTERS_UNKNOWN: u32 = 32;
const MAX_THREADS: u32 = 1024;

/// A created context or the primary one.
#[derive(Default)]
pub struct Context {
    /// Number of times that it is retained. 1 for a created context.
    pub users: usize,
    pub flags: c_uint,
}

/// A module or a library.
pub struct Module {
    /// `None`: the module is machine code, which a test may load but not launch.
    pub code: Option<Arc<Code>>,
}

/// A function of a module.
pub struct Function {
    pub module: Handle,
    pub name: CString,
    /// `None`: the module is machine code.
    pub code: Option<Arc<Code>>,
    /// Maximum dynamic shared memory of a launch in bytes.
    pub shared_bytes: u32,
    pub non_portable_cluster: bool,
    /// Attributes that are stored and have no effect.
    pub hints: [c_int; 2],
}

/// Properties of a kernel that are known before it runs.
pub struct Facts {
    pub static_shared: u32,
    pub local_bytes: u32,
    pub max_threads: u32,
    pub registers: u32,
    pub cluster: Option<[u32; 3]>,
    pub parameters: Vec<(usize, usize)>,
}

impl Function {
    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    /// Returns the properties that are known before the kernel runs. A test gets defaults, because it does not run the
    /// PTX.
    pub fn facts(&self, of_a_test: bool) -> Result<Facts, ErrorCode> {
        let Some(code) = self.code.as_ref().filter(|_| !of_a_test) else {
            let (static_shared, local_bytes, max_threads) = (0, 0, MAX_THREADS);
            let registers = REGISTERS_UNKNOWN;
            return Ok(Facts { static_shared, local_bytes, max_threads, registers, cluster: None, parameters: vec![] });
        };
        let module = code.decoded().map_err(|words| {
            refusal::once(&words);
            INVALID_PTX
        })?;
        let kernel = module.entry(self.name()).ok_or(NOT_FOUND)?;
        let max_threads = kernel.most_threads().unwrap_or(MAX_THREADS);
        Ok(Facts {
            static_shared: kernel.shared_bytes,
            local_bytes: kernel.local_bytes(),
            max_threads,
            registers: kernel.registers_at_launch().unwrap_or(REGISTERS_UNKNOWN),
            cluster: kernel.required_cluster(),
            parameters: kernel.params.iter().map(|param| (param.offset as usize, param.bytes as usize)).collect(),
        })
    }
}

/// A graph or an executable graph.
pub struct Graph {
    pub operations: Arc<Vec<Operation>>,
    pub executable: bool,
}

/// A node of a graph that has a handle.
#[derive(Clone, Copy)]
pub struct Node {
    pub graph: Handle,
    pub index: usize,
}

/// A test's kernel. Arguments: entry's name, grid, block and cluster, shared memory, stream, parameters.
pub type Kernel = extern "C" fn(*const c_char, *const c_uint, c_uint, Handle, *const *const c_void);

/// A test's settings and records.
#[derive(Default)]
pub struct Test {
    pub calls: Vec<String>,
    pub failures: HashMap<String, ErrorCode>,
    /// Function that a launch calls.
    pub kernel: Option<Kernel>,
}

impl Test {
    /// Records a call, and fails it if the test requested that.
    pub fn note(&mut self, name: &str) -> Result<(), ErrorCode> {
        let questions = ["cuDeviceGet", "cuDeviceTotalMem", "cuDriverGet", "cuCtxGet", "cuGetError"];
        if !questions.iter().any(|question| name.starts_with(question)) {
            self.calls.push(name.to_owned());
        }
        self.failures.remove(name).map_or(Ok(()), Err)
    }
}

/// Calls the kernel of a test.
pub fn call(kernel: Kernel, launch: &Launch) {
    let parameters: Vec<_> = launch.parameters.iter().map(|bytes| bytes.as_ptr().cast()).collect();
    let name = CString::new(launch.name.as_str()).unwrap_or_default();
    kernel(name.as_ptr(), launch.size.as_ptr().cast(), launch.shared_bytes, launch.stream, parameters.as_ptr());
}
