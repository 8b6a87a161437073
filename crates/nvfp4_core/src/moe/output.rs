//! Results of a layer: the hidden states and, if a caller wants to check them in stages, the values in between.

use super::problem::MoeStep;
use crate::error::Error;
use crate::format::BLOCK;
use crate::output::POISON;
use crate::problem::{TokenDtype, TokenFormat};
use crate::quantized::QuantizedRows;

/// Results of the products in memory: in the token type, row-major without gaps, columns in their natural order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Intermediate of each row, `silu(gate) ∘ up` or another activation: `[rows, I]`. The rows are those in
    /// [`MoeStep::rows`].
    pub intermediate: Vec<u16>,
    /// Down projection of each row of the intermediate: `[rows, H]`.
    pub partial: Vec<u16>,
    /// Intermediate of the shared expert: `[T, I of the shared expert]`. Empty if there is no shared expert.
    pub shared_intermediate: Vec<u16>,
    /// Down projection of the shared expert: `[T, H]`. Empty if there is no shared expert.
    pub shared_partial: Vec<u16>,
    /// Quantized operands of the products. `None` if tokens are multiplied in 16 bits.
    pub quantized: Option<QuantizedStages>,
}

/// Rows of e4m3 or NVFP4 that the products multiply, each with a scale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantizedStages {
    /// Token of each row, `[rows, H]`, after multiplication with weights on the input.
    pub tokens: QuantizedRows,
    /// Intermediate of each row, `[rows, I]`.
    pub intermediate: QuantizedRows,
    /// Tokens of the shared expert, `[T, H]`. Empty if there is no shared expert.
    pub shared_tokens: QuantizedRows,
    /// Intermediate of the shared expert, `[T, I of the shared expert]`. Empty if there is no shared expert.
    pub shared_intermediate: QuantizedRows,
}

impl QuantizedStages {
    /// All four parts, in the order of [`quantized_sizes`].
    fn parts(&self) -> [&QuantizedRows; 4] {
        [&self.tokens, &self.intermediate, &self.shared_tokens, &self.shared_intermediate]
    }
}

/// Output of a step: hidden states `[T, H]` in the token type, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeOutput {
    dtype: TokenDtype,
    /// `[T, H]`.
    pub hidden: Vec<u16>,
    /// Values in between, which the backend fills in if they are `Some`.
    pub stages: Option<Stages>,
}

impl MoeOutput {
    /// Makes an output for a step, filled with poison.
    pub fn new(step: &MoeStep<'_>) -> Self {
        let sizes = step.sizes();
        Self { dtype: sizes.dtype, hidden: vec![POISON; step.tokens() * sizes.hidden], stages: None }
    }

    /// Makes an output with stages for a step, filled with poison.
    pub fn with_stages(step: &MoeStep<'_>) -> Self {
        let [intermediate, partial, shared_intermediate, shared_partial] =
            stage_lengths(step).map(|length| vec![POISON; length]);
        let format = step.sizes().token_format;
        let quantized = (format != TokenFormat::Bits16).then(|| {
            let [tokens, intermediate, shared_tokens, shared_intermediate] =
                quantized_sizes(step).map(|[rows, k]| QuantizedRows::poisoned(format, rows, k));
            QuantizedStages { tokens, intermediate, shared_tokens, shared_intermediate }
        });
        let stages = Stages { intermediate, partial, shared_intermediate, shared_partial, quantized };
        Self { stages: Some(stages), ..Self::new(step) }
    }

    /// Fills the output with NaN, so that a comparison finds any element that a kernel does not write.
    pub fn poison(&mut self) {
        self.hidden.fill(POISON);
        if let Some(Stages { intermediate, partial, shared_intermediate, shared_partial, quantized }) = &mut self.stages
        {
            for part in [intermediate, partial, shared_intermediate, shared_partial] {
                part.fill(POISON);
            }
            if let Some(QuantizedStages { tokens, intermediate, shared_tokens, shared_intermediate }) = quantized {
                for part in [tokens, intermediate, shared_tokens, shared_intermediate] {
                    part.poison();
                }
            }
        }
    }

    /// Checks that the type and the lengths match the output of this step.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not match.
    pub fn check_fits(&self, step: &MoeStep<'_>) -> Result<(), Error> {
        let sizes = step.sizes();
        let stages_fit = self.stages.as_ref().is_none_or(|stages| {
            let Stages { intermediate, partial, shared_intermediate, shared_partial, quantized } = stages;
            let quantized_fit = quantized.as_ref().map_or(sizes.token_format == TokenFormat::Bits16, |quantized| {
                let lengths = quantized.parts().map(|part| [&part.codes, &part.block_scales].map(Vec::len));
                let rows = quantized.parts().map(|part| part.scales.len());
                let blocks = |elements: usize| match sizes.token_format {
                    TokenFormat::Nvfp4 => elements / BLOCK,
                    _ => 0,
                };
                sizes.token_format != TokenFormat::Bits16
                    && rows == quantized_sizes(step).map(|[rows, _]| rows)
                    && lengths == quantized_sizes(step).map(|[rows, k]| [rows * k, blocks(rows * k)])
            });
            [intermediate, partial, shared_intermediate, shared_partial].map(Vec::len) == stage_lengths(step)
                && quantized_fit
        });
        if self.dtype == sizes.dtype && self.hidden.len() == step.tokens() * sizes.hidden && stages_fit {
            return Ok(());
        }
        Err(Error::Invalid("this output was made for another step; make a new one for this step".into()))
    }

    /// Token type of the output.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }
}

/// Number of elements of each part of [`Stages`], in the order of its fields.
fn stage_lengths(step: &MoeStep<'_>) -> [usize; 4] {
    let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
    let shared_tokens = sizes.shared_intermediate.map_or(0, |_| tokens);
    let shared_intermediate = tokens * sizes.shared_intermediate.unwrap_or(0);
    [rows * sizes.intermediate, rows * sizes.hidden, shared_intermediate, shared_tokens * sizes.hidden]
}

/// Rows and columns of each part of [`QuantizedStages`], in the order of its fields.
fn quantized_sizes(step: &MoeStep<'_>) -> [[usize; 2]; 4] {
    let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
    let shared_rows = sizes.shared_intermediate.map_or(0, |_| tokens);
    let shared_intermediate = sizes.shared_intermediate.unwrap_or(0);
    [[rows, sizes.hidden], [rows, sizes.intermediate], [shared_rows, sizes.hidden], [shared_rows, shared_intermediate]]
}
