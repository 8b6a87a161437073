//! Tests that the fake driver keeps exactly the order that streams, events and graphs guarantee.

use std::ptr;
use std::sync::Mutex;

use cuda_driver::cust::context::Context;
use cuda_driver::cust::device::Device;
use cuda_driver::cust::event::{Event, EventFlags};
use cuda_driver::cust::memory::DeviceBuffer;
use cuda_driver::cust::module::Module;
use cuda_driver::cust::stream::{Stream, StreamFlags, StreamWaitEventFlags};
use cuda_driver::cust::{self, CudaFlags, launch};
use cuda_driver::{last_failure, sys};
use fake_cuda::{FakeCuda, Launch};

const NOTE: &str = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry note(.param .u32 number) { ret; }\n";

/// Numbers of the kernels that ran, in order.
static RAN: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn ran() -> Vec<u32> {
    std::mem::take(&mut RAN.lock().unwrap())
}

/// A device with one kernel, which records its number, and two streams.
struct Setup {
    streams: [Stream; 2],
    module: Module,
    _context: Context,
    _fake: FakeCuda,
}

impl Setup {
    fn new() -> Self {
        let fake = fake_cuda::install();
        fake.on_launch(|launch: &Launch| {
            // SAFETY: every launch passes a u32.
            RAN.lock().unwrap().push(unsafe { launch.parameter(0) });
        });
        ran();
        cust::init(CudaFlags::empty()).unwrap();
        let context = Context::new(Device::get_device(0).unwrap()).unwrap();
        let stream = || Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
        Self {
            streams: [stream(), stream()],
            module: Module::from_ptx(NOTE, &[]).unwrap(),
            _context: context,
            _fake: fake,
        }
    }

    fn note(&self, stream: usize, number: u32) {
        let (function, stream) = (self.module.get_function("note").unwrap(), &self.streams[stream]);
        // SAFETY: the kernel has this single parameter.
        unsafe { launch!(function<<<1, 32, 0, stream>>>(number)).unwrap() };
    }

    /// Records an event after all work of a stream.
    fn mark(&self, stream: usize) -> Event {
        let event = Event::new(EventFlags::DISABLE_TIMING).unwrap();
        event.record(&self.streams[stream]).unwrap();
        event
    }

    fn wait(&self, stream: usize, for_stream: usize) {
        self.streams[stream].wait_event(self.mark(for_stream), StreamWaitEventFlags::DEFAULT).unwrap();
    }

    fn begin_capture(&self) {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.streams[0].as_inner(), mode) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }

    fn end_capture(&self) -> Result<sys::CUgraph, String> {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamEndCapture(self.streams[0].as_inner(), &mut graph) } {
            sys::CUresult::CUDA_SUCCESS => Ok(graph),
            _ => Err(last_failure().unwrap().name()),
        }
    }
}

#[test]
fn stream_runs_in_order_and_only_on_demand() {
    let setup = Setup::new();
    (1..=3).for_each(|number| setup.note(0, number));
    setup.note(1, 9);
    assert_eq!(ran(), [0; 0]);
    setup.streams[0].synchronize().unwrap();
    assert_eq!(ran(), [1, 2, 3]);
    setup.streams[1].synchronize().unwrap();
    assert_eq!(ran(), [9]);
}

#[test]
fn waiting_streams_run_after_their_events() {
    let setup = Setup::new();
    setup.note(0, 1);
    setup.wait(1, 0);
    setup.note(1, 2);
    setup.note(0, 3);
    setup.wait(0, 1);
    setup.note(0, 4);
    setup.streams[0].synchronize().unwrap();
    // 3 and 2 are unordered; the fake driver runs the other stream's work first.
    assert_eq!(ran(), [1, 2, 3, 4]);
}

#[test]
fn other_stream_runs_first_without_a_fork() {
    let setup = Setup::new();
    setup.note(0, 1);
    setup.note(1, 2);
    setup.wait(0, 1);
    setup.streams[0].synchronize().unwrap();
    assert_eq!(ran(), [2, 1]);
}

#[test]
fn captured_fork_runs_at_each_graph_launch() {
    let setup = Setup::new();
    setup.begin_capture();
    setup.note(0, 1);
    setup.wait(1, 0);
    setup.note(1, 2);
    setup.wait(0, 1);
    let graph = setup.end_capture().unwrap();
    setup.streams[0].synchronize().unwrap();
    assert_eq!(ran(), [0; 0]);
    let mut executable = ptr::null_mut();
    // SAFETY: the graph was captured above, all objects in it are alive, and the stream belongs to this context.
    unsafe {
        assert_eq!(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuGraphDestroy(graph), sys::CUresult::CUDA_SUCCESS);
        for _ in 0..2 {
            assert_eq!(sys::cuGraphLaunch(executable, setup.streams[1].as_inner()), sys::CUresult::CUDA_SUCCESS);
        }
        assert_eq!(sys::cuGraphExecDestroy(executable), sys::CUresult::CUDA_SUCCESS);
    }
    setup.streams[1].synchronize().unwrap();
    assert_eq!(ran(), [1, 2, 1, 2]);
}

#[test]
fn forbidden_calls_in_a_capture_are_refused() {
    let setup = Setup::new();
    setup.begin_capture();
    assert!(DeviceBuffer::<u8>::zeroed(1).is_err());
    assert_eq!(last_failure().unwrap().name(), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    assert!(setup.streams[0].synchronize().is_err());
    setup.wait(1, 0);
    setup.note(1, 1);
    assert_eq!(setup.end_capture().unwrap_err(), "CUDA_ERROR_STREAM_CAPTURE_UNJOINED");

    let outside = setup.mark(1);
    setup.begin_capture();
    let waits = setup.streams[0].wait_event(outside, StreamWaitEventFlags::DEFAULT);
    assert!(waits.is_err(), "the event belongs to a stream that is not capturing");
    assert_eq!(last_failure().unwrap().name(), "CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
    setup.end_capture().unwrap();
}
