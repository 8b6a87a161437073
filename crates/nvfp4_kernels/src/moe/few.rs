//! The chain of two launches for few tokens, on Hopper.

use kernels_gpu::mma_sync::moe_few_sm90::abi::{Choices, Down, GateUp, Matrices};

use super::chain::Chain;
use super::projection::Projection;
use crate::launch::Launch;
use crate::mma_sync::moe_few_sm90::MoeFewSm90;

impl Chain<'_> {
    /// Returns all launches of the chunk: gate and up, then down with the weighted sums.
    pub(super) fn few(&self, few: &MoeFewSm90) -> [Launch; 2] {
        let (sizes, arguments, routed) = (&self.layer.sizes, self.arguments, &self.routed);
        let choices = Choices {
            ids: arguments.topk_ids,
            map: self.layer.map,
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            experts: routed.count(),
            named_experts: sizes.named_experts as u32,
        };
        let matrices = |projection: &Projection| {
            let &Projection { b, expert_bytes, alpha, bias, n, k, .. } = projection;
            Matrices { b, expert_bytes, alpha, bias, n, k }
        };
        let (gate_up, down) = (Projection::gate_up(sizes, routed), Projection::down(sizes, routed));
        let (intermediate, rows) = (routed.result(0), routed.result(1));
        let first = GateUp {
            choices,
            matrices: matrices(&gate_up),
            tokens: arguments.tokens,
            token_pitch: arguments.token_pitch as u64,
            intermediate,
            activation: gate_up.activation,
            unused: 0,
        };
        let second = Down {
            choices,
            matrices: matrices(&down),
            intermediate,
            weights: arguments.topk_weights,
            rows: if self.layer.keeps_stages { rows } else { 0 },
            output: arguments.output,
            output_pitch: arguments.output_pitch as u64,
        };
        [few.gate_up(first, sizes.dtype, self.sms), few.down(second, sizes.dtype, self.sms)]
    }
}
