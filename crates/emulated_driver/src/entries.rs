//! Properties of a PTX module that the driver needs: its target, its entries, and the sizes of their parameters.

use gpu_arch::{Arch, Capability};
use std::collections::BTreeMap;

use crate::code::{Code, INVALID_PTX, NO_BINARY_FOR_GPU};

/// Entries by name.
pub type Entries = BTreeMap<String, Entry>;

/// Launch properties of an entry.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Offset and size in bytes of each parameter in the parameter block.
    pub parameters: Vec<(usize, usize)>,
    /// CTAs per cluster along x, y and z.
    pub cluster: [u32; 3],
}

/// Returns the entries of a module. If this GPU cannot run it, returns a code and the compiler's message.
pub fn entries(ptx: &str, card: Capability) -> Result<Entries, (Code, &'static str)> {
    let target = after(ptx, ".target")
        .next()
        .ok_or((INVALID_PTX, "ptxas fatal : Missing .version directive at start of file"))?;
    if !word(target).parse::<Arch>().is_ok_and(|arch| arch.runs_on(card)) {
        return Err((NO_BINARY_FOR_GPU, "ptxas fatal : the target is not for this device"));
    }
    let mut entries = Entries::new();
    for text in after(ptx, ".entry") {
        // `.entry` in a comment or in a section's name is not followed by whitespace.
        if text.starts_with(char::is_whitespace) {
            entries.insert(word(text).to_owned(), entry(text));
        }
    }
    Ok(entries)
}

/// Returns the text after each occurrence of a directive.
fn after<'t>(text: &'t str, directive: &'t str) -> impl Iterator<Item = &'t str> {
    text.match_indices(directive).map(|(at, found)| &text[at + found.len()..])
}

/// Returns the identifier at the beginning of a text.
fn word(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$');
    &text[..end.unwrap_or(text.len())]
}

/// Parses the text between an entry's name and its body: parameters such as `.param .u64 p` or `.param .align 8 .b8
/// p[16]`, and an optional `.reqnctapercluster 2`.
fn entry(text: &str) -> Entry {
    let head = &text[..text.find('{').unwrap_or(text.len())];
    let mut parameters = Vec::new();
    let mut end = 0_usize;
    for parameter in after(head, ".param") {
        let parameter = parameter.split([',', ')']).next().unwrap_or_default();
        let mut words = parameter.split_whitespace();
        let bits = words.clone().find_map(|word| word.strip_prefix('.')?.get(1..)?.parse::<usize>().ok());
        let count = parameter.split_once('[').and_then(|(_, count)| count.split(']').next()?.trim().parse().ok());
        // `.ptr .align` is the alignment of the memory that a pointer refers to, not of the parameter.
        let pointer = words.clone().any(|word| word == ".ptr");
        let asked = words.find(|word| *word == ".align").and_then(|_| words.next()?.parse().ok());
        let element = bits.unwrap_or(0) / 8;
        let align = asked.filter(|align: &usize| !pointer && align.is_power_of_two()).unwrap_or(element).max(1);
        let bytes = element.saturating_mul(count.unwrap_or(1));
        let begin = end.checked_next_multiple_of(align).unwrap_or(end);
        parameters.push((begin, bytes));
        end = begin.saturating_add(bytes);
    }
    let mut cluster = [1; 3];
    for blocks in after(head, ".reqnctapercluster").filter_map(|text| text.lines().next()) {
        let blocks = blocks.split("//").next().unwrap_or_default().split(',');
        cluster.iter_mut().zip(blocks).for_each(|(side, blocks)| *side = blocks.trim().parse().unwrap_or(1));
    }
    Entry { parameters, cluster }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_drivers_offsets() {
        let ptx = ".version 8.0\n.target sm_90a\n.visible .entry k(\n.param .u32 n,\n\
                   .param .u64 .ptr .global .align 4 p,\n.param .align 64 .b8 map[128]\n)\n.reqnctapercluster 2, 1, 1\n{ ret; }";
        let entries = entries(ptx, (9, 0)).unwrap();
        assert_eq!(entries["k"].parameters, [(0, 4), (8, 8), (64, 128)]);
        assert_eq!(entries["k"].cluster, [2, 1, 1]);
        assert_eq!(super::entries(ptx, (10, 0)).unwrap_err().0, NO_BINARY_FOR_GPU);
    }
}
