//! Syntax of modifier forms. A form lists the modifiers that an instruction takes: `{a b}` is exactly one of them, `[a
//! b]` is at most one of them, and a bare word is required. Types must come in the order of the form. Other modifiers
//! may come in any order, because compilers differ in their order.

use crate::types::Type;

/// The group of modifiers allowed at one position of a form.
pub struct Group<'a> {
    pub required: bool,
    pub names: Vec<&'a str>,
}

/// The groups of a form, in order.
pub fn groups(form: &str) -> Vec<Group<'_>> {
    let mut out = Vec::new();
    let mut rest = form.trim_start();
    while !rest.is_empty() {
        let (required, close) = match rest.as_bytes()[0] {
            b'{' => (true, '}'),
            b'[' => (false, ']'),
            _ => {
                let end = rest.find(' ').unwrap_or(rest.len());
                out.push(Group { required: true, names: vec![&rest[..end]] });
                rest = rest[end..].trim_start();
                continue;
            }
        };
        let end = rest.find(close).unwrap_or(rest.len());
        out.push(Group { required, names: rest[1..end].split_whitespace().collect() });
        rest = rest[end + 1..].trim_start();
    }
    out
}

/// Whether the form allows these modifiers.
pub fn allows(form: &str, modifiers: &[String]) -> bool {
    let groups = groups(form);
    let mut used = vec![false; groups.len()];
    let mut types = 0;
    for m in modifiers {
        let from = if Type::parse(m).is_some() { types } else { 0 };
        match (from..groups.len()).find(|&n| !used[n] && groups[n].names.contains(&m.as_str())) {
            Some(n) => {
                used[n] = true;
                types = if Type::parse(m).is_some() { n } else { types };
            }
            None => return false,
        }
    }
    groups.iter().zip(used).all(|(g, used)| used || !g.required)
}

/// Whether the form has the modifier at any position.
pub fn has_word(form: &str, word: &str) -> bool {
    form.split([' ', '{', '}', '[', ']']).any(|w| w == word)
}
