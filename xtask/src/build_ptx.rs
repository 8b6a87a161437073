//! `cargo xtask build-ptx`: compiles the kernels to `target/ptx/<kernel>.<arch>.ptx`.

use anyhow::ensure;
use cuda_builder::{Arch, Built, KernelCrate};

use crate::workspace;

/// Compile the kernels to target/ptx/KERNEL.ARCH.ptx.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
}

/// Selection of kernels and architectures.
#[derive(clap::Args, Default)]
pub struct Selection {
    /// Only this kernel (may be given several times)
    #[arg(long)]
    kernel: Vec<String>,
    /// For this architecture instead of the kernel's own architectures (may be given several times)
    #[arg(long)]
    arch: Vec<Arch>,
}

impl Selection {
    /// Whether every kernel is selected for its own architectures.
    pub fn is_all(&self) -> bool {
        self.kernel.is_empty() && self.arch.is_empty()
    }
}

/// Compiles the selected kernels and prints the path of each PTX file.
pub fn run(args: &Args) -> anyhow::Result<()> {
    for built in build(&args.selection)? {
        println!("{}", built.path.display());
    }
    Ok(())
}

/// Returns the kernels that `[package.metadata.kernels]` lists.
pub fn kernels() -> anyhow::Result<KernelCrate> {
    Ok(KernelCrate::open(workspace::kernels())?)
}

/// Compiles the selected kernels.
pub fn build(selection: &Selection) -> anyhow::Result<Vec<Built>> {
    let kernels = kernels()?;
    let known: Vec<_> = kernels.kernels().iter().map(|kernel| kernel.name.as_str()).collect();
    for name in &selection.kernel {
        ensure!(known.contains(&name.as_str()), "unknown kernel {name:?}; expected one of {}", known.join(", "));
    }

    let mut arches = selection.arch.clone();
    arches.sort_unstable();
    arches.dedup();
    let mut jobs = Vec::new();
    for kernel in kernels.kernels() {
        if !selection.kernel.is_empty() && !selection.kernel.contains(&kernel.name) {
            continue;
        }
        let arches = if arches.is_empty() { &kernel.arches } else { &arches };
        jobs.extend(arches.iter().map(|&arch| (kernel.name.as_str(), arch)));
    }
    Ok(kernels.build(&jobs, &workspace::target_dir().join("ptx"))?)
}
