//! Machine code of a kernel: the PTX line of each instruction, and the stall counts.
//!
//! The listing is that of `ptxas -lineinfo` and `nvdisasm --print-line-info-ptx --print-instruction-encoding --print-code`. A
//! stall count is bits 105 to 108 of an instruction; 113 to 115 are the barrier that it lets go when it has read its registers, 116 to
//! 121 the barriers that it waits for (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018;
//! unchanged since).

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cost::Cost;

/// An instruction of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Machine {
    name: String,
    stall: u16,
    /// If it waits until an access of memory has read its registers: for how long they have been in use, by the stall counts.
    in_use: Option<u16>,
}

impl Machine {
    fn cost(&self, release: u16) -> Cost {
        let wait = self.in_use.map_or(0, |since| release.saturating_sub(since));
        Cost::of_machine(&self.name, self.stall.max(1) + wait)
    }
}

/// What follows the stall count of an instruction.
#[derive(Clone, Copy, Debug)]
struct Barriers {
    /// The barrier that is let go when registers have been read.
    read: usize,
    /// Those that are waited for, a bit each.
    awaited: u64,
}

/// A thread's barriers.
const BARRIERS: usize = 6;

/// Accesses of memory whose registers are in use, by their barriers: how many cycles ago they were issued.
#[derive(Clone, Debug, Default)]
struct InUse([Option<u16>; BARRIERS]);

impl InUse {
    /// The next instruction, in the order of addresses. For how long the registers that it waits for have been in use.
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

/// The machine code of a module's entries.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// By entry, then by line of the PTX.
    entries: HashMap<String, HashMap<u32, Vec<Machine>>>,
}

/// What stands before the PTX line in a listing.
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
                    // The upper half of the encoding of the instruction before.
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
                    // Whoever comes to what follows comes from elsewhere.
                    leaves = ["BRA", "EXIT", "RET"].iter().any(|jump| code.trim().starts_with(jump));
                    let name = code.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
                    open = Some(Machine { name: name.trim_end_matches(';').to_owned(), stall: 0, in_use: None });
                }
            }
        }
        listing
    }

    /// Assembles PTX and reads its listing; `None` where there is no ptxas or nvdisasm on PATH or under CUDA_PATH.
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

    /// Costs of an entry's instructions, which are given by name and line in their order, and by which of them something jumps
    /// to; `None` where the listing lacks the entry. An access of memory has read its registers after `release` cycles.
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
        // A block ends at a jump and before a target; what ptxas unrolled it has several times, which its memory instructions
        // show.
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
                // Several instructions of one line share what the line became.
                if n > 0 && block[n - 1].1 == line {
                    continue;
                }
                let machine = lines.get(&line).map_or(&[][..], Vec::as_slice);
                all = machine.iter().map(|m| m.cost(release)).fold(all, Cost::and);
                // Rounded so that the block's sum is right.
                costs[first + n] = all.divided(copies).less(given);
                given = given.and(costs[first + n]);
            }
            first = last;
        }
        Some(costs)
    }
}

/// What an instruction of PTX becomes once, if that is sure.
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
    on_path.into_iter().chain(toolkit).map(|folder| folder.join(program)).find(|file| file.is_file())
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
    fn instructions_and_stalls_go_to_their_lines() {
        let costs = Listing::parse(LISTING)
            .costs("k", &[("add.u32", 12), ("ld.shared.u32", 13), ("add.u32", 14)], &BTreeSet::new(), 0)
            .unwrap();
        assert_eq!(costs[0], Cost { slots: 2, stall: 6, alu: 2, fma: 2, ..Cost::default() });
        assert_eq!(costs[1], Cost { slots: 1, stall: 1, memory: 1, ..Cost::default() });
        assert_eq!(costs[2], Cost::default());
    }

    #[test]
    fn registers_of_a_copy_are_written_when_it_has_read_them() {
        // A stall of 2; the copy lets barrier 1 go, for which the last one waits.
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
        // It was issued four cycles before.
        assert_eq!(stalls(0), [2, 2, 2]);
        assert_eq!(stalls(10), [2, 2, 8]);
    }

    #[test]
    fn what_was_unrolled_is_divided() {
        let twice = format!("{LISTING}{}", LISTING.replace(".text.k:", ""));
        let costs = |targets| {
            Listing::parse(&twice).costs("k", &[("add.u32", 12), ("ld.shared.u32", 13)], &targets, 0).unwrap()
        };
        let slots = |targets| costs(targets).iter().map(|cost| cost.slots).collect::<Vec<_>>();
        assert_eq!(slots(BTreeSet::new()), [2, 1]);
        // What lies before the head of a loop is another block.
        assert_eq!(slots([1].into()), [4, 1]);
    }

    #[test]
    fn what_was_unrolled_adds_up_again() {
        let row = |name: &&str| format!("/*0000*/ {name} R7 ; /* 0x0 */\n/* 0x000fca00078e0206 */\n");
        let line = |number: u32, names: &[&str]| {
            format!("//## File \".nv_debug_ptx_txt\", line {number}\n{}", names.iter().map(row).collect::<String>())
        };
        // Two loads, so unrolled twice: three instructions of a line are one and a half of each.
        let listing = [".text.k:\n".to_owned(), line(12, &["IADD3"; 3]), line(13, &["LOP3"; 3]), line(14, &["LDS"; 2])];
        let code = [("add.u32", 12), ("and.b32", 13), ("ld.shared.u32", 14)];
        let costs = Listing::parse(&listing.concat()).costs("k", &code, &BTreeSet::new(), 0).unwrap();
        assert_eq!(costs.iter().map(|cost| cost.slots).collect::<Vec<_>>(), [2, 1, 1]);
    }
}
