//! What surrounds experts in a latent space, for `nvfp4 run --op moe`: the projections, which the host computes as it
//! computes the router's logits, and the shared expert, a layer of its own on the same device.

use nvfp4::Error;
use nvfp4::backend::{self, Backend, cpu::Cpu};
use nvfp4::checkpoint::Latent;
use nvfp4::moe::compare::MoeComparison;
use nvfp4::moe::{MoeInputs, MoeOutput, MoeStep};
use nvfp4::problem::{TokenDtype, TokenFormat};
use serde_json::{Value, json};

use super::args::{Args, Choice, Verify};
use super::verification::compare_layer;

/// The projections around the experts, and the result of the shared expert.
pub struct LatentPart<'a> {
    around: Latent<'a>,
    shared: Option<Shared>,
}

/// Result of the shared expert.
struct Shared {
    /// I of the shared expert.
    intermediate: usize,
    output: MoeOutput,
    /// `None`: nothing was compared.
    comparison: Option<MoeComparison>,
}

impl<'a> LatentPart<'a> {
    /// Computes the shared expert on the backend and compares its output. `inputs`: the router's.
    ///
    /// # Errors
    /// Returns an error if the backend fails or does not compute the shared expert.
    pub fn new(
        args: &Args,
        backend: &dyn Backend,
        around: Latent<'a>,
        inputs: &MoeInputs<'_>,
        token_format: TokenFormat,
    ) -> Result<Self, Error> {
        let Some(weights) = around.shared() else { return Ok(Self { around, shared: None }) };
        let weights = weights.clone().with_token_format(token_format);
        let step = MoeStep::new(&weights, around.of_shared(inputs))?;
        let mut layer = match backend.prepare_moe(&weights) {
            Err(Error::NotComputed(_)) if args.backend == Choice::Auto => Cpu::new().prepare_moe(&weights),
            prepared => prepared,
        }?;
        let mut output = match args.verify {
            Verify::Off => MoeOutput::new(&step),
            _ => MoeOutput::with_stages(&step),
        };
        backend::run(layer.as_mut(), &step, &mut output)?;
        let comparison = compare_layer(args, &weights, &step, &output);
        let shared = Some(Shared { intermediate: weights.sizes().intermediate, output, comparison });
        Ok(Self { around, shared })
    }

    /// H of the layer.
    pub fn hidden(&self) -> usize {
        self.around.hidden()
    }

    /// Comparison of the shared expert.
    pub fn comparison(&self) -> Option<&MoeComparison> {
        self.shared.as_ref()?.comparison.as_ref()
    }

    /// Returns the layer's output, from the output of the routed experts.
    pub fn output(&self, dtype: TokenDtype, routed: &MoeOutput) -> Vec<u16> {
        let shared = self.shared.as_ref().map(|shared| &shared.output.hidden[..]);
        self.around.output(dtype, &routed.hidden, shared)
    }

    /// Returns the line of text about the latent space.
    pub fn line(&self) -> String {
        let (hidden, width) = (self.around.hidden(), self.around.width());
        let shared = self.shared.as_ref().map_or(String::new(), |shared| {
            format!("; beside them a shared expert of I {} with tokens of H {hidden}", shared.intermediate)
        });
        format!(
            "latent    the host projects tokens of H {hidden} to {width} before the experts and back after them{shared}. \
             Time, rate and bytes are those of the routed experts"
        )
    }

    /// JSON keys about the latent space.
    pub fn json(&self) -> Value {
        json!({
            "hidden": self.around.hidden(),
            "shared_intermediate": self.shared.as_ref().map(|shared| shared.intermediate),
        })
    }
}
