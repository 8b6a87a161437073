//! `cargo xtask sass`: disassembles every kernel and looks for the instructions that the kernel is written for.
//!
//! PTX shows what a kernel requests. Only the machine code shows that the assembler chose the intended instruction and
//! not a slower sequence. The kernel's `sass.toml`, beside its source in `kernels-gpu/src/MECHANISM`, lists the
//! intended instructions:
//!
//! ```toml
//! [[instruction]]
//! ptx = "wgmma.mma_async"
//! machine = ["HGMMA"]     # possible beginnings of the instruction's name, as nvdisasm prints it
//! entries = "sm90_t"      # only entries whose name contains this; default: all entries
//! except = ["_warps"]     # except entries whose name contains one of these
//! since = "sm_90"         # only builds for this architecture or later
//! ```
//!
//! The file may also list instructions that loops must not have:
//!
//! ```toml
//! [[outside_loops]]
//! machine = ["MEMBAR.ALL.GPU"]
//! except = ["_release"]
//! ```
//!
//! It also looks for an error of ptxas: a write to a register that a product may still read ([`wgmma`]). Drivers
//! compile PTX with the ptxas of their own version, so an older version's machine code is checked too.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context, ensure};
use cuda_builder::{Arch, Built};
use rayon::prelude::*;
use serde::Deserialize;

use crate::{
    build_ptx, loops,
    ptxas::performance_warnings,
    table::Table,
    tools::{self, NVDISASM, OLDER_PTXAS, PTXAS},
    wgmma, workspace,
};

/// Disassemble every kernel, count its intended instructions (sass.toml beside the kernel's source), and fail if an
/// entry lacks one
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: build_ptx::Selection,
    /// Install ptxas and nvdisasm from PyPI under target/ if there are none
    #[arg(long)]
    install: bool,
}

/// The intended instructions of a kernel. May be empty; then nothing can be missing.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Meant {
    #[serde(rename = "instruction", default)]
    instructions: Vec<Instruction>,
    #[serde(default)]
    outside_loops: Vec<OutsideLoops>,
}

/// Instructions that loops of entries must not contain.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OutsideLoops {
    /// Parts of the names of entries that are exempt.
    #[serde(default)]
    except: Vec<String>,
    /// Beginnings of their names in the machine code, as nvdisasm prints them.
    machine: Vec<String>,
}

impl OutsideLoops {
    /// Returns messages about these instructions in loops of an entry.
    fn faults(&self, entry: &str, lines: &[&str], card: &str) -> Vec<String> {
        if self.except.iter().any(|except| entry.contains(except)) {
            return Vec::new();
        }
        let found = loops::in_loops(lines, |name| self.machine.iter().any(|begin| name.starts_with(begin)));
        found.into_iter().map(|line| format!("{entry} for {card}: this instruction is in a loop: {line}")).collect()
    }
}

/// An instruction that entries must contain.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Instruction {
    /// Part of the names of the entries that must contain it. Empty: all entries.
    #[serde(default)]
    entries: String,
    /// Parts of the names of entries that are exempt.
    #[serde(default)]
    except: Vec<String>,
    /// First architecture whose builds contain the instruction. `None`: all builds do.
    since: Option<String>,
    /// Name of the instruction in PTX.
    ptx: String,
    /// Possible beginnings of its name in the machine code, as nvdisasm prints it. The GPUs of a family may differ.
    machine: Vec<String>,
}

impl Instruction {
    /// Whether a build for an architecture must contain the instruction.
    fn is_in(&self, arch: Arch) -> bool {
        let since =
            self.since.as_ref().map(|since| since.parse::<Arch>().expect("the file was validated when it was read"));
        since.is_none_or(|since| since.capability() <= arch.capability())
    }
}

impl Meant {
    /// Reads the `sass.toml` of a kernel.
    fn of(kernel: &str) -> anyhow::Result<Self> {
        let file = workspace::kernel_sass(kernel)?;
        if !file.exists() {
            return Ok(Self::default());
        }
        let meant: Self = toml::from_str(&fs::read_to_string(&file)?).with_context(|| file.display().to_string())?;
        let named = meant.instructions.iter().all(|instruction| !instruction.machine.is_empty());
        ensure!(named, "{}: an instruction has an empty `machine` list", file.display());
        for since in meant.instructions.iter().filter_map(|instruction| instruction.since.as_ref()) {
            since.parse::<Arch>().with_context(|| file.display().to_string())?;
        }
        Ok(meant)
    }
}

/// Returns messages about writes in an entry's machine code to registers that a product may still read.
fn overwrites_in(entry: &str, lines: &[&str], card: &str, assembler: &str) -> Vec<String> {
    let found = wgmma::overwrites(lines).into_iter();
    found.map(|line| format!("{entry} for {card} by {assembler}: this instruction overwrites a register that a product may still read: {line}")).collect()
}

/// Assembles and disassembles a build. Returns nvdisasm's text and the assembler's messages.
fn machine_code(ptxas: &Path, nvdisasm: &Path, built: &Built, card: &str) -> anyhow::Result<(String, String)> {
    let (cubin, log) = tools::assemble(ptxas, built, card)?;
    let (code, _) = tools::output(Command::new(nvdisasm).arg("--print-code").arg(&cubin))?;
    Ok((code, log))
}

/// Result of the checks of one build.
struct Checked {
    /// Table with the number of each intended instruction in each entry, and a legend.
    report: String,
    faults: Vec<String>,
}

/// Counts the intended instructions of a build's entries, and looks for faults in its machine code.
fn check(ptxas: &Path, older: &Path, nvdisasm: &Path, built: &Built, card: &str) -> anyhow::Result<Checked> {
    let Meant { instructions: mut meant, outside_loops } = Meant::of(&built.kernel)?;
    meant.retain(|instruction| instruction.is_in(built.arch));
    let has_products = fs::read_to_string(&built.path)?.contains("wgmma.mma_async");
    let (newer_code, older_code) = rayon::join(
        || machine_code(ptxas, nvdisasm, built, card),
        || has_products.then(|| machine_code(older, nvdisasm, built, card)).transpose(),
    );
    let (code, log) = newer_code?;
    let older_code = older_code?.map(|(code, _)| code);
    let entries = lines_of_entries(&code);
    let older_entries = older_code.as_deref().map(lines_of_entries);
    let mut faults: Vec<_> =
        performance_warnings(&log).map(|line| format!("{} for {card}: {line}", built.kernel)).collect();
    for (assembler, entries) in [(ptxas, Some(&entries)), (older, older_entries.as_ref())] {
        let Some(entries) = entries else { continue };
        let assembler = format!("ptxas {}", tools::version(assembler)?);
        ensure!(
            !entries.is_empty(),
            "nvdisasm lists no entry of {} for {card}, assembled by {assembler}",
            built.kernel
        );
        faults.extend(entries.iter().flat_map(|(entry, lines)| overwrites_in(entry, lines, card, &assembler)));
    }

    let mut report = format!("{} for {card}\n", built.kernel);
    for Instruction { ptx, machine, .. } in &meant {
        report += &format!("  {}: {ptx}\n", machine.join(" or "));
    }
    let columns = meant.iter().map(|instruction| instruction.machine[0].as_str());
    let mut table = Table::new(1, &["entry", "instructions"].into_iter().chain(columns).collect::<Vec<_>>());
    for (entry, lines) in entries {
        faults.extend(outside_loops.iter().flat_map(|each| each.faults(entry, &lines, card)));
        let names = names(&lines);
        let mut cells = vec![entry.to_owned(), names.len().to_string()];
        for Instruction { entries: of, except, ptx, machine, .. } in &meant {
            let is_meant = |name: &&&str| machine.iter().any(|begin| name.starts_with(begin));
            let count = names.iter().filter(is_meant).count();
            if count == 0 && entry.contains(of) && !except.iter().any(|except| entry.contains(except)) {
                faults.push(format!("{entry} for {card} has no {}, expected for {ptx}", machine.join(" or ")));
            }
            cells.push(count.to_string());
        }
        table.push(cells);
    }
    report += &format!("\n{table}\n");
    Ok(Checked { report, faults })
}

/// Builds, assembles and disassembles the kernels, prints a table per kernel, and fails if an entry lacks an
/// instruction.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let [ptxas, older, nvdisasm] = [PTXAS, OLDER_PTXAS, NVDISASM].map(|tool| tool.find(args.install));
    let (ptxas, older, nvdisasm) = (ptxas?, older?, nvdisasm?);
    let builds = tools::builds(&args.selection)?;
    let checked: Vec<_> =
        builds.par_iter().map(|(built, card)| check(&ptxas, &older, &nvdisasm, built, card)).collect();
    let mut faults = Vec::new();
    for checked in checked {
        let Checked { report, faults: found } = checked?;
        print!("{report}");
        faults.extend(found);
    }
    ensure!(faults.is_empty(), "the machine code of the kernels has faults:\n{}", faults.join("\n"));
    Ok(())
}

/// Returns the lines of each entry in nvdisasm's text, from the entry's section `.text.NAME`.
fn lines_of_entries(code: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut entries: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut entry = None;
    for line in code.lines() {
        if let Some(label) = line.trim().strip_prefix(".text.").and_then(|line| line.strip_suffix(':')) {
            entry = Some(label);
        } else if let Some(entry) = entry {
            entries.entry(entry).or_default().push(line);
        }
    }
    entries
}

/// Returns the names of the instructions of some lines.
fn names<'l>(lines: &[&'l str]) -> Vec<&'l str> {
    lines.iter().filter_map(|line| loops::Instruction::of(line)).map(|instruction| instruction.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_found_after_guards() {
        let code = "\t.section\t.text.one,\"ax\",@progbits\n.text.one:\n        /*0000*/                   LDC R1, c[0x0][0x37c] ;\n\
             .L_x_0:\n        /*0010*/              @!UP0 UTMALDG.2D [UR4], [UR10] ;\n.text.two:\n        /*0000*/  EXIT ;\n";
        let found: Vec<(_, Vec<_>)> =
            lines_of_entries(code).into_iter().map(|(entry, lines)| (entry, names(&lines))).collect();
        assert_eq!(found, [("one", vec!["LDC", "UTMALDG.2D"]), ("two", vec!["EXIT"])]);
    }

    /// Number of files below a folder whose names end with `sass.toml`.
    fn sass_files(folder: &Path) -> usize {
        let paths = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let count = |path: std::path::PathBuf| match path.is_dir() {
            true => sass_files(&path),
            false => usize::from(path.to_string_lossy().ends_with("sass.toml")),
        };
        paths.map(count).sum()
    }

    #[test]
    fn every_sass_toml_belongs_to_a_kernel() {
        let kernels = build_ptx::kernels().unwrap();
        let mut read = 0;
        for kernel in kernels.kernels() {
            read += usize::from(!Meant::of(&kernel.name).unwrap().instructions.is_empty());
        }
        let files = sass_files(&workspace::kernels().join("src"));
        assert!(read == files && read > 0, "{read} of {files}");
    }
}
