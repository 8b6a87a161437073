//! Routers on a GPU: launched on the caller's stream, or with operands in host memory.

use std::sync::Arc;

use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use cuda_driver::sys::{CUfunction, CUstream};

use super::device::Device;
use super::planned::ReadyLaunch;
use crate::Error;
use crate::router::{Logits, Router, Routes};
use nvfp4_kernels::Subject;
use nvfp4_kernels::kernel::{Entry, Kernel};
use nvfp4_kernels::layer::router::{RouterArguments, RouterKernel, launch};

/// Launches routers with operands in device memory. Made by [`Cuda::router_launcher`](super::Cuda::router_launcher).
/// One launcher serves all routers of a device.
///
/// A launch allocates nothing, waits for nothing, and does not change the thread's current context. A call may
/// therefore be captured into the caller's graph.
#[derive(Clone)]
pub struct RouterLauncher {
    /// The kernel's entries and their names. Valid while `device` lives.
    functions: [(&'static str, CUfunction); 2],
    device: Arc<Device>,
}

// SAFETY: `functions` are handles of the driver, which any thread may use while the context is current. Every method
// makes the context current.
unsafe impl Send for RouterLauncher {}
// SAFETY: no method changes the launcher, and any thread may use `functions` while the context is current. Every method
// makes the context current.
unsafe impl Sync for RouterLauncher {}

impl RouterLauncher {
    /// Loads the kernel of routers.
    pub(super) fn new(device: Arc<Device>) -> Result<Self, Error> {
        device.standing.check(Subject::Router)?;
        let entered = device.enter()?;
        let entries = RouterKernel.entries();
        let function = |entry: &Entry| Ok::<_, Error>((entry.name, device.function(RouterKernel.name(), entry)?));
        let functions = [function(&entries[0])?, function(&entries[1])?];
        drop(entered);
        Ok(Self { functions, device })
    }

    /// Queues a call on the caller's stream and returns without waiting.
    ///
    /// # Errors
    /// [`Error::Invalid`] if an address is not aligned, the stride is less than the number of experts, or a list that the
    /// rule needs is missing. [`Error::TooLarge`] if a size is too large. [`Error::Driver`] if the driver fails.
    ///
    /// # Safety
    ///
    /// - `stream` is null or a stream of this device's primary context.
    /// - Every address of `arguments` points to memory that this device can read (write, for ids and weights), with the
    ///   number of bytes that [`RouterArguments`] documents. The biases, factors and table belong to `router`.
    /// - This memory stays allocated, and nobody else writes it, until the stream has passed this call or, if the call
    ///   was captured, until the graph is not launched any more.
    pub unsafe fn launch(&self, router: &Router, arguments: &RouterArguments, stream: CUstream) -> Result<(), Error> {
        let Some(launch) = launch(router, arguments)? else { return Ok(()) };
        let parameter = launch.write(0, &mut [], &mut |_| unreachable!("the kernel of routers has no tensor maps"))?;
        let entry = self.functions.iter().find(|(name, _)| *name == launch.grid.entry);
        let (_, function) = *entry.expect("a launch is of one of the kernel's entries");
        let ready = ReadyLaunch { function, grid: launch.grid, parameter };
        let _entered = self.device.enter()?;
        // SAFETY: the context is current. The caller guarantees that `stream` belongs to it and that all operands stay
        // valid until the kernel has run.
        unsafe { ready.queue(&self.device, stream) }
    }

    /// Computes the experts of each token and their weights, from logits in host memory.
    pub(super) fn route(&self, router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
        let token_count = logits.tokens(router)?;
        router.check_token_ids(token_count, token_ids)?;
        let choices = token_count * router.top_k();
        let mut routes = Routes { ids: vec![i32::MIN; choices], weights: vec![f32::NAN; choices] };
        if token_count == 0 {
            return Ok(routes);
        }
        self.device.make_current()?;
        let numbers = self.device.check(DeviceBuffer::from_slice(logits.bytes()))?;
        let rule = router.rule();
        let [bias, expert_scale] =
            [&rule.bias, &rule.expert_scale].map(|list| self.device.check(DeviceBuffer::from_slice(list)));
        let (bias, expert_scale) = (bias?, expert_scale?);
        let table = rule.table.as_ref().map_or(&[][..], |table| &table.ids);
        let [table, token_ids] = [table, token_ids].map(|list| self.device.check(DeviceBuffer::from_slice(list)));
        let (table, token_ids) = (table?, token_ids?);
        let ids = self.device.check(DeviceBuffer::from_slice(&routes.ids))?;
        let weights = self.device.check(DeviceBuffer::from_slice(&routes.weights))?;
        let stream = self.device.check(Stream::new(StreamFlags::DEFAULT, None))?;
        let arguments = RouterArguments {
            token_count,
            logits: numbers.as_device_ptr().as_raw(),
            logit_type: logits.logit_type(),
            logits_stride: router.experts(),
            bias: bias.as_device_ptr().as_raw(),
            expert_scale: expert_scale.as_device_ptr().as_raw(),
            table: table.as_device_ptr().as_raw(),
            token_ids: token_ids.as_device_ptr().as_raw(),
            ids: ids.as_device_ptr().as_raw(),
            weights: weights.as_device_ptr().as_raw(),
        };
        // SAFETY: the stream belongs to the current context, and runs after the null stream, on which the operands were
        // copied. The buffers have the sizes of the router and live until the stream has finished below.
        let queued = unsafe { self.launch(router, &arguments, stream.as_inner()) };
        let finished = self.device.check(stream.synchronize());
        queued.and(finished)?;
        self.device.check(ids.copy_to(&mut routes.ids))?;
        self.device.check(weights.copy_to(&mut routes.weights))?;
        Ok(routes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::backend::cuda::Cuda;
    use crate::problem::TokenDtype;
    use crate::router::{LogitType, Scoring, compare};

    fn deepseek() -> Router {
        let bias = (0..32).map(|expert| expert as f32 / 100.0).collect();
        let scoring = Scoring::SigmoidGroups { bias, groups: 4, top_groups: 2, renormalize: true, scale: 2.5 };
        Router::new(32, 3, scoring).unwrap()
    }

    fn fake() -> fake_cuda::FakeCuda {
        let fake = fake_cuda::install();
        fake.set_device(8, 0, 4);
        fake.on_launch(|launch| RouterKernel.fake(launch));
        fake
    }

    #[test]
    fn routers_run_from_host_memory() {
        let _fake = fake();
        let gpu = Cuda::open(0).unwrap();
        let routers = [
            deepseek(),
            Router::new(32, 3, Scoring::TopKSoftmax).unwrap(),
            Router::new(32, 3, Scoring::Softmax { renormalize: false }).unwrap(),
            Router::new(32, 1, Scoring::SigmoidTop1).unwrap(),
        ];
        let numbers: Vec<u16> = (0..7 * 32).map(|i: u16| 0x3C00 + i * 37 % 0x300).collect();
        for router in &routers {
            for logits in
                [Logits::F16(numbers.clone().into()), Logits::Bf16(numbers.clone().into()), Logits::F32(vec![].into())]
            {
                let routes = gpu.route(router, &logits).unwrap();
                assert_eq!(compare::compare(router, &logits, &routes).unwrap(), None);
            }
        }
    }

    #[test]
    fn a_launcher_routes_strided_rows_on_the_callers_stream() {
        let _fake = fake();
        let router = deepseek();
        let launcher = Cuda::open(0).unwrap().router_launcher().unwrap();
        let numbers: Vec<u16> = (0..5 * 40).map(|i: u16| 0x3C00 + i * 37 % 0x300).collect();
        let logits = DeviceBuffer::from_slice(&numbers).unwrap();
        let bias = DeviceBuffer::from_slice(router.bias().unwrap()).unwrap();
        let (ids, weights) =
            (DeviceBuffer::from_slice(&[0i32; 15]).unwrap(), DeviceBuffer::from_slice(&[0f32; 15]).unwrap());
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
        let arguments = RouterArguments {
            token_count: 5,
            logits: logits.as_device_ptr().as_raw(),
            logit_type: LogitType::Token(TokenDtype::Bf16),
            logits_stride: 40,
            bias: bias.as_device_ptr().as_raw(),
            expert_scale: 0,
            table: 0,
            token_ids: 0,
            ids: ids.as_device_ptr().as_raw(),
            weights: weights.as_device_ptr().as_raw(),
        };
        // SAFETY: the buffers have these sizes and live until `synchronize`, and the stream belongs to this context.
        unsafe { launcher.launch(&router, &arguments, stream.as_inner()) }.unwrap();
        stream.synchronize().unwrap();
        let mut routes = Routes { ids: vec![0; 15], weights: vec![0.0; 15] };
        ids.copy_to(&mut routes.ids).unwrap();
        weights.copy_to(&mut routes.weights).unwrap();
        let rows: Vec<u16> = numbers.chunks(40).flat_map(|row| row[..32].to_vec()).collect();
        assert_eq!(compare::compare(&router, &Logits::Bf16(rows.into()), &routes).unwrap(), None);
    }
}
