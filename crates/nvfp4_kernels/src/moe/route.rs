//! Launches before and after the products: lists of rows, tokens to their rows, and the sums of tokens' rows.

use bytemuck::Zeroable;
use kernels_gpu::layer::moe_route::abi::{Combine, Expand, ExpandedRows, Route};

use super::chain::Chain;
use super::experts::Experts;
use crate::group::Address;
use crate::launch::{Launch, output_code};
use crate::layer::moe_route::MoeRoute;
use nvfp4_core::Error;

impl Chain<'_> {
    /// Returns the launch that makes the lists and brings 16-bit tokens to the order of K.
    pub(super) fn route(&self) -> Result<Launch, Error> {
        let (sizes, arguments, routed) = (&self.layer.sizes, self.arguments, &self.routed);
        let route = Route {
            ids: arguments.topk_ids,
            map: self.layer.map,
            input: arguments.tokens,
            input_pitch: arguments.token_pitch as u64,
            input_weights: self.input_weights(),
            tokens: routed.tokens.in_order(),
            shared_tokens: self.shared.as_ref().map_or(0, |shared| shared.tokens.in_order()),
            lists: routed.memory.lists.at,
            shared_lists: self.shared.as_ref().map_or(0, |shared| shared.memory.lists.at),
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            experts: routed.count(),
            named_experts: sizes.named_experts as u32,
            hidden: sizes.hidden as u32,
            tile_tokens: routed.tile_tokens,
            shared_tile_tokens: self.shared.as_ref().unwrap_or(routed).tile_tokens,
            operand_type: output_code(sizes.dtype),
            row_multiple: routed.row_multiple,
            unused: 0,
        };
        MoeRoute.route(route, self.kernels.largest_cluster)
    }

    /// Returns the launch that copies tokens to the sorted rows of their experts.
    pub(super) fn expand(&self) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let expand = Expand {
            input: arguments.tokens,
            input_pitch: arguments.token_pitch as u64,
            input_weights: self.input_weights(),
            places: self.routed.list(|lists| lists.places),
            routed: self.routed.expanded_rows(),
            shared: self.shared.as_ref().map_or(ExpandedRows::zeroed(), Experts::expanded_rows),
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            hidden: sizes.hidden as u32,
            operand_type: output_code(sizes.dtype),
        };
        MoeRoute.expand(expand, self.kernels.overlaps())
    }

    /// Returns the launch that adds up each token's rows.
    pub(super) fn combine(&self) -> Result<Launch, Error> {
        let (sizes, arguments, shared) = (&self.layer.sizes, self.arguments, self.shared.as_ref());
        let combine = Combine {
            rows: self.routed.result(1),
            places: self.routed.list(|lists| lists.places),
            weights: if arguments.weights_on_input { 0 } else { arguments.topk_weights },
            shared_rows: shared.map_or(0, |shared| shared.result(1)),
            shared_weights: shared.map_or(0, |_| arguments.shared_weights),
            output: arguments.output,
            output_pitch: arguments.output_pitch as u64,
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            hidden: sizes.hidden as u32,
            unused: 0,
        };
        MoeRoute.combine(combine, sizes.dtype, self.kernels.overlaps())
    }

    /// Returns the address of the weights that multiply the tokens, or 0 if none do.
    pub(super) fn input_weights(&self) -> Address {
        if self.arguments.weights_on_input { self.arguments.topk_weights } else { 0 }
    }
}

impl Experts<'_> {
    /// Returns the sorted rows of tokens; zeros if tokens are not sorted.
    fn expanded_rows(&self) -> ExpandedRows {
        // The rows of down take the place of the tokens.
        let (intermediate, tokens) = (self.result(0), self.result(1));
        self.tokens.sorted_capacity().map_or(ExpandedRows::zeroed(), |capacity| ExpandedRows {
            tokens,
            intermediate,
            capacity,
            width: self.memory.width,
        })
    }
}
