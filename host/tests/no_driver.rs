//! Feature `cuda` on a machine without a driver: the program starts and names the missing library.
#![cfg(feature = "cuda")]

use nvfp4::backend::cuda::{Cuda, devices};

#[test]
fn opening_a_device_names_the_missing_driver_library() {
    let Err(error) = devices() else {
        eprintln!("skipped: this machine has a CUDA driver");
        return;
    };
    assert!(error.is_no_device());
    let expected = "no CUDA device: cannot open the driver library (libcuda.so.1";
    if error.to_string().starts_with(expected) {
        assert!(Cuda::open(0).err().unwrap().to_string().starts_with(expected));
    } else {
        eprintln!("skipped: this machine has a CUDA driver without devices ({error})");
    }
}
