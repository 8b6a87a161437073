//! Measures the constants of the time model on the first GPU, and prints them beside the model's constants.

mod gpu;
mod lines;
mod probes;
mod table;

use anyhow::Result;
use clap::Parser;
use ptx_emulator::Card;

use gpu::Gpu;
use probes::{Probes, Sizes};

/// Measure the constants of the time model on the first CUDA device. Prints one line per probe, `name, median, least,
/// most, unit`, and the table of constants.
#[derive(Parser)]
struct Args {
    /// GPU of the model to compare with [default: the GPU whose name is part of the device's name]
    #[arg(long, value_parser = Card::NAMES)]
    card: Option<String>,
    /// Do little work, for the emulator; probes of DRAM then need an L2 of less than 32 MB
    #[arg(long)]
    quick: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let gpu = Gpu::open()?;
    let card = args.card.or_else(|| named(&gpu.name).map(str::to_owned));
    println!("# {}, {} SMs\n# name, median, least, most, unit", gpu.name, gpu.multiprocessors);
    let probes = Probes::new(&gpu, if args.quick { Sizes::QUICK } else { Sizes::FULL })?;
    probes.run()?;
    table::print(&probes.lines, gpu.multiprocessors, card.as_deref().and_then(Card::named).as_ref());
    Ok(())
}

/// Returns the model's GPU whose name a device's name contains.
fn named(device: &str) -> Option<&'static str> {
    let words = device.to_lowercase().replace(' ', "-");
    Card::NAMES.into_iter().find(|name| words.contains(name))
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn device_is_recognized_by_its_name() {
        assert_eq!(
            ["NVIDIA H200", "NVIDIA GeForce RTX 5070 Ti", "NVIDIA RTX PRO 6000 Blackwell", "NVIDIA A100"].map(named),
            [Some("h200"), Some("rtx-5070-ti"), Some("rtx-pro-6000"), None]
        );
    }
}
