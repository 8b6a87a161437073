//! Modules and libraries, and their variables.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use crate::call::{Needs, array, enter, functions, put, text};
use crate::code::{
    Code as ErrorCode, FILE_NOT_FOUND, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU,
    NOT_FOUND,
};
use crate::fatbin;
use crate::handle::Handle;
use crate::image::code;
use crate::objects::Module;
use crate::refusal;
use crate::state::Driver;

/// `CUjit_option` (cuda.h).
const JIT_ERROR_LOG_BUFFER: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;

/// Writes the compiler's message to the caller's log buffer.
///
/// # Safety
///
/// - `options` and `values` are null or have `count` elements.
/// - The buffer has the size that is given with it.
unsafe fn complain(words: &str, count: usize, options: *const c_int, values: *const *mut c_char) {
    // SAFETY: the caller guarantees that both arrays have `count` elements.
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
    // SAFETY: the caller guarantees that the buffer has `room` bytes.
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
    /// - `image` is a C string of PTX, an ELF file, a fat binary or its wrapper.
    /// - `options` and `values` are null or have `count` elements.
    /// - The log buffer among `values` has the size that is given with it.
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
        // SAFETY: the caller guarantees that `image` is PTX, an ELF file, a fat binary or its wrapper, each complete.
        let result = unsafe { code(image, self.card.capability()) };
        let code = result.map_err(|(code, words)| {
            // SAFETY: the caller guarantees `count` elements in both arrays, and a buffer of the size given with it.
            unsafe { complain(&words, count, options, values) };
            if self.test.is_none() {
                refusal::once(&words);
            }
            code
        })?;
        if code.is_none() && self.test.is_none() {
            refusal::once("a module is machine code (SASS), which the emulator does not run; give the driver its PTX");
            return Err(NO_BINARY_FOR_GPU);
        }
        let handle = self.handle();
        self.modules.insert(handle, Module { code });
        Ok(handle)
    }

    /// Loads a file as a module or a library.
    fn load_file(&mut self, path: &Path) -> Result<Handle, ErrorCode> {
        let mut bytes = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
        // PTX in a file need not end with a NUL, and a header must not be read past the end.
        bytes.extend([0; 64]);
        let size = bytes.first_chunk::<16>().and_then(fatbin::size);
        if size.is_some_and(|size| size > bytes.len()) || bytes.starts_with(&fatbin::WRAPPER.to_le_bytes()) {
            return Err(INVALID_IMAGE);
        }
        // SAFETY: the bytes end with NULs, a fat binary has the size that it states, and wrappers are refused above.
        unsafe { self.load(bytes.as_ptr(), 0, std::ptr::null(), std::ptr::null()) }
    }

    fn unload(&mut self, module: Handle) -> Result<(), ErrorCode> {
        self.modules.remove(&module).ok_or(INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    /// Returns the address and the size of a variable.
    fn variable(&mut self, module: Handle, name: &str) -> Result<(u64, usize), ErrorCode> {
        let code = self.modules.get(&module).ok_or(INVALID_HANDLE)?.code.clone().ok_or(NOT_FOUND)?;
        let module = code.decoded().map_err(|words| {
            refusal::once(&words);
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
