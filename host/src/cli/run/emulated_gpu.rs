//! The emulated GPU of `nvfp4 run --backend emulated`.

use anyhow::Context;
use gpu_arch::Arch;
use nvfp4::backend::emulated::{self, Card, Emulated};
use nvfp4::files::read_bounded;

use super::args::{Args, Operation};

/// Returns the emulated GPU, with the clock of --gpu if --timed is given.
pub fn by_card(args: &Args) -> anyhow::Result<Emulated> {
    let gpu = untimed(args)?;
    let Some(card) = args.card()? else { return Ok(gpu) };
    Ok(by_clock(args, gpu, card, args.trace.is_some()))
}

/// Returns an emulated GPU with the clock of a GPU.
pub fn by_clock(args: &Args, gpu: Emulated, card: Card, drawn: bool) -> Emulated {
    let gpu = gpu.with_clock(card, !args.no_values, drawn);
    match args.sample {
        Some(multiprocessors) => gpu.with_sample(multiprocessors),
        None => gpu,
    }
}

/// Returns the architecture of --arch or of the GPU of --gpu.
fn arch(args: &Args) -> Option<&str> {
    let of_card = || arch_of_card(&Card::named(args.gpu.as_deref()?)?);
    args.arch.as_deref().or_else(of_card)
}

/// Returns the most specific architecture with kernels that runs on a GPU.
fn arch_of_card(card: &Card) -> Option<&'static str> {
    let capability = card.arch.parse::<Arch>().ok()?.capability();
    // The portable architecture also runs there, but precedes the specific one in the list.
    emulated::arches().into_iter().rfind(|arch| arch.parse::<Arch>().is_ok_and(|arch| arch.runs_on(capability)))
}

/// Returns the emulated GPU without a clock.
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
    /// Maximum size of a PTX file. The kernels here have some hundred kilobytes.
    const MAX_PTX_BYTES: usize = 256 << 20;
    let not_ptx = || format!("{} is not a PTX text", path.display());
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
    fn gpu_gets_the_kernels_of_its_family() {
        let arch = |name: &str| arch_of_card(&Card::named(name).unwrap()).unwrap();
        assert!(Card::NAMES.iter().all(|name| arch(name) != "sm_80"));
        assert_eq!(["h200", "b200", "rtx-5090", "gb10"].map(arch), ["sm_90a", "sm_100f", "sm_120f", "sm_120f"]);
    }
}
