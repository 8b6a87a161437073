//! The chain of launches of a chunk of tokens.

use kernels_gpu::lists::Lists;

use super::kernels::{MoeKernels, RowPlan};
use super::projection::Projection;
use super::tokens::Tokens;
use super::workspace::{RowMemory, Workspace};
use super::{MoeArguments, PlacedExperts, PlacedMoe};
use crate::error::Error;
use crate::kernels::group::Address;
use crate::kernels::launch::Launch;
use crate::kernels::products::expected_rows;

/// Returns the launches of a chunk, in order, with these kernels on a device with `sms` SMs.
///
/// # Errors
/// [`Error::TooLarge`] if a grid would need too many CTAs; [`Error::NotComputed`] if there is no kernel for the format of
/// the tokens.
pub(crate) fn launches(
    layer: &PlacedMoe,
    chunk: &MoeArguments,
    workspace: &Workspace,
    kernels: MoeKernels,
    sms: u32,
) -> Result<Vec<Launch>, Error> {
    let chain = Chain::new(layer, chunk, workspace, kernels, sms);
    if let Some(few) = kernels.few(&layer.sizes, chunk) {
        return Ok(chain.few(few).into());
    }
    let mut launches = vec![chain.route()?];
    if chain.expands() {
        launches.push(chain.expand()?);
    }
    for experts in chain.experts() {
        for projection in [Projection::gate_up(&layer.sizes, experts), Projection::down(&layer.sizes, experts)] {
            match experts.tokens {
                Tokens::Bits16 { .. } | Tokens::Bits16Sorted { .. } => {
                    launches.push(chain.bits16_product(experts, projection));
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
    pub kernels: MoeKernels,
    pub sms: u32,
    /// Experts that tokens name.
    pub routed: Experts<'l>,
    /// Expert that all tokens share, if there is one.
    pub shared: Option<Experts<'l>>,
}

impl<'l> Chain<'l> {
    fn new(
        layer: &'l PlacedMoe,
        arguments: &'l MoeArguments,
        workspace: &'l Workspace,
        kernels: MoeKernels,
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

    /// Whether a launch copies tokens to their sorted rows.
    pub fn expands(&self) -> bool {
        self.experts().any(|experts| experts.tokens.sorted_capacity().is_some())
    }
}

/// Experts whose products are launched together: the routed experts, or the shared one.
pub(super) struct Experts<'l> {
    pub placed: &'l PlacedExperts,
    pub memory: &'l RowMemory,
    /// Operands of the products.
    pub tokens: Tokens,
    /// Whether tokens name these experts, so that the lists give each row's token. Otherwise rows are tokens.
    pub is_routed: bool,
    /// Each expert's number of rows is rounded up to a multiple of this number.
    pub row_multiple: u32,
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Maximum number of rows.
    pub rows: u64,
    /// Expected number of rows, if tokens name all experts equally often.
    pub expected_rows: u64,
}

impl Experts<'_> {
    /// Number of experts.
    pub fn count(&self) -> u32 {
        self.memory.lists.experts
    }

    /// Returns the address of a list, by its offset.
    pub fn list(&self, offset: impl Fn(&Lists) -> u64) -> Address {
        self.memory.lists.at + offset(&self.memory.lists.offsets(self.row_multiple))
    }

    /// Returns the address of the result of a product: the intermediate for 0, the rows of down for 1.
    pub fn result(&self, index: usize) -> Address {
        [self.memory.intermediate, self.memory.rows][index]
    }
}
