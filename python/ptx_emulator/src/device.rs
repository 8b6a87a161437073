//! A device: its memory, and launches.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use ptx_emulator::launch_json::{self, ArgSpec, Places};
use ptx_emulator::{Arg, Buffer, Card, DeviceConfig, Fault, Timeline};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::module::Module;
use crate::options::{Options, SearchBounds};
use crate::report::{Report, exploration, fault};

struct State {
    device: ptx_emulator::Device,
    timeline: Option<Timeline>,
    /// Live allocations.
    buffers: std::collections::BTreeMap<u64, u64>,
}

/// A device with its memory.
#[pyclass(frozen, module = "ptx_emulator._native")]
pub struct Device {
    state: Mutex<State>,
}

impl State {
    /// Returns the buffer of bytes that lie in an allocation. Other bytes are an `IndexError`.
    fn part(&self, address: u64, bytes: u64) -> PyResult<Buffer> {
        let inside = self
            .buffers
            .range(..=address)
            .next_back()
            .is_some_and(|(base, length)| address.checked_add(bytes).is_some_and(|end| end <= base + length));
        if inside {
            return Ok(Buffer { address, bytes });
        }
        Err(PyIndexError::new_err(format!("{bytes} bytes at {address:#x} do not lie in an allocation of the device")))
    }
}

impl Device {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Device {
    /// A device with a number of SMs. `timed`: the GPU whose clock launches run by. `constants`: `NAME=VALUE`.
    #[new]
    fn new(sms: u32, timed: Option<&str>, constants: Vec<String>) -> PyResult<Self> {
        let card = timed.map(|name| {
            let names = Card::NAMES.join(", ");
            Card::named(name).ok_or_else(|| {
                PyValueError::new_err(format!("timed: `{name}` has no time model; expected one of {names}"))
            })
        });
        let set = |card: Card, one: &String| card.with(one).map_err(PyValueError::new_err);
        let card = card.transpose()?.map(|card| constants.iter().try_fold(card, set)).transpose()?;
        let device = ptx_emulator::Device::new(DeviceConfig { sms });
        let state = State { device, timeline: card.map(Timeline::new), buffers: Default::default() };
        Ok(Self { state: Mutex::new(state) })
    }

    /// Allocates zero bytes and returns their address, a multiple of 256. `undefined`: nothing has written the bytes.
    fn allocate(&self, bytes: u64, name: &str, undefined: bool) -> u64 {
        let mut state = self.lock();
        let buffer = state.device.allocate(bytes);
        state.device.name(buffer, name);
        if undefined {
            state.device.undefine(buffer, 0, bytes);
        }
        state.buffers.insert(buffer.address, bytes);
        buffer.address
    }

    /// Marks the bytes from the start of an allocation as undefined until something writes them.
    fn undefine(&self, address: u64, bytes: u64) -> PyResult<()> {
        let mut state = self.lock();
        let part = state.part(address, bytes)?;
        state.device.undefine(part, 0, bytes);
        Ok(())
    }

    /// Frees an allocation.
    fn free(&self, address: u64) -> PyResult<()> {
        let mut state = self.lock();
        let bytes = state.buffers.remove(&address);
        let bytes = bytes.ok_or_else(|| PyIndexError::new_err(format!("no allocation begins at {address:#x}")))?;
        state.device.free(Buffer { address, bytes });
        Ok(())
    }

    /// Copies `bytes` bytes of this process at `host` to the device.
    ///
    /// The caller guarantees that the bytes are readable. Python passes the memory of an array that it holds.
    fn copy_in(&self, address: u64, host: usize, bytes: usize) -> PyResult<()> {
        let mut state = self.lock();
        let part = state.part(address, bytes as u64)?;
        if bytes > 0 {
            // SAFETY: Python passes the address and size of an array's memory, and holds the array during the call.
            let data = unsafe { std::slice::from_raw_parts(host as *const u8, bytes) };
            state.device.write(part, 0, data);
        }
        Ok(())
    }

    /// Copies bytes of the device to `host` in this process. Returns `true` if a byte has changed there.
    ///
    /// The caller guarantees that the bytes are readable and, if one differs, writable.
    fn copy_out(&self, address: u64, host: usize, bytes: usize, writable: bool) -> PyResult<bool> {
        let state = self.lock();
        let part = state.part(address, bytes as u64)?;
        if bytes == 0 {
            return Ok(false);
        }
        let data = state.device.download::<u8>(part);
        // SAFETY: Python passes the address and size of an array's memory, and holds the array during the call.
        let changed = unsafe { std::slice::from_raw_parts(host as *const u8, bytes) } != data;
        if changed && writable {
            // SAFETY: Python passes `writable` for an array whose memory may be written, with its address and size.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), host as *mut u8, bytes) };
        }
        Ok(changed)
    }

    /// Runs a kernel to its end. `arguments` has the bytes of each parameter. Returns a report, or the fault as JSON.
    fn launch(
        &self,
        py: Python<'_>,
        module: &Module,
        entry: &str,
        options: Options,
        arguments: Vec<Vec<u8>>,
    ) -> PyResult<(Option<Report>, Option<String>)> {
        let (config, order) = (options.config()?, options.order()?);
        let arguments: Vec<Arg> = arguments.into_iter().map(Arg).collect();
        let run = || -> Result<Report, Fault> {
            let mut state = self.lock();
            let State { device, timeline, .. } = &mut *state;
            if let Some(order) = &order {
                let report = device.replay(&module.module, entry, &config, &arguments, order)?;
                return Ok(Report { report, time: None });
            }
            let Some(timeline) = timeline else {
                let report = device.launch(&module.module, entry, &config, &arguments)?;
                return Ok(Report { report, time: None });
            };
            module.listing(timeline.card().arch).into_iter().for_each(|listing| timeline.add_listing(listing));
            let report = device.time(timeline, &module.module, entry, &config, &arguments)?;
            Ok(Report { report, time: timeline.launches().last().cloned() })
        };
        Ok(match py.detach(run) {
            Ok(report) => (Some(report), None),
            Err(stopped) => (None, Some(fault(&stopped))),
        })
    }

    /// Runs a kernel in all orders, up to bounds. Returns the result of the search, or why the launch cannot run, as JSON.
    fn explore(
        &self,
        py: Python<'_>,
        module: &Module,
        entry: &str,
        options: Options,
        arguments: Vec<Vec<u8>>,
        bounds: SearchBounds,
    ) -> PyResult<(Option<String>, Option<String>)> {
        let (config, bounds) = (options.config()?, bounds.bounds()?);
        let arguments: Vec<Arg> = arguments.into_iter().map(Arg).collect();
        let run = || self.lock().device.explore(&module.module, entry, &config, &arguments, &bounds);
        Ok(match py.detach(run) {
            Ok(found) => (Some(exploration(&found)), None),
            Err(stopped) => (None, Some(fault(&stopped))),
        })
    }
}

/// Number of SMs of a GPU.
#[pyfunction]
pub fn card_sms(name: &str) -> PyResult<u32> {
    let card = Card::named(name).ok_or_else(|| PyValueError::new_err(format!("`{name}` is not a known GPU")))?;
    Ok(card.sms)
}

/// The 128 bytes of a tensor map. `spec` is the JSON of an argument of a launch file, whose buffer is named `tensor` and
/// begins at `address`.
#[pyfunction]
pub fn tensor_map(spec: &str, address: u64) -> PyResult<Vec<u8>> {
    let invalid = |error: &dyn std::fmt::Display| PyValueError::new_err(format!("tensor map: {error}"));
    let spec: ArgSpec = serde_json::from_str(spec).map_err(|error| invalid(&error))?;
    let addresses = [("tensor".to_owned(), address)].into();
    let places = Places { addresses, encode: &|map| Ok(map.to_bytes()) };
    let made = launch_json::arguments(&[spec], &places, Path::new(""));
    let made = made.map_err(|error| invalid(&format_args!("{:#}", error)))?;
    Ok(made.into_iter().flat_map(|argument| argument.0).collect())
}
