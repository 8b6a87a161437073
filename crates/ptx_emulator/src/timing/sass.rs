//! Machine code of a kernel: the PTX line of each instruction, and the stall counts.
//!
//! The listing is the output of `ptxas -lineinfo` and `nvdisasm --print-line-info-ptx --print-instruction-encoding
//! --print-code`. Bits of an instruction (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via
//! Microbenchmarking", 2018; unchanged since):
//!
//! - 105 to 108: stall count.
//! - 113 to 115: barrier that the instruction releases after it has read its registers.
//! - 116 to 121: barriers that the instruction waits for.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cost::Cost;

/// A machine instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Machine {
    name: String,
    stall: u16,
    /// If the instruction waits until a memory access has read its registers: cycles since that access was issued, by
    /// the stall counts.
    in_use: Option<u16>,
}

impl Machine {
    fn cost(&self, release: u16) -> Cost {
        let wait = self.in_use.map_or(0, |since| release.saturating_sub(since));
        Cost::of_machine(&self.name, self.stall.max(1) + wait)
    }
}

/// Barrier fields of an instruction.
#[derive(Clone, Copy, Debug)]
struct Barriers {
    /// Barrier that is released when the registers have been read.
    read: usize,
    /// Bit mask of the barriers that the instruction waits for.
    awaited: u64,
}

/// Number of barriers per thread.
const BARRIERS: usize = 6;

/// For each barrier, a memory access whose registers are still in use: cycles since its issue.
#[derive(Clone, Debug, Default)]
struct InUse([Option<u16>; BARRIERS]);

impl InUse {
    /// Processes the next instruction, in the order of addresses. Returns the cycles since the access that it waits
    /// for.
    fn next(&mut self, machine: &Machine, barriers: Barriers) -> Option<u16> {
        let awaited = (0..BARRIERS).filter(|n| barriers.awaited >> n & 1 == 1);
        let since = awaited.filter_map(|n| self.0[n].take()).min();
        let cost = Cost::of_machine(&machine.name, machine.stall);
        if let Some(slot) = self.0.get_mut(barriers.read).filter(|_| cost.memory > 0) {
            *slot = Some(0);
        }
        self.0.iter_mut().flatten().for_each(|cycles| *cycles = cycles.saturating_add(cost.stall));
        since
    }
}

/// Machine code of a module's entries.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Instructions by entry and PTX line.
    entries: HashMap<String, HashMap<u32, Vec<Machine>>>,
}

/// Text before the PTX line in a listing.
const LINE: &str = ".nv_debug_ptx_txt\", line ";

impl Listing {
    /// Reads a listing.
    pub fn parse(text: &str) -> Listing {
        let mut listing = Listing::default();
        let (mut entry, mut line) = (None, 0);
        let mut open: Option<Machine> = None;
        let (mut in_use, mut leaves) = (InUse::default(), false);
        for row in text.lines().map(str::trim) {
            if let Some(label) = row.strip_prefix(".text.").and_then(|row| row.strip_suffix(':')) {
                (entry, line, in_use) = (Some(label), 0, InUse::default());
            } else if let Some((_, number)) = row.split_once(LINE) {
                let digits = number.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
                line = digits.parse().unwrap_or(0);
            } else if let Some(rest) = row.strip_prefix("/*") {
                if let Some(hex) = rest.strip_prefix(" 0x") {
                    // The upper half of the previous instruction's encoding.
                    let bits = u64::from_str_radix(hex.trim_end_matches(" */"), 16).unwrap_or(0);
                    if let (Some(mut machine), Some(entry)) = (open.take(), entry) {
                        machine.stall = (bits >> 41 & 0xf) as u16;
                        let barriers = Barriers { read: (bits >> 49 & 7) as usize, awaited: bits >> 52 & 0x3f };
                        machine.in_use = in_use.next(&machine, barriers);
                        if leaves {
                            in_use = InUse::default();
                        }
                        listing.entries.entry(entry.to_owned()).or_default().entry(line).or_default().push(machine);
                    }
                } else if let Some((_, code)) = rest.split_once("*/") {
                    // Code after a jump is reached from elsewhere, so no registers are in use there.
                    leaves = ["BRA", "EXIT", "RET"].iter().any(|jump| code.trim().starts_with(jump));
                    let name = code.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
                    open = Some(Machine { name: name.trim_end_matches(';').to_owned(), stall: 0, in_use: None });
                }
            }
        }
        listing
    }

    /// Assembles PTX and reads its listing. `None`: ptxas or nvdisasm failed, or is neither on PATH, nor under CUDA_PATH,
    /// nor where `cargo xtask ptxas --install` and `cargo xtask sass --install` put it: in a build folder that contains
    /// this program, or in `target` of the current folder or a folder above it.
    pub fn of_ptx(ptx: &str, arch: &str) -> Option<Listing> {
        let (ptxas, nvdisasm) = (tool("ptxas")?, tool("nvdisasm")?);
        let folder = tempfile::tempdir().ok()?;
        let (source, cubin) = (folder.path().join("kernel.ptx"), folder.path().join("kernel.cubin"));
        std::fs::write(&source, ptx).ok()?;
        let assembled =
            Command::new(ptxas).args(["-lineinfo", "--gpu-name", arch, "-o"]).args([&cubin, &source]).output();
        assembled.ok().filter(|done| done.status.success())?;
        let listing = Command::new(nvdisasm).args(["-gp", "-hex", "-c"]).arg(&cubin).output().ok()?;
        listing.status.success().then(|| Listing::parse(&String::from_utf8_lossy(&listing.stdout)))
    }

    /// Costs of an entry's instructions. `code` holds their names and PTX lines in order, `targets` the indices of jump
    /// targets. A memory access has read its registers after `release` cycles. `None`: the listing lacks the entry.
    pub fn costs(
        &self,
        entry: &str,
        code: &[(&str, u32)],
        targets: &BTreeSet<usize>,
        release: u16,
    ) -> Option<Vec<Cost>> {
        let lines = self.entries.get(entry)?;
        let mut costs = vec![Cost::default(); code.len()];
        let mut first = 0;
        // A block ends at a jump or before a target. If ptxas unrolled the block, the listing holds several copies of
        // it. The number of its memory instructions gives the number of copies.
        while first < code.len() {
            let is_jump = |(name, _): &(&str, u32)| {
                name.starts_with("bra") || name.starts_with("ret") || name.starts_with("exit")
            };
            let jump = code[first..].iter().position(is_jump).map_or(code.len(), |n| first + n + 1);
            let target = targets.range(first + 1..).next().copied().unwrap_or(code.len());
            let last = jump.min(target);
            let block = &code[first..last];
            let copies = |&(name, line): &(&str, u32)| {
                let prefix = anchor(name)?;
                let machine = lines.get(&line)?;
                Some(machine.iter().filter(|m| prefix.iter().any(|p| m.name.starts_with(p))).count())
            };
            let copies = block.iter().filter_map(copies).filter(|&n| n > 0).min().unwrap_or(1) as u16;
            let (mut all, mut given) = (Cost::default(), Cost::default());
            for (n, &(_, line)) in block.iter().enumerate() {
                // Several PTX instructions on one line share the machine code of the line.
                if n > 0 && block[n - 1].1 == line {
                    continue;
                }
                let machine = lines.get(&line).map_or(&[][..], Vec::as_slice);
                all = machine.iter().map(|m| m.cost(release)).fold(all, Cost::and);
                // Rounded so that the sum over the block is exact.
                costs[first + n] = all.divided(copies).less(given);
                given = given.and(costs[first + n]);
            }
            first = last;
        }
        Some(costs)
    }
}

/// Machine instructions that a PTX instruction is translated to exactly once. `None`: the number is not certain.
fn anchor(name: &str) -> Option<&'static [&'static str]> {
    const ANCHORS: &[(&str, &[&str])] = &[
        ("wgmma.mma_async", &["HGMMA", "QGMMA", "IGMMA"]),
        ("ld.shared", &["LDS"]),
        ("st.shared", &["STS"]),
        ("ld.global", &["LDG", "LD."]),
        ("st.global", &["STG", "ST."]),
        ("mbarrier.try_wait", &["SYNCS"]),
        ("mbarrier.arrive", &["SYNCS"]),
        ("shfl", &["SHFL"]),
        ("cp.async.bulk.shared", &["UBLKCP"]),
        ("cp.async.bulk.tensor", &["UTMALDG", "UTMASTG"]),
        ("tcgen05.mma", &["UTCQMMA", "UTCOMMA", "UTCHMMA", "UTCIMMA"]),
        ("tcgen05.cp", &["UTCCP"]),
        ("tcgen05.ld", &["LDTM"]),
        ("tcgen05.st", &["STTM"]),
        ("tcgen05.commit", &["UTCBAR"]),
        ("mma.sync", &["HMMA", "IMMA", "QMMA", "OMMA"]),
        ("ldmatrix", &["LDSM"]),
        ("ex2", &["MUFU"]),
        ("rcp.approx", &["MUFU"]),
    ];
    ANCHORS.iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, machine)| *machine)
}

fn tool(program: &str) -> Option<PathBuf> {
    let on_path =
        std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let toolkit = std::env::var_os("CUDA_PATH").map(|path| Path::new(&path).join("bin"));
    let of_machine = on_path.into_iter().chain(toolkit).map(|folder| folder.join(program));
    of_machine.chain(build_folders().iter().flat_map(|folder| of_wheel(folder, program))).find(|file| file.is_file())
}

/// Folders that Cargo may have built this program in, or builds in from here.
fn build_folders() -> Vec<PathBuf> {
    let (given, own) = (std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from), std::env::current_exe().ok());
    let of_own = own.iter().flat_map(|program| program.ancestors()).skip(1).map(Path::to_owned);
    let here = std::env::current_dir().ok();
    let of_here = here.iter().flat_map(|folder| folder.ancestors()).map(|folder| folder.join("target"));
    given.into_iter().chain(of_own).chain(of_here).collect()
}

/// Places of a program that pip installed from a wheel into a folder of its own name: `nvidia/<cu13, cuda_nvcc, …>/bin`.
fn of_wheel(build_folder: &Path, program: &str) -> Vec<PathBuf> {
    let versions = build_folder.join(program).join("nvidia").read_dir().into_iter().flatten().flatten();
    versions.map(|version| version.path().join("bin").join(program)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = r#"
.text.k:
	//## File ".nv_debug_ptx_txt", line 12
        /*0000*/                   IMAD R7, R5, R0, R6 ;        /* 0x0000000005077224 */
                                                                /* 0x000fca00078e0206 */
        /*0010*/              @!P0 LOP3.LUT R7, R5, R0, R6 ;    /* 0x0000000005077224 */
                                                                /* 0x000fc200078e0206 */
	//## File ".nv_debug_ptx_txt", line 13
        /*0020*/                   LDS R7, [R5] ;               /* 0x0000000005077224 */
                                                                /* 0x000fe200078e0206 */
"#;

    #[test]
    fn programs_of_wheels_are_found_in_a_build_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(of_wheel(folder.path(), "nvdisasm"), [] as [PathBuf; 0]);
        let bin = folder.path().join("nvdisasm/nvidia/cu13/bin");
        std::fs::create_dir_all(&bin).unwrap();
        assert_eq!(of_wheel(folder.path(), "nvdisasm"), [bin.join("nvdisasm")]);
        let own = std::env::current_exe().unwrap();
        assert!(build_folders().contains(&own.parent().unwrap().to_owned()));
    }

    #[test]
    fn instructions_and_stalls_belong_to_their_lines() {
        let costs = Listing::parse(LISTING)
            .costs("k", &[("add.u32", 12), ("ld.shared.u32", 13), ("add.u32", 14)], &BTreeSet::new(), 0)
            .unwrap();
        assert_eq!(costs[0], Cost { slots: 2, stall: 6, alu: 2, fma: 2, ..Cost::default() });
        assert_eq!(costs[1], Cost { slots: 1, stall: 1, memory: 1, ..Cost::default() });
        assert_eq!(costs[2], Cost::default());
    }

    #[test]
    fn write_waits_until_a_copy_has_read_its_registers() {
        // The stall count is 2. The copy releases barrier 1, and the last instruction waits for it.
        let row = |name: &str, barriers: u64| {
            format!("/*0000*/ {name} R5 ; /* 0x0 */\n/* {:#018x} */\n", 2u64 << 41 | 7 << 46 | barriers << 49)
        };
        let rows = [row("LDGSTS.E", 1), row("LOP3.LUT", 7), row("IADD3", 7 | 0b10 << 3)];
        let lines: Vec<String> = (12..)
            .zip(&rows)
            .map(|(line, row)| format!("//## File \".nv_debug_ptx_txt\", line {line}\n{row}"))
            .collect();
        let listing = Listing::parse(&format!(".text.k:\n{}", lines.concat()));
        let code = [("cp.async", 12), ("and.b32", 13), ("add.u32", 14)];
        let stalls = |release| {
            let costs = listing.costs("k", &code, &BTreeSet::new(), release).unwrap();
            costs.iter().map(|cost| cost.stall).collect::<Vec<_>>()
        };
        // The copy was issued four cycles earlier.
        assert_eq!(stalls(0), [2, 2, 2]);
        assert_eq!(stalls(10), [2, 2, 8]);
    }

    #[test]
    fn cost_of_unrolled_code_is_divided() {
        let twice = format!("{LISTING}{}", LISTING.replace(".text.k:", ""));
        let costs = |targets| {
            Listing::parse(&twice).costs("k", &[("add.u32", 12), ("ld.shared.u32", 13)], &targets, 0).unwrap()
        };
        let slots = |targets| costs(targets).iter().map(|cost| cost.slots).collect::<Vec<_>>();
        assert_eq!(slots(BTreeSet::new()), [2, 1]);
        // The code before a loop head is a separate block.
        assert_eq!(slots([1].into()), [4, 1]);
    }

    #[test]
    fn costs_of_unrolled_code_add_up() {
        let row = |name: &&str| format!("/*0000*/ {name} R7 ; /* 0x0 */\n/* 0x000fca00078e0206 */\n");
        let line = |number: u32, names: &[&str]| {
            format!("//## File \".nv_debug_ptx_txt\", line {number}\n{}", names.iter().map(row).collect::<String>())
        };
        // Two loads mean that the code is unrolled twice. Three instructions of a line are then 1.5 per copy.
        let listing = [".text.k:\n".to_owned(), line(12, &["IADD3"; 3]), line(13, &["LOP3"; 3]), line(14, &["LDS"; 2])];
        let code = [("add.u32", 12), ("and.b32", 13), ("ld.shared.u32", 14)];
        let costs = Listing::parse(&listing.concat()).costs("k", &code, &BTreeSet::new(), 0).unwrap();
        assert_eq!(costs.iter().map(|cost| cost.slots).collect::<Vec<_>>(), [2, 1, 1]);
    }
}
