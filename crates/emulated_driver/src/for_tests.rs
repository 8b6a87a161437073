//! Functions for tests, which no real driver has. `fake_cuda` calls them.

use std::ffi::{CStr, CString, c_char, c_int};

use crate::card::Card;
use crate::code::Code;
use crate::current;
use crate::objects::{Kernel, Test};
use crate::options::Options;
use crate::state::{Driver, driver};

#[unsafe(no_mangle)]
extern "C" fn fake_reset() {
    *driver() = Driver::new(Options::from_environment(), Some(Test::default()));
    current::forget();
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
    // SAFETY: the caller guarantees that `function` is a C string.
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
/// `text` was returned by `fake_take_calls` and is freed only once.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_free_text(text: *mut c_char) {
    // SAFETY: the caller guarantees that `text` comes from `CString::into_raw` in `fake_take_calls` and is freed only
    // once.
    drop(unsafe { CString::from_raw(text) });
}

#[unsafe(no_mangle)]
extern "C" fn fake_live_objects() -> usize {
    driver().live_objects()
}
