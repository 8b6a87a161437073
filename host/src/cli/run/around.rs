//! What surrounds the routed experts of a layer, for `nvfp4 run --op moe`: norms and projections, which the host computes
//! as it computes the router's logits, and the branch beside the experts, a layer of its own on the same device.

use nvfp4::Error;
use nvfp4::backend::{self, Backend, Moe};
use nvfp4::checkpoint::Around;
use nvfp4::moe::compare::MoeComparison;
use nvfp4::moe::{MoeInputs, MoeOutput, MoeStep};
use nvfp4::problem::{TokenDtype, TokenFormat};
use serde_json::{Value, json};

use super::args::Args;
use super::runs::prepare;
use super::verification::{compare_layer, layer_output};

/// The surroundings of the experts, and the result of the branch beside them.
pub struct AroundPart<'a> {
    around: Around<'a>,
    branch: Option<Branch>,
}

/// Result of the branch beside the experts.
struct Branch {
    /// I of the branch.
    intermediate: usize,
    output: MoeOutput,
    /// `None`: nothing was compared.
    comparison: Option<MoeComparison>,
}

impl<'a> AroundPart<'a> {
    /// Computes the branch on the backend and compares its output. `inputs`: the router's.
    ///
    /// # Errors
    /// Returns an error if the backend fails or does not compute the branch.
    pub fn new(
        args: &Args,
        backend: &mut Box<dyn Backend>,
        around: Around<'a>,
        inputs: &MoeInputs<'_>,
        dtype: TokenDtype,
        token_format: TokenFormat,
    ) -> Result<Self, Error> {
        let Some(weights) = around.branch() else { return Ok(Self { around, branch: None }) };
        let weights = weights.clone().with_token_format(token_format);
        let step = MoeStep::new(&weights, around.of_branch(dtype, inputs)?)?;
        let mut layer = prepare::<Moe>(args, backend, false, &weights)?;
        let mut output = layer_output(args, &step);
        backend::run(layer.as_mut(), &step, &mut output)?;
        let comparison = compare_layer(args, &weights, &step, &output);
        let branch = Some(Branch { intermediate: weights.sizes().intermediate, output, comparison });
        Ok(Self { around, branch })
    }

    /// H of the layer.
    pub fn hidden(&self) -> usize {
        self.around.hidden()
    }

    /// Comparison of the branch.
    pub fn comparison(&self) -> Option<&MoeComparison> {
        self.branch.as_ref()?.comparison.as_ref()
    }

    /// Returns the layer's output, from the output of the routed experts.
    pub fn output(&self, dtype: TokenDtype, routed: &MoeOutput) -> Vec<u16> {
        let branch = self.branch.as_ref().map(|branch| &branch.output.hidden[..]);
        self.around.output(dtype, &routed.hidden, branch)
    }

    /// Returns the line of text about the surroundings.
    pub fn line(&self) -> String {
        let (hidden, width) = (self.around.hidden(), self.around.width());
        let has_norms = self.around.branch_norms()[0].is_some();
        let what = match width == hidden && has_norms {
            true => "the host normalizes the tokens before the experts and their sum after them".into(),
            false => {
                format!("the host projects tokens of H {hidden} to {width} before the experts and back after them")
            }
        };
        let norms = if has_norms { ", with norms of its own" } else { "" };
        let branch = self.branch.as_ref().map_or(String::new(), |branch| {
            format!("; beside them a branch of I {} with tokens of H {hidden}{norms}", branch.intermediate)
        });
        format!("around    {what}{branch}. Time, rate and bytes are those of the routed experts")
    }

    /// JSON keys about the surroundings.
    pub fn json(&self) -> Value {
        json!({
            "hidden": self.around.hidden(),
            "branch_intermediate": self.branch.as_ref().map(|branch| branch.intermediate),
        })
    }
}
