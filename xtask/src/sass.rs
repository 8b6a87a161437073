//! `cargo xtask sass`: disassembles every kernel and looks for the instructions that it is written for.
//!
//! PTX says what a kernel asks for; only the machine code shows that the assembler gave it that, and not a slower way.

use std::{collections::BTreeMap, process::Command};

use anyhow::{Context, ensure};

use crate::{
    build_ptx,
    ptxas::performance_warnings,
    table::Table,
    tools::{self, NVDISASM, PTXAS},
};

/// Disassemble every kernel, count the instructions that it is written for, and fail if an entry lacks one.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: build_ptx::Selection,
    /// Install ptxas and nvdisasm from PyPI under target/ if there are none
    #[arg(long)]
    install: bool,
}

/// An instruction that entries must have.
struct Meant {
    /// Of which entries: those with this in their name.
    of: &'static str,
    /// Its name in PTX.
    ptx: &'static str,
    /// How the machine code that is meant for it may begin, as nvdisasm prints it: on one card or on another.
    machine: &'static [&'static str],
}

const fn every(ptx: &'static str, machine: &'static [&'static str]) -> Meant {
    Meant { of: "", ptx, machine }
}

/// What the entries of each kernel module must have.
const MEANT: [(&str, &[Meant]); 4] = [
    ("gated_simt", &[every("dp4a", &["IDP.4A"])]),
    (
        "gated_sm90",
        // But for the entry that decodes tokens, which has but what its name says.
        &[
            Meant { of: "sm90_t", ptx: "wgmma.mma_async", machine: &["HGMMA"] },
            Meant { of: "sm90_t", ptx: "cp.async.bulk.shared::cluster.global", machine: &["UBLKCP.S.G"] },
            Meant { of: "sm90_t", ptx: "mbarrier.try_wait", machine: &["SYNCS.PHASECHK"] },
            Meant { of: "sm90_t", ptx: "setmaxnreg", machine: &["USETMAXREG"] },
            every("mul.f16x2", &["HMUL2"]),
        ],
    ),
    (
        "gated_sm100",
        &[
            every(
                "tcgen05.mma.kind::mxf4nvf4.block_scale.block16",
                // B200 and B300, one CTA and two.
                &["UTCOMMA.4X", "UTCOMMA.2CTA.4X", "UTCOMMA.BLOCK16", "UTCOMMA.2CTA.BLOCK16"],
            ),
            Meant { of: "_pair", ptx: "tcgen05.mma.cta_group::2", machine: &["UTCOMMA.2CTA"] },
            every("cp.async.bulk.tensor.2d.shared::cluster.global", &["UTMALDG.2D"]),
            every("cp.async.bulk.shared::cluster.global", &["UBLKCP.S.G"]),
            Meant { of: "_tma", ptx: "cp.async.bulk.tensor.2d.global.shared::cta", machine: &["UTMASTG.2D"] },
            every("tcgen05.cp", &["UTCCP"]),
            every("tcgen05.ld", &["LDTM"]),
            every("tcgen05.commit", &["UTCBAR"]),
            every("mbarrier.try_wait", &["SYNCS.PHASECHK"]),
        ],
    ),
    ("silu_mul", &[every("ex2.approx", &["MUFU.EX2"]), every("rcp.approx", &["MUFU.RCP"])]),
];

/// Builds, assembles, disassembles, prints a table for each kernel, and fails if an entry lacks an instruction.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (ptxas, nvdisasm) = (PTXAS.find(args.install)?, NVDISASM.find(args.install)?);
    let mut faults = Vec::new();
    for built in build_ptx::build(&args.selection)? {
        let meant = MEANT.iter().find(|(kernel, _)| *kernel == built.kernel).map(|&(_, meant)| meant);
        let meant = meant.with_context(|| format!("xtask/src/sass.rs does not say what {} must have", built.kernel))?;
        for card in tools::cards(built.arch) {
            let (cubin, log) = tools::assemble(&ptxas, &built, card)?;
            faults.extend(performance_warnings(&log).map(|line| format!("{} for {card}: {line}", built.kernel)));
            let (code, _) = tools::output(Command::new(&nvdisasm).arg("--print-code").arg(&cubin))?;
            let entries = instructions(&code);
            ensure!(!entries.is_empty(), "nvdisasm finds no entry in {}", cubin.display());

            println!("{} for {card}", built.kernel);
            for Meant { ptx, machine, .. } in meant {
                println!("  {}: {ptx}", machine.join(" or "));
            }
            let columns = meant.iter().map(|meant| meant.machine[0]);
            let mut table = Table::new(1, &["entry", "instructions"].into_iter().chain(columns).collect::<Vec<_>>());
            for (entry, names) in entries {
                let mut cells = vec![entry.to_owned(), names.len().to_string()];
                for Meant { of, ptx, machine } in meant {
                    let is_meant = |name: &&&str| machine.iter().any(|begin| name.starts_with(begin));
                    let count = names.iter().filter(is_meant).count();
                    if count == 0 && entry.contains(of) {
                        faults.push(format!("{entry} for {card} has no {}, which is {ptx}", machine.join(" or ")));
                    }
                    cells.push(count.to_string());
                }
                table.push(cells);
            }
            println!("\n{table}");
        }
    }
    ensure!(faults.is_empty(), "kernels are not made of what they are written for:\n{}", faults.join("\n"));
    Ok(())
}

/// The names of each entry's instructions, in nvdisasm's text.
///
/// A section `.text.NAME` holds lines such as `/*0040*/ @!P0 MOV R1, R2 ;`.
fn instructions(code: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut entries: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut entry = None;
    for line in code.lines() {
        let line = line.trim();
        if let Some(label) = line.strip_prefix(".text.").and_then(|line| line.strip_suffix(':')) {
            entry = Some(label);
        }
        let text = line.strip_prefix("/*").and_then(|line| line.split_once("*/"));
        if let (Some(entry), Some((_, text))) = (entry, text) {
            // A guard stands before the name.
            let name = text.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
            entries.entry(entry).or_default().push(name.trim_end_matches(';'));
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_found_behind_guards_and_in_their_entry() {
        let code = "\t.section\t.text.one,\"ax\",@progbits\n.text.one:\n        /*0000*/                   LDC R1, c[0x0][0x37c] ;\n\
             .L_x_0:\n        /*0010*/              @!UP0 UTMALDG.2D [UR4], [UR10] ;\n.text.two:\n        /*0000*/  EXIT ;\n";
        let found = instructions(code);
        assert_eq!(found, BTreeMap::from([("one", vec!["LDC", "UTMALDG.2D"]), ("two", vec!["EXIT"])]));
    }
}
