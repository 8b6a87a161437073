//! Kernels that multiply in an MoE layer, one per token format and GPU family: their common trait, and their numbers of
//! tiles.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use kernels_gpu::units::OperandType;
use kernels_gpu::{lists, moe, wgmma::moe_fp8_sm90};

use super::explain::Candidate;
use super::kernel::{Kernel, op_of};
use super::launch::{Grid, Launch};
use super::mma_sync::moe_few_sm90::MoeFewSm90;
use super::refused::Refused;
use nvfp4_core::problem::Op;

/// Launch and tile properties of an instance of a kernel that multiplies tokens of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductInstance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of weight matrices: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Type that weights are packed for. `None`: NVFP4 weights are not packed for a type.
    pub operand_type: Option<OperandType>,
    /// Whether a gated product has a curve as its activation ([`kernels_gpu::curve`]).
    pub curves: bool,
    /// Maximum number of experts of a layer.
    pub max_experts: u32,
    /// Maximum tokens of a tile.
    pub tile_tokens: u32,
    /// Columns of C per tile.
    pub columns: u32,
    /// Rows of the box of the weights' tensor map. 0: weights have no tensor map.
    pub weight_rows: u32,
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA in bytes.
    pub shared_bytes: u32,
    /// Whether tokens are sorted by expert ([`sorted`](kernels_gpu::sorted)).
    pub sorted: bool,
    /// Maximum CTAs of a grid per SM.
    pub multiprocessor_blocks: u32,
    /// Time of a tile, comparable between instances with the same number of tokens per tile.
    pub tile_time: u64,
    /// Fixed start-up cost per SM, in the unit of `tile_time`.
    pub first_time: u64,
    /// Whether the instance is used only if an SM has few tiles.
    pub for_few_tiles: bool,
    /// Maximum K.
    pub most_k: u32,
    /// Whether weights are loaded before the wait for earlier launches
    /// ([`Instance::early`](kernels_gpu::tcgen05::gated_sm100::abi::Instance::early)).
    pub early: bool,
}

impl ProductInstance {
    /// Common properties of a kernel's instances, without name, sizes and resources. The kernel has one instance per
    /// kind of product and tile size, and one CTA per SM.
    pub const ALONE: Self = Self {
        entry: "",
        matrices: 0,
        operand_type: None,
        curves: false,
        max_experts: lists::MAX_EXPERTS,
        tile_tokens: 0,
        columns: 0,
        weight_rows: 0,
        threads: 0,
        shared_bytes: 0,
        sorted: false,
        multiprocessor_blocks: 1,
        tile_time: 0,
        first_time: 0,
        for_few_tiles: false,
        most_k: u32::MAX,
        early: false,
    };
}

/// What a product computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductKind {
    pub op: Op,
    /// Type that weights are packed for. `None`: NVFP4 weights are not packed for a type.
    pub operand_type: Option<OperandType>,
    /// Whether the activation is a curve ([`kernels_gpu::curve`]).
    pub curves: bool,
    /// Whether weights may be loaded early: the lists are complete before the launch before this one lets it start.
    pub early: bool,
}

/// Sizes of a product that do not depend on tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductSizes {
    /// Number of experts of the layer.
    pub experts: u32,
    /// Columns of C.
    pub n: u32,
    /// Columns of the weights.
    pub k: u32,
}

impl ProductInstance {
    /// Whether the instance computes such products.
    fn supports(&self, product: ProductKind, sizes: ProductSizes) -> bool {
        let is_kind = (op_of(self.matrices), self.operand_type, self.curves)
            == (product.op, product.operand_type, product.curves);
        is_kind && sizes.experts <= self.max_experts && sizes.k <= self.most_k && (product.early || !self.early)
    }
}

impl ProductKind {
    /// Returns the kind of a product without curves.
    #[cfg(test)]
    pub fn of(op: Op, operand_type: OperandType) -> Self {
        Self { op, operand_type: Some(operand_type), curves: false, early: false }
    }
}

/// Up to this many tiles per SM, few-tile instances may be used. On an H200, wide tiles are as fast or faster with more
/// tiles.
const FEW_TILES: u64 = 28;

/// Operands of a product: inputs and outputs of kernels that multiply tokens of one format.
pub trait Operands: Copy {
    /// Columns of C.
    fn columns(&self) -> u32;

    /// Columns of the weights, K.
    fn k(&self) -> u32;

    /// Number of experts.
    fn experts(&self) -> u32;

    /// Returns the launch of a grid of an instance of `kernel` for at most `rows` rows.
    fn launch(self, kernel: &'static str, grid: Grid, instance: &ProductInstance, rows: u64) -> Launch;
}

/// Operands of 16-bit tokens.
pub type Bits16 = moe::Launch;

/// Operands of FP8 tokens.
pub type Fp8 = moe_fp8_sm90::abi::Launch;

impl Operands for Bits16 {
    fn columns(&self) -> u32 {
        self.n
    }

    fn k(&self) -> u32 {
        self.k
    }

    fn experts(&self) -> u32 {
        self.experts
    }

    fn launch(self, kernel: &'static str, grid: Grid, _: &ProductInstance, _: u64) -> Launch {
        Launch::of_parameter(kernel, grid, self)
    }
}

impl Operands for Fp8 {
    fn columns(&self) -> u32 {
        self.n
    }

    fn k(&self) -> u32 {
        self.k
    }

    fn experts(&self) -> u32 {
        self.experts
    }

    fn launch(self, kernel: &'static str, grid: Grid, _: &ProductInstance, _: u64) -> Launch {
        Launch::of_parameter(kernel, grid, self)
    }
}

/// A kernel for a layer's products of tokens in one format. All kernels with the same [`Operands`] take the same
/// parameter, lists and packed weights. They differ in their instances, and in which instance is fastest when.
pub trait Products<O: Operands>: Kernel {
    /// Returns every instance for layers.
    fn instances(&self) -> Vec<ProductInstance>;

    /// Returns the tokens per tile for `rows` rows of `experts` named experts whose down projection has `k` columns.
    fn tile_tokens(&self, rows: u64, experts: u64, k: u32) -> u32;

    /// Returns the least and the most tokens per tile for a layer of `experts` experts with or without a curve as its
    /// activation.
    fn tile_range(&self, curves: bool, experts: u32) -> [u32; 2] {
        let takes = |of: &ProductInstance| of.matrices == 2 && of.curves == curves && experts <= of.max_experts;
        let tiles = || self.instances().into_iter().filter(takes).map(|of| of.tile_tokens);
        [tiles().min(), tiles().max()].map(|tile| tile.expect("every kernel has gated instances of both kinds"))
    }

    /// Whether the instances with such tiles take tokens sorted by expert.
    fn sorts(&self, tile_tokens: u32) -> bool {
        self.instances().iter().any(|of| of.tile_tokens == tile_tokens && of.sorted)
    }

    /// Whether a grid may begin while the previous one runs.
    fn overlaps(&self) -> bool {
        true
    }

    /// Returns the kernel with another method for a layer's few tokens on the same GPUs, if there is one.
    fn few(&self) -> Option<&'static MoeFewSm90> {
        None
    }

    /// Whether products can have tiles of `tile_tokens` tokens: an instance for them is not refused.
    fn has_tiles(&self, product: ProductKind, tile_tokens: u32, sizes: ProductSizes, refused: &Refused) -> bool {
        let is_it = |of: &ProductInstance| of.tile_tokens == tile_tokens && of.supports(product, sizes);
        self.instances().iter().any(|of| is_it(of) && !refused.contains(of.entry))
    }

    /// Returns the instances for a product and a tile size with what the plan expects of each, the least expected time
    /// first, and of equal ones an early one. `token_tiles`: expected number of token tiles. Instances for few tiles
    /// compute many tiles if no other instance is left.
    ///
    /// All SMs process one tile each, then the next ones.
    fn candidates(
        &self,
        product: ProductKind,
        tile_tokens: u32,
        token_tiles: u64,
        sizes: ProductSizes,
        sms: u32,
        refused: &Refused,
    ) -> Vec<(ProductInstance, Candidate)> {
        let is_it = |of: &ProductInstance| {
            of.tile_tokens == tile_tokens && of.supports(product, sizes) && !refused.contains(of.entry)
        };
        let expected = |of: ProductInstance| {
            let tiles = token_tiles * u64::from(sizes.n.div_ceil(of.columns));
            let rounds = tiles.div_ceil(sms.into());
            let cost = of.first_time + rounds * of.tile_time;
            (of, Candidate { entry: of.entry, tile_tokens, columns: of.columns, tiles, rounds, cost })
        };
        let mut found: Vec<_> = self.instances().into_iter().filter(is_it).map(expected).collect();
        let is_fast = |(of, found): &(ProductInstance, Candidate)| !of.for_few_tiles || found.rounds <= FEW_TILES;
        if found.iter().any(is_fast) {
            found.retain(is_fast);
        }
        found.sort_by_key(|(of, found)| (found.cost, !of.early));
        found
    }

    /// Returns the first of [`Self::candidates`] on a device where no self-test has failed.
    #[cfg(test)]
    fn instance(
        &self,
        product: ProductKind,
        tile_tokens: u32,
        token_tiles: u64,
        experts: u32,
        [n, k]: [u32; 2],
        sms: u32,
    ) -> ProductInstance {
        let sizes = ProductSizes { experts, n, k };
        self.candidates(product, tile_tokens, token_tiles, sizes, sms, &Refused::default())[0].0
    }

    /// Returns the dynamic shared memory that each CTA requests if `_resident_blocks` CTAs run on each SM, in bytes.
    fn shared_bytes(&self, instance: &ProductInstance, _resident_blocks: u32) -> u32 {
        instance.shared_bytes
    }

    /// Returns the launch of a product of at most `rows` rows, not counting rows that pad each expert's. The grid has one
    /// CTA per possible tile, up to a limit per SM. A CTA continues with further tiles by itself.
    fn product(&self, instance: &ProductInstance, operands: O, rows: u64, sms: u32) -> Launch {
        let token_tiles = most_token_tiles(rows, operands.experts().into(), instance.tile_tokens);
        let tiles = token_tiles * u64::from(operands.columns().div_ceil(instance.columns));
        let most = u64::from(instance.multiprocessor_blocks) * u64::from(sms);
        let blocks = tiles.min(most) as u32;
        let grid = Grid {
            shared_bytes: self.shared_bytes(instance, blocks.div_ceil(sms)),
            overlaps: self.overlaps(),
            ..Grid::linear(instance.entry, blocks, instance.threads)
        };
        operands.launch(self.name(), grid, instance, rows)
    }
}

/// Returns the preferred tokens per tile, if all products have an instance with such tiles that is not refused: else the
/// next larger size with instances and with room, or the next smaller one. If there is none, returns the preferred size.
pub fn tile_tokens_left<O: Operands>(
    products: &dyn Products<O>,
    preferred: u32,
    of: &[(ProductKind, ProductSizes)],
    refused: &Refused,
    has_room: impl Fn(u32) -> bool,
) -> u32 {
    if refused.is_empty() {
        return preferred;
    }
    let is_left = |tokens: &u32| {
        has_room(*tokens) && of.iter().all(|(kind, sizes)| products.has_tiles(*kind, *tokens, *sizes, refused))
    };
    let sizes: BTreeSet<_> = products.instances().iter().map(|of| of.tile_tokens).collect();
    let larger = sizes.range(preferred..).copied().find(is_left);
    larger.or_else(|| sizes.range(..preferred).copied().rfind(is_left)).unwrap_or(preferred)
}

/// Tokens of the smallest tile, which every kernel has. These tokens are never sorted: they are few, and saving a
/// launch counts.
pub(super) const SMALLEST_TILE: u32 = 16;

/// Whether the rows of most experts fit the smallest tile, for `rows` rows of `experts` named experts. Then every
/// kernel uses that tile. The rows of several experts vary around the average. If they fill three quarters of a tile on
/// average, one expert in ten needs a second tile and decodes its weights twice. If they fill all of it, four in ten do
/// (benches/lab/experiments.md).
pub(super) fn fit_smallest_tile(rows: u64, experts: u64) -> bool {
    let most = if experts == 1 { SMALLEST_TILE } else { SMALLEST_TILE * 3 / 4 };
    rows <= u64::from(most) * experts
}

/// Numbers of named experts with so few tiles that all SMs wait for an expert with many more rows than the average.
pub(super) const FEW_EXPERTS: RangeInclusive<u64> = 8..=16;

/// Whether `rows` rows of `experts` named experts are multiplied in tiles of sorted tokens, on a kernel with such
/// tiles: if they do not fit the smallest tiles, or with few experts if they have at least eight rows on average
/// (benches/lab/experiments.md).
pub(super) fn may_be_sorted(rows: u64, experts: u64) -> bool {
    !fit_smallest_tile(rows, experts) || (FEW_EXPERTS.contains(&experts) && rows >= 8 * experts)
}

/// Returns the maximum number of tiles of `tile_tokens` tokens for rows of `experts` experts: all experts have a row,
/// and one expert has all others.
pub(super) fn most_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let hit = rows.min(experts);
    hit + (rows - hit) / u64::from(tile_tokens)
}
