//! Checks the machine code of `wgmma` with A in registers: no register of A may be written while a product may still
//! read it.
//!
//! PTX requires registers of A to stay unchanged until a `wgmma.wait_group` covers the product. ptxas does not ensure
//! this: if the source permits it, ptxas reuses the registers as soon as the product is issued. So every path is
//! searched from a product (`HGMMA`, or `QGMMA` for 8-bit numbers, with A in registers; `gsb0` closes a group) to the
//! wait that covers it (`WARPGROUP.DEPBAR.LE gsb0, N`: all but the newest N groups are complete).

use std::collections::{BTreeMap, BTreeSet};

use crate::loops::{Instruction, label};

/// Registers per thread for A of a product.
const A_REGISTERS: u32 = 4;

/// Beginnings of the names of products: 16-bit numbers, 8-bit numbers.
const PRODUCTS: [&str; 2] = ["HGMMA.64x", "QGMMA.64x"];

/// Returns the rest of a product's name. `None`: the instruction is no product.
fn product(name: &str) -> Option<&str> {
    PRODUCTS.iter().find_map(|begin| name.strip_prefix(begin))
}

/// Number of groups that are tracked separately.
const MOST_GROUPS: usize = 8;

/// Registers of A that running products may read, by group: the group being formed, then the newest group, and so on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Running(Vec<BTreeSet<u32>>);

impl Running {
    /// Merges the state of another path to the same place. Returns whether the state grew.
    fn join(&mut self, other: &Self) -> bool {
        let before = self.clone();
        self.0.resize(self.0.len().max(other.0.len()), BTreeSet::new());
        self.0.iter_mut().zip(&other.0).for_each(|(group, other)| group.extend(other));
        *self != before
    }

    /// Executes an instruction. Returns whether it writes a register that a product may still read.
    fn execute(&mut self, name: &str, operands: &[&str]) -> bool {
        let is_wrong = written(name, operands).any(|register| self.0.iter().any(|group| group.contains(&register)));
        if product(name).is_some() {
            self.0.resize(self.0.len().max(1), BTreeSet::new());
            if let Some(first) = operands.get(1).and_then(|a| register(a)) {
                self.0[0].extend(first..first + A_REGISTERS);
            }
            if operands.contains(&"gsb0") {
                self.0.insert(0, BTreeSet::new());
                // Older groups are merged, so that the search of a loop without a wait terminates.
                if self.0.len() > MOST_GROUPS {
                    let oldest = self.0.pop().unwrap_or_default();
                    self.0[MOST_GROUPS - 1].extend(oldest);
                }
            }
        } else if name.starts_with("WARPGROUP.DEPBAR") {
            let count = operands.get(1).and_then(|count| count.strip_prefix("0x"));
            let pending = count.and_then(|count| usize::from_str_radix(count, 16).ok());
            self.0.truncate(1 + pending.unwrap_or(usize::MAX - 1));
        }
        is_wrong
    }
}

/// Returns the instructions of an entry that write a register of A while a product may still read it. `lines` are the
/// entry's lines as nvdisasm prints them.
pub fn overwrites<'l>(lines: &[&'l str]) -> BTreeSet<&'l str> {
    let labels: BTreeMap<_, _> = lines.iter().enumerate().filter_map(|(at, line)| Some((label(line)?, at))).collect();
    let (mut found, mut known) = (BTreeSet::new(), BTreeMap::<usize, Running>::new());
    // An indirect jump may lead to any label.
    let mut paths: Vec<_> = labels.values().copied().chain([0]).map(|start| (start, Running::default())).collect();
    while let Some((start, mut running)) = paths.pop() {
        for (at, line) in lines.iter().enumerate().skip(start) {
            if label(line).is_some() {
                let is_first = !known.contains_key(&at);
                if !known.entry(at).or_default().join(&running) && !is_first {
                    break;
                }
                running = known[&at].clone();
            }
            let Some(instruction) = Instruction::of(line) else { continue };
            if running.execute(instruction.name, &instruction.operands) {
                found.insert(line.trim());
            }
            let starts = instruction.targets.iter().filter_map(|target| labels.get(target));
            paths.extend(starts.map(|&start| (start, running.clone())));
            if instruction.ends() {
                break;
            }
        }
    }
    found
}

/// Returns the registers that an instruction writes. The target is the first operand, or the second if the first is a
/// predicate.
fn written(name: &str, operands: &[&str]) -> impl Iterator<Item = u32> {
    let is_predicate = |operand: &str| operand.starts_with('P') || operand.starts_with("UP");
    let target = match operands {
        [first, second, ..] if is_predicate(first) => second,
        [first, ..] => first,
        [] => "",
    };
    let has = |part: &str| name.split('.').any(|of_name| of_name == part);
    let count = match product(name).and_then(|rest| rest.split('x').next()?.parse::<u32>().ok()) {
        Some(columns) => columns / 2,
        None if has("128") => 4,
        None if has("64") || has("WIDE") || has("CS2R") && !has("32") => 2,
        None => 1,
    };
    register(target).into_iter().flat_map(move |first| first..first + count)
}

/// Returns the number of a register operand such as `R12` or `R12.reuse`.
fn register(operand: &str) -> Option<u32> {
    operand.strip_prefix('R')?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the overwriting instructions among these instructions and labels.
    fn found(instructions: &[&str]) -> Vec<String> {
        let lines: Vec<_> = instructions
            .iter()
            .map(|text| if text.ends_with(':') { (*text).to_owned() } else { format!("/*0000*/ {text} ;") })
            .collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        overwrites(&lines).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn registers_are_free_after_the_covering_wait() {
        let first = "HGMMA.64x16x16.F32 R24, R4, gdesc[UR4], R24, gsb0";
        let second = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R8, gdesc[UR8], R24, gsb0";
        let (one_left, none_left) = ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0");
        let (to_first, to_second) = ("@P0 HMUL2 R7, R20, R21.reuse", "LDS.128 R8, [R2+UR4]");
        assert!(found(&[first, second, one_left, to_first, none_left, to_second]).is_empty());
        assert_eq!(found(&[first, second, one_left, to_second, none_left]).len(), 1);
        assert_eq!(found(&[first, second, to_first, one_left, none_left]).len(), 1);
    }

    #[test]
    fn products_are_tracked_through_branches_and_loops() {
        let product = "HGMMA.64x8x16.F32 R24, R4, gdesc[UR4], R24, gsb0";
        let wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0";
        let round = [".L_x_1:", "MOV R5, R9", product, "@P0 BRA `(.L_x_1)", wait, "EXIT"];
        assert_eq!(found(&round).len(), 1);
        assert!(found(&[".L_x_1:", "MOV R5, R9", product, wait, "@P0 BRA `(.L_x_1)", "EXIT"]).is_empty());
        let out = [
            product,
            "BRA `(.L_x_2)",
            ".L_x_1:",
            "IMAD.WIDE R6, R1, R2, R3",
            "EXIT",
            ".L_x_2:",
            "@!P1 BRA `(.L_x_1)",
            wait,
        ];
        assert_eq!(found(&out).len(), 1);
    }
}
