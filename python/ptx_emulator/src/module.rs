//! PTX text, parsed and decoded.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;

/// A PTX module.
#[pyclass(frozen, module = "ptx_emulator._native")]
pub struct Module {
    pub module: ptx_emulator::Module,
    pub text: String,
    /// Machine code of the text by architecture, if there is a ptxas.
    listings: std::sync::Mutex<Vec<(String, Option<Arc<ptx_emulator::Listing>>)>>,
}

impl Module {
    /// The machine code for an architecture. `None`: there is no ptxas.
    pub fn listing(&self, arch: &str) -> Option<Arc<ptx_emulator::Listing>> {
        let mut listings = self.listings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, listing)) = listings.iter().find(|(known, _)| known == arch) {
            return listing.clone();
        }
        let listing = ptx_emulator::Listing::of_ptx(&self.text, arch).map(Arc::new);
        listings.push((arch.to_owned(), listing.clone()));
        listing
    }
}

#[pymethods]
impl Module {
    /// Parses PTX text.
    #[new]
    fn new(py: Python<'_>, text: String) -> PyResult<Self> {
        let module = py.detach(|| ptx_emulator::Module::parse(&text));
        let module = module.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { module, text, listings: Default::default() })
    }

    /// Names of the entries, in the order of the text.
    #[getter]
    fn entries(&self) -> Vec<&str> {
        self.module.entries().iter().map(|kernel| kernel.name.as_str()).collect()
    }

    /// Name and size in bytes of each parameter of an entry.
    fn parameters(&self, entry: &str) -> PyResult<Vec<(&str, u32)>> {
        let kernel = self.module.entry(entry).ok_or_else(|| PyKeyError::new_err(entry.to_owned()))?;
        Ok(kernel.params.iter().map(|p| (p.name.as_str(), p.bytes)).collect())
    }

    /// Cluster size that an entry requires (`.reqnctapercluster`).
    fn required_cluster(&self, entry: &str) -> Option<[u32; 3]> {
        self.module.entry(entry)?.required_cluster()
    }

    /// Line and text of each instruction of an entry that the emulator cannot run.
    fn unsupported(&self, entry: &str) -> PyResult<Vec<(u32, String)>> {
        let kernel = self.module.entry(entry).ok_or_else(|| PyKeyError::new_err(entry.to_owned()))?;
        Ok(kernel.unsupported.clone())
    }
}
