//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::router::abi::{
    self, LOGITS_F32, RULE_ENTRY, SCORE_SIGMOID, SCORE_SOFTMAX, SIGMOID, SIGMOID_SHARES, SOFTMAX, THREADS,
};

use crate::fake::{out_dtype, slice, slice_mut};
use nvfp4_core::router::{GroupScore, Router, Rule, Score, Scoring, Table, route_token};

/// Routes every token by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    if launch.kernel == RULE_ENTRY { by_rule(launch) } else { usual(launch) }
}

/// Inputs and outputs of a launch.
struct Call {
    logits: u64,
    pitch: u64,
    format: u32,
    ids: u64,
    weights: u64,
    token_count: u32,
}

fn usual(launch: &Launch<'_>) {
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::Launch = launch.parameter(0);
        let abi::Launch { logits, pitch, ids, weights, token_count, experts, top_k, format, groups, .. } = parameter;
        assert_eq!(launch.shared_bytes, abi::shared_bytes(experts, groups));
        let scoring = match parameter.scoring {
            SIGMOID if parameter.bias == 0 => Scoring::SigmoidTop1,
            SIGMOID | SIGMOID_SHARES => Scoring::SigmoidGroups {
                bias: slice::<f32>(parameter.bias, experts as usize).to_vec(),
                groups: groups as usize,
                top_groups: parameter.top_groups as usize,
                renormalize: parameter.scoring == SIGMOID_SHARES,
                scale: parameter.scale,
            },
            code => Scoring::Softmax { renormalize: code != SOFTMAX },
        };
        let router = Router::new(experts as usize, top_k as usize, scoring).unwrap();
        route(launch, &router, &Call { logits, pitch, format, ids, weights, token_count }, &[]);
    }
}

fn by_rule(launch: &Launch<'_>) {
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        let parameter: abi::RuleLaunch = launch.parameter(0);
        let abi::RuleLaunch { logits, pitch, ids, weights, token_count, experts, top_k, format, groups, .. } =
            parameter;
        assert_eq!(launch.shared_bytes, abi::rule_shared_bytes(experts, groups));
        let numbers = |list: u64| if list == 0 { vec![] } else { slice::<f32>(list, experts as usize).to_vec() };
        let entries = parameter.vocabulary as usize * top_k as usize;
        let rule = Rule {
            score: match parameter.score {
                SCORE_SOFTMAX => Score::Softmax,
                SCORE_SIGMOID => Score::Sigmoid,
                _ => Score::SqrtSoftplus,
            },
            bias: numbers(parameter.bias),
            groups: groups as usize,
            top_groups: parameter.top_groups as usize,
            group_score: if parameter.best_two == 0 { GroupScore::Best } else { GroupScore::BestTwo },
            renormalize: parameter.renormalize != 0,
            scale: parameter.scale,
            expert_scale: numbers(parameter.expert_scale),
            null_experts: (experts - parameter.null_from) as usize,
            table: (parameter.table != 0).then(|| Table {
                vocabulary: parameter.vocabulary as usize,
                ids: slice::<i32>(parameter.table, entries).to_vec(),
            }),
        };
        let token_ids: &[i32] =
            if parameter.table == 0 { &[] } else { slice(parameter.token_ids, token_count as usize) };
        let router = Router::new(experts as usize, top_k as usize, Scoring::Rule(rule)).unwrap();
        route(launch, &router, &Call { logits, pitch, format, ids, weights, token_count }, token_ids);
    }
}

/// Routes every token.
///
/// # Safety
///
/// The addresses in `call` refer to live operands of the router's sizes, which nobody else accesses.
unsafe fn route(launch: &Launch<'_>, router: &Router, call: &Call, token_ids: &[i32]) {
    assert_eq!((launch.grid, launch.block), ([abi::blocks(call.token_count) as u32, 1, 1], [THREADS, 1, 1]));
    let (experts, top_k) = (router.experts(), router.top_k());
    for token in 0..call.token_count as usize {
        let first = token as u64 * call.pitch;
        // SAFETY: the caller guarantees a token's logits, ids and weights at these addresses.
        unsafe {
            let logits: Vec<f32> = if call.format == LOGITS_F32 {
                slice::<f32>(call.logits + 4 * first, experts).to_vec()
            } else {
                let dtype = out_dtype(call.format);
                let bits: &[u16] = slice(call.logits + 2 * first, experts);
                bits.iter().map(|&bits| dtype.decode(bits) as f32).collect()
            };
            let at = 4 * (token * top_k) as u64;
            let (ids, weights) = (slice_mut(call.ids + at, top_k), slice_mut(call.weights + at, top_k));
            route_token(router, &logits, token_ids.get(token).copied(), ids, weights);
        }
    }
}
