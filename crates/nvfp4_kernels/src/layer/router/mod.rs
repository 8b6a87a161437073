//! Routers on a GPU, `kernels-gpu/src/layer/router/`. Functions of sizes and addresses.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::layer::router::abi::{
    self, LOGITS_F32, MAX_EXPERTS, SIGMOID, SIGMOID_SHARES, SOFTMAX, SOFTMAX_OF_CHOSEN, THREADS,
};

use crate::group::Address;
use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, output_code};
use nvfp4_core::Error;
use nvfp4_core::problem;
use nvfp4_core::router::{LogitType, MAX_GROUPS, Router, Scoring};

const _: () = {
    assert!(problem::MAX_EXPERTS <= MAX_EXPERTS as usize, "the kernel ranks all experts");
    assert!(problem::MAX_TOP_K <= abi::MAX_TOP_K as usize, "the kernel chooses all experts of a token");
    assert!(MAX_GROUPS <= abi::MAX_GROUPS as usize, "the kernel ranks all groups");
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
        let shared_bytes = abi::shared_bytes(MAX_EXPERTS, 2);
        vec![Entry { name: self.name(), op: None, threads: THREADS, shared_bytes }]
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
    /// Output: experts of each token, `[T, k]`, i32.
    pub ids: Address,
    /// Output: weights of these experts, `[T, k]`, f32.
    pub weights: Address,
}

/// Returns the launch of a router. `None`: there are no tokens.
///
/// # Errors
/// If an address is not aligned, the stride is too small, there are too many tokens, or the biases are missing.
pub fn launch(router: &Router, arguments: &RouterArguments) -> Result<Option<Launch>, Error> {
    let &RouterArguments { token_count, logits, logit_type, logits_stride, bias, ids, weights } = arguments;
    let (bytes, format) = match logit_type {
        LogitType::F32 => (4, LOGITS_F32),
        LogitType::Token(dtype) => (2, output_code(dtype)),
    };
    for (what, address, bytes) in
        [("logits", logits, bytes), ("biases", bias, 4), ("ids", ids, 4), ("weights", weights, 4)]
    {
        if !address.is_multiple_of(bytes) {
            return Err(Error::Invalid(format!(
                "router: {what} at {address:#x}; the address must be a multiple of {bytes}"
            )));
        }
    }
    if logits_stride < router.experts() {
        let experts = router.experts();
        return Err(Error::Invalid(format!(
            "router: the logits have a stride of {logits_stride} elements; \
             expected at least {experts}, the number of experts"
        )));
    }
    if router.bias().is_some() && bias == 0 {
        return Err(Error::Invalid("router: the address of the biases is missing".into()));
    }
    let token_count = u32::try_from(token_count).map_err(|_| Error::TooLarge)?;
    let (groups, top_groups) = router.groups();
    let (scoring, scale) = match *router.scoring() {
        Scoring::Softmax { renormalize: false } => (SOFTMAX, 1.0),
        Scoring::Softmax { renormalize: true } | Scoring::TopKSoftmax => (SOFTMAX_OF_CHOSEN, 1.0),
        Scoring::SigmoidTop1 => (SIGMOID, 1.0),
        Scoring::SigmoidGroups { renormalize, scale, .. } => {
            (if renormalize { SIGMOID_SHARES } else { SIGMOID }, scale)
        }
    };
    let launch = abi::Launch {
        logits,
        pitch: logits_stride as u64,
        bias: router.bias().map_or(0, |_| bias),
        ids,
        weights,
        token_count,
        experts: router.experts() as u32,
        top_k: router.top_k() as u32,
        format,
        scoring,
        groups: groups as u32,
        top_groups: top_groups as u32,
        scale,
    };
    let blocks = Grid::blocks(abi::blocks(token_count))?;
    let shared_bytes = abi::shared_bytes(launch.experts, launch.groups);
    let grid = Grid { shared_bytes, ..Grid::linear(RouterKernel.name(), blocks, THREADS) };
    Ok((token_count > 0).then(|| Launch::of_parameter(RouterKernel.name(), grid, launch)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> RouterArguments {
        let (logits, bias, ids, weights) = (0x1002, 0x2000, 0x3004, 0x4000);
        let logit_type = LogitType::Token(nvfp4_core::problem::TokenDtype::Bf16);
        RouterArguments { token_count: 9, logits, logit_type, logits_stride: 8, bias, ids, weights }
    }

    #[test]
    fn launch_has_one_warp_per_token_and_group_memory() {
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
}
