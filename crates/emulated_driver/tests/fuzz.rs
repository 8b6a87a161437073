//! Any order of calls with any handles ends with an error code, never with a crash.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use proptest::prelude::*;

/// An argument of a call.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A handle or a device address: a known one, or any number.
    Handle,
    /// A number: a size, a flag, an attribute.
    Number,
    /// Room for what the call returns. A handle that is left there is known from then on.
    Out,
    /// Memory of the host's: zeros.
    Host,
    /// Memory of the host's: ones.
    Ones,
    /// PTX.
    Image,
    /// An entry's name, or another.
    Name,
    /// A host function.
    Function,
}

use Kind::{Function, Handle, Host, Image, Name, Number, Ones, Out};

const CALLS: &[(&str, &[Kind])] = &[
    ("cuInit", &[Number]),
    ("cuDeviceGet", &[Out, Number]),
    ("cuDeviceGetAttribute", &[Out, Number, Number]),
    ("cuDevicePrimaryCtxRetain", &[Out, Number]),
    ("cuDevicePrimaryCtxRelease_v2", &[Number]),
    ("cuDevicePrimaryCtxReset_v2", &[Number]),
    ("cuCtxCreate_v2", &[Out, Number, Number]),
    ("cuCtxDestroy_v2", &[Handle]),
    ("cuCtxSetCurrent", &[Handle]),
    ("cuCtxPushCurrent_v2", &[Handle]),
    ("cuCtxPopCurrent_v2", &[Out]),
    ("cuCtxSynchronize", &[]),
    ("cuModuleLoadData", &[Out, Image]),
    ("cuModuleUnload", &[Handle]),
    ("cuModuleGetFunction", &[Out, Handle, Name]),
    ("cuModuleGetGlobal_v2", &[Out, Out, Handle, Name]),
    ("cuLibraryGetKernel", &[Out, Handle, Name]),
    ("cuKernelGetFunction", &[Out, Handle]),
    ("cuFuncGetAttribute", &[Out, Number, Handle]),
    ("cuFuncSetAttribute", &[Handle, Number, Number]),
    ("cuOccupancyMaxActiveBlocksPerMultiprocessor", &[Out, Handle, Number, Number]),
    ("cuMemAlloc_v2", &[Out, Number]),
    ("cuMemAllocAsync", &[Out, Number, Handle]),
    ("cuMemFree_v2", &[Handle]),
    ("cuMemFreeAsync", &[Handle, Handle]),
    ("cuMemAllocHost_v2", &[Out, Number]),
    ("cuMemFreeHost", &[Handle]),
    ("cuMemHostUnregister", &[Handle]),
    ("cuMemGetInfo_v2", &[Out, Out]),
    ("cuMemGetAddressRange_v2", &[Out, Out, Handle]),
    ("cuPointerGetAttribute", &[Out, Number, Handle]),
    ("cuMemcpyHtoD_v2", &[Handle, Host, Number]),
    ("cuMemcpyDtoH_v2", &[Host, Handle, Number]),
    ("cuMemcpyDtoD_v2", &[Handle, Handle, Number]),
    ("cuMemcpyHtoDAsync_v2", &[Handle, Host, Number, Handle]),
    ("cuMemcpyDtoHAsync_v2", &[Host, Handle, Number, Handle]),
    ("cuMemcpyDtoDAsync_v2", &[Handle, Handle, Number, Handle]),
    ("cuMemcpy2D_v2", &[Host]),
    ("cuMemcpy3DAsync_v2", &[Host, Handle]),
    ("cuMemsetD8_v2", &[Handle, Number, Number]),
    ("cuMemsetD32Async", &[Handle, Number, Number, Handle]),
    ("cuMemsetD2D8_v2", &[Handle, Number, Number, Number, Number]),
    ("cuStreamCreate", &[Out, Number]),
    ("cuStreamDestroy_v2", &[Handle]),
    ("cuStreamSynchronize", &[Handle]),
    ("cuStreamQuery", &[Handle]),
    ("cuStreamWaitEvent", &[Handle, Handle, Number]),
    ("cuStreamIsCapturing", &[Handle, Out]),
    ("cuStreamBeginCapture_v2", &[Handle, Number]),
    ("cuStreamEndCapture", &[Handle, Out]),
    ("cuEventCreate", &[Out, Number]),
    ("cuEventDestroy_v2", &[Handle]),
    ("cuEventRecord", &[Handle, Handle]),
    ("cuEventQuery", &[Handle]),
    ("cuEventSynchronize", &[Handle]),
    ("cuEventElapsedTime", &[Out, Handle, Handle]),
    ("cuLaunchHostFunc", &[Handle, Function, Number]),
    ("cuLaunchKernelEx", &[Host, Handle, Host, Host]),
    ("cuGraphCreate", &[Out, Number]),
    ("cuGraphAddEmptyNode", &[Out, Handle, Out, Number]),
    ("cuGraphAddKernelNode_v2", &[Out, Handle, Out, Number, Host]),
    ("cuGraphAddMemcpyNode", &[Out, Handle, Out, Number, Host, Handle]),
    ("cuGraphAddMemsetNode", &[Out, Handle, Out, Number, Host, Handle]),
    ("cuGraphAddChildGraphNode", &[Out, Handle, Out, Number, Handle]),
    ("cuGraphAddDependencies", &[Handle, Out, Out, Number]),
    ("cuGraphGetNodes", &[Handle, Out, Out]),
    ("cuGraphInstantiateWithFlags", &[Out, Handle, Number]),
    ("cuGraphExecUpdate_v2", &[Handle, Handle, Out]),
    ("cuGraphLaunch", &[Handle, Handle]),
    ("cuGraphExecDestroy", &[Handle]),
    ("cuGraphDestroy", &[Handle]),
    ("cuTensorMapEncodeTiled", &[Host, Number, Number, Handle, Ones, Ones, Ones, Ones, Number, Number, Number, Number]),
    ("cuGetProcAddress_v2", &[Name, Out, Number, Number, Out]),
    ("cuGetErrorName", &[Number, Out]),
    ("cuMemAllocManaged", &[Out, Number, Number]),
    ("cuArrayCreate_v2", &[Out, Host]),
];

const PTX: &std::ffi::CStr = c".version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .b8 k_variable[16];
.visible .entry k(.param .u32 n) { ret; }
";

/// A call: which, and a number for each argument.
fn calls() -> impl Strategy<Value = Vec<(usize, [u16; 12])>> {
    // The first calls, which all others need, come now and then at the beginning.
    let begin = prop::sample::select(vec![vec![], vec![0, 3, 8, 12, 14, 42, 50]]);
    let random = prop::collection::vec((0..CALLS.len(), any::<[u16; 12]>()), 1..80);
    (begin, random).prop_map(|(begin, random)| {
        let begin = begin.into_iter().map(|call| (call, [0; 12]));
        begin.chain(random).collect()
    })
}

extern "C" fn host_function(_data: *mut c_void) {}

fn library() -> Library {
    let test = std::env::current_exe().unwrap();
    // SAFETY: the library is Rust without initialisers.
    unsafe { Library::new(test.with_file_name("libemulated_driver.so")) }.unwrap()
}

type Call =
    unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, usize) -> c_int;

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_calls_with_any_handles_ends_with_a_code(calls in calls()) {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = library();
        let mut handles: Vec<usize> = vec![0, 1, 2, 0xC0, usize::MAX, 0xdead_beef, 0x1_0000_0000];
        // Kept to the end: a queued copy still uses it.
        let mut rooms: Vec<Box<[u64; 600]>> = Vec::new();
        for (call, numbers) in calls {
            let (name, kinds) = CALLS[call];
            let mut arguments = [0; 12];
            let mut outs = Vec::new();
            for ((argument, kind), number) in arguments.iter_mut().zip(kinds).zip(numbers) {
                let number = usize::from(number);
                let mut room = |value: u64| {
                    rooms.push(Box::new([value; 600]));
                    rooms.last_mut().unwrap().as_mut_ptr() as usize
                };
                *argument = match kind {
                    // The latest are likelier: most calls want one of them.
                    Handle if number % 3 == 0 => handles[handles.len() - 1 - number / 3 % handles.len().min(4)],
                    Handle => handles[number % handles.len()],
                    // Small ones are likelier, and none is larger than the room.
                    Number if number % 2 == 0 => number / 2 % 8,
                    Number => number % 4096,
                    Out => {
                        outs.push(room(handles[number % handles.len()] as u64));
                        *outs.last().unwrap()
                    }
                    Host => room(0),
                    Ones => room(1),
                    Image if number % 4 == 3 => c"nonsense".as_ptr() as usize,
                    Image => PTX.as_ptr() as usize,
                    Name if number % 4 == 3 => c"k_variable".as_ptr() as usize,
                    Name => c"k".as_ptr() as usize,
                    Function => host_function as *const () as usize,
                };
            }
            // SAFETY: integers and pointers are passed alike, and a callee does not look at those behind its last.
            let code = unsafe {
                let function = library.get::<Call>(name).unwrap();
                let [a, b, c, d, e, f, g, h, i, j, k, l] = arguments;
                function(a, b, c, d, e, f, g, h, i, j, k, l)
            };
            prop_assert!((0..1000).contains(&code), "{name}: {code}");
            prop_assert_ne!(code, 999, "{} panicked", name);
            if code == 0 {
                // SAFETY: rooms are kept.
                handles.extend(outs.iter().map(|out| unsafe { *(*out as *const usize) }));
            }
        }
        // SAFETY: as above. What is still queued uses the rooms of this case.
        unsafe {
            for name in ["cuDevicePrimaryCtxReset_v2", "cuCtxSynchronize"] {
                library.get::<Call>(name).unwrap()(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            }
        }
        // The library's state is a static: it must stay.
        std::mem::forget(library);
    }
}
