//! Control flow of machine code as nvdisasm prints it, and the instructions in loops.

use std::collections::BTreeMap;

/// An instruction of a line such as `/*0040*/ @!P0 BRA `(.L_x_7) ;`.
pub struct Instruction<'l> {
    /// Whether a predicate guards it.
    pub guarded: bool,
    pub name: &'l str,
    pub operands: Vec<&'l str>,
    /// Labels that it may jump to.
    pub targets: Vec<&'l str>,
}

impl<'l> Instruction<'l> {
    /// Parses a line. `None`: the line has no instruction.
    pub fn of(line: &'l str) -> Option<Self> {
        let (_, text) = line.trim().strip_prefix("/*")?.split_once("*/")?;
        let text = text.trim().trim_end_matches(';').trim();
        let guarded = text.starts_with('@');
        let text = if guarded { text.split_once(' ').map_or("", |(_, text)| text.trim()) } else { text };
        let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
        let targets = text.match_indices("`(").filter_map(|(from, _)| text[from + 2..].split(')').next()).collect();
        Some(Self { guarded, name, operands: operands.split(',').map(str::trim).collect(), targets })
    }

    /// Whether the next instruction is never executed behind this one.
    pub fn ends(&self) -> bool {
        let leaves = match self.name.split('.').next() {
            // The first operand of a branch may be a condition.
            Some("BRA") => self.operands[0].starts_with('`'),
            Some("EXIT" | "RET" | "BRX") => true,
            _ => false,
        };
        leaves && !self.guarded
    }
}

/// Returns the label of a line, if the line is one.
pub fn label(line: &str) -> Option<&str> {
    line.trim().strip_suffix(':')
}

/// Returns the lines of instructions in loops that `is_meant` selects by name. `lines` are an entry's lines as nvdisasm
/// prints them.
pub fn in_loops<'l>(lines: &[&'l str], is_meant: impl Fn(&str) -> bool) -> Vec<&'l str> {
    let labels: BTreeMap<_, _> = lines.iter().enumerate().filter_map(|(at, line)| Some((label(line)?, at))).collect();
    let instructions: Vec<_> = lines.iter().map(|line| Instruction::of(line)).collect();
    let next = |at: usize| {
        let instruction = instructions[at].as_ref();
        let follows = at + 1 < lines.len() && !instruction.is_some_and(Instruction::ends);
        // An indirect jump may lead to any label.
        let anywhere = instruction.is_some_and(|i| i.name.starts_with("BRX"));
        let jumps = instruction.into_iter().flat_map(|i| &i.targets).filter_map(|target| labels.get(target));
        let anywhere = labels.values().filter(move |_| anywhere);
        follows.then_some(at + 1).into_iter().chain(jumps.chain(anywhere).copied())
    };
    let repeats = |start: usize| {
        let (mut reached, mut paths) = (vec![false; lines.len()], vec![start]);
        while let Some(at) = paths.pop() {
            for at in next(at) {
                if !std::mem::replace(&mut reached[at], true) {
                    paths.push(at);
                }
            }
        }
        reached[start]
    };
    let meant = (0..lines.len()).filter(|&at| instructions[at].as_ref().is_some_and(|i| is_meant(i.name)));
    meant.filter(|&at| repeats(at)).map(|at| lines[at].trim()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_in_loops_are_found() {
        // A loop whose wait continues behind the end of the code, as ptxas places it.
        let lines = [
            "/*0000*/ MEMBAR.ALL.GPU ;",
            ".L_x_1:",
            "/*0010*/ SYNCS.PHASECHK P0, [R1] ;",
            "/*0020*/ @!P0 BRA `(.L_x_2) ;",
            ".L_x_3:",
            "/*0030*/ @P1 BRA `(.L_x_1) ;",
            "/*0040*/ MEMBAR.ALL.GPU ;",
            "/*0050*/ EXIT ;",
            ".L_x_2:",
            "/*0060*/ CCTL.IVALL ;",
            "/*0070*/ BRA `(.L_x_3) ;",
        ];
        let found = in_loops(&lines, |name| name.starts_with("MEMBAR") || name.starts_with("CCTL"));
        assert_eq!(found, ["/*0060*/ CCTL.IVALL ;"]);
    }
}
