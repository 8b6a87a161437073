//! `nvfp4 devices`: lists the devices and the kernel of each.

use std::io::Write;
use std::process::ExitCode;

use nvfp4::Error;
use nvfp4::backend::{
    Backend,
    cpu::Cpu,
    cuda,
    emulated::{self, Emulated},
};

use super::table;

/// List the devices that `run` can use, and the kernel for each.
#[derive(clap::Args)]
pub struct Args {}

/// Prints the devices as a table; without a GPU, prints the reason.
pub fn run(_: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let cpu = Cpu::new();
    let mut rows = table::table(&["backend", "device", "kernel", "memory"], 3);
    rows.add_row(["cpu".into(), cpu.device(), cpu.isa().name().into(), String::new()]);
    let gpus = cuda::devices();
    for gpu in gpus.as_deref().unwrap_or_default() {
        let (major, minor) = gpu.capability;
        rows.add_row([
            format!("cuda:{}", gpu.ordinal),
            format!("{}, compute capability {major}.{minor}, {} SMs", gpu.name, gpu.sms),
            gpu.kernel.map_or("none".into(), |(kernel, arch)| format!("{kernel} ({arch})")),
            table::bytes(gpu.memory as f64),
        ]);
    }
    for arch in emulated::arches() {
        let gpu = Emulated::new(arch, Default::default())?;
        let (kernel, made_for) = gpu.kernel();
        rows.add_row(["emulated".into(), arch.into(), format!("{kernel} ({made_for})"), String::new()]);
    }
    writeln!(out, "{rows}")?;
    for gpu in gpus.as_deref().unwrap_or_default() {
        for note in &gpu.notes {
            writeln!(out, "note: cuda:{}: {note}", gpu.ordinal)?;
        }
    }
    match gpus {
        Err(error @ Error::NoDevice(_)) => writeln!(out, "{error}")?,
        Err(error) => return Err(error.into()),
        Ok(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}
