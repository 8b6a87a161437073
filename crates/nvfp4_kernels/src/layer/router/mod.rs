//! Routers on a GPU, `kernels-gpu/src/layer/router/`. Functions of sizes and addresses.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::layer::router::abi::{
    self, LOGITS_F32, MAX_EXPERTS, MAX_GROUPS, RULE_ENTRY, SCORE_SIGMOID, SCORE_SOFTMAX, SCORE_SQRT_SOFTPLUS, SIGMOID,
    SIGMOID_SHARES, SMALL_EXPERTS, SOFTMAX, SOFTMAX_OF_CHOSEN, THREADS,
};

use crate::group::Address;
use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, output_code};
use nvfp4_core::Error;
use nvfp4_core::problem;
use nvfp4_core::router::{GroupScore, LogitType, Router, Score, Scoring};

const _: () = {
    assert!(problem::MAX_EXPERTS <= MAX_EXPERTS as usize, "the kernel must rank all experts");
    assert!(problem::MAX_TOP_K <= abi::MAX_TOP_K as usize, "the kernel must be able to choose all experts of a token");
};

/// The kernel.
pub struct RouterKernel;

impl Kernel for RouterKernel {
    fn name(&self) -> &'static str {
        "router"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |name, shared_bytes| Entry { name, op: None, threads: THREADS, shared_bytes };
        let of_rule = abi::rule_shared_bytes(MAX_EXPERTS, MAX_EXPERTS);
        vec![entry(self.name(), abi::shared_bytes(SMALL_EXPERTS, 2)), entry(RULE_ENTRY, of_rule)]
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

/// Inputs and outputs of a router call: addresses in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterArguments {
    /// Number of tokens, T; may be 0.
    pub token_count: usize,
    /// Logits, T rows of E numbers.
    pub logits: Address,
    /// Type of the logits.
    pub logit_type: LogitType,
    /// Distance between the logits of consecutive tokens in elements, at least E.
    pub logits_stride: usize,
    /// Biases of the router, `[E]`, f32. Ignored if the router has none.
    pub bias: Address,
    /// Factors of the weights, `[E]`, f32. Ignored if the router's rule has none.
    pub expert_scale: Address,
    /// Experts of each token id, `[vocabulary, k]`, i32. Ignored if the router's rule has no table.
    pub table: Address,
    /// Id of each token, `[T]`, i32. Ignored if the router's rule has no table.
    pub token_ids: Address,
    /// Output: experts of each token, `[T, k]`, i32.
    pub ids: Address,
    /// Output: weights of these experts, `[T, k]`, f32.
    pub weights: Address,
}

/// Returns the launch of a router. `None`: there are no tokens.
///
/// # Errors
/// If an address is not aligned, the stride is too small, there are too many tokens, or biases, factors, the table or
/// the ids of tokens are missing.
pub fn launch(router: &Router, arguments: &RouterArguments) -> Result<Option<Launch>, Error> {
    check(router, arguments)?;
    let token_count = u32::try_from(arguments.token_count).map_err(|_| Error::TooLarge)?;
    if token_count == 0 {
        return Ok(None);
    }
    let blocks = Grid::blocks(abi::blocks(token_count))?;
    let (experts, groups) = (router.experts() as u32, router.rule().groups as u32);
    let usual = usual_scoring(router).filter(|_| experts <= SMALL_EXPERTS && groups <= MAX_GROUPS);
    let Some((scoring, scale)) = usual else {
        let shared_bytes = abi::rule_shared_bytes(experts, groups);
        let grid = Grid { shared_bytes, ..Grid::linear(RULE_ENTRY, blocks, THREADS) };
        return Ok(Some(Launch::of_parameter(
            RouterKernel.name(),
            grid,
            rule_parameter(router, arguments, token_count),
        )));
    };
    let launch = abi::Launch {
        logits: arguments.logits,
        pitch: arguments.logits_stride as u64,
        bias: router.bias().map_or(0, |_| arguments.bias),
        ids: arguments.ids,
        weights: arguments.weights,
        token_count,
        experts,
        top_k: router.top_k() as u32,
        format: format(arguments.logit_type),
        scoring,
        groups,
        top_groups: router.rule().top_groups as u32,
        scale,
    };
    let grid =
        Grid { shared_bytes: abi::shared_bytes(experts, groups), ..Grid::linear(RouterKernel.name(), blocks, THREADS) };
    Ok(Some(Launch::of_parameter(RouterKernel.name(), grid, launch)))
}

/// Code of a type of logits.
fn format(logit_type: LogitType) -> u32 {
    match logit_type {
        LogitType::F32 => LOGITS_F32,
        LogitType::Token(dtype) => output_code(dtype),
    }
}

/// Scoring code and factor of the weights, for the entry of the usual rules.
fn usual_scoring(router: &Router) -> Option<(u32, f32)> {
    Some(match *router.scoring() {
        Scoring::Softmax { renormalize: false } => (SOFTMAX, 1.0),
        Scoring::Softmax { renormalize: true } | Scoring::TopKSoftmax => (SOFTMAX_OF_CHOSEN, 1.0),
        Scoring::SigmoidTop1 => (SIGMOID, 1.0),
        Scoring::SigmoidGroups { renormalize, scale, .. } => {
            (if renormalize { SIGMOID_SHARES } else { SIGMOID }, scale)
        }
        Scoring::Rule(_) => return None,
    })
}

/// Parameter of the entry for any rule.
fn rule_parameter(router: &Router, arguments: &RouterArguments, token_count: u32) -> abi::RuleLaunch {
    let rule = router.rule();
    let if_some = |is_some: bool, address: Address| if is_some { address } else { 0 };
    let vocabulary = rule.table.as_ref().map(|table| table.vocabulary);
    abi::RuleLaunch {
        logits: arguments.logits,
        pitch: arguments.logits_stride as u64,
        bias: if_some(!rule.bias.is_empty(), arguments.bias),
        ids: arguments.ids,
        weights: arguments.weights,
        expert_scale: if_some(!rule.expert_scale.is_empty(), arguments.expert_scale),
        table: if_some(vocabulary.is_some(), arguments.table),
        token_ids: if_some(vocabulary.is_some(), arguments.token_ids),
        token_count,
        experts: router.experts() as u32,
        top_k: router.top_k() as u32,
        format: format(arguments.logit_type),
        score: match rule.score {
            Score::Softmax => SCORE_SOFTMAX,
            Score::Sigmoid => SCORE_SIGMOID,
            Score::SqrtSoftplus => SCORE_SQRT_SOFTPLUS,
        },
        renormalize: rule.renormalize.into(),
        groups: rule.groups as u32,
        top_groups: rule.top_groups as u32,
        best_two: (rule.group_score == GroupScore::BestTwo).into(),
        null_from: (router.experts() - rule.null_experts) as u32,
        vocabulary: vocabulary.unwrap_or(0) as u32,
        scale: rule.scale,
    }
}

/// Checks the addresses and the stride of a call.
fn check(router: &Router, arguments: &RouterArguments) -> Result<(), Error> {
    let &RouterArguments { logits, logit_type, bias, expert_scale, table, token_ids, ids, weights, .. } = arguments;
    let bytes = if logit_type == LogitType::F32 { 4 } else { 2 };
    let rule = router.rule();
    let (has_bias, has_scale, has_table) = (!rule.bias.is_empty(), !rule.expert_scale.is_empty(), rule.table.is_some());
    for (what, address, bytes, is_needed) in [
        ("logits", logits, bytes, false),
        ("biases", bias, 4, has_bias),
        ("factors of experts", expert_scale, 4, has_scale),
        ("table", table, 4, has_table),
        ("token ids", token_ids, 4, has_table),
        ("ids", ids, 4, false),
        ("weights", weights, 4, false),
    ] {
        if !address.is_multiple_of(bytes) {
            return Err(Error::Invalid(format!(
                "router: {what} at {address:#x}; the address must be a multiple of {bytes}"
            )));
        }
        if is_needed && address == 0 {
            return Err(Error::Invalid(format!("router: the address of the {what} is missing")));
        }
    }
    let (stride, experts) = (arguments.logits_stride, router.experts());
    if stride < experts {
        return Err(Error::Invalid(format!(
            "router: the logits have a stride of {stride} elements; expected at least {experts}, the number of experts"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::router::{Rule, Table};

    fn arguments() -> RouterArguments {
        let (logits, bias, ids, weights) = (0x1002, 0x2000, 0x3004, 0x4000);
        let logit_type = LogitType::Token(nvfp4_core::problem::TokenDtype::Bf16);
        let (expert_scale, table, token_ids) = (0, 0, 0);
        let (token_count, logits_stride) = (9, 8);
        RouterArguments {
            token_count,
            logits,
            logit_type,
            logits_stride,
            bias,
            expert_scale,
            table,
            token_ids,
            ids,
            weights,
        }
    }

    #[test]
    fn launch_has_a_warp_per_token_and_memory_for_groups() {
        let softmax = Router::new(8, 2, Scoring::TopKSoftmax).unwrap();
        let grid = launch(&softmax, &arguments()).unwrap().unwrap().grid;
        assert_eq!((grid.blocks, grid.threads, grid.shared_bytes), (3, 128, 0));
        assert!(launch(&softmax, &RouterArguments { token_count: 0, ..arguments() }).unwrap().is_none());
        let scoring =
            Scoring::SigmoidGroups { bias: vec![0.0; 8], groups: 4, top_groups: 2, renormalize: true, scale: 2.5 };
        let groups = Router::new(8, 2, scoring).unwrap();
        assert_eq!(launch(&groups, &arguments()).unwrap().unwrap().grid.shared_bytes, 4 * 8 * 4);
        let error = launch(&groups, &RouterArguments { bias: 0, ..arguments() }).err().unwrap().to_string();
        assert_eq!(error, "router: the address of the biases is missing");
    }

    #[test]
    fn misaligned_addresses_and_small_strides_are_refused() {
        let router = Router::new(8, 2, Scoring::Softmax { renormalize: true }).unwrap();
        let refused = |arguments: RouterArguments| launch(&router, &arguments).err().unwrap().to_string();
        let text = refused(RouterArguments { logit_type: LogitType::F32, ..arguments() });
        assert_eq!(text, "router: logits at 0x1002; the address must be a multiple of 4");
        let text = refused(RouterArguments { weights: 0x4002, ..arguments() });
        assert_eq!(text, "router: weights at 0x4002; the address must be a multiple of 4");
        let text = refused(RouterArguments { logits_stride: 7, ..arguments() });
        assert_eq!(text, "router: the logits have a stride of 7 elements; expected at least 8, the number of experts");
        assert!(launch(&router, &RouterArguments { token_count: 1 << 33, ..arguments() }).is_err());
    }

    #[test]
    fn other_rules_and_more_experts_take_the_entry_for_any_rule() {
        let rule = Rule {
            score: Score::SqrtSoftplus,
            expert_scale: vec![1.0; 8],
            null_experts: 2,
            table: Some(Table { vocabulary: 100, ids: vec![] }),
            ..Rule::default()
        };
        let router = Router::new(8, 2, Scoring::Rule(rule)).unwrap();
        let refused = |arguments: RouterArguments| launch(&router, &arguments).err().unwrap().to_string();
        assert_eq!(refused(arguments()), "router: the address of the factors of experts is missing");
        let given = RouterArguments { expert_scale: 0x5000, table: 0x6000, token_ids: 0x7000, ..arguments() };
        assert_eq!(
            refused(RouterArguments { token_ids: 0x7002, ..given }),
            "router: token ids at 0x7002; the address must be a multiple of 4"
        );
        let parameter = rule_parameter(&router, &given, 9);
        assert_eq!((parameter.bias, parameter.table, parameter.token_ids), (0, 0x6000, 0x7000));
        assert_eq!((parameter.null_from, parameter.vocabulary, parameter.score), (6, 100, SCORE_SQRT_SOFTPLUS));
        let entry = |router: &Router, arguments| launch(router, &arguments).unwrap().unwrap().grid.entry;
        assert_eq!(entry(&router, given), RULE_ENTRY);
        let many = |experts| Router::new(experts, 2, Scoring::TopKSoftmax).unwrap();
        let wide = RouterArguments { logits_stride: 1024, ..arguments() };
        assert_eq!([512, 513].map(|experts| entry(&many(experts), wide)), ["router", RULE_ENTRY]);
    }
}
