//! The chain of launches of a chunk of tokens.

use kernels_gpu::epilogue::Activation;

use super::experts::Experts;
use super::kernels::{MoeKernels, RowPlan};
use super::projection::Projection;
use super::tokens::Tokens;
use super::weights::operand_type_of;
use super::workspace::Workspace;
use super::{MoeArguments, PlacedMoe};
use crate::expected::{expected_rows, expected_token_tiles};
use crate::explain::Candidate;
use crate::kernel::none_left;
use crate::launch::Launch;
use crate::products::{Operands, ProductInstance, ProductKind, ProductSizes, Products};
use nvfp4_core::Error;
use nvfp4_core::problem::Op;

/// Returns the launches of a chunk, in order, with these kernels on a device with `sms` SMs.
///
/// # Errors
/// [`Error::TooLarge`] if a grid would need too many CTAs; [`Error::NotComputed`] if there is no kernel for the format of
/// the tokens, or no instance is left for a product.
pub fn launches(
    layer: &PlacedMoe,
    chunk: &MoeArguments,
    workspace: &Workspace,
    kernels: &MoeKernels,
    sms: u32,
) -> Result<Vec<Launch>, Error> {
    let chain = Chain::new(layer, chunk, workspace, kernels, sms);
    if let Some(few) = kernels.few(&layer.sizes, chunk) {
        return Ok(chain.few(few).into());
    }
    let mut launches = Vec::new();
    if !chain.routes_nvfp4() {
        launches.push(chain.route()?);
    }
    if chain.expands() {
        launches.push(chain.expand()?);
    }
    for experts in chain.experts() {
        for projection in [Projection::gate_up(&layer.sizes, experts), Projection::down(&layer.sizes, experts)] {
            match experts.tokens {
                Tokens::Bits16 { .. } | Tokens::Bits16Sorted { .. } => {
                    launches.push(chain.bits16_product(experts, projection)?);
                }
                Tokens::Fp8(rows) => launches.extend(chain.fp8_product(experts, projection, rows)?),
                Tokens::Nvfp4(rows) => launches.extend(chain.nvfp4_product(experts, projection, rows)?),
            }
        }
    }
    launches.push(chain.combine()?);
    Ok(launches)
}

/// A chunk: a part of a call for which the workspace is large enough.
pub(super) struct Chain<'l> {
    pub layer: &'l PlacedMoe,
    pub arguments: &'l MoeArguments,
    pub kernels: &'l MoeKernels,
    pub sms: u32,
    /// Experts that tokens name.
    pub routed: Experts<'l>,
    /// Expert that all tokens share, if there is one.
    pub shared: Option<Experts<'l>>,
}

impl<'l> Chain<'l> {
    pub(super) fn new(
        layer: &'l PlacedMoe,
        arguments: &'l MoeArguments,
        workspace: &'l Workspace,
        kernels: &'l MoeKernels,
        sms: u32,
    ) -> Self {
        let (sizes, tokens) = (&layer.sizes, arguments.token_count as u64);
        let RowPlan { routed, shared, row_multiple } = RowPlan::new(sizes, arguments.token_count, kernels);
        let choices = tokens * sizes.top_k as u64;
        let of_layer = Experts {
            placed: &layer.experts,
            memory: &workspace.routed,
            tokens: workspace.routed.tokens_of(routed),
            is_routed: true,
            row_multiple,
            tile_tokens: routed.tile_tokens,
            rows: choices,
            expected_rows: expected_rows(choices, sizes.experts as u64, sizes.named_experts as u64),
        };
        let of_shared = layer.shared.as_ref().zip(workspace.shared.as_ref()).map(|(placed, memory)| Experts {
            placed,
            memory,
            tokens: match memory.tokens_of(shared) {
                // The shared expert's tokens differ from the others only if those are multiplied by weights.
                Tokens::Bits16 { .. } if !arguments.weights_on_input => workspace.routed.tokens,
                own => own,
            },
            is_routed: false,
            row_multiple,
            tile_tokens: shared.tile_tokens,
            rows: tokens,
            expected_rows: tokens,
        });
        Self { layer, arguments, kernels, sms, routed: of_layer, shared: of_shared }
    }

    /// Returns the routed experts and the shared one.
    pub fn experts(&self) -> impl Iterator<Item = &Experts<'l>> {
        [&self.routed].into_iter().chain(&self.shared)
    }

    /// Returns the launch of a product with these operands on the fastest instance. `early`: weights may be loaded early
    /// ([`ProductKind::early`]).
    ///
    /// # Errors
    /// [`Error::NotComputed`] if every instance for this product is refused.
    pub fn product<O: Operands>(
        &self,
        products: &dyn Products<O>,
        experts: &Experts<'_>,
        (op, activation, early): (Op, &Activation, bool),
        operands: O,
    ) -> Result<Launch, Error> {
        let found = self.candidates(products, experts, (op, activation, early), [operands.columns(), operands.k()]);
        let (instance, _) = found.first().ok_or_else(|| none_left(products, &self.kernels.refused))?;
        Ok(products.product(instance, operands, experts.rows, self.sms))
    }

    /// Returns the instances for a product, the fastest first. `n`: columns of C. `k`: columns of the weights.
    pub fn candidates<O: Operands>(
        &self,
        products: &dyn Products<O>,
        experts: &Experts<'_>,
        (op, activation, early): (Op, &Activation, bool),
        [n, k]: [u32; 2],
    ) -> Vec<(ProductInstance, Candidate)> {
        let token_tiles = expected_token_tiles(experts.expected_rows, experts.count().into(), experts.tile_tokens);
        let (operand_type, curves) = (operand_type_of(&self.layer.sizes), activation.is_curve());
        let kind = ProductKind { op, operand_type, curves, early };
        let sizes = ProductSizes { experts: experts.count(), n, k };
        products.candidates(kind, experts.tile_tokens, token_tiles, sizes, self.sms, &self.kernels.refused)
    }

    /// Whether a launch copies tokens to their sorted rows.
    pub fn expands(&self) -> bool {
        self.experts().any(|experts| experts.tokens.sorted_capacity().is_some())
    }
}
