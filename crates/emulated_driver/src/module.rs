//! Modules and libraries: PTX text, alone or in a fat binary, and the variables in it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use gpu_arch::Capability;

use crate::call::{Needs, array, enter, functions, put, text};
use crate::code::{
    Code as ErrorCode, FILE_NOT_FOUND, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU,
    NOT_FOUND,
};
use crate::entries::{self, Entries};
use crate::fatbin;
use crate::refused;
use crate::state::{Driver, Handle};

/// A module or a library.
pub struct Module {
    /// Nothing where it is machine code, which a test may load and never launch.
    pub code: Option<Arc<Code>>,
}

/// A module's code. It outlives the module where launches of it are queued.
pub struct Code {
    text: String,
    pub entries: Entries,
    /// The decoded text: of a large one that takes long, and a test never asks for it.
    decoded: OnceLock<Result<ptx_emulator::Module, String>>,
}

impl Code {
    /// The decoded text.
    ///
    /// # Errors
    ///
    /// What the emulator says about the text.
    pub fn decoded(&self) -> Result<&ptx_emulator::Module, String> {
        let decode = || ptx_emulator::Module::parse(&self.text).map_err(|error| error.to_string());
        self.decoded.get_or_init(decode).as_ref().map_err(Clone::clone)
    }
}

/// A refused image: the code, and what the compiler would say.
type Refusal = (ErrorCode, String);

/// The code in an image; nothing where it is machine code.
///
/// # Safety
///
/// `image` is what `cuModuleLoadData` takes: a C string of PTX, an ELF file, a fat binary or its wrapper.
unsafe fn code(image: *const u8, card: Capability) -> Result<Option<Arc<Code>>, Refusal> {
    // SAFETY: any image is at least a NUL; the first bytes are looked at one after another.
    let begins = |magic: &[u8]| (0..magic.len()).all(|at| unsafe { *image.add(at) } == magic[at]);
    let ptx = if begins(&fatbin::WRAPPER.to_le_bytes()) {
        // SAFETY: `__fatBinC_Wrapper_t` (fatbinary_section.h): magic, version, and the address of the binary.
        let inner = unsafe { image.add(8).cast::<*const u8>().read_unaligned() };
        if inner.is_null() {
            return Err((INVALID_IMAGE, "a fat binary's wrapper is empty".into()));
        }
        // SAFETY: the wrapper leads to a fat binary.
        unsafe { in_fatbin(inner, card)? }
    } else if begins(&fatbin::MAGIC.to_le_bytes()) {
        // SAFETY: it begins as a fat binary does.
        unsafe { in_fatbin(image, card)? }
    } else if begins(b"\x7fELF") {
        return Ok(None);
    } else {
        // SAFETY: neither of the binary formats, so a C string.
        unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned()
    };
    let entries = entries::entries(&ptx, card).map_err(|(code, complaint)| (code, complaint.to_owned()))?;
    Ok(Some(Arc::new(Code { text: ptx, entries, decoded: OnceLock::new() })))
}

/// The PTX of a fat binary.
///
/// # Safety
///
/// `image` leads to as many bytes as its header says.
unsafe fn in_fatbin(image: *const u8, card: Capability) -> Result<String, Refusal> {
    let damaged = || (INVALID_IMAGE, "this is no fat binary".to_owned());
    // SAFETY: a fat binary begins with a header of 16 bytes.
    let header = unsafe { image.cast::<[u8; 16]>().read_unaligned() };
    let size = fatbin::size(&header).ok_or_else(damaged)?;
    // SAFETY: that many bytes follow, as its header says.
    fatbin::ptx(unsafe { std::slice::from_raw_parts(image, size) }, card)
}

/// `CUjit_option` (cuda.h).
const JIT_ERROR_LOG_BUFFER: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;

/// Leaves the compiler's words where the caller wants them.
///
/// # Safety
///
/// The arrays have `count` elements, and the buffer has the size that is given with it.
unsafe fn complain(words: &str, count: usize, options: *const c_int, values: *const *mut c_char) {
    // SAFETY: as this function's contract says.
    let (Ok(options), Ok(values)) = (unsafe { array(options, count) }, unsafe { array(values, count) }) else { return };
    let value = |wanted| options.iter().position(|option| *option == wanted).map(|at| values[at]);
    let (Some(buffer), room) =
        (value(JIT_ERROR_LOG_BUFFER), value(JIT_ERROR_LOG_BYTES).map_or(1, |room| room as usize))
    else {
        return;
    };
    if buffer.is_null() || room == 0 {
        return;
    }
    let bytes = &words.as_bytes()[..words.len().min(room - 1)];
    // SAFETY: the buffer has `room` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buffer, bytes.len());
        *buffer.add(bytes.len()) = 0;
    }
}

impl Driver {
    /// Loads an image as a module or a library.
    ///
    /// # Safety
    ///
    /// As [`code`]'s, and [`complain`]'s.
    unsafe fn load(
        &mut self,
        image: *const u8,
        count: usize,
        options: *const c_int,
        values: *const *mut c_char,
    ) -> Result<Handle, ErrorCode> {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as this function's contract says.
        let result = unsafe { code(image, self.card.capability()) };
        let code = result.map_err(|(code, words)| {
            // SAFETY: as this function's contract says.
            unsafe { complain(&words, count, options, values) };
            if self.test.is_none() {
                refused::once(&words);
            }
            code
        })?;
        if code.is_none() && self.test.is_none() {
            refused::once("a module is machine code (SASS), which the emulator does not run; give the driver its PTX");
            return Err(NO_BINARY_FOR_GPU);
        }
        let handle = self.handle();
        self.modules.insert(handle, Module { code });
        Ok(handle)
    }

    /// As [`Self::load`], of a file.
    fn load_file(&mut self, path: &Path) -> Result<Handle, ErrorCode> {
        let mut bytes = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
        // PTX in a file need not end with a NUL; and no header is read past the end.
        bytes.extend([0; 64]);
        let size = bytes.first_chunk::<16>().and_then(fatbin::size);
        if size.is_some_and(|size| size > bytes.len()) || bytes.starts_with(&fatbin::WRAPPER.to_le_bytes()) {
            return Err(INVALID_IMAGE);
        }
        // SAFETY: the bytes end with NULs, a fat binary is as long as it says, and wrappers were just refused.
        unsafe { self.load(bytes.as_ptr(), 0, std::ptr::null(), std::ptr::null()) }
    }

    fn unload(&mut self, module: Handle) -> Result<(), ErrorCode> {
        self.modules.remove(&module).ok_or(INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    /// Address and length of a variable.
    fn variable(&mut self, module: Handle, name: &str) -> Result<(u64, usize), ErrorCode> {
        let code = self.modules.get(&module).ok_or(INVALID_HANDLE)?.code.clone().ok_or(NOT_FOUND)?;
        let module = code.decoded().map_err(|words| {
            refused::once(&words);
            INVALID_PTX
        })?;
        let device = self.memory.emulator().ok_or(NOT_FOUND)?;
        let variables = device.variables(module).map_err(|_| INVALID_IMAGE)?;
        variables.iter().for_each(|(_, buffer)| self.memory.add_variable(*buffer));
        let found = variables.iter().find(|(variable, _)| variable == name).ok_or(NOT_FOUND)?;
        Ok((found.1.address, found.1.bytes as usize))
    }
}

functions! {
    fn cuModuleLoad(module: *mut Handle, path: *const c_char) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(module, 0)?;
        let handle = driver.load_file(text(path)?.as_ref())?;
        put(module, handle)
    }
    fn cuModuleLoadData(module: *mut Handle, image: *const u8) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(module, 0)?;
        let handle = driver.load(image, 0, std::ptr::null(), std::ptr::null())?;
        put(module, handle)
    }
    fn cuModuleLoadDataEx(
        module: *mut Handle, image: *const u8, count: c_uint, options: *const c_int, values: *const *mut c_char,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(module, 0)?;
        let handle = driver.load(image, count as usize, options, values)?;
        put(module, handle)
    }
    fn cuModuleLoadFatBinary(module: *mut Handle, image: *const u8) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(module, 0)?;
        let handle = driver.load(image, 0, std::ptr::null(), std::ptr::null())?;
        put(module, handle)
    }
    fn cuModuleUnload(module: Handle) { enter(NAME, Needs::Context)?.unload(module) }
    fn cuModuleGetLoadingMode(mode: *mut c_int) {
        let _driver = enter(NAME, Needs::Init)?;
        // CU_MODULE_LAZY_LOADING
        put(mode, 2)
    }
    fn cuModuleGetGlobal_v2(address: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) {
        let mut driver = enter(NAME, Needs::Context)?;
        let found = driver.variable(module, &text(name)?)?;
        if !address.is_null() { put(address, found.0)?; }
        if !bytes.is_null() { put(bytes, found.1)?; }
        Ok(())
    }

    fn cuLibraryLoadData(
        library: *mut Handle, image: *const u8, options: *const c_int, values: *const *mut c_char, count: c_uint,
        _library_options: *const c_int, _library_values: *const *mut c_void, _library_count: c_uint,
    ) {
        let mut driver = enter(NAME, Needs::Init)?;
        put(library, 0)?;
        let handle = driver.load(image, count as usize, options, values)?;
        put(library, handle)
    }
    fn cuLibraryLoadFromFile(
        library: *mut Handle, path: *const c_char, _options: *const c_int, _values: *const *mut c_void, _count: c_uint,
        _library_options: *const c_int, _library_values: *const *mut c_void, _library_count: c_uint,
    ) {
        let mut driver = enter(NAME, Needs::Init)?;
        put(library, 0)?;
        let handle = driver.load_file(text(path)?.as_ref())?;
        put(library, handle)
    }
    fn cuLibraryUnload(library: Handle) { enter(NAME, Needs::Init)?.unload(library) }
    fn cuLibraryGetModule(module: *mut Handle, library: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        driver.modules.get(&library).ok_or(INVALID_HANDLE)?;
        put(module, library)
    }
    fn cuLibraryGetGlobal(address: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        let mut driver = enter(NAME, Needs::Context)?;
        let found = driver.variable(library, &text(name)?)?;
        if !address.is_null() { put(address, found.0)?; }
        if !bytes.is_null() { put(bytes, found.1)?; }
        Ok(())
    }
}
