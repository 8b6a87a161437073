//! The plan of a call for people.

use super::workspace::Workspace;
use super::{Cut, LinearArguments, LinearKernels, PlacedLinear};
use crate::explain::{Candidate, Choice, PlannedLaunch, matched};
use crate::group::Address;
use crate::launch::ALIGNMENT;
use crate::moe::each_size_of_tiles;
use nvfp4_core::Error;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::TokenFormat;

/// Returns the launches of a call of `tokens` tokens, not 0, on a device with `sms` SMs. Only 16-bit tokens have a choice of
/// instances.
///
/// # Errors
/// [`Error::TooLarge`] if there are more tokens or tiles than a kernel can count; [`Error::NotComputed`] if there is no
/// kernel for the format of the tokens, or no instance is left.
pub fn explain(
    sizes: &LinearSizes,
    tokens: usize,
    kernels: &LinearKernels,
    sms: u32,
) -> Result<Vec<PlannedLaunch>, Error> {
    // Nothing is read or written, so all memory may lie at one aligned address.
    const MEMORY: Address = ALIGNMENT;
    kernels.check(sizes.token_format, "this device")?;
    let layer = PlacedLinear { sizes: *sizes, packed: MEMORY, alpha: MEMORY, bias: 0, input_scale: MEMORY };
    let token_pitch = size_of::<u16>() * sizes.k;
    let arguments = LinearArguments { token_count: tokens, tokens: MEMORY, token_pitch, output: MEMORY };
    let (workspace, _) = Workspace::at(sizes, tokens, MEMORY);
    let launches = kernels.launches(&layer, &arguments, workspace, sms)?;
    let choice = match sizes.token_format {
        TokenFormat::Bits16 => choice(kernels, sizes, tokens as u32, sms),
        TokenFormat::Fp8 | TokenFormat::Nvfp4 => None,
    };
    Ok(matched(launches, choice))
}

/// Returns the entry that multiplies in a call.
///
/// # Errors
/// The errors of [`explain`].
pub fn multiplying_entry(
    sizes: &LinearSizes,
    tokens: usize,
    kernels: &LinearKernels,
    sms: u32,
) -> Result<&'static str, Error> {
    let launches = explain(sizes, tokens, kernels, sms)?;
    Ok(launches.last().expect("a call with tokens has launches").grid.entry)
}

/// Checks that the refused instances leave one for a layer, whatever the number of tokens.
///
/// # Errors
/// [`Error::NotComputed`] if they do not.
pub fn check_left(sizes: &LinearSizes, kernels: &LinearKernels, sms: u32) -> Result<(), Error> {
    each_size_of_tiles(&kernels.refused, |tokens| explain(sizes, tokens, kernels, sms).map(drop))
}

/// Returns the choice of the instance for 16-bit tokens: for each instance, its fastest tiling. `None`: no instance is left.
fn choice(kernels: &LinearKernels, sizes: &LinearSizes, m: u32, sms: u32) -> Option<Choice> {
    let (kernel, refused) = (kernels.bits16, &kernels.refused);
    let (n, k) = (sizes.n as u32, sizes.k as u32);
    let cost = |cut: Cut| kernel.k_block_cycles(cut, n, sms) * cut.k_blocks(k);
    let candidate = |cut: Cut| Candidate {
        entry: cut.instance.entry(),
        tile_tokens: cut.box_tokens(),
        columns: cut.instance.columns(),
        tiles: cut.ctas(n) / u64::from(cut.instance.cluster()),
        rounds: cut.ctas(n).div_ceil(sms.into()),
        cost: cost(cut),
    };
    let chosen = kernel.cut(sizes, m, sms, refused)?;
    let is_chosen = |cut: &Cut| cut.instance.entry() == chosen.instance.entry();
    let others = kernel.fitting(sizes, refused).filter_map(|instance| instance.cuts(m).min_by_key(|cut| cost(*cut)));
    let mut others: Vec<_> = others.filter(|cut| !is_chosen(cut)).map(candidate).collect();
    others.sort_by_key(|candidate| candidate.cost);
    Some(Choice { rows: m.into(), experts: 1, candidates: [candidate(chosen)].into_iter().chain(others).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::problem::TokenDtype;

    #[test]
    fn the_first_candidate_is_the_launch_and_the_cheapest() {
        for device in [(8, 0), (9, 0), (12, 0)] {
            for (n, k, tokens) in [(4096, 14336, 1), (5120, 5120, 70), (16, 32, 3), (28672, 4096, 5000)] {
                let token_format = TokenFormat::Bits16;
                let sizes = LinearSizes { n, k, dtype: TokenDtype::F16, bias: false, token_format };
                let planned = explain(&sizes, tokens, &LinearKernels::of(device).unwrap(), 132).unwrap();
                let [PlannedLaunch { grid, choice: Some(choice), .. }] = &*planned else { panic!("{planned:?}") };
                assert_eq!(grid.entry, choice.candidates[0].entry);
                assert!(choice.candidates.is_sorted_by_key(|candidate| candidate.cost), "{choice:?}");
            }
        }
    }
}
