//! `cargo xtask ptxas`: assembles every kernel and shows the GPU resources that it uses.
//!
//! Fails if a kernel is slower than necessary: more than a few registers spilled to memory, a stack frame, or a
//! performance warning of the assembler.

use anyhow::ensure;
use rayon::prelude::*;

use crate::{
    build_ptx,
    document::{self, Mode},
    table::Table,
    tools::{self, PTXAS},
};

/// Assemble every kernel for its GPUs, print its registers, spills, stack and shared memory, and compare them with
/// kernels-gpu/README.md.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: build_ptx::Selection,
    /// Install ptxas from PyPI under target/ if there is none
    #[arg(long)]
    install: bool,
    /// Renew the table in kernels-gpu/README.md
    #[arg(long, conflicts_with_all = ["kernel", "arch"])]
    write: bool,
}

/// Document with the table.
const README: &str = "kernels-gpu/README.md";

/// Command that renews the table.
const COMMAND: &str = "cargo xtask ptxas --write";

/// ptxas's warnings about lost performance: `setmaxnreg` ignored, `wgmma` serialized, and others.
const PERFORMANCE_WARNINGS: std::ops::RangeInclusive<u32> = 7508..=7517;

/// Allowed bytes of spill stores: a few registers that stay constant over a tile's mainloop. A mainloop that spills its
/// own values stores far more.
const FEW_STORES: u32 = 24;

/// Allowed bytes of spill stores and loads together. A kernel contains one mainloop per width, and each of them may
/// load the spilled constants.
const FEW_SPILLS: u32 = 128;

/// Allowed bytes of stack of an entry that sums two parts of K one after the other: 128 sums of the first part.
const PARTS_STACK: u32 = 4 * 128;

/// Resources of an entry, as ptxas reports them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    name: String,
    registers: u32,
    /// Bytes of spill stores.
    stores: u32,
    /// Bytes of spill stores and spill loads.
    spill: u32,
    stack: u32,
    /// Bytes of static shared memory. Dynamic shared memory is set at launch.
    shared: u32,
}

/// Builds and assembles the kernels, prints the table, and fails if a kernel spills or has a performance warning.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let ptxas = PTXAS.find(args.install)?;
    let version = tools::version(&ptxas)?;
    let mut faults = Vec::new();
    let mut table = Table::new(2, &["entry", "card", "registers", "spill bytes", "stack bytes", "static shared bytes"]);
    let builds = tools::builds(&args.selection)?;
    let logs: Vec<_> = builds.par_iter().map(|(built, card)| tools::assemble(&ptxas, built, card)).collect();
    for ((built, card), assembled) in builds.iter().zip(logs) {
        let (_, log) = assembled?;
        let mut entries = entries(&log);
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        ensure!(!entries.is_empty(), "ptxas reports no entry of {}:\n{log}", built.path.display());
        for Entry { name, registers, stores, spill, stack, shared } in entries {
            let most_stack = if name.ends_with("_c128_k2") { PARTS_STACK } else { FEW_STORES };
            if stores > FEW_STORES || spill > FEW_SPILLS || stack > most_stack {
                faults.push(format!("{name} for {card}: {spill} bytes of spills, {stack} bytes of stack"));
            }
            let numbers = [registers, spill, stack, shared].map(|number| number.to_string());
            table.push([name, (*card).to_owned()].into_iter().chain(numbers).collect());
        }
        faults.extend(performance_warnings(&log).map(|line| format!("{} for {card}: {line}", built.kernel)));
    }
    print!("{table}");
    let text = format!("ptxas {version}:\n\n{table}");
    let same_version = document::read(README)?.contains(&format!("ptxas {version}:\n"));
    if args.write {
        document::section(README, "ptxas", &text, Mode::Write, COMMAND)?;
    } else if !same_version {
        println!("not compared with {README}: its table was made by another version of ptxas than {version}");
    } else if args.selection.is_all() {
        document::section(README, "ptxas", &text, Mode::Check, COMMAND)?;
    }
    ensure!(
        faults.is_empty(),
        "ptxas reports kernels with spills, a stack or performance warnings:\n{}",
        faults.join("\n")
    );
    Ok(())
}

/// Returns the entries in ptxas's verbose messages, in order of appearance.
fn entries(log: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            entries.push(Entry { name, ..Entry::default() });
        }
        let Some(entry) = entries.last_mut() else {
            continue;
        };
        let number = |unit: &str| {
            let before = line.split(unit).next().filter(|before| before.len() < line.len())?;
            before.rsplit([' ', ',']).next()?.parse().ok()
        };
        entry.registers = number(" registers").unwrap_or(entry.registers);
        entry.stack = number(" bytes stack frame").unwrap_or(entry.stack);
        entry.shared = number(" bytes smem").unwrap_or(entry.shared);
        let stores = number(" bytes spill stores").unwrap_or(0);
        entry.stores += stores;
        entry.spill += stores + number(" bytes spill loads").unwrap_or(0);
    }
    entries
}

/// Returns the lines of ptxas's messages that warn about lost performance.
pub fn performance_warnings(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter(|line| is_performance_warning(line))
}

/// Whether a line of ptxas's messages contains one of [`PERFORMANCE_WARNINGS`], written as `(C7510)`.
fn is_performance_warning(line: &str) -> bool {
    line.match_indices("(C").any(|(at, _)| {
        let code = line[at + 2..].split(')').next().and_then(|code| code.parse().ok());
        code.is_some_and(|code: u32| PERFORMANCE_WARNINGS.contains(&code))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clean' for 'sm_80'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 368 bytes cmem[0]
ptxas info    : Compiling entry function 'spilling' for 'sm_80'
ptxas info    : Function properties for spilling
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 4096 bytes smem, 368 bytes cmem[0]
";

    #[test]
    fn resources_of_entries_are_read_from_the_log() {
        let entry = |name: &str, registers, stores, spill, stack, shared| Entry {
            name: name.to_owned(),
            registers,
            stores,
            spill,
            stack,
            shared,
        };
        assert_eq!(entries(LOG), [entry("clean", 10, 0, 0, 0, 0), entry("spilling", 255, 8, 20, 16, 4096)]);
    }

    #[test]
    fn only_performance_warnings_count() {
        let wgmma = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized";
        assert!(is_performance_warning(wgmma));
        assert!(!is_performance_warning("ptxas warning : (C7519) something else"));
        assert!(!LOG.lines().any(is_performance_warning));
    }
}
