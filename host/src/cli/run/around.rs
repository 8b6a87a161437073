//! What surrounds the routed experts of a layer, for `nvfp4 run --op moe`: norms, projections and a branch in another precision,
//! which the host computes as it computes the router's logits, and a branch in NVFP4, a layer of its own on the same device.

use std::collections::{BTreeMap, BTreeSet};

use nvfp4::Error;
use nvfp4::backend::{self, Backend, Moe};
use nvfp4::checkpoint::{Around, FeedForward};
use nvfp4::moe::compare::MoeComparison;
use nvfp4::moe::{Activation, MoeInputs, MoeOutput, MoeStep};
use nvfp4::problem::{TokenDtype, TokenFormat};
use serde_json::{Value, json};

use super::args::Args;
use super::runs::prepare;
use super::verification::{compare_layer, layer_output};

/// The surroundings of the experts, and the result of the branch beside them.
pub struct AroundPart<'a> {
    around: Around<'a>,
    /// The router's inputs.
    inputs: MoeInputs<'static>,
    branch: Option<Branch>,
}

/// Result of the branch beside the experts on the device.
struct Branch {
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
        inputs: MoeInputs<'static>,
        dtype: TokenDtype,
        token_format: TokenFormat,
    ) -> Result<Self, Error> {
        let Some(weights) = around.branch() else { return Ok(Self { around, inputs, branch: None }) };
        let weights = weights.clone().with_token_format(token_format);
        let step = MoeStep::new(&weights, around.of_branch(dtype, &inputs)?)?;
        let mut layer = prepare::<Moe>(args, backend, false, &weights)?;
        let mut output = layer_output(args, &step);
        backend::run(layer.as_mut(), &step, &mut output)?;
        let comparison = compare_layer(args, &weights, &step, &output);
        Ok(Self { around, inputs, branch: Some(Branch { output, comparison }) })
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
        self.around.output(dtype, &self.inputs, &routed.hidden, branch)
    }

    /// I and activation of the branch.
    fn branch_sizes(&self) -> Option<(usize, Activation)> {
        let of_layer = self.around.branch().map(|weights| (weights.sizes().intermediate, weights.sizes().activation));
        of_layer.or_else(|| self.around.host_branch().map(|block| (block.intermediate(), block.activation)))
    }

    /// Returns the line of text about the surroundings.
    pub fn line(&self) -> String {
        let (hidden, width) = (self.around.hidden(), self.around.width());
        let has_norms = self.around.branch_norms()[0].is_some();
        let mut parts = Vec::new();
        if self.around.before().projection.is_some() {
            parts.push(format!(
                "the host projects tokens from {hidden} to {width} numbers before the experts, and back after them"
            ));
        } else if has_norms {
            parts.push("the host normalizes the tokens before the experts and their sum after them".into());
        }
        if self.around.identity_experts() > 0 {
            let count = self.around.identity_experts();
            parts.push(format!("{count} identity experts: the host adds the token times their weights"));
        }
        if let Some((intermediate, activation)) = self.branch_sizes() {
            let norms = if has_norms { " and separate norms" } else { "" };
            let branch =
                format!("a branch beside the experts, {hidden} → {intermediate} → {hidden} with {activation}{norms}");
            let forms = self.around.host_branch().into_iter().flat_map(FeedForward::projections);
            let forms: BTreeSet<&str> = forms.map(|projection| &projection.form[..]).collect();
            parts.push(match forms.is_empty() {
                true => branch,
                false => format!("{branch}, on the host ({})", forms.into_iter().collect::<Vec<_>>().join(", ")),
            });
        }
        let unchecked = if self.around.host_branch().is_some() { "; the host's branch is not compared" } else { "" };
        format!("around    {}. Time, rate and bytes count the routed experts alone{unchecked}", parts.join("; "))
    }

    /// JSON keys about the surroundings.
    pub fn json(&self) -> Value {
        let branch = self.branch_sizes();
        // Gate and up in one matrix are one module.
        let forms: BTreeMap<&str, &str> =
            self.around.projections().map(|projection| (&projection.module[..], &projection.form[..])).collect();
        json!({
            "hidden": self.around.hidden(),
            "branch_intermediate": branch.map(|(intermediate, _)| intermediate),
            "branch_activation": branch.map(|(_, activation)| activation.to_string()),
            "identity_experts": self.around.identity_experts(),
            "branch_on_host": self.around.host_branch().is_some(),
            "forms_on_host": forms,
        })
    }
}
