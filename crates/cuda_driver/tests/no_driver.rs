//! Tests on a machine without `libcuda.so.1`: everything links, starts, and returns an error.

use cuda_driver::cust::{self, CudaFlags, error::CudaError};
use cuda_driver::{Unavailable, last_failure, probe, sys};

/// Whether the machine has a driver. If so, prints that the test is skipped.
fn has_driver() -> bool {
    let present = !matches!(probe(), Err(Unavailable::LibraryNotFound { .. }));
    if present {
        eprintln!("skipped: this machine has a CUDA driver");
    }
    present
}

#[test]
fn reason_names_the_library() {
    if has_driver() {
        return;
    }
    let reason = probe().unwrap_err().to_string();
    assert!(reason.starts_with("cannot open the driver library (libcuda.so.1"), "{reason}");
}

#[test]
fn cust_gets_a_printable_error() {
    if has_driver() {
        return;
    }
    let error = cust::init(CudaFlags::empty()).unwrap_err();
    assert_eq!(error, CudaError::NoDevice);
    assert!(error.to_string().contains("no CUDA device: cannot open the driver library"), "{error}");

    let failure = last_failure().expect("the forwarder recorded the failure");
    assert_eq!(failure.call, "cuInit");
    assert!(failure.to_string().starts_with("CUDA_ERROR_NO_DEVICE (100): no CUDA device"), "{failure}");
}

#[test]
fn calls_missing_in_cust_also_report_no_device() {
    if has_driver() {
        return;
    }
    // SAFETY: without a driver the arguments are not read.
    let code = unsafe {
        sys::cuLaunchKernelEx(std::ptr::null(), std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut())
    };
    assert_eq!(code, sys::CUresult::CUDA_ERROR_NO_DEVICE);
    assert_eq!(last_failure().expect("the forwarder recorded the failure").call, "cuLaunchKernelEx");
}
