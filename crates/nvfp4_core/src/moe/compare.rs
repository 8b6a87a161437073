//! Compares the output of a device with the reference, stage by stage. The reference of a stage is computed from the
//! device's own results of the stage before, so an error is reported only in the stage where it arises.
//!
//! | stage | reference | bound |
//! |---|---|---|
//! | intermediate, of rows and of the shared expert | tokens · gate and up, activated | [`Expected::activated`] |
//! | down projection, of rows and of the shared expert | the device's intermediate · down | [`Expected::plain`] |
//! | output | the device's down projections, weighted and added in order | none: every bit |
//!
//! If tokens are multiplied in [FP8](crate::fp8) or [NVFP4](crate::fp4), there is one more stage before each product,
//! and sums of FP8 tokens must match in every bit:
//!
//! | stage | reference | bound |
//! |---|---|---|
//! | quantized tokens, of rows and of the shared expert | tokens, quantized | none: every bit |
//! | quantized intermediate, of rows and of the shared expert | device's intermediate, quantized | none: every bit |
//!
//! Transforms of an expert ([`ExpertTransforms`](super::ExpertTransforms)) are applied to tokens and intermediate before they
//! are multiplied or quantized.

use std::borrow::Cow;
use std::ops::Range;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use super::oracle::{Expected, Operand, projected, weighted_token};
use super::{MoeOutput, MoeStep, MoeWeights, Stages};
use crate::format::{BLOCK, Matrix, e2m1, e4m3};
use crate::fp8::Factors;
use crate::problem::{TokenDtype, TokenFormat};
use crate::quantized::QuantizedRows;

/// A stage that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// [`QuantizedStages::tokens`](super::QuantizedStages::tokens).
    QuantizedTokens,
    /// [`Stages::intermediate`].
    Intermediate,
    /// [`QuantizedStages::intermediate`](super::QuantizedStages::intermediate).
    QuantizedIntermediate,
    /// [`Stages::partial`].
    Partial,
    /// [`QuantizedStages::shared_tokens`](super::QuantizedStages::shared_tokens).
    SharedQuantizedTokens,
    /// [`Stages::shared_intermediate`].
    SharedIntermediate,
    /// [`QuantizedStages::shared_intermediate`](super::QuantizedStages::shared_intermediate).
    SharedQuantizedIntermediate,
    /// [`Stages::shared_partial`].
    SharedPartial,
    /// [`MoeOutput::hidden`].
    Output,
}

impl Stage {
    /// All stages, in the order of computation.
    pub const ALL: [Self; 9] = [
        Self::QuantizedTokens,
        Self::Intermediate,
        Self::QuantizedIntermediate,
        Self::Partial,
        Self::SharedQuantizedTokens,
        Self::SharedIntermediate,
        Self::SharedQuantizedIntermediate,
        Self::SharedPartial,
        Self::Output,
    ];

    /// Name of the stage for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::QuantizedTokens => "quantized tokens",
            Self::Intermediate => "intermediate",
            Self::QuantizedIntermediate => "quantized intermediate",
            Self::Partial => "down projection",
            Self::SharedQuantizedTokens => "shared expert's quantized tokens",
            Self::SharedIntermediate => "shared expert's intermediate",
            Self::SharedQuantizedIntermediate => "shared expert's quantized intermediate",
            Self::SharedPartial => "shared expert's down projection",
            Self::Output => "output",
        }
    }

    /// Whether the stage belongs to the shared expert.
    const fn is_shared(self) -> bool {
        use Stage::{SharedIntermediate, SharedPartial, SharedQuantizedIntermediate, SharedQuantizedTokens};
        matches!(self, SharedQuantizedTokens | SharedIntermediate | SharedQuantizedIntermediate | SharedPartial)
    }

    /// Whether the stage has rows of e4m3 or NVFP4.
    const fn is_quantized(self) -> bool {
        use Stage::{QuantizedIntermediate, QuantizedTokens, SharedQuantizedIntermediate, SharedQuantizedTokens};
        matches!(self, QuantizedTokens | QuantizedIntermediate | SharedQuantizedTokens | SharedQuantizedIntermediate)
    }
}

/// An element of a stage: a wrong element, or the element with the largest error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeMismatch {
    /// Stage of the element.
    pub stage: Stage,
    /// Row within the stage.
    pub row: usize,
    /// Token of the row.
    pub token: usize,
    /// The layer's own number of the expert. `None` for the shared expert and for the output.
    pub expert: Option<usize>,
    /// Column within the stage.
    pub column: usize,
    /// Value of the device.
    pub got: f64,
    /// The reference.
    pub want: f64,
}

impl std::fmt::Display for MoeMismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stage, token, expert, column, got, want, .. } = self;
        write!(f, "{}, token {token}", stage.name())?;
        expert.map_or(Ok(()), |expert| write!(f, ", expert {expert}"))?;
        write!(f, ", column {column}: got {got}, want {want}")
    }
}

/// Result of the comparison of one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageComparison {
    /// The stage that was compared.
    pub stage: Stage,
    /// Number of elements compared.
    pub checked: usize,
    /// Number of wrong elements.
    pub mismatches: usize,
    /// Number of elements with any value allowed, since f32 sums may overflow ([`Expected::Anything`]).
    pub unbounded: usize,
    /// First wrong element, in the order of rows.
    pub first: Option<MoeMismatch>,
    /// Element farthest from the reference, right or wrong.
    pub worst: Option<MoeMismatch>,
    /// Distance of `worst` from the reference. Infinite if the element is NaN or infinite and the reference is not.
    pub max_abs_err: f64,
}

impl StageComparison {
    pub(crate) fn new(stage: Stage) -> Self {
        Self { stage, checked: 0, mismatches: 0, unbounded: 0, first: None, worst: None, max_abs_err: 0.0 }
    }

    pub(crate) fn add(&mut self, dtype: TokenDtype, expected: Expected, element: MoeMismatch) {
        let MoeMismatch { got, want, .. } = element;
        self.checked += 1;
        if expected == Expected::Anything {
            self.unbounded += 1;
            return;
        }
        let rounded = dtype.decode(dtype.round(want));
        let same = got == rounded || got.is_nan() && want.is_nan();
        let distance = if same { 0.0 } else { (got - rounded).abs() };
        self.judge(expected.accepts(dtype, got), distance, element);
    }

    /// Adds an element that must match the reference in every bit.
    fn add_exact(&mut self, is_right: bool, element: MoeMismatch) {
        self.checked += 1;
        self.judge(is_right, if is_right { 0.0 } else { (element.got - element.want).abs() }, element);
    }

    fn judge(&mut self, is_right: bool, distance: f64, element: MoeMismatch) {
        let distance = if distance.is_nan() { f64::INFINITY } else { distance };
        if !is_right {
            self.mismatches += 1;
            self.first.get_or_insert(element);
        }
        if self.worst.is_none() || distance > self.max_abs_err {
            (self.max_abs_err, self.worst) = (distance, Some(element));
        }
    }

    /// Combines the results of different elements of a stage. The result does not depend on the order.
    pub(crate) fn merge(self, other: Self) -> Self {
        let place = |element: &MoeMismatch| (element.row, element.column);
        let first = [self.first, other.first].into_iter().flatten().min_by_key(place);
        let worst = [(self.worst, self.max_abs_err), (other.worst, other.max_abs_err)];
        let worst = worst.into_iter().filter_map(|(worst, error)| Some((worst?, error)));
        let worst = worst.max_by(|(a, x), (b, y)| x.total_cmp(y).then(place(b).cmp(&place(a))));
        Self {
            stage: self.stage,
            checked: self.checked + other.checked,
            mismatches: self.mismatches + other.mismatches,
            unbounded: self.unbounded + other.unbounded,
            first,
            worst: worst.map(|(worst, _)| worst),
            max_abs_err: worst.map_or(0.0, |(_, error)| error),
        }
    }
}

/// Result of a comparison, stage by stage.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeComparison {
    /// Results of the stages that the layer has.
    pub stages: Vec<StageComparison>,
}

impl MoeComparison {
    /// Whether no compared element was wrong. Also `true` if no elements were compared.
    pub fn passed(&self) -> bool {
        self.mismatches() == 0
    }

    /// Number of elements compared, in all stages.
    pub fn checked(&self) -> usize {
        self.stages.iter().map(|stage| stage.checked).sum()
    }

    /// Number of wrong elements, in all stages.
    pub fn mismatches(&self) -> usize {
        self.stages.iter().map(|stage| stage.mismatches).sum()
    }

    /// Number of elements with any value allowed, in all stages. They were not judged.
    pub fn unbounded(&self) -> usize {
        self.stages.iter().map(|stage| stage.unbounded).sum()
    }

    /// First wrong element of the first stage that has one.
    pub fn first(&self) -> Option<MoeMismatch> {
        self.stages.iter().find_map(|stage| stage.first)
    }
}

/// Compares every element of every stage.
///
/// # Panics
/// If the step was not made for these weights, or the output has no stages or was not made for this step.
pub fn compare(weights: &MoeWeights<'_>, step: &MoeStep<'_>, output: &MoeOutput) -> MoeComparison {
    compare_with_progress(weights, step, output, &|_| ())
}

/// Does the same as [`compare`], and calls `progress` from any thread with the number of elements compared since its
/// last call. The numbers add up to [`elements`].
///
/// # Panics
/// In the same cases as [`compare`].
pub fn compare_with_progress(
    weights: &MoeWeights<'_>,
    step: &MoeStep<'_>,
    output: &MoeOutput,
    progress: &(dyn Fn(usize) + Sync),
) -> MoeComparison {
    let checker = Checker::new(weights, step, output);
    let stages = checker.stages().map(|stage| match stage {
        Stage::Output => checker.output_stage(progress),
        stage if stage.is_quantized() => checker.quantized_stage(stage, progress),
        Stage::Intermediate | Stage::Partial => (0..weights.experts().len())
            .map(|expert| checker.product_stage(stage, step.rows().of_expert(expert), progress))
            .fold(StageComparison::new(stage), StageComparison::merge),
        _ => checker.product_stage(stage, 0..step.tokens(), progress),
    });
    MoeComparison { stages: stages.collect() }
}

/// Compares `elements_of_stage` random elements of each stage, selected by a seed. For layers that are too large for
/// [`compare`].
///
/// # Panics
/// In the same cases as [`compare`].
pub fn compare_sample(
    weights: &MoeWeights<'_>,
    step: &MoeStep<'_>,
    output: &MoeOutput,
    elements_of_stage: usize,
    seed: u64,
) -> MoeComparison {
    let checker = Checker::new(weights, step, output);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let stages = checker.stages().map(|stage| {
        let (elements, width) = checker.size(stage);
        let places = if elements == 0 { 0 } else { elements_of_stage };
        let places: Vec<_> = (0..places).map(|_| rng.random_range(0..elements)).collect();
        let compared = places.into_par_iter().map(|at| checker.one(stage, at / width, at % width));
        // Merged in order, although the result does not depend on it.
        compared.collect::<Vec<_>>().into_iter().fold(StageComparison::new(stage), StageComparison::merge)
    });
    MoeComparison { stages: stages.collect() }
}

/// Number of elements that [`compare`] compares.
pub fn elements(step: &MoeStep<'_>) -> usize {
    let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
    let shared = sizes.shared_intermediate.map_or(0, |intermediate| tokens * (intermediate + sizes.hidden));
    let stages = rows * (sizes.intermediate + sizes.hidden) + shared;
    // Each stage of products has a quantized operand with the same number of elements.
    let quantized = if sizes.token_format == TokenFormat::Bits16 { 0 } else { stages };
    stages + quantized + tokens * sizes.hidden
}

/// Reference of an output element: the weighted f32 sum of the device's down projections, in order.
fn combined(step: &MoeStep<'_>, stages: &Stages, token: usize, column: usize) -> u16 {
    let (dtype, hidden, top_k) = (step.sizes().dtype, step.sizes().hidden, step.sizes().top_k);
    let number = |rows: &[u16], row: usize| dtype.decode(rows[row * hidden + column]) as f32;
    let mut sum = 0f32;
    for choice in token * top_k..(token + 1) * top_k {
        if let Some(row) = step.rows().place(choice) {
            sum = step.row_weight(choice).mul_add(number(&stages.partial, row), sum);
        }
    }
    if step.sizes().shared_intermediate.is_some() {
        sum = step.shared_weight(token).mul_add(number(&stages.shared_partial, token), sum);
    }
    dtype.round_f32(sum)
}

/// Block scales of a row.
fn block_scales(quantized: &QuantizedRows, row: usize, k: usize) -> &[u8] {
    &quantized.block_scales[row * (k / BLOCK)..][..k / BLOCK]
}

/// A matrix, and the numbers of its bias if it has a bias.
struct Projection<'a> {
    matrix: &'a Matrix<'a>,
    bias: Option<Cow<'a, [f32]>>,
}

/// Computes the reference of each stage from the results of the stage before.
struct Checker<'a> {
    weights: &'a MoeWeights<'a>,
    step: &'a MoeStep<'a>,
    output: &'a MoeOutput,
    between: &'a Stages,
    dtype: TokenDtype,
}

impl<'a> Checker<'a> {
    fn new(weights: &'a MoeWeights<'a>, step: &'a MoeStep<'a>, output: &'a MoeOutput) -> Self {
        assert_eq!(weights.sizes(), step.sizes(), "the step was made for other weights");
        let between = output.stages.as_ref().expect("the output has stages");
        let checker = Self { weights, step, output, between, dtype: output.dtype() };
        let compared: usize = checker.stages().map(|stage| checker.size(stage).0).sum();
        assert_eq!(compared, elements(step), "the output was made for another step");
        checker
    }

    /// Stages that this layer has.
    fn stages(&self) -> impl Iterator<Item = Stage> + use<> {
        let (is_shared, is_quantized) = (self.weights.shared().is_some(), self.is_quantized());
        let has = move |stage: &Stage| (is_shared || !stage.is_shared()) && (is_quantized || !stage.is_quantized());
        Stage::ALL.into_iter().filter(has)
    }

    fn is_quantized(&self) -> bool {
        self.step.sizes().token_format != TokenFormat::Bits16
    }

    /// Number of elements of a stage, and its number of columns.
    fn size(&self, stage: Stage) -> (usize, usize) {
        if stage.is_quantized() {
            let (quantized, width) = self.quantized(stage);
            return (quantized.codes.len(), width);
        }
        let (bits, width) = self.bits(stage);
        (bits.len(), width)
    }

    /// The device's rows of a stage in e4m3 or NVFP4, and their number of columns.
    fn quantized(&self, stage: Stage) -> (&'a QuantizedRows, usize) {
        let sizes = self.step.sizes();
        let quantized = self.between.quantized.as_ref().expect("the output has stages of quantized tokens");
        match stage {
            Stage::QuantizedTokens => (&quantized.tokens, sizes.hidden),
            Stage::QuantizedIntermediate => (&quantized.intermediate, sizes.intermediate),
            Stage::SharedQuantizedTokens => (&quantized.shared_tokens, sizes.hidden),
            _ => (&quantized.shared_intermediate, sizes.shared_intermediate.unwrap_or(1)),
        }
    }

    /// The device's bits of a 16-bit stage, and its number of columns.
    fn bits(&self, stage: Stage) -> (&'a [u16], usize) {
        let sizes = self.step.sizes();
        match stage {
            Stage::Intermediate => (&self.between.intermediate, sizes.intermediate),
            Stage::Partial => (&self.between.partial, sizes.hidden),
            Stage::SharedIntermediate => (&self.between.shared_intermediate, sizes.shared_intermediate.unwrap_or(1)),
            Stage::SharedPartial => (&self.between.shared_partial, sizes.hidden),
            _ => (&self.output.hidden, sizes.hidden),
        }
    }

    /// Token of a row and, in stages of the layer's own experts, its expert.
    fn owner(&self, stage: Stage, row: usize) -> (usize, Option<usize>) {
        match stage {
            stage if stage != Stage::Output && !stage.is_shared() => {
                let rows = self.step.rows();
                let expert = rows.firsts().partition_point(|&first| first as usize <= row) - 1;
                (rows.tokens()[row] as usize, Some(expert))
            }
            _ => (row, None),
        }
    }

    /// Projections of a product: gate, if there is one, and up; or down.
    fn projections(&self, stage: Stage, expert: Option<usize>) -> Vec<Projection<'a>> {
        let shared = || self.weights.shared().expect("the layer has a shared expert");
        let expert = expert.map_or_else(shared, |expert| &self.weights.experts()[expert]);
        let is_down = matches!(stage, Stage::Partial | Stage::SharedPartial);
        let projections = expert.projections().filter(|(name, ..)| (*name == "down") == is_down);
        projections
            .map(|(_, matrix, bias)| Projection { matrix, bias: bias.map(|bias| bias.numbers(self.dtype)) })
            .collect()
    }

    /// Operand of a row of a product: the token, or the device's intermediate. In quantized formats, the device's own
    /// codes and scales are decoded.
    fn multiplied(&self, stage: Stage, row: usize) -> Operand {
        let is_intermediate = matches!(stage, Stage::Partial | Stage::SharedPartial);
        if self.is_quantized() {
            let (quantized, k) = self.quantized(match stage {
                Stage::Intermediate => Stage::QuantizedTokens,
                Stage::Partial => Stage::QuantizedIntermediate,
                Stage::SharedIntermediate => Stage::SharedQuantizedTokens,
                _ => Stage::SharedQuantizedIntermediate,
            });
            let (codes, scale) = (&quantized.codes[row * k..][..k], quantized.scales[row]);
            return match self.step.sizes().token_format {
                TokenFormat::Nvfp4 => Operand::nvfp4(codes, block_scales(quantized, row, k), scale),
                _ => Operand::Fp8(Factors::new(codes), scale),
            };
        }
        let bits = self.bits_before(stage, is_intermediate, row);
        Operand::token(TokenFormat::Bits16, self.dtype, &bits, None)
    }

    /// Returns the 16-bit numbers of a row that a stage starts from, before they are quantized: the row's intermediate or
    /// its token, with weights on the input and transforms applied.
    fn bits_before(&self, stage: Stage, is_intermediate: bool, row: usize) -> Cow<'a, [u16]> {
        let (inputs, is_shared, (token, expert)) = (self.step.inputs(), stage.is_shared(), self.owner(stage, row));
        let mut bits: Cow<'_, [u16]> = if is_intermediate {
            let (bits, width) = self.bits(if is_shared { Stage::SharedIntermediate } else { Stage::Intermediate });
            bits[row * width..][..width].into()
        } else if inputs.weights_on_input && !is_shared {
            // Weights on the input require k = 1, so the number of a token is also the number of its choice.
            weighted_token(self.dtype, self.step.token(token), inputs.weights[token]).into()
        } else {
            self.step.token(token).into()
        };
        let transforms = self.weights.transforms(expert.unwrap_or(self.weights.experts().len()));
        let transform = transforms.and_then(|of| if is_intermediate { of.down.as_ref() } else { of.gate_up.as_ref() });
        transform.into_iter().for_each(|transform| transform.row(self.dtype, bits.to_mut()));
        bits
    }

    /// Range of an element of a product, given the decoded rows of the matrices.
    fn expected(
        &self,
        stage: Stage,
        multiplied: &Operand,
        projections: &[Projection<'_>],
        rows: &[Operand],
        column: usize,
    ) -> Expected {
        let sum = |index: usize| {
            let Projection { matrix, bias } = &projections[index];
            let bias = bias.as_ref().map(|bias| bias[column]);
            projected(multiplied, &rows[index], matrix.global_scale(), bias)
        };
        match stage {
            Stage::Partial | Stage::SharedPartial => Expected::plain(sum(0)),
            _ => {
                let up = projections.len() - 1;
                Expected::activated(self.weights.sizes().activation, (up > 0).then(|| sum(0)), sum(up))
            }
        }
    }

    /// Decodes the rows of matrices that belong to one column of a product.
    fn rows(&self, projections: &[Projection<'_>], column: usize) -> Vec<Operand> {
        let format = self.step.sizes().token_format;
        projections.iter().map(|projection| Operand::weights(format, projection.matrix, column)).collect()
    }

    /// Compares one element.
    fn one(&self, stage: Stage, row: usize, column: usize) -> StageComparison {
        let mut found = StageComparison::new(stage);
        if stage.is_quantized() {
            self.add_quantized(&mut found, row, column..column + 1);
            return found;
        }
        let (token, expert) = self.owner(stage, row);
        let (bits, width) = self.bits(stage);
        let expected = if stage == Stage::Output {
            self.expected_output(token, column)
        } else {
            let projections = self.projections(stage, expert);
            let (multiplied, rows) = (self.multiplied(stage, row), self.rows(&projections, column));
            self.expected(stage, &multiplied, &projections, &rows, column)
        };
        let got = self.dtype.decode(bits[row * width + column]);
        found.add(self.dtype, expected, MoeMismatch { stage, row, token, expert, column, got, want: expected.want() });
        found
    }

    /// Compares some columns of a row in e4m3 or NVFP4. Codes and scales must match the reference in every bit, except
    /// that all NaN are equal.
    fn add_quantized(&self, found: &mut StageComparison, row: usize, columns: Range<usize>) {
        let stage = found.stage;
        let (token, expert) = self.owner(stage, row);
        let is_intermediate = matches!(stage, Stage::QuantizedIntermediate | Stage::SharedQuantizedIntermediate);
        let bits = self.bits_before(stage, is_intermediate, row);
        let want = self.reference(&bits, expert, is_intermediate);
        let (quantized, width) = self.quantized(stage);
        let (want_codes, want_scale) = (&want.codes, want.scales[0]);
        let (codes, scale) = (&quantized.codes[row * width..][..width], quantized.scales[row]);
        let same_scale = scale.to_bits() == want_scale.to_bits() || scale.is_nan() && want_scale.is_nan();
        let canonical = |code: u8| if e4m3::decode(code).is_nan() { e4m3::NAN_CODE } else { code };
        if self.step.sizes().token_format == TokenFormat::Nvfp4 {
            let (of_blocks, want_of_blocks) = (block_scales(quantized, row, width), &want.block_scales);
            let number = |code: u8, block: u8, scale: f32| {
                f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(block)) * f64::from(scale)
            };
            for column in columns {
                let (code, want_code) = (codes[column], want_codes[column]);
                let (block, want_block) = (of_blocks[column / BLOCK], want_of_blocks[column / BLOCK]);
                let is_right = same_scale && (code, block) == (want_code, want_block);
                let (got, want) = (number(code, block, scale), number(want_code, want_block, want_scale));
                found.add_exact(is_right, MoeMismatch { stage, row, token, expert, column, got, want });
            }
            return;
        }
        let number = |code: u8, scale: f32| f64::from(e4m3::decode(code)) * f64::from(scale);
        for column in columns {
            let is_right = same_scale && canonical(codes[column]) == canonical(want_codes[column]);
            let (got, want) = (number(codes[column], scale), number(want_codes[column], want_scale));
            found.add_exact(is_right, MoeMismatch { stage, row, token, expert, column, got, want });
        }
    }

    /// Quantizes a token, or a row of the intermediate, for an expert. `None` is the shared expert.
    fn reference(&self, bits: &[u16], expert: Option<usize>, is_intermediate: bool) -> QuantizedRows {
        let scales = self.weights.input_scales(expert.unwrap_or(self.weights.experts().len()));
        let scale = scales.map(|scales| if is_intermediate { scales.down } else { scales.gate_up });
        QuantizedRows::of(self.step.sizes().token_format, self.dtype, bits, bits.len(), scale)
    }

    /// Compares all rows of a stage in e4m3 or NVFP4.
    fn quantized_stage(&self, stage: Stage, progress: &(dyn Fn(usize) + Sync)) -> StageComparison {
        let (elements, width) = self.size(stage);
        let rows = (0..elements / width).into_par_iter().map(|row| {
            let mut found = StageComparison::new(stage);
            self.add_quantized(&mut found, row, 0..width);
            progress(width);
            found
        });
        rows.collect::<Vec<_>>().into_iter().fold(StageComparison::new(stage), StageComparison::merge)
    }

    fn expected_output(&self, token: usize, column: usize) -> Expected {
        let value = self.dtype.decode(combined(self.step, self.between, token, column));
        if value.is_nan() { Expected::Nan } else { Expected::Between { want: value, low: value, high: value } }
    }

    /// Compares all rows of one expert in a stage of products.
    fn product_stage(&self, stage: Stage, rows: Range<usize>, progress: &(dyn Fn(usize) + Sync)) -> StageComparison {
        /// Number of rows decoded at a time: 256 rows of 14,336 numbers take 29 MB.
        const ROWS: usize = 256;
        /// Number of columns per task: 32 rows of weights with 7168 numbers take 1.8 MB, which fits in a core's L2
        /// cache.
        const COLUMNS: usize = 16;
        let Some(expert) = rows.clone().next().map(|row| self.owner(stage, row).1) else {
            return StageComparison::new(stage);
        };
        let ((bits, width), projections) = (self.bits(stage), self.projections(stage, expert));
        let mut found = StageComparison::new(stage);
        for first in rows.clone().step_by(ROWS) {
            let count = ROWS.min(rows.end - first);
            let multiplied = (first..first + count).into_par_iter();
            let multiplied = multiplied.map(|row| self.multiplied(stage, row));
            let multiplied: Vec<Operand> = multiplied.collect();
            let chunks = (0..width.div_ceil(COLUMNS)).into_par_iter().map(|chunk| {
                let columns = chunk * COLUMNS..width.min((chunk + 1) * COLUMNS);
                let decoded: Vec<_> = columns.clone().map(|column| self.rows(&projections, column)).collect();
                let mut found = StageComparison::new(stage);
                for (row, multiplied) in (first..).zip(&multiplied) {
                    let token = self.owner(stage, row).0;
                    for (column, decoded) in columns.clone().zip(&decoded) {
                        let expected = self.expected(stage, multiplied, &projections, decoded, column);
                        let got = self.dtype.decode(bits[row * width + column]);
                        let want = expected.want();
                        let element = MoeMismatch { stage, row, token, expert, column, got, want };
                        found.add(self.dtype, expected, element);
                    }
                }
                progress(count * columns.len());
                found
            });
            found = chunks.collect::<Vec<_>>().into_iter().fold(found, StageComparison::merge);
        }
        found
    }

    fn output_stage(&self, progress: &(dyn Fn(usize) + Sync)) -> StageComparison {
        let stage = Stage::Output;
        let (bits, width) = self.bits(stage);
        let tokens = bits.par_chunks(width).enumerate().map(|(token, bits)| {
            let mut found = StageComparison::new(stage);
            for (column, &bits) in bits.iter().enumerate() {
                let (expected, got) = (self.expected_output(token, column), self.dtype.decode(bits));
                let want = expected.want();
                let element = MoeMismatch { stage, row: token, token, expert: None, column, got, want };
                found.add(self.dtype, expected, element);
            }
            progress(bits.len());
            found
        });
        tokens.collect::<Vec<_>>().into_iter().fold(StageComparison::new(stage), StageComparison::merge)
    }
}
