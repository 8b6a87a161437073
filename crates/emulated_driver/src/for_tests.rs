//! What a test asks of the driver, by functions that no driver has (`fake_cuda` calls them).

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::card::Card;
use crate::code::Code;
use crate::context;
use crate::options::Options;
use crate::state::{Driver, Handle, driver};
use crate::work::Launch;

/// A test's kernel: the entry's name, grid, block and cluster, shared memory, the stream, the parameters.
pub type Kernel = extern "C" fn(*const c_char, *const c_uint, c_uint, Handle, *const *const c_void);

/// A test's part of the driver.
#[derive(Default)]
pub struct Test {
    calls: Vec<String>,
    failures: HashMap<String, Code>,
    /// What a launch does.
    pub kernel: Option<Kernel>,
}

impl Test {
    /// Writes a call down, and fails it if that was asked for.
    pub fn note(&mut self, name: &str) -> Result<(), Code> {
        let questions = ["cuDeviceGet", "cuDeviceTotalMem", "cuDriverGet", "cuCtxGet", "cuGetError"];
        if !questions.iter().any(|question| name.starts_with(question)) {
            self.calls.push(name.to_owned());
        }
        self.failures.remove(name).map_or(Ok(()), Err)
    }
}

/// Calls a test's kernel.
pub fn call(kernel: Kernel, launch: &Launch) {
    let parameters: Vec<_> = launch.parameters.iter().map(|bytes| bytes.as_ptr().cast()).collect();
    let name = CString::new(launch.name.as_str()).unwrap_or_default();
    kernel(name.as_ptr(), launch.size.as_ptr().cast(), launch.shared_bytes, launch.stream, parameters.as_ptr());
}

#[unsafe(no_mangle)]
extern "C" fn fake_reset() {
    *driver() = Driver::new(Options::from_environment(), Some(Test::default()));
    context::forget();
}

#[unsafe(no_mangle)]
extern "C" fn fake_set_device(major: c_int, minor: c_int, sms: c_int) {
    driver().card = Card::of_tests(major, minor, sms);
}

#[unsafe(no_mangle)]
extern "C" fn fake_set_device_count(count: c_int) {
    driver().cards = count;
}

/// # Safety
///
/// `function` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_fail_next(function: *const c_char, code: Code) {
    // SAFETY: as this function's contract says.
    let function = unsafe { CStr::from_ptr(function) }.to_string_lossy().into_owned();
    if let Some(test) = &mut driver().test {
        test.failures.insert(function, code);
    }
}

#[unsafe(no_mangle)]
extern "C" fn fake_on_launch(kernel: Kernel) {
    if let Some(test) = &mut driver().test {
        test.kernel = Some(kernel);
    }
}

#[unsafe(no_mangle)]
extern "C" fn fake_take_calls() -> *mut c_char {
    let calls = driver().test.as_mut().map(|test| std::mem::take(&mut test.calls).join("\n"));
    CString::new(calls.unwrap_or_default()).unwrap_or_default().into_raw()
}

/// # Safety
///
/// `text` came from `fake_take_calls`, and is freed once.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_free_text(text: *mut c_char) {
    // SAFETY: as this function's contract says.
    drop(unsafe { CString::from_raw(text) });
}

#[unsafe(no_mangle)]
extern "C" fn fake_live_objects() -> usize {
    driver().live_objects()
}
