//! What the driver must know of a PTX module: whether the device may run it, its entries, and the sizes of their parameters.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};

use crate::{Code, INVALID_PTX, NO_BINARY_FOR_GPU};

/// Entries by name.
pub type Entries = BTreeMap<String, Entry>;

/// How an entry is launched.
#[derive(Clone)]
pub struct Entry {
    /// Bytes of its parameters.
    pub parameters: Vec<usize>,
    /// Blocks of a cluster along x, y and z.
    pub cluster: [c_uint; 3],
}

/// The entries of a module, if this device may run it (PTX ISA, ".target": `a` runs on that very architecture, `f` on its
/// family, a plain one on itself and all later); else a code and what the compiler says.
pub fn entries(ptx: &str, major: c_int, minor: c_int) -> Result<Entries, (Code, &'static str)> {
    let target = after(ptx, ".target")
        .next()
        .ok_or((INVALID_PTX, "ptxas fatal : Missing .version directive at start of file"))?;
    let arch = word(target).trim_start_matches("sm_");
    let number: c_int = arch.trim_end_matches(['a', 'f']).parse().unwrap_or(c_int::MAX);
    let here = major * 10 + minor;
    let runs = match arch.as_bytes().last() {
        Some(b'a') => number == here,
        Some(b'f') => number / 10 == major && number <= here,
        _ => number <= here,
    };
    if !runs {
        return Err((NO_BINARY_FOR_GPU, "ptxas fatal : the target is not for this device"));
    }
    Ok(after(ptx, ".entry").map(|text| (word(text).to_owned(), entry(text))).collect())
}

/// What follows each occurrence of a directive.
fn after<'t>(text: &'t str, directive: &'t str) -> impl Iterator<Item = &'t str> {
    text.match_indices(directive).map(|(at, found)| &text[at + found.len()..])
}

/// The identifier that a text begins with.
fn word(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$');
    &text[..end.unwrap_or(text.len())]
}

/// What stands between an entry's name and its body: parameters, `.param .u64 p` or `.param .align 8 .b8 p[16]`, and perhaps
/// `.reqnctapercluster 2`.
fn entry(text: &str) -> Entry {
    let head = &text[..text.find('{').unwrap_or(text.len())];
    let size = |parameter: &str| {
        let parameter = parameter.split([',', ')']).next().unwrap_or_default();
        let bits =
            parameter.split_whitespace().find_map(|word| word.strip_prefix(['.'])?.get(1..)?.parse::<usize>().ok());
        let count = parameter.split_once('[').and_then(|(_, count)| count.split(']').next()?.trim().parse().ok());
        bits.unwrap_or(0) / 8 * count.unwrap_or(1)
    };
    let mut cluster = [1; 3];
    for blocks in after(head, ".reqnctapercluster").filter_map(|text| text.lines().next()) {
        let blocks = blocks.split("//").next().unwrap_or_default().split(',');
        cluster.iter_mut().zip(blocks).for_each(|(side, blocks)| *side = blocks.trim().parse().unwrap_or(1));
    }
    Entry { parameters: after(head, ".param").map(size).collect(), cluster }
}
