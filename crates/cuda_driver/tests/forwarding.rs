//! Tests with a driver that records its calls: cust's calls reach it with their arguments, and cust gets its answers.

use cuda_driver::cust::context::Context;
use cuda_driver::cust::device::{Device, DeviceAttribute};
use cuda_driver::cust::error::CudaError;
use cuda_driver::cust::event::{Event, EventFlags};
use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::module::Module;
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::cust::{self, CudaFlags};
use cuda_driver::{Unavailable, jit_log, last_failure, probe};

const ADD_ONE: &str =
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry add_one(.param .u64 p, .param .u32 n) { ret; }\n";

/// Returns the context of device 0, current on this thread.
fn context() -> Context {
    cust::init(CudaFlags::empty()).unwrap();
    Context::new(Device::get_device(0).unwrap()).unwrap()
}

#[test]
fn devices_are_counted_and_described() {
    let fake = fake_cuda::install();
    fake.set_device(9, 0, 132);
    assert_eq!(probe().unwrap(), 1);
    let device = Device::get_device(0).unwrap();
    assert_eq!(device.name().unwrap(), "Fake GPU");
    assert_eq!(device.total_memory().unwrap(), 8 << 30);
    assert_eq!(device.get_attribute(DeviceAttribute::ComputeCapabilityMajor).unwrap(), 9);
    assert_eq!(device.get_attribute(DeviceAttribute::MultiprocessorCount).unwrap(), 132);
}

#[test]
fn driver_without_devices_differs_from_no_driver() {
    let fake = fake_cuda::install();
    fake.set_device_count(0);
    assert!(matches!(probe(), Err(Unavailable::NoDevice)));
}

#[test]
fn launch_gets_size_and_parameters_and_writes_memory() {
    let fake = fake_cuda::install();
    fake.on_launch(|launch| {
        assert_eq!((launch.kernel, launch.grid, launch.block), ("add_one", [3, 2, 1], [64, 1, 1]));
        assert_eq!(launch.shared_bytes, 512);
        // SAFETY: the launch below passes a device pointer to two u32 and a u32.
        let (values, count) = unsafe { (launch.parameter::<*mut u32>(0), launch.parameter::<u32>(1)) };
        for i in 0..count as usize {
            // SAFETY: the launch below passes a pointer to `count` values.
            unsafe { *values.add(i) += 1 };
        }
    });
    {
        let _context = context();
        let module = Module::from_ptx(ADD_ONE, &[]).unwrap();
        let function = module.get_function("add_one").unwrap();
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
        let (start, end) = (Event::new(EventFlags::DEFAULT).unwrap(), Event::new(EventFlags::DEFAULT).unwrap());
        let values = DeviceBuffer::from_slice(&[41_u32, 99]).unwrap();
        fake.take_calls();

        start.record(&stream).unwrap();
        // SAFETY: the fake kernel above takes these parameters.
        unsafe {
            cust::launch!(function<<<(3, 2), 64, 512, stream>>>(values.as_device_ptr(), 2_u32)).unwrap();
        }
        end.record(&stream).unwrap();
        stream.synchronize().unwrap();
        let mut back = [0_u32; 2];
        values.copy_to(&mut back).unwrap();

        assert_eq!(back, [42, 100]);
        assert!(end.elapsed_time_f32(&start).unwrap() > 0.0);
        assert_eq!(
            fake.take_calls(),
            [
                "cuEventRecord",
                "cuLaunchKernel",
                "cuEventRecord",
                "cuStreamSynchronize",
                "cuMemcpyDtoH_v2",
                "cuEventElapsedTime"
            ]
        );
    }
    assert_eq!(fake.live_objects(), 0);
}

#[test]
fn code_unknown_to_cust_keeps_its_name() {
    let fake = fake_cuda::install();
    let _context = context();
    fake.fail_next("cuModuleLoadDataEx", 222);
    assert_eq!(Module::from_ptx(ADD_ONE, &[]).unwrap_err(), CudaError::UnknownError);
    let failure = last_failure().unwrap();
    assert_eq!(failure.call, "cuModuleLoadDataEx");
    assert_eq!(
        failure.to_string(),
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222): the provided PTX was compiled with an unsupported toolchain."
    );
}

#[test]
fn refused_module_has_a_compiler_log() {
    let _fake = fake_cuda::install();
    let _context = context();
    assert_eq!(Module::from_ptx("nonsense", &[]).unwrap_err(), CudaError::InvalidPtx);
    assert_eq!(jit_log(c"nonsense").unwrap(), "ptxas fatal : Missing .version directive at start of file");
}
