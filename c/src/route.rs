//! Routers: from logits to the experts that each token names and their weights.

use std::ffi::c_void;

use nvfp4::Error;
use nvfp4::backend::{Backend, cpu::Cpu, cuda::RouterArguments};
use nvfp4::problem::TokenDtype;
use nvfp4::router::{LogitType, Logits, Router, Scoring};

use crate::gpu::nvfp4_device;
use crate::pointer::{address, elements, elements_mut, value};
use crate::status::{guard, nvfp4_status};
use crate::types::{nvfp4_logit_type, nvfp4_route_call, nvfp4_router, nvfp4_scoring};

impl nvfp4_router {
    /// A router whose biases are these, or all zero if it has some that are read elsewhere.
    fn checked(&self, bias: &[f32]) -> Result<Router, Error> {
        const SOFTMAX: u32 = nvfp4_scoring::SOFTMAX as u32;
        const TOP_K_SOFTMAX: u32 = nvfp4_scoring::TOP_K_SOFTMAX as u32;
        const SIGMOID_TOP1: u32 = nvfp4_scoring::SIGMOID_TOP1 as u32;
        const SIGMOID_GROUPS: u32 = nvfp4_scoring::SIGMOID_GROUPS as u32;
        let scoring = match self.scoring {
            SOFTMAX => Scoring::Softmax { renormalize: self.renormalise },
            TOP_K_SOFTMAX => Scoring::TopKSoftmax,
            SIGMOID_TOP1 => Scoring::SigmoidTop1,
            SIGMOID_GROUPS => Scoring::SigmoidGroups {
                bias: bias.into(),
                groups: self.groups,
                top_groups: self.top_groups,
                renormalize: self.renormalise,
                scale: self.scale,
            },
            other => return Err(Error::Invalid(format!("scoring {other} is no nvfp4_scoring"))),
        };
        Router::new(self.experts, self.top_k, scoring)
    }

    /// Whether biases are read.
    fn has_bias(&self) -> bool {
        self.scoring == nvfp4_scoring::SIGMOID_GROUPS as u32
    }
}

/// Chooses experts on the CPU.
///
/// # Safety
///
/// The pointers, the router's biases and the call's among them, are to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_route_cpu(router: *const nvfp4_router, call: *const nvfp4_route_call) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (router, call) = unsafe { (value(router, "router")?, value(call, "call")?) };
        let experts = router.experts;
        let bias = if router.has_bias() {
            // SAFETY: as above.
            unsafe { elements(router.bias, experts, "bias")? }
        } else {
            &[]
        };
        let router = router.checked(bias)?;
        // SAFETY: as above.
        let logits = unsafe {
            match logit_type(call.logit_type)? {
                LogitType::F32 => Logits::F32(rows(call, call.logits.cast(), experts)?.into()),
                LogitType::Token(TokenDtype::F16) => Logits::F16(rows(call, call.logits.cast(), experts)?.into()),
                LogitType::Token(TokenDtype::Bf16) => Logits::Bf16(rows(call, call.logits.cast(), experts)?.into()),
            }
        };
        let routes = Cpu::new().route(&router, &logits)?;
        // SAFETY: as above.
        let (ids, weights) = unsafe {
            (
                elements_mut(call.ids, routes.ids.len(), "ids")?,
                elements_mut(call.weights, routes.weights.len(), "weights")?,
            )
        };
        ids.copy_from_slice(&routes.ids);
        weights.copy_from_slice(&routes.weights);
        Ok(())
    })
}

/// The rows of a call's logits, without gaps.
///
/// # Safety
///
/// The rows are there, in host memory.
unsafe fn rows<T: Copy>(call: &nvfp4_route_call, logits: *const T, experts: usize) -> Result<Vec<T>, Error> {
    let stride = call.logits_stride;
    if stride < experts {
        return Err(Error::Invalid(format!("logits_stride {stride} is less than {experts} experts")));
    }
    let Some(last) = call.tokens.checked_sub(1) else { return Ok(Vec::new()) };
    let len = last.checked_mul(stride).and_then(|len| len.checked_add(experts)).ok_or(Error::TooLarge)?;
    // SAFETY: `# Safety` above.
    let numbers = unsafe { elements(logits, len, "logits")? };
    Ok(numbers.chunks(stride).flat_map(|row| &row[..experts]).copied().collect())
}

/// Queues the choice of experts, and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
///
/// # Safety
///
/// The router's biases and what the call points to lie in memory of these sizes that the GPU can use, and stay until the stream has come
/// past the call. `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_route_launch(
    device: *const nvfp4_device,
    router: *const nvfp4_router,
    call: *const nvfp4_route_call,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: `# Safety` above.
        let (device, router, call) =
            unsafe { (value(device, "device")?, value(router, "router")?, value(call, "call")?) };
        let logit_type = logit_type(call.logit_type)?;
        // The kernel reads the biases; a router for more experts than there can be is refused, whatever they are.
        let checked = router.checked(&vec![0.0; router.experts.min(1 << 16)])?;
        if call.tokens == 0 {
            return Ok(());
        }
        let arguments = RouterArguments {
            token_count: call.tokens,
            logits: address(call.logits, "logits")?,
            logit_type,
            logits_stride: call.logits_stride,
            bias: if router.has_bias() { address(router.bias, "bias")? } else { 0 },
            ids: address(call.ids, "ids")?,
            weights: address(call.weights, "weights")?,
        };
        // SAFETY: as above.
        unsafe { device.router.launch(&checked, &arguments, stream.cast()) }
    })
}

fn logit_type(of: u32) -> Result<LogitType, Error> {
    const F16: u32 = nvfp4_logit_type::F16 as u32;
    const BF16: u32 = nvfp4_logit_type::BF16 as u32;
    const F32: u32 = nvfp4_logit_type::F32 as u32;
    match of {
        F16 => Ok(LogitType::Token(TokenDtype::F16)),
        BF16 => Ok(LogitType::Token(TokenDtype::Bf16)),
        F32 => Ok(LogitType::F32),
        other => Err(Error::Invalid(format!("logit_type {other} is no nvfp4_logit_type"))),
    }
}
