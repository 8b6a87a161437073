//! Conversion of the library's errors to Python's exceptions.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

create_exception!(nvfp4, Error, PyRuntimeError, "A device is missing, failed, or has no kernel for the layer.");

/// Returns a `ValueError` about an argument.
pub fn invalid(name: &str, text: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("{name}: {text}"))
}

/// Returns a `ValueError` if the library's error says that the input is wrong, else an [`Error`].
pub fn exception(error: nvfp4::Error) -> PyErr {
    match error.code() {
        "driver" | "no-device" | "not-computed" => Error::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}
