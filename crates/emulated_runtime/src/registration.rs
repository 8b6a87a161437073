//! Objects that nvcc's code registers before `main`: fat binaries, and their kernels and variables, identified by host
//! addresses (crt/host_runtime.h). A binary is loaded into the driver when one of its objects is first used.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::call::{Code, INVALID_DEVICE_FUNCTION, INVALID_SYMBOL, functions, put};
use crate::driver::ready;
use crate::refused;
use crate::types::Handle;

/// A registered fat binary.
struct Binary {
    /// Address of the `__fatBinC_Wrapper_t`, which the program keeps.
    wrapper: usize,
    /// Result of loading the binary. `None`: not loaded yet.
    library: Option<Result<Handle, Code>>,
}

/// A kernel or a variable, identified by a host address.
#[derive(Clone)]
struct Symbol {
    binary: usize,
    name: CString,
}

#[derive(Default)]
struct Registry {
    /// Binaries by handle. The handle is the address of a word that was returned to the program.
    binaries: HashMap<usize, Binary>,
    kernels: HashMap<usize, Symbol>,
    variables: HashMap<usize, Symbol>,
    /// Handles of kernels that were looked up.
    found: HashMap<usize, Handle>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Returns the driver's library of a binary, and loads it at the first call.
    fn library(&mut self, binary: usize) -> Result<Handle, Code> {
        let driver = ready()?;
        let binary = self.binaries.get_mut(&binary).ok_or(INVALID_DEVICE_FUNCTION)?;
        let load = || {
            let (mut library, image) = (0, binary.wrapper as *const c_void);
            // SAFETY: the program keeps the wrapper until it unregisters the binary.
            unsafe {
                driver.cuLibraryLoadData(
                    &mut library,
                    image,
                    ptr::null(),
                    ptr::null(),
                    0,
                    ptr::null(),
                    ptr::null(),
                    0,
                )?;
            }
            Ok(library)
        };
        *binary.library.get_or_insert_with(load)
    }
}

/// Returns the kernel that a host address identifies. A kernel's own handle is also accepted.
pub fn kernel(function: *const c_void) -> Result<Handle, Code> {
    let key = function as usize;
    let mut registry = registry();
    if let Some(kernel) = registry.found.get(&key) {
        return Ok(*kernel);
    }
    let Some(symbol) = registry.kernels.get(&key).cloned() else {
        let driver = ready()?;
        let mut name = ptr::null();
        // SAFETY: `name` outlives the call, and the driver accepts any number as a handle.
        let known = unsafe { driver.cuKernelGetName(&mut name, key) };
        return known.map(|()| key).map_err(|_| INVALID_DEVICE_FUNCTION);
    };
    let library = registry.library(symbol.binary)?;
    let mut kernel = 0;
    // SAFETY: `kernel` outlives the call, and the name is a C string.
    unsafe { ready()?.cuLibraryGetKernel(&mut kernel, library, symbol.name.as_ptr()) }
        .map_err(|code| if code == 500 { INVALID_DEVICE_FUNCTION } else { code })?;
    registry.found.insert(key, kernel);
    Ok(kernel)
}

/// Returns address and size of the variable that a host address identifies.
pub fn variable(symbol: *const c_void) -> Result<(u64, usize), Code> {
    let mut registry = registry();
    let symbol = registry.variables.get(&(symbol as usize)).cloned().ok_or(INVALID_SYMBOL)?;
    let library = registry.library(symbol.binary)?;
    let (mut address, mut bytes) = (0, 0);
    // SAFETY: `address` and `bytes` outlive the call, and the name is a C string.
    unsafe { ready()?.cuLibraryGetGlobal(&mut address, &mut bytes, library, symbol.name.as_ptr()) }
        .map_err(|code| if code == 500 { INVALID_SYMBOL } else { code })?;
    Ok((address, bytes))
}

/// # Safety
///
/// `wrapper` is the wrapper of a fat binary and stays valid until the binary is unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterFatBinary(wrapper: *const c_void) -> *mut *mut c_void {
    // Each binary gets its own word. The word's address is the handle, and nobody dereferences it.
    let handle = Box::into_raw(Box::new(ptr::null_mut()));
    registry().binaries.insert(handle as usize, Binary { wrapper: wrapper as usize, library: None });
    handle
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_binary: *mut *mut c_void) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(binary: *mut *mut c_void) {
    let mut registry = registry();
    let Some(gone) = registry.binaries.remove(&(binary as usize)) else { return };
    let of_it: Vec<usize> =
        registry.kernels.iter().filter(|(_, symbol)| symbol.binary == binary as usize).map(|(key, _)| *key).collect();
    for key in of_it {
        registry.kernels.remove(&key);
        registry.found.remove(&key);
    }
    registry.variables.retain(|_, symbol| symbol.binary != binary as usize);
    drop(registry);
    if let (Some(Ok(library)), Ok(driver)) = (gone.library, ready()) {
        // SAFETY: the driver accepts any number as a handle. Queued work keeps its code.
        let _ = unsafe { driver.cuLibraryUnload(library) };
    }
    // SAFETY: `__cudaRegisterFatBinary` created the box, and removing it from `binaries` above shows that it is not
    // freed yet.
    drop(unsafe { Box::from_raw(binary) });
}

/// # Safety
///
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterFunction(
    binary: *mut *mut c_void,
    function: *const c_void,
    _device_function: *const c_char,
    name: *const c_char,
    _thread_limit: c_int,
    _tid: *const c_void,
    _bid: *const c_void,
    _block: *const c_void,
    _grid: *const c_void,
    _warp: *const c_int,
) {
    if !name.is_null() {
        // SAFETY: `name` is not null, so the caller guarantees a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_owned();
        registry().kernels.insert(function as usize, Symbol { binary: binary as usize, name });
    }
}

/// # Safety
///
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterVar(
    binary: *mut *mut c_void,
    variable: *const c_void,
    _device_address: *const c_char,
    name: *const c_char,
    _external: c_int,
    _bytes: usize,
    _constant: c_int,
    _global: c_int,
) {
    if !name.is_null() {
        // SAFETY: `name` is not null, so the caller guarantees a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_owned();
        registry().variables.insert(variable as usize, Symbol { binary: binary as usize, name });
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterManagedVar(
    _binary: *mut *mut c_void,
    _variable: *mut *mut c_void,
    _device_address: *const c_char,
    _name: *const c_char,
    _external: c_int,
    _bytes: usize,
    _constant: c_int,
    _global: c_int,
) {
    refused::managed_memory();
}

/// # Safety
///
/// Always safe: no argument is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterHostVar(
    _binary: *mut *mut c_void,
    _device_name: *const c_char,
    _variable: *const c_void,
    _bytes: usize,
) {
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(_binary: *mut *mut c_void) -> c_char {
    1
}

functions! {
    fn __cudaGetKernel(handle: *mut Handle, function: *const c_void) {
        put(handle, kernel(function)?)
    }
    fn cudaGetKernel(handle: *mut Handle, function: *const c_void) {
        put(handle, kernel(function)?)
    }
    fn cudaGetFuncBySymbol(handle: *mut Handle, function: *const c_void) {
        let mut found = 0;
        ready()?.cuKernelGetFunction(&mut found, kernel(function)?)?;
        put(handle, found)
    }
    fn cudaGetSymbolAddress(address: *mut u64, symbol: *const c_void) {
        put(address, variable(symbol)?.0)
    }
    fn cudaGetSymbolSize(bytes: *mut usize, symbol: *const c_void) {
        put(bytes, variable(symbol)?.1)
    }
    fn cudaLibraryLoadData(
        library: *mut Handle, image: *const c_void, _options: *const c_int, _values: *const *mut c_void, _count: u32,
        _library_options: *const c_int, _library_values: *const *mut c_void, _library_count: u32,
    ) {
        ready()?.cuLibraryLoadData(library, image, ptr::null(), ptr::null(), 0, ptr::null(), ptr::null(), 0)
    }
    fn cudaLibraryUnload(library: Handle) { ready()?.cuLibraryUnload(library) }
    fn cudaLibraryGetKernel(handle: *mut Handle, library: Handle, name: *const c_char) {
        ready()?.cuLibraryGetKernel(handle, library, name)
    }
    fn cudaLibraryGetKernelCount(count: *mut u32, library: Handle) {
        ready()?.cuLibraryGetKernelCount(count, library)
    }
    fn cudaLibraryEnumerateKernels(kernels: *mut Handle, count: u32, library: Handle) {
        ready()?.cuLibraryEnumerateKernels(kernels, count, library)
    }
    fn cudaLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        ready()?.cuLibraryGetGlobal(address, bytes, library, name)
    }
}
