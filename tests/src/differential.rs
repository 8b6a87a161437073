//! Runs the emulator's own test programs on a GPU too: both must leave the same bits in every buffer.
//!
//! This module knows the driver's calls and the programs' launch descriptions, but no kernel of this project.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};
use cuda_driver::cust::context::{Context, CurrentContext};
use cuda_driver::cust::device::{Device, DeviceAttribute};
use cuda_driver::cust::function::Function;
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::module::Module;
use cuda_driver::cust::{self, CudaFlags};
use cuda_driver::{jit_log, last_failure, probe, sys};
use gpu_arch::Arch;
use ptx_emulator::launch_json::{LaunchFile, Places, arguments};
use ptx_emulator::program::Program;
use ptx_emulator::{Arg, Interleave, L2Promotion, OobFill, Swizzle, TensorMap};

/// Contents of every buffer after a launch, by name.
pub type Buffers = BTreeMap<String, Vec<u8>>;

/// Returns the programs that run without a fault in the emulator.
pub fn programs() -> Vec<Program> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/ptx_emulator/tests/pass");
    Program::read_all(&folder).unwrap_or_else(|error| panic!("{error:#}"))
}

/// Runs a program in the emulator.
pub fn emulate(program: &Program) -> Result<Buffers> {
    let mut prepared = program.prepare()?;
    prepared.run()?;
    let buffers = prepared.buffers.iter();
    Ok(buffers.map(|(name, buffer)| (name.clone(), prepared.device.download(*buffer))).collect())
}

/// Describes the first byte in which two runs of a program differ.
///
/// # Panics
/// If the runs have different buffers.
pub fn difference(program: &Program, gpu: &Buffers, emulator: &Buffers) -> Option<String> {
    assert!(gpu.keys().eq(emulator.keys()), "the GPU's and the emulator's runs have different buffers");
    gpu.iter().filter(|(name, _)| !program.outcome.opaque.contains(name)).find_map(|(name, gpu)| {
        let emulator = &emulator[name];
        assert_eq!(gpu.len(), emulator.len(), "buffer `{name}` has different lengths on the GPU and in the emulator");
        let at = (0..gpu.len()).find(|&at| gpu[at] != emulator[at])?;
        let (gpu, emulator) = (gpu[at], emulator[at]);
        Some(format!("byte {at} of `{name}` is {gpu:#04x} on the GPU and {emulator:#04x} in the emulator"))
    })
}

/// This machine's GPU, with its context current on this thread.
pub struct Gpu {
    capability: (u32, u32),
    _context: Context,
}

impl Gpu {
    /// Opens device 0.
    ///
    /// # Errors
    /// Why no GPU can be used.
    pub fn open() -> Result<Gpu> {
        probe()?;
        cust::init(CudaFlags::empty())?;
        let device = Device::get_device(0)?;
        let attribute = |attribute| device.get_attribute(attribute).map(i32::unsigned_abs);
        let major = attribute(DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = attribute(DeviceAttribute::ComputeCapabilityMinor)?;
        Ok(Gpu { capability: (major, minor), _context: Context::new(device)? })
    }

    /// Returns whether this GPU runs code of the program's `.target`.
    pub fn runs(&self, program: &Program) -> bool {
        let target = program.text.lines().find_map(|line| line.trim().strip_prefix(".target "));
        target.and_then(|target| target.trim().parse().ok()).is_some_and(|arch: Arch| arch.runs_on(self.capability))
    }

    /// Returns the compute capability as text.
    pub fn capability(&self) -> String {
        format!("compute capability {}.{}", self.capability.0, self.capability.1)
    }

    /// Waits for errors that the GPU has not reported yet. Some errors arrive after the kernel has ended, on an H200
    /// up to a third of a second later.
    ///
    /// # Errors
    /// The error of an earlier kernel.
    pub fn settle(&self) -> Result<()> {
        std::thread::sleep(std::time::Duration::from_secs(1));
        Ok(CurrentContext::synchronize()?)
    }

    /// Runs a program on the GPU and returns its buffers.
    ///
    /// # Errors
    /// The driver's error, or the PTX compiler's log if the driver refuses the text.
    pub fn run(&self, program: &Program) -> Result<Buffers> {
        let upload = |(name, spec): (&String, &ptx_emulator::launch_json::BufferSpec)| {
            let buffer = DeviceBuffer::from_slice(&spec.contents(program.folder())?)?;
            Ok((name.clone(), buffer))
        };
        let buffers: BTreeMap<String, DeviceBuffer<u8>> =
            program.launch.buffers.iter().map(upload).collect::<Result<_>>()?;
        let addresses = buffers.iter().map(|(name, buffer)| (name.clone(), buffer.as_device_ptr().as_raw())).collect();
        let places = Places { addresses, encode: &encode };
        let arguments = |args| arguments(args, &places, program.folder());
        let args = arguments(&program.launch.args)?;
        let overlaps = program.launch.overlaps.as_deref().map(arguments).transpose()?;

        let module = Module::from_ptx(&program.text, &[]).map_err(|error| {
            let log = CString::new(program.text.as_str()).ok().and_then(|ptx| jit_log(&ptx));
            anyhow!(log.unwrap_or_else(|| error.to_string()))
        })?;
        let parsed = ptx_emulator::Module::parse(&program.text)?;
        let [entry] = parsed.entries() else { return Err(anyhow!("a program must have exactly one entry")) };
        for args in overlaps.iter().chain([&args]) {
            let wanted = entry.params.iter().map(|param| param.bytes as usize);
            ensure!(wanted.eq(args.iter().map(|arg| arg.0.len())), "the arguments do not match the entry's parameters");
        }
        let function = module.get_function(&entry.name)?;
        if let Some(before) = &overlaps {
            launch(&function, &program.launch, before, false)?;
        }
        launch(&function, &program.launch, &args, overlaps.is_some())?;
        CurrentContext::synchronize()?;

        let download = |(name, buffer): (String, DeviceBuffer<u8>)| {
            let mut bytes = vec![0; buffer.len()];
            buffer.copy_to(&mut bytes)?;
            Ok((name, bytes))
        };
        buffers.into_iter().map(download).collect()
    }
}

/// Returns the line that the differential test prints for a program whose buffers agree.
pub fn agreement(program: &Program, ran: &Buffers) -> String {
    let compared = ran.iter().filter(|(name, _)| !program.outcome.opaque.contains(name));
    let buffers = compared.map(|(name, bytes)| format!("{} bytes of `{name}`", bytes.len()));
    format!("{}: {} agree", program.name(), buffers.collect::<Vec<_>>().join(", "))
}

/// An argument, aligned to 64 bytes as tensor maps require.
#[repr(align(64))]
struct Aligned([u8; size_of::<sys::CUtensorMap>()]);

fn launch(function: &Function, launch: &LaunchFile, args: &[Arg], overlaps: bool) -> Result<()> {
    let mut args: Vec<_> = args
        .iter()
        .map(|Arg(bytes)| {
            let mut arg = Aligned([0; size_of::<sys::CUtensorMap>()]);
            let room = arg.0.get_mut(..bytes.len()).context("an argument is longer than 128 bytes")?;
            room.copy_from_slice(bytes);
            Ok(arg)
        })
        .collect::<Result<_>>()?;
    let mut pointers: Vec<*mut c_void> = args.iter_mut().map(|arg| arg.0.as_mut_ptr().cast()).collect();
    let cluster = sys::CUlaunchAttribute {
        id: sys::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        value: sys::CUlaunchAttributeValue { cluster_dim: launch.cluster },
    };
    let overlap = sys::CUlaunchAttribute {
        id: sys::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        value: sys::CUlaunchAttributeValue { programmatic_stream_serialization_allowed: 1 },
    };
    // A cluster of one CTA needs no attribute.
    let attributes = [(cluster, launch.cluster != [1; 3]), (overlap, overlaps)];
    let mut attributes: Vec<_> =
        attributes.into_iter().filter_map(|(attribute, given)| given.then_some(attribute)).collect();
    let config = sys::CUlaunchConfig {
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.block[0],
        blockDimY: launch.block[1],
        blockDimZ: launch.block[2],
        sharedMemBytes: launch.shared_bytes,
        hStream: std::ptr::null_mut(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    // SAFETY: the function's module is loaded; `Gpu::run` has compared the arguments with the function's parameters;
    // `config`, `attributes` and `pointers` outlive the calls.
    unsafe {
        let asked = sys::cuFuncSetAttribute(
            function.to_raw(),
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            launch.shared_bytes.try_into()?,
        );
        checked(asked)?;
        checked(sys::cuLaunchKernelEx(&config, function.to_raw(), pointers.as_mut_ptr(), std::ptr::null_mut()))
    }
}

/// Encodes a tensor map as the driver's opaque object.
fn encode(map: &TensorMap) -> Result<[u8; size_of::<sys::CUtensorMap>()]> {
    let swizzle = match map.swizzle {
        Swizzle::None => sys::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => sys::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => sys::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => sys::CU_TENSOR_MAP_SWIZZLE_128B,
        other => return Err(anyhow!("swizzle {other:?} is not supported by this test; add it to `encode`")),
    };
    let plain = (Interleave::None, L2Promotion::None, OobFill::Zero);
    let asked = (map.interleave, map.l2_promotion, map.oob_fill);
    ensure!(asked == plain, "{asked:?} is not supported by this test; add it to `encode`");
    let mut object = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: `object` and the arrays outlive the call; the arrays have the lengths that the rank requires.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut object,
            map.data_type as sys::CUtensorMapDataType,
            map.rank.try_into()?,
            map.global_address as *mut c_void,
            map.dims.as_ptr(),
            map.strides.as_ptr(),
            map.box_dims.as_ptr(),
            map.element_strides.as_ptr(),
            sys::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            sys::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    checked(code)?;
    let mut bytes = [0; size_of::<sys::CUtensorMap>()];
    for (bytes, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(object.opaque) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(bytes)
}

fn checked(code: sys::CUresult) -> Result<()> {
    let failure = || last_failure().map_or_else(|| anyhow!("{code:?}"), Into::into);
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure()) }
}
