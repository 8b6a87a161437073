//! Tests with an older driver that lacks a function.

use cuda_driver::cust::context::Context;
use cuda_driver::cust::device::Device;
use cuda_driver::cust::{self, CudaFlags};
use cuda_driver::{last_failure, probe, sys};

#[test]
fn call_newer_than_the_driver_is_refused_alone() {
    let fake = fake_cuda::install_without(Some("cuTensorMapEncodeTiled"));
    assert_eq!(probe().unwrap(), 1);
    cust::init(CudaFlags::empty()).unwrap();
    let _context = Context::new(Device::get_device(0).unwrap()).unwrap();
    fake.take_calls();
    // SAFETY: the driver lacks this function, so the arguments are not read.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::null_mut(),
            sys::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            1,
            std::ptr::null_mut(),
            std::ptr::null(),
            std::ptr::null(),
            std::ptr::null(),
            std::ptr::null(),
            sys::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CU_TENSOR_MAP_SWIZZLE_NONE,
            sys::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            sys::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    assert_eq!(code, sys::CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND);
    let failure = last_failure().unwrap();
    assert_eq!(failure.call, "cuTensorMapEncodeTiled");
    assert!(failure.to_string().ends_with("the driver lacks this call; update the NVIDIA driver"), "{failure}");
    assert_eq!(fake.take_calls(), [""; 0]);
}
