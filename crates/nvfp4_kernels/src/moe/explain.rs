//! The plan of a call for people.

use super::chain::{Chain, launches};
use super::experts::Experts;
use super::kernels::MoeKernels;
use super::projection::Projection;
use super::tokens::Tokens;
use super::weights::PackedWeights;
use super::workspace::Workspace;
use super::{MoeArguments, PlacedMoe};
use crate::explain::{Choice, PlannedLaunch, matched};
use crate::group::Address;
use crate::kernel::Kernel as _;
use crate::launch::ALIGNMENT;
use crate::refused::Refused;
use nvfp4_core::Error;
use nvfp4_core::moe::MoeSizes;

/// Returns the launches of a call of `tokens` tokens, not 0, that the workspace has room for, on a device with `sms` SMs.
///
/// # Errors
/// [`Error::TooLarge`] if a grid would need too many CTAs; [`Error::NotComputed`] if there is no kernel for the format of
/// the tokens.
pub fn explain(sizes: &MoeSizes, tokens: usize, kernels: &MoeKernels, sms: u32) -> Result<Vec<PlannedLaunch>, Error> {
    // Nothing is read or written, so all memory may lie at one aligned address.
    const MEMORY: Address = ALIGNMENT;
    let PackedWeights { experts, shared, .. } = PackedWeights::at(sizes, MEMORY);
    let layer = PlacedMoe { sizes: *sizes, experts, shared, map: 0, keeps_stages: false };
    let pitch = size_of::<u16>() * sizes.hidden;
    let arguments = MoeArguments {
        token_count: tokens,
        tokens: MEMORY,
        token_pitch: pitch,
        topk_ids: MEMORY,
        topk_weights: MEMORY,
        weights_on_input: false,
        shared_weights: 0,
        output: MEMORY,
        output_pitch: pitch,
    };
    let workspace = Workspace::at(sizes, tokens, MEMORY);
    let launches = launches(&layer, &arguments, &workspace, kernels, sms)?;
    let chain = Chain::new(&layer, &arguments, &workspace, kernels, sms);
    let choices = chain.experts().flat_map(|experts| {
        let projections = [Projection::gate_up(sizes, experts), Projection::down(sizes, experts)];
        projections.map(|projection| chain.choice(experts, &projection))
    });
    let choices: Result<Vec<_>, Error> = choices.collect();
    Ok(matched(launches, choices?))
}

/// Returns the entries that multiply in a call: gate and up, then down, and the same of the shared expert.
///
/// # Errors
/// The errors of [`explain`].
pub fn multiplying_entries(
    sizes: &MoeSizes,
    tokens: usize,
    kernels: &MoeKernels,
    sms: u32,
) -> Result<Vec<&'static str>, Error> {
    let product = kernels.check(sizes.token_format, "this device")?.product;
    let multiplies = |launch: &PlannedLaunch| {
        let few = kernels.bits16.few().map(|few| few.name());
        launch.kernel == product.name() || Some(launch.kernel) == few
    };
    Ok(explain(sizes, tokens, kernels, sms)?
        .iter()
        .filter(|launch| multiplies(launch))
        .map(|of| of.grid.entry)
        .collect())
}

/// Checks that the refused instances leave one for each product of a layer, whatever the number of tokens.
///
/// # Errors
/// [`Error::NotComputed`] if they do not.
pub fn check_left(sizes: &MoeSizes, kernels: &MoeKernels, sms: u32) -> Result<(), Error> {
    each_size_of_tiles(&kernels.refused, |tokens| explain(sizes, tokens, kernels, sms).map(drop))
}

/// Plans calls of so many tokens that every size of tiles occurs, if instances are refused. Only the error of refused
/// instances counts: the others depend on the number of tokens, and a call reports them.
pub(crate) fn each_size_of_tiles(refused: &Refused, plan: impl Fn(usize) -> Result<(), Error>) -> Result<(), Error> {
    let powers = if refused.is_empty() { 0 } else { 17 };
    let errors = (0..powers).filter_map(|power| plan(1 << power).err());
    errors.into_iter().find(|error| matches!(error, Error::NotComputed(_))).map_or(Ok(()), Err)
}

impl Chain<'_> {
    /// Returns the choice of a product's instance.
    fn choice(&self, experts: &Experts<'_>, projection: &Projection) -> Result<Choice, Error> {
        let &Projection { index, op, n, k, ref activation, .. } = projection;
        let of = |early| (op, activation, early);
        let found = match experts.tokens {
            Tokens::Bits16 { .. } | Tokens::Bits16Sorted { .. } => {
                self.candidates(self.kernels.bits16, experts, of(false), [n, k])
            }
            Tokens::Fp8(_) => self.candidates(self.kernels.fp8_products()?, experts, of(false), [n, k]),
            Tokens::Nvfp4(_) => {
                let early = self.is_early(experts, index == 0);
                self.candidates(self.kernels.nvfp4_products()?, experts, of(early), [n, k])
            }
        };
        let candidates = found.into_iter().map(|(_, candidate)| candidate).collect();
        Ok(Choice { rows: experts.expected_rows, experts: experts.count(), candidates })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::moe::Activation;
    use nvfp4_core::problem::{TokenDtype, TokenFormat};

    /// Returns the plan of a layer of 128 experts of Qwen3-30B's sizes with a shared expert.
    fn plan(tokens: usize, token_format: TokenFormat, device: (u32, u32)) -> Vec<PlannedLaunch> {
        let sizes = MoeSizes {
            hidden: 2048,
            intermediate: 768,
            experts: 128,
            named_experts: 128,
            top_k: 8,
            shared_intermediate: Some(768),
            dtype: TokenDtype::Bf16,
            activation: Activation::Silu,
            biases: false,
            token_format,
            input_scales: false,
        };
        explain(&sizes, tokens, &MoeKernels::of(device).unwrap(), 132).unwrap()
    }

    #[test]
    fn every_product_names_its_instances_and_takes_the_cheapest() {
        let cases = [(TokenFormat::Bits16, (9, 0)), (TokenFormat::Fp8, (9, 0)), (TokenFormat::Nvfp4, (10, 0))];
        for (format, device) in cases.into_iter().chain([(TokenFormat::Bits16, (8, 0)), (TokenFormat::Bits16, (12, 0))])
        {
            for tokens in [1, 7, 64, 700, 8192] {
                let planned = plan(tokens, format, device);
                let choices: Vec<_> =
                    planned.iter().filter_map(|of| Some((of.grid.entry, of.choice.as_ref()?))).collect();
                // Gate and up, and down, of the routed experts and of the shared one.
                assert_eq!(choices.len(), 4, "{format:?} on {device:?}, {tokens} tokens");
                for (entry, Choice { rows, experts, candidates }) in choices {
                    assert_eq!(candidates[0].entry, entry);
                    assert!(candidates.is_sorted_by_key(|candidate| candidate.cost), "{candidates:?}");
                    assert_eq!(
                        (*rows, *experts == 1),
                        (if *experts == 1 { 1 } else { 8 } * tokens as u64, *experts == 1)
                    );
                }
            }
        }
    }
}
