//! The CUDA driver, found at run time.
//!
//! [`cust`] declares the driver's functions as symbols for the linker, so a program that uses it does not even start on
//! a machine without `libcuda`. This crate defines those symbols. Each one forwards to the driver library, which is
//! opened at the first call (`table.rs` lists the functions). So one binary runs everywhere, and on a machine without a
//! driver every call returns `CUDA_ERROR_NO_DEVICE`. The list also contains the few functions that `cust` 0.3.2 lacks
//! ([`sys`]), with their types in [`abi`].
//!
//! Use `cust` through this crate's re-export, so that a program that links `cust` also links this crate.
//!
//! ```
//! match cuda_driver::probe() {
//!     Ok(devices) => println!("{devices} CUDA devices"),
//!     Err(reason) => println!("no CUDA device: {reason}"),
//! }
//! ```
//!
//! The crate knows no kernel and no matrix.

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

/// The driver's functions: functions that `cust` declares, and functions that `cust` lacks.
pub mod sys {
    pub use crate::abi::*;
    pub use crate::table::added::*;
    pub use cust::sys::*;
}

/// Returns the number of usable CUDA devices, at least one.
///
/// The first call opens and initializes the driver; later calls are cheap.
///
/// # Errors
///
/// [`Unavailable`] states the failed step. A library that could not be opened is not tried again in this process.
pub fn probe() -> Result<u32, Unavailable> {
    table::driver().map_err(Clone::clone)?;
    let mut count = 0;
    // SAFETY: both functions may be called at any time in any order, and `count` outlives the call.
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
