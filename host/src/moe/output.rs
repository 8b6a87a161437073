//! What a layer computes: the hidden states, and, to check it in stages, what lies between.

use super::problem::MoeStep;
use crate::output::POISON;
use crate::problem::OutDtype;

/// What the products leave in memory, in the tokens' type, row-major without gaps, columns in their natural order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// `silu(gate) ∘ up` of each row: `[rows, I]`. Rows are those of [`MoeStep::rows`].
    pub intermediate: Vec<u16>,
    /// What the down projection makes of it: `[rows, H]`.
    pub partial: Vec<u16>,
    /// As `intermediate`, of the shared expert: `[T, I of the shared expert]`; empty if there is none.
    pub shared_intermediate: Vec<u16>,
    /// As `partial`, of the shared expert: `[T, H]`; empty if there is none.
    pub shared_partial: Vec<u16>,
}

/// The output of a step: hidden states `[T, H]` in the tokens' type, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeOutput {
    dtype: OutDtype,
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
        let (sizes, rows, tokens) = (step.sizes(), step.rows().count(), step.tokens());
        let shared = |width: usize| vec![POISON; sizes.shared_intermediate.map_or(0, |_| tokens * width)];
        let stages = Stages {
            intermediate: vec![POISON; rows * sizes.intermediate],
            partial: vec![POISON; rows * sizes.hidden],
            shared_intermediate: shared(sizes.shared_intermediate.unwrap_or(0)),
            shared_partial: shared(sizes.hidden),
        };
        Self { stages: Some(stages), ..Self::new(step) }
    }

    /// Fills it with NaN, so that an element which a kernel fails to write is found.
    pub fn poison(&mut self) {
        self.hidden.fill(POISON);
        if let Some(Stages { intermediate, partial, shared_intermediate, shared_partial }) = &mut self.stages {
            for part in [intermediate, partial, shared_intermediate, shared_partial] {
                part.fill(POISON);
            }
        }
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> OutDtype {
        self.dtype
    }
}
