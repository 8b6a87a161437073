//! The CUDA driver, found at run time.
//!
//! [`cust`] declares the driver's functions as symbols for the linker, so a program that uses it does not even start on
//! a machine without `libcuda`. This crate defines those symbols: each is a forwarder into the driver library, opened
//! at the first call (`table.rs` is the list). One binary then runs everywhere, and on a machine without a driver
//! every call returns `CUDA_ERROR_NO_DEVICE`. The few calls that `cust` 0.3.2 lacks stand in the same list
//! ([`sys`]), with their types in [`abi`].
//!
//! Use `cust` through this crate's re-export: a program that links `cust` then links this crate too.
//!
//! ```
//! match cuda_driver::probe() {
//!     Ok(devices) => println!("{devices} CUDA devices"),
//!     Err(reason) => println!("no CUDA device: {reason}"),
//! }
//! ```
//!
//! This crate knows no kernel and no matrix.

pub mod abi;
mod cluster;
mod failure;
mod jit;
mod record;
mod table;
mod unavailable;

pub use cluster::allow_large_clusters;
pub use cust;
pub use jit::jit_log;
pub use record::{Failure, last_failure};
pub use unavailable::Unavailable;

/// The driver's functions: those that `cust` declares, and those that it lacks.
pub mod sys {
    pub use crate::abi::*;
    pub use crate::table::added::*;
    pub use cust::sys::*;
}

/// How many CUDA devices can be used, at least one.
///
/// Opens and initializes the driver if nothing has yet; cheap after the first call.
///
/// # Errors
///
/// [`Unavailable`] says which step failed. A library that could not be opened is not looked for again by this process.
pub fn probe() -> Result<u32, Unavailable> {
    table::driver().map_err(Clone::clone)?;
    let mut count = 0;
    // SAFETY: both are sound at any time, in any order; `count` outlives the call.
    let code = unsafe {
        match sys::cuInit(0) {
            sys::CUresult::CUDA_SUCCESS => sys::cuDeviceGetCount(&mut count),
            failed => failed,
        }
    };
    match (code, u32::try_from(count)) {
        (sys::CUresult::CUDA_ERROR_NO_DEVICE, _) | (sys::CUresult::CUDA_SUCCESS, Err(_) | Ok(0)) => {
            Err(Unavailable::NoDevice)
        }
        (sys::CUresult::CUDA_SUCCESS, Ok(count)) => Ok(count),
        (code, _) => {
            Err(Unavailable::NotStarting(last_failure().unwrap_or(Failure { call: "cuInit", code: code as i32 })))
        }
    }
}
