//! What a layer computes: the hidden states, and, to check it in stages, what lies between.

use super::problem::MoeStep;
use crate::error::Error;
use crate::format::BLOCK;
use crate::output::POISON;
use crate::problem::{TokenDtype, TokenFormat};
use crate::quantized::QuantizedRows;

/// What the products leave in memory, in the tokens' type, row-major without gaps, columns in their natural order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// `silu(gate) ∘ up`, or another activation, of each row: `[rows, I]`. Rows are those of [`MoeStep::rows`].
    pub intermediate: Vec<u16>,
    /// What the down projection makes of it: `[rows, H]`.
    pub partial: Vec<u16>,
    /// As `intermediate`, of the shared expert: `[T, I of the shared expert]`; empty if there is none.
    pub shared_intermediate: Vec<u16>,
    /// As `partial`, of the shared expert: `[T, H]`; empty if there is none.
    pub shared_partial: Vec<u16>,
    /// What was multiplied, if tokens are not multiplied as they are.
    pub quantized: Option<QuantizedStages>,
}

/// Rows in e4m3 or NVFP4 as the products multiply them, each with a scale.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantizedStages {
    /// Each row's token, `[rows, H]`. Weights on the input have been multiplied.
    pub tokens: QuantizedRows,
    /// Each row's intermediate, `[rows, I]`.
    pub intermediate: QuantizedRows,
    /// The shared expert's tokens, `[T, H]`; empty if there is none.
    pub shared_tokens: QuantizedRows,
    /// Its intermediate, `[T, I of the shared expert]`; empty if there is none.
    pub shared_intermediate: QuantizedRows,
}

impl QuantizedStages {
    /// All of them, in the order of [`quantized_sizes`].
    fn parts(&self) -> [&QuantizedRows; 4] {
        [&self.tokens, &self.intermediate, &self.shared_tokens, &self.shared_intermediate]
    }
}

/// The output of a step: hidden states `[T, H]` in the tokens' type, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeOutput {
    dtype: TokenDtype,
    /// `[T, H]`.
    pub hidden: Vec<u16>,
    /// What a backend has to bring back besides, if it was asked for.
    pub stages: Option<Stages>,
}

impl MoeOutput {
    /// A poisoned output for a step.
    pub fn new(step: &MoeStep<'_>) -> Self {
        let sizes = step.sizes();
        Self { dtype: sizes.dtype, hidden: vec![POISON; step.tokens() * sizes.hidden], stages: None }
    }

    /// A poisoned output that asks for the stages too.
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

    /// Fills it with NaN, so that an element which a kernel fails to write is found.
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

    /// Checks that it has the type and the elements of this step's output.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it does not.
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
        Err(Error::Invalid("the output was made for another step: make a new one".into()))
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }
}

/// Elements of each part of [`Stages`], in their order.
fn stage_lengths(step: &MoeStep<'_>) -> [usize; 4] {
    let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
    let shared_tokens = sizes.shared_intermediate.map_or(0, |_| tokens);
    let shared_intermediate = tokens * sizes.shared_intermediate.unwrap_or(0);
    [rows * sizes.intermediate, rows * sizes.hidden, shared_intermediate, shared_tokens * sizes.hidden]
}

/// Rows and columns of each part of [`QuantizedStages`], in their order.
fn quantized_sizes(step: &MoeStep<'_>) -> [[usize; 2]; 4] {
    let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
    let shared_rows = sizes.shared_intermediate.map_or(0, |_| tokens);
    let shared_intermediate = sizes.shared_intermediate.unwrap_or(0);
    [[rows, sizes.hidden], [rows, sizes.intermediate], [shared_rows, sizes.hidden], [shared_rows, shared_intermediate]]
}
