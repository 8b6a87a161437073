//! Routers: from logits to each token's experts and their weights.

use std::ffi::c_void;

use nvfp4::Error;
use nvfp4::backend::{Backend, cpu::Cpu, cuda::RouterArguments};
use nvfp4::problem::TokenDtype;
use nvfp4::router::{GroupScore, LogitType, Logits, Router, Rule, Score, Scoring, Table};

use crate::gpu::nvfp4_device;
use crate::pointer::{address, elements, elements_mut, value};
use crate::status::{guard, nvfp4_status};
use crate::types::{nvfp4_logit_type, nvfp4_route_call, nvfp4_router, nvfp4_scoring};

/// Lists of a router in host memory. On a GPU only their lengths matter: the kernel reads the caller's lists.
struct Lists<'a> {
    bias: &'a [f32],
    expert_scale: &'a [f32],
    table: &'a [i32],
}

impl nvfp4_router {
    /// Returns the router with these lists.
    fn checked(&self, lists: &Lists<'_>) -> Result<Router, Error> {
        const SOFTMAX: u32 = nvfp4_scoring::SOFTMAX as u32;
        const TOP_K_SOFTMAX: u32 = nvfp4_scoring::TOP_K_SOFTMAX as u32;
        const SIGMOID_TOP1: u32 = nvfp4_scoring::SIGMOID_TOP1 as u32;
        const SIGMOID_GROUPS: u32 = nvfp4_scoring::SIGMOID_GROUPS as u32;
        const RULE_SOFTMAX: u32 = nvfp4_scoring::RULE_SOFTMAX as u32;
        const RULE_SIGMOID: u32 = nvfp4_scoring::RULE_SIGMOID as u32;
        const RULE_SQRT_SOFTPLUS: u32 = nvfp4_scoring::RULE_SQRT_SOFTPLUS as u32;
        let rule = |score| {
            Scoring::Rule(Rule {
                score,
                bias: lists.bias.into(),
                groups: self.groups,
                top_groups: self.top_groups,
                group_score: if self.best_two { GroupScore::BestTwo } else { GroupScore::Best },
                renormalize: self.renormalise,
                scale: self.scale,
                expert_scale: lists.expert_scale.into(),
                null_experts: self.null_experts,
                table: self.has_table().then(|| Table { vocabulary: self.vocabulary, ids: lists.table.into() }),
            })
        };
        let scoring = match self.scoring {
            SOFTMAX => Scoring::Softmax { renormalize: self.renormalise },
            TOP_K_SOFTMAX => Scoring::TopKSoftmax,
            SIGMOID_TOP1 => Scoring::SigmoidTop1,
            SIGMOID_GROUPS => Scoring::SigmoidGroups {
                bias: lists.bias.into(),
                groups: self.groups,
                top_groups: self.top_groups,
                renormalize: self.renormalise,
                scale: self.scale,
            },
            RULE_SOFTMAX => rule(Score::Softmax),
            RULE_SIGMOID => rule(Score::Sigmoid),
            RULE_SQRT_SOFTPLUS => rule(Score::SqrtSoftplus),
            other => return Err(Error::Invalid(format!("scoring {other} is not an nvfp4_scoring"))),
        };
        Router::new(self.experts, self.top_k, scoring)
    }

    /// `true` if the scoring is a rule.
    fn is_rule(&self) -> bool {
        self.scoring >= nvfp4_scoring::RULE_SOFTMAX as u32
    }

    /// `true` if the scoring uses biases.
    fn has_bias(&self) -> bool {
        self.scoring == nvfp4_scoring::SIGMOID_GROUPS as u32 || self.is_rule() && !self.bias.is_null()
    }

    /// `true` if the scoring has factors of experts.
    fn has_expert_scale(&self) -> bool {
        self.is_rule() && !self.expert_scale.is_null()
    }

    /// `true` if token ids select the experts.
    fn has_table(&self) -> bool {
        self.is_rule() && !self.table.is_null()
    }
}

/// Selects experts on the CPU.
///
/// # Safety
///
/// All pointers, also the router's biases and the call's pointers, point to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_route_cpu(router: *const nvfp4_router, call: *const nvfp4_route_call) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (router, call) = unsafe { (value(router, "router")?, value(call, "call")?) };
        let experts = router.experts;
        let of_table = router.vocabulary.checked_mul(router.top_k).ok_or(Error::TooLarge)?;
        let len = |is_there: bool, len: usize| if is_there { len } else { 0 };
        // SAFETY: the caller guarantees that each list is null or has its length in host memory.
        let (lists, token_ids) = unsafe {
            let lists = Lists {
                bias: elements(router.bias, len(router.has_bias(), experts), "bias")?,
                expert_scale: elements(router.expert_scale, len(router.has_expert_scale(), experts), "expert_scale")?,
                table: elements(router.table, len(router.has_table(), of_table), "table")?,
            };
            (lists, elements(call.token_ids, len(router.has_table(), call.tokens), "token_ids")?)
        };
        let router = router.checked(&lists)?;
        // SAFETY: the caller guarantees that the logits are null or in host memory, with these sizes.
        let logits = unsafe {
            match logit_type(call.logit_type)? {
                LogitType::F32 => Logits::F32(rows(call, call.logits.cast(), experts)?.into()),
                LogitType::Token(TokenDtype::F16) => Logits::F16(rows(call, call.logits.cast(), experts)?.into()),
                LogitType::Token(TokenDtype::Bf16) => Logits::Bf16(rows(call, call.logits.cast(), experts)?.into()),
            }
        };
        let routes = Cpu::new().route_with_ids(&router, &logits, token_ids)?;
        // SAFETY: the caller guarantees that the outputs are null or in host memory, with these sizes.
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

/// Copies the rows of a call's logits, without gaps.
///
/// # Safety
///
/// `logits` is null or points to the call's rows in host memory.
unsafe fn rows<T: Copy>(call: &nvfp4_route_call, logits: *const T, experts: usize) -> Result<Vec<T>, Error> {
    let stride = call.logits_stride;
    if stride < experts {
        return Err(Error::Invalid(format!("logits_stride {stride} is less than {experts} experts")));
    }
    let Some(last) = call.tokens.checked_sub(1) else { return Ok(Vec::new()) };
    let len = last.checked_mul(stride).and_then(|len| len.checked_add(experts)).ok_or(Error::TooLarge)?;
    // SAFETY: the caller guarantees that the pointer is null or points to these rows in host memory.
    let numbers = unsafe { elements(logits, len, "logits")? };
    Ok(numbers.chunks(stride).flat_map(|row| &row[..experts]).copied().collect())
}

/// Queues the selection of experts and returns without waiting. It allocates nothing, so the stream may be captured
/// into a graph.
///
/// # Safety
///
/// - The router's biases and the call's pointers point to memory of these sizes that the GPU can use. The memory stays
///   allocated until the stream has passed the call.
/// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_route_launch(
    device: *const nvfp4_device,
    router: *const nvfp4_router,
    call: *const nvfp4_route_call,
    stream: *mut c_void,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or valid.
        let (device, router, call) =
            unsafe { (value(device, "device")?, value(router, "router")?, value(call, "call")?) };
        let logit_type = logit_type(call.logit_type)?;
        // The kernel reads the lists. A capped length is enough, because `Router::new` refuses more experts.
        let zeros = vec![0.0; router.experts.min(1 << 16)];
        let of = |is_there: bool| if is_there { &zeros[..] } else { &[] };
        let lists = Lists { bias: of(router.has_bias()), expert_scale: of(router.has_expert_scale()), table: &[] };
        let checked = router.checked(&lists)?;
        if call.tokens == 0 {
            return Ok(());
        }
        let arguments = RouterArguments {
            token_count: call.tokens,
            logits: address(call.logits, "logits")?,
            logit_type,
            logits_stride: call.logits_stride,
            bias: if router.has_bias() { address(router.bias, "bias")? } else { 0 },
            expert_scale: router.expert_scale.addr() as u64,
            table: router.table.addr() as u64,
            token_ids: if router.has_table() { address(call.token_ids, "token_ids")? } else { 0 },
            ids: address(call.ids, "ids")?,
            weights: address(call.weights, "weights")?,
        };
        // SAFETY: the caller guarantees the memory of the router and the call, and the stream's context.
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
        other => Err(Error::Invalid(format!("logit_type {other} is not an nvfp4_logit_type"))),
    }
}
