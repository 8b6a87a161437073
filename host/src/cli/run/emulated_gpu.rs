//! The emulated GPU that `nvfp4 run --backend emulated` takes.

use anyhow::Context;
use gpu_arch::Arch;
use nvfp4::backend::emulated::{self, Card, Emulated};
use nvfp4::files::read_bounded;

use super::args::{Args, Operation};

/// The emulated GPU, by a card's clock if that was asked for.
pub fn by_card(args: &Args) -> anyhow::Result<Emulated> {
    let gpu = untimed(args)?;
    let Some(card) = args.card()? else { return Ok(gpu) };
    Ok(by_clock(args, gpu, card, args.trace.is_some()))
}

/// An emulated GPU by the clock of a card.
pub fn by_clock(args: &Args, gpu: Emulated, card: Card, drawn: bool) -> Emulated {
    let gpu = gpu.with_clock(card, !args.no_values, drawn);
    match args.sample {
        Some(multiprocessors) => gpu.with_sample(multiprocessors),
        None => gpu,
    }
}

/// The architecture of the emulated GPU, if one was named, or a card.
fn arch(args: &Args) -> Option<&str> {
    let of_card = || arch_of_card(&Card::named(args.gpu.as_deref()?)?);
    args.arch.as_deref().or_else(of_card)
}

/// Of those that there are kernels for, the one that is made for a card.
fn arch_of_card(card: &Card) -> Option<&'static str> {
    let capability = card.arch.parse::<Arch>().ok()?.capability();
    // The portable one, which runs there too, comes before it.
    emulated::arches().into_iter().rfind(|arch| arch.parse::<Arch>().is_ok_and(|arch| arch.runs_on(capability)))
}

/// The emulated GPU, by no clock.
pub fn untimed(args: &Args) -> anyhow::Result<Emulated> {
    let options =
        emulated::Options { schedule: args.schedule.unwrap_or_default(), sms: args.sms, ..Default::default() };
    let default_arch = match args.op {
        Some(Operation::Linear) => emulated::linear_arch(),
        _ if args.is_moe() => emulated::moe_arch(),
        _ => emulated::default_arch(),
    };
    let Some(path) = &args.ptx else {
        let arch = arch(args).unwrap_or(default_arch);
        return Ok(Emulated::new(arch, options)?.with_variant(args.variant)?);
    };
    /// The longest PTX here has some hundred kilobytes.
    const MAX_PTX_BYTES: usize = 256 << 20;
    let not_ptx = || format!("{} is no PTX", path.display());
    let ptx = String::from_utf8(read_bounded(path, MAX_PTX_BYTES, "a file of PTX")?).with_context(not_ptx)?;
    let target = ptx.lines().find_map(|line| line.trim().strip_prefix(".target")).unwrap_or_default();
    let target = target.split([',', ' ']).find(|word| !word.is_empty());
    let arch = args.arch.as_deref().or(target).unwrap_or(default_arch);
    let gpu = Emulated::new(arch, options)?.with_variant(args.variant)?;
    gpu.with_ptx(&ptx).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_the_kernels_of_its_family() {
        let arch = |name: &str| arch_of_card(&Card::named(name).unwrap()).unwrap();
        assert!(Card::NAMES.iter().all(|name| arch(name) != "sm_80"));
        assert_eq!(["h200", "b200", "rtx-5090", "gb10"].map(arch), ["sm_90a", "sm_100f", "sm_120f", "sm_120f"]);
    }
}
