//! How an MoE layer is launched: a function of sizes and addresses, which knows no device.
//!
//! A call of a layer is a chain of launches, each of which may begin while the one before it still runs: lists of each expert's
//! tokens (`moe_route`), where experts have many the rows of tokens sorted by expert (`moe_expand`), gate and up, down (`moe_sm90` or another of `kernels.rs`), the same for the expert that all tokens share, and
//! the sum of each token's rows. With tokens in FP8 or NVFP4, what a product multiplies is rounded before it (`moe_quantize`,
//! `moe_fp8_sm90`; `moe_quantize_nvfp4`, `moe_sm100`, `moe_nvfp4_sm120`); where experts have input scales, the product of gate and up
//! rounds what down multiplies itself. Grids, instances and memory depend on sizes alone; how many rows an expert has, kernels read from the lists. So a chain
//! that was captured once is right for whatever routing comes later. Where tokens are few, Hopper has a chain of
//! two: gate and up, then down with the sums (`moe_few_sm90`).
//!
//! A token's numbers are the same whatever else is in the batch, in which order, and on which instance: every product sums its K
//! in the same order, and a token's rows are added in the order in which it names its experts.

mod kernels;
mod stages;
mod weights;
mod workspace;

use kernels_gpu::epilogue::{self, PARAMETERS};
use kernels_gpu::layer::moe_quantize::abi::Quantize;
use kernels_gpu::layer::moe_quantize_nvfp4::abi::Quantize as Nvfp4Quantize;
use kernels_gpu::layer::moe_route::abi::{Combine, Expand, ExpandedRows, Route};
use kernels_gpu::lists::Lists;
use kernels_gpu::mma_sync::moe_few_sm90::abi::{Choices, Down, GateUp, Matrices};
use kernels_gpu::moe::Launch as Product;
use kernels_gpu::nvfp4_rows::value_bytes;
use kernels_gpu::routed::QuantizedC;
use kernels_gpu::units::OperandType;
use kernels_gpu::wgmma::moe_fp8_sm90::abi::Launch as Fp8Product;

use super::group::Address;
use super::launch::{Launch, output_code};
use super::layer::moe_pack::row_order::RowOrder;
use super::layer::moe_quantize::MoeQuantize;
use super::layer::moe_quantize_nvfp4::MoeQuantizeNvfp4;
use super::layer::moe_route::MoeRoute;
use super::mma_sync::moe_few_sm90::MoeFewSm90;
use super::nvfp4_products;
use super::products::{expected_rows, expected_token_tiles};
use super::wgmma::moe_fp8_sm90::MoeFp8Sm90;
use crate::error::Error;
use crate::moe::{Activation, MoeSizes};
use crate::problem::{Op, TokenDtype, TokenFormat};
use kernels::RowPlan;
pub(crate) use kernels::{FP8_KERNELS, MoeKernels, products_named};
pub(crate) use stages::StageParts;
use weights::packed_bytes;
pub use weights::weight_bytes;
pub(crate) use weights::{PROJECTIONS, PackedWeights};
pub use workspace::workspace_bytes;
pub(crate) use workspace::{Nvfp4Rows, PlacedLists, SortedRows, Workspace};

/// The tickets of the lists that each product takes its tiles by.
const TICKETS: [u64; 2] = [0, 1];

/// Experts of the same sizes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedExperts {
    /// Units of every expert's gate, with those of its up behind them; or of its up alone. For tokens in NVFP4 first the values of all
    /// of them, then the scales, as [`nvfp4_rows`](kernels_gpu::nvfp4_rows) says.
    pub gate_up: Address,
    /// Those of every expert's down.
    pub down: Address,
    /// The global scales of every gate, up and down: three arrays of f32.
    pub alpha: [Address; 3],
    /// The biases of every gate, up and down; 0 where there are none.
    pub bias: [Address; 3],
    /// For tokens in NVFP4: the global scales of what each expert's gate and up multiply, and its down, f32; 0 where a token has one of
    /// its own.
    pub input_scales: [Address; 2],
}

/// An activation as kernels are told of it. They round its numbers to f32.
fn activation_parameters(activation: Activation) -> epilogue::Activation {
    let none = epilogue::Activation::NONE;
    match activation.gate() {
        _ if activation == Activation::Silu => none,
        None => epilogue::Activation { kind: PARAMETERS, ..none },
        Some(gate) => epilogue::Activation {
            kind: PARAMETERS,
            exponent: [gate.slope, gate.cubic].map(|factor| (-std::f64::consts::LOG2_E * factor) as f32),
            limit: gate.limit as f32,
            offset: gate.offset as f32,
        },
    }
}

/// A layer in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedMoe {
    pub sizes: MoeSizes,
    pub experts: PlacedExperts,
    /// The expert that every token shares, if there is one.
    pub shared: Option<PlacedExperts>,
    /// The layer's own number of each expert that can be named; 0 if experts are named by those.
    pub map: Address,
    /// Whether the intermediate is left in 16 bits where down does not read it so, and experts' rows where nothing else reads them:
    /// what a comparison in stages looks at.
    pub keeps_stages: bool,
}

/// What a call of a layer reads and writes: addresses in the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoeArguments {
    /// T; may be 0.
    pub token_count: usize,
    /// Tokens X, at a multiple of 16: T rows of H numbers of the layer's type.
    pub tokens: Address,
    /// Bytes from one token to the next, a multiple of 16.
    pub token_pitch: usize,
    /// The experts that tokens name, `[T, k]`, i32. An expert that is negative, or that does not exist, contributes nothing.
    pub topk_ids: Address,
    /// The weight of each, `[T, k]`, f32.
    pub topk_weights: Address,
    /// Whether weights multiply the tokens, rather than the experts' results: only if k = 1. A shared expert's tokens stay as they are.
    pub weights_on_input: bool,
    /// A weight of the shared expert for each token, `[T]`, f32; 0 if all are 1.
    pub shared_weights: Address,
    /// The output, at a multiple of 16: T rows of H numbers of the layer's type.
    pub output: Address,
    /// Bytes from one row of the output to the next, a multiple of 16.
    pub output_pitch: usize,
}

impl MoeArguments {
    /// Checks what can be seen without a device.
    pub(crate) fn check(&self, sizes: &MoeSizes) -> Result<(), Error> {
        if self.weights_on_input && sizes.top_k > 1 {
            return Err(Error::Invalid(
                "weights on the input are for layers with one expert a token; multiply the results".into(),
            ));
        }
        let row_bytes = size_of::<u16>() * sizes.hidden;
        for (what, address, pitch) in
            [("tokens", self.tokens, self.token_pitch), ("output", self.output, self.output_pitch)]
        {
            if !address.is_multiple_of(16) || !pitch.is_multiple_of(16) || pitch < row_bytes {
                return Err(Error::Invalid(format!(
                    "{what} at {address:#x}, {pitch} bytes apart: both must be multiples of 16, and a row has {row_bytes} bytes"
                )));
            }
        }
        Ok(())
    }

    /// The part of so many tokens from `first` on.
    fn part(&self, sizes: &MoeSizes, first: usize, token_count: usize) -> Self {
        let (first, choices) = (first as u64, (first * sizes.top_k) as u64);
        Self {
            token_count,
            tokens: self.tokens + first * self.token_pitch as u64,
            topk_ids: self.topk_ids + 4 * choices,
            topk_weights: self.topk_weights + 4 * choices,
            shared_weights: if self.shared_weights == 0 { 0 } else { self.shared_weights + 4 * first },
            output: self.output + first * self.output_pitch as u64,
            ..*self
        }
    }
}

/// The type of a layer's 16-bit tokens, as kernels name it.
pub(crate) fn operand_type(dtype: TokenDtype) -> OperandType {
    match dtype {
        TokenDtype::F16 => OperandType::F16,
        TokenDtype::Bf16 => OperandType::Bf16,
    }
}

/// The type that a layer's weights are multiplied with, for which they are packed.
pub(crate) fn packing(sizes: &MoeSizes) -> OperandType {
    match sizes.token_format {
        TokenFormat::Bits16 => operand_type(sizes.dtype),
        TokenFormat::Fp8 => OperandType::E4m3,
        TokenFormat::Nvfp4 => unreachable!("weights for NVFP4 tokens are packed as they are"),
    }
}

/// The order in which the rows of a projection (gate, up, down: 0, 1, 2) are packed.
pub(crate) fn row_order(sizes: &MoeSizes, projection: usize) -> RowOrder {
    match sizes.token_format {
        TokenFormat::Nvfp4 => RowOrder::Kept,
        _ => RowOrder::of_projection(projection, packing(sizes)),
    }
}

/// The parts of a call that are worked off one after the other, each with its first token: one, unless the workspace would be
/// too large.
///
/// # Errors
/// If the arguments are not aligned, or ask for weights on the input where that cannot be.
pub(crate) fn chunks(
    sizes: &MoeSizes,
    arguments: &MoeArguments,
) -> Result<impl Iterator<Item = (usize, MoeArguments)>, Error> {
    arguments.check(sizes)?;
    let (sizes, arguments) = (*sizes, *arguments);
    let (all, most) = (arguments.token_count, workspace::chunk_tokens(&sizes, arguments.token_count));
    Ok((0..all).step_by(most).map(move |first| (first, arguments.part(&sizes, first, most.min(all - first)))))
}

/// The launches of a chunk, in order, of these kernels, on a device of so many multiprocessors.
///
/// # Errors
/// [`Error::TooLarge`] if a grid cannot have as many blocks as it takes.
pub(crate) fn launches(
    layer: &PlacedMoe,
    chunk: &MoeArguments,
    workspace: &Workspace,
    kernels: MoeKernels,
    sms: u32,
) -> Result<Vec<Launch>, Error> {
    let sizes = &layer.sizes;
    let choices = (chunk.token_count * sizes.top_k) as u64;
    let plan = RowPlan::new(sizes, chunk.token_count, kernels);
    let routed = Experts {
        placed: &layer.experts,
        count: sizes.experts as u32,
        intermediate: sizes.intermediate as u32,
        tokens: workspace.tokens,
        fp8: workspace.fp8,
        nvfp4: workspace.nvfp4,
        lists: workspace.lists,
        has_rows: true,
        row_multiple: plan.row_multiple,
        sorted: plan.are_sorted.then_some(workspace.row_capacity),
        tile_tokens: plan.tile_tokens,
        rows: choices,
        expected_rows: expected_rows(choices, sizes.experts as u64, sizes.named_experts as u64),
        products: [workspace.intermediate, workspace.rows],
    };
    let shared = layer.shared.as_ref().zip(workspace.shared).map(|(placed, shared)| Experts {
        placed,
        count: 1,
        intermediate: shared.width,
        tokens: shared.tokens.filter(|_| chunk.weights_on_input).unwrap_or(workspace.tokens),
        fp8: shared.fp8,
        nvfp4: shared.nvfp4,
        lists: shared.lists,
        has_rows: false,
        row_multiple: plan.row_multiple,
        sorted: plan.shared_are_sorted.then_some(shared.row_capacity),
        tile_tokens: plan.shared_tile_tokens,
        rows: chunk.token_count as u64,
        expected_rows: chunk.token_count as u64,
        products: [shared.intermediate, shared.rows],
    });
    let expands = plan.are_sorted || plan.shared_are_sorted;
    let chunk = Chunk { layer, arguments: chunk, workspace, kernels, expands, sms };
    if let Some(few) = kernels.few(sizes, chunk.arguments) {
        return Ok(chunk.few(few, &routed).into());
    }
    let mut launches = vec![chunk.route(&routed, shared.as_ref())?];
    if expands {
        launches.push(chunk.expand(&routed, shared.as_ref())?);
    }
    for experts in [Some(&routed), shared.as_ref()].into_iter().flatten() {
        for (index, projection) in [chunk.gate_up(experts), chunk.down(experts)].into_iter().enumerate() {
            match (experts.fp8, experts.nvfp4) {
                (Some(rows), _) => {
                    launches.push(chunk.quantize(experts, index, projection.k, rows[index])?);
                    launches.push(chunk.fp8_product(experts, index, projection, rows[index]));
                }
                (_, Some(rows)) => {
                    // With input scales, what a gated product leaves to down is quantized where it is made.
                    let is_made = sizes.has_input_scales() && sizes.activation.has_gate();
                    let next = (index == 0 && is_made).then_some(rows[1]);
                    if index == 0 || !is_made {
                        launches.push(chunk.quantize_nvfp4(experts, index, projection.k, rows[index])?);
                    }
                    launches.push(chunk.nvfp4_product(experts, index, projection, rows[index], next));
                }
                _ => launches.push(chunk.product(experts, index, projection)),
            }
        }
    }
    launches.push(chunk.combine(&routed)?);
    Ok(launches)
}

/// Experts whose products are launched together: those that tokens name, or the shared one.
struct Experts<'l> {
    placed: &'l PlacedExperts,
    count: u32,
    /// I.
    intermediate: u32,
    /// Tokens in the order of K, if they are 16-bit numbers that are not sorted.
    tokens: Address,
    /// Tokens of each product, if they are in FP8.
    fp8: Option<[SortedRows; 2]>,
    /// Tokens of each product, if they are in NVFP4.
    nvfp4: Option<[Nvfp4Rows; 2]>,
    lists: PlacedLists,
    /// Whether tokens name these experts, so that lists say which token a row is of; else rows are tokens.
    has_rows: bool,
    /// What each expert's rows are filled up to a multiple of.
    row_multiple: u32,
    /// Rows that there is room for, if products take 16-bit numbers sorted.
    sorted: Option<u32>,
    tile_tokens: u32,
    /// The most rows.
    rows: u64,
    /// As many as there are if tokens name every expert as often as any other.
    expected_rows: u64,
    /// What gate and up leave to down, and what down leaves.
    products: [Address; 2],
}

impl Experts<'_> {
    /// Address of what the lists have at an offset.
    fn list(&self, offset: impl Fn(&Lists) -> u64) -> Address {
        self.lists.at + offset(&self.lists.offsets(self.row_multiple))
    }

    /// Where tokens are expanded to, if they are sorted.
    fn expanded_rows(&self) -> ExpandedRows {
        let none = ExpandedRows { tokens: 0, intermediate: 0, capacity: 0, width: 0 };
        // What down gives takes the place of its experts' tokens.
        let [intermediate, tokens] = self.products;
        self.sorted.map_or(none, |capacity| ExpandedRows { tokens, intermediate, capacity, width: self.intermediate })
    }
}

/// What a product takes of experts: gate and up, or one matrix alone, of which the second address is 0.
struct Projection {
    op: Op,
    b: [Address; 2],
    expert_bytes: u64,
    alpha: [Address; 2],
    bias: [Address; 2],
    /// Columns of the product.
    n: u32,
    /// Elements that are summed over.
    k: u32,
    activation: epilogue::Activation,
}

/// A part of a call for which the workspace is large enough.
struct Chunk<'l> {
    layer: &'l PlacedMoe,
    arguments: &'l MoeArguments,
    workspace: &'l Workspace,
    kernels: MoeKernels,
    /// Whether a launch brings tokens to their rows.
    expands: bool,
    sms: u32,
}

impl Chunk<'_> {
    /// All of a layer, where tokens are few.
    fn few(&self, few: &MoeFewSm90, routed: &Experts<'_>) -> [Launch; 2] {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let choices = Choices {
            ids: arguments.topk_ids,
            map: self.layer.map,
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            experts: routed.count,
            named_experts: sizes.named_experts as u32,
        };
        let matrices = |projection: &Projection| {
            let &Projection { b, expert_bytes, alpha, bias, n, k, .. } = projection;
            Matrices { b, expert_bytes, alpha, bias, n, k }
        };
        let (gate_up, down) = (self.gate_up(routed), self.down(routed));
        let [intermediate, rows] = routed.products;
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

    /// Lists, and tokens in the order of K.
    fn route(&self, routed: &Experts<'_>, shared: Option<&Experts<'_>>) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let route = Route {
            ids: arguments.topk_ids,
            map: self.layer.map,
            input: arguments.tokens,
            input_pitch: arguments.token_pitch as u64,
            input_weights: if arguments.weights_on_input { arguments.topk_weights } else { 0 },
            tokens: if routed.sorted.is_some() { 0 } else { self.workspace.tokens },
            shared_tokens: shared.filter(|shared| shared.sorted.is_none()).map_or(0, |shared| shared.tokens),
            lists: routed.lists.at,
            shared_lists: shared.map_or(0, |shared| shared.lists.at),
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            experts: routed.count,
            named_experts: sizes.named_experts as u32,
            hidden: sizes.hidden as u32,
            tile_tokens: routed.tile_tokens,
            shared_tile_tokens: shared.unwrap_or(routed).tile_tokens,
            operand_type: output_code(sizes.dtype),
            row_multiple: routed.row_multiple,
            unused: 0,
        };
        MoeRoute.route(route, self.kernels.largest_cluster)
    }

    /// Tokens to the rows of experts that take them sorted.
    fn expand(&self, routed: &Experts<'_>, shared: Option<&Experts<'_>>) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let expand = Expand {
            input: arguments.tokens,
            input_pitch: arguments.token_pitch as u64,
            input_weights: if arguments.weights_on_input { arguments.topk_weights } else { 0 },
            places: routed.list(|lists| lists.places),
            routed: routed.expanded_rows(),
            shared: shared.map_or(bytemuck::Zeroable::zeroed(), Experts::expanded_rows),
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            hidden: sizes.hidden as u32,
            operand_type: output_code(sizes.dtype),
        };
        MoeRoute.expand(expand, self.kernels.overlaps())
    }

    /// Gate and up, or up alone.
    fn gate_up(&self, experts: &Experts<'_>) -> Projection {
        let (n, k) = (experts.intermediate, self.layer.sizes.hidden as u32);
        let PlacedExperts { gate_up, alpha: [gate_alpha, up_alpha, _], bias: [gate_bias, up_bias, _], .. } =
            *experts.placed;
        let bytes = packed_bytes(self.layer.sizes.token_format, n, k);
        let activation = activation_parameters(self.layer.sizes.activation);
        if self.layer.sizes.activation.has_gate() {
            let (b, alpha, bias) = ([gate_up, gate_up + bytes], [gate_alpha, up_alpha], [gate_bias, up_bias]);
            Projection { op: Op::Gated, b, expert_bytes: 2 * bytes, alpha, bias, n, k, activation }
        } else {
            let (b, alpha, bias) = ([gate_up, 0], [up_alpha, 0], [up_bias, 0]);
            Projection { op: Op::Plain, b, expert_bytes: bytes, alpha, bias, n, k, activation }
        }
    }

    /// Down.
    fn down(&self, experts: &Experts<'_>) -> Projection {
        let (n, k) = (self.layer.sizes.hidden as u32, experts.intermediate);
        let PlacedExperts { down, alpha: [.., alpha], bias: [.., bias], .. } = *experts.placed;
        Projection {
            op: Op::Plain,
            b: [down, 0],
            expert_bytes: packed_bytes(self.layer.sizes.token_format, n, k),
            alpha: [alpha, 0],
            bias: [bias, 0],
            n,
            k,
            activation: epilogue::Activation::NONE,
        }
    }

    /// The first or the second product of experts' rows of 16-bit numbers, on the instance for it.
    fn product(&self, experts: &Experts<'_>, index: usize, projection: Projection) -> Launch {
        let Projection { op, b, expert_bytes, alpha, bias, n, k, activation } = projection;
        let launch = Product {
            tokens: match (index, experts.sorted) {
                (0, None) => experts.tokens,
                (0, Some(_)) => experts.expanded_rows().tokens,
                _ => experts.products[0],
            },
            rows: if index == 0 && experts.has_rows { experts.list(|lists| lists.rows) } else { 0 },
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            ticket: experts.list(|lists| lists.tickets) + 4 * TICKETS[index],
            b,
            expert_bytes,
            alpha,
            bias,
            c: experts.products[index],
            n,
            k,
            experts: experts.count,
            // The launch before the first product makes the lists, unless another one comes between.
            lists_pending: (index == 0 && experts.has_rows && !self.expands).into(),
            row_capacity: experts.sorted.unwrap_or(0),
            c_is_sorted: (index == 0 && experts.sorted.is_some()).into(),
            activation,
            unused: 0,
        };
        let operand_type = operand_type(self.layer.sizes.dtype);
        let token_tiles = expected_token_tiles(experts.expected_rows, experts.count.into(), experts.tile_tokens);
        let instance = self.kernels.products.instance(op, operand_type, experts.tile_tokens, token_tiles, n, self.sms);
        self.kernels.products.product(&instance, launch, experts.rows, self.sms)
    }

    /// The first or the second product's tokens to FP8: `k` columns of X, or of what the first product left.
    fn quantize(&self, experts: &Experts<'_>, index: usize, k: u32, rows: SortedRows) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let common = Quantize {
            firsts: experts.list(|lists| lists.firsts),
            codes: rows.codes,
            scales: rows.scales,
            top_k: 1,
            experts: experts.count,
            row_capacity: rows.capacity,
            k,
            ..bytemuck::Zeroable::zeroed()
        };
        let quantize = if index == 0 {
            let weights_on_input = arguments.weights_on_input && experts.has_rows;
            Quantize {
                input: arguments.tokens,
                input_pitch: arguments.token_pitch as u64,
                input_weights: if weights_on_input { arguments.topk_weights } else { 0 },
                places: if experts.has_rows { experts.list(|lists| lists.places) } else { 0 },
                rows: experts.list(|lists| lists.rows),
                token_count: arguments.token_count as u32,
                top_k: if experts.has_rows { sizes.top_k as u32 } else { 1 },
                ..common
            }
        } else {
            let input_pitch = u64::from(k) * size_of::<u16>() as u64;
            Quantize { input: experts.products[0], input_pitch, ..common }
        };
        MoeQuantize.launch(quantize, sizes.dtype)
    }

    /// The first or the second product of experts' rows in FP8.
    fn fp8_product(&self, experts: &Experts<'_>, index: usize, projection: Projection, rows: SortedRows) -> Launch {
        let Projection { op, b, expert_bytes, alpha, bias, n, k, activation } = projection;
        let launch = Fp8Product {
            tokens: rows.codes,
            scales: rows.scales,
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            ticket: experts.list(|lists| lists.tickets) + 4 * TICKETS[index],
            b,
            expert_bytes,
            alpha,
            bias,
            c: experts.products[index],
            n,
            k,
            experts: experts.count,
            rows: 0,
            row_capacity: rows.capacity,
            output: output_code(self.layer.sizes.dtype),
            activation,
            unused: 0,
        };
        let instance = MoeFp8Sm90.instance(op, experts.tile_tokens);
        MoeFp8Sm90.product(instance, launch, experts.rows, self.sms)
    }

    /// The first or the second product's tokens to NVFP4: `k` columns of X, or of what the first product left.
    fn quantize_nvfp4(&self, experts: &Experts<'_>, index: usize, k: u32, rows: Nvfp4Rows) -> Result<Launch, Error> {
        let (sizes, arguments) = (&self.layer.sizes, self.arguments);
        let common = Nvfp4Quantize {
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            input_scales: experts.placed.input_scales[index],
            values: rows.values,
            scales: rows.scales,
            globals: rows.globals,
            top_k: 1,
            experts: experts.count,
            k,
            ..bytemuck::Zeroable::zeroed()
        };
        let quantize = if index == 0 {
            let weights_on_input = arguments.weights_on_input && experts.has_rows;
            Nvfp4Quantize {
                input: arguments.tokens,
                input_pitch: arguments.token_pitch as u64,
                input_weights: if weights_on_input { arguments.topk_weights } else { 0 },
                places: if experts.has_rows { experts.list(|lists| lists.places) } else { 0 },
                token_count: arguments.token_count as u32,
                top_k: if experts.has_rows { sizes.top_k as u32 } else { 1 },
                ..common
            }
        } else {
            let input_pitch = u64::from(k) * size_of::<u16>() as u64;
            Nvfp4Quantize { input: experts.products[0], input_pitch, token_count: experts.rows as u32, ..common }
        };
        MoeQuantizeNvfp4.launch(quantize, sizes.dtype)
    }

    /// The first or the second product of experts' rows in NVFP4; the first may leave its own to the `next` in the same way.
    fn nvfp4_product(
        &self,
        experts: &Experts<'_>,
        index: usize,
        projection: Projection,
        rows: Nvfp4Rows,
        next: Option<Nvfp4Rows>,
    ) -> Launch {
        let Projection { op, b: [weights, _], alpha, bias, n, k, activation, .. } = projection;
        let quantized = next.map_or(QuantizedC::default(), |Nvfp4Rows { values, scales, globals, .. }| QuantizedC {
            input_scales: experts.placed.input_scales[1],
            values,
            scales,
            globals,
        });
        let is_read = next.is_none() || self.layer.keeps_stages;
        let matrices = u64::from(experts.count) * op.projections() as u64;
        let product = nvfp4_products::Product {
            tokens: rows.values,
            rows: rows.rows,
            token_scales: rows.scales,
            globals: rows.globals,
            firsts: experts.list(|lists| lists.firsts),
            tile_firsts: experts.list(|lists| lists.tile_firsts),
            weights,
            weight_scales: weights + value_bytes(matrices * u64::from(n), k),
            alpha,
            bias,
            c: if is_read { experts.products[index] } else { 0 },
            quantized,
            n,
            k,
            experts: experts.count,
            output: output_code(self.layer.sizes.dtype),
            activation,
        };
        let kernel = self.kernels.nvfp4.expect("tokens are in NVFP4 where a kernel multiplies them");
        kernel.product(op, experts.tile_tokens, product, experts.rows, self.sms)
    }

    /// The sum of each token's rows.
    fn combine(&self, routed: &Experts<'_>) -> Result<Launch, Error> {
        let (sizes, arguments, workspace) = (&self.layer.sizes, self.arguments, self.workspace);
        let combine = Combine {
            rows: workspace.rows,
            places: routed.list(|lists| lists.places),
            weights: if arguments.weights_on_input { 0 } else { arguments.topk_weights },
            shared_rows: workspace.shared.map_or(0, |shared| shared.rows),
            shared_weights: workspace.shared.map_or(0, |_| arguments.shared_weights),
            output: arguments.output,
            output_pitch: arguments.output_pitch as u64,
            token_count: arguments.token_count as u32,
            top_k: sizes.top_k as u32,
            hidden: sizes.hidden as u32,
            unused: 0,
        };
        MoeRoute.combine(combine, sizes.dtype, self.kernels.overlaps())
    }
}

#[cfg(test)]
mod tests;
