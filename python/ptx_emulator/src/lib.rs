//! The native module of the Python package `ptx_emulator`: modules, devices and launches of the crate `ptx_emulator`.
//!
//! Python (`python/ptx_emulator/_device.py`) turns arguments into bytes and arrays into memory of a device. A fault
//! leaves this module as JSON, from which Python makes an exception. The driver's reports have the same form.

mod device;
mod module;
mod options;
mod report;

use pyo3::prelude::*;

/// Modules, devices and launches.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<module::Module>()?;
    module.add_class::<device::Device>()?;
    module.add_class::<report::Report>()?;
    module.add_function(wrap_pyfunction!(device::tensor_map, module)?)?;
    module.add_function(wrap_pyfunction!(device::card_sms, module)?)?;
    module.add("CARDS", ptx_emulator::Card::NAMES)?;
    Ok(())
}
