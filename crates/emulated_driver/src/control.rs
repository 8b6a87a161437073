//! Calls that no real driver has. A program that knows the emulator changes options between launches, names memory for
//! faults, and reads the report of each launch. The Python package `ptx-emulator` uses these calls.
//!
//! The calls need no context and never wait.

use std::ffi::{CString, c_char};

use crate::call::{Needs, enter, functions, put, text};
use crate::code::INVALID_VALUE;
use crate::state::driver;

functions! {
    // Sets an option for later launches. Names and values are the same as for the environment variables, without
    // `PTX_EMULATOR_`. If `message` is not null, it receives the text of an error, which `ptxEmulatorFree` frees.
    fn ptxEmulatorSet(name: *const c_char, value: *const c_char, message: *mut *mut c_char) {
        let mut driver = enter(NAME, Needs::Nothing)?;
        let set = driver.set_option(&text(name)?, &text(value)?);
        set.map_err(|words| {
            let words = CString::new(words).unwrap_or_default().into_raw();
            if put(message, words).is_err() {
                drop(CString::from_raw(words));
            }
            INVALID_VALUE
        })
    }
    // Names the allocation or the page-locked memory that begins at an address.
    fn ptxEmulatorName(address: u64, name: *const c_char) {
        enter(NAME, Needs::Nothing)?.memory.name(address, &text(name)?)
    }
    // Marks bytes as undefined, until something writes them. They must lie in an allocation or in page-locked memory.
    fn ptxEmulatorUndefine(address: u64, bytes: u64) {
        enter(NAME, Needs::Nothing)?.memory.undefine(address, bytes)
    }
    // Returns the reports of the launches since the last call, a line of JSON per launch. The first call returns an
    // empty text, and the driver keeps reports from then on. `ptxEmulatorFree` frees the text.
    fn ptxEmulatorReports(reports: *mut *mut c_char) {
        let mut driver = enter(NAME, Needs::Nothing)?;
        let lines = driver.reports.replace(String::new()).unwrap_or_default();
        put(reports, CString::new(lines).unwrap_or_default().into_raw())
    }
    // Frees a text of these calls.
    fn ptxEmulatorFree(text: *mut c_char) {
        if !text.is_null() { drop(CString::from_raw(text)); }
        drop(driver());
        Ok(())
    }
}
