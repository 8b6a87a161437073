//! `cargo xtask additions`: what it takes to add a thing, counted from the code in CONTRIBUTING.md.
//!
//! The page shows each addition under a heading of its own, as blocks of code of which the line before names the file:
//!
//! ````text
//! ## A shape
//!
//! `host/src/shapes.json`:
//!
//! ```diff
//!  [
//! +{"name": "mine", "op": "gated", "groups": [[80, 4096, 7168]]},
//! ```
//! ````
//!
//! A block of `diff` changes a file: lines with `+` come, lines with `-` go, and the others, which begin with a space, say
//! where; all that are there before must stand in the file once. Any other block is a new file. So the page can be held to the
//! tree: what no longer fits is an error.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::{
    document::{self, Mode},
    table::Table,
    workspace,
};

/// Count the files and lines of each addition in CONTRIBUTING.md, and renew its table.
#[derive(clap::Args)]
pub struct Args {
    /// Fail if an addition no longer fits the tree, or the table is not what the additions make of it
    #[arg(long)]
    check: bool,
    /// Make all additions in this copy of the repository instead, so that it can be built and tested
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    into: Option<PathBuf>,
}

const PAGE: &str = "CONTRIBUTING.md";
const COMMAND: &str = "cargo xtask additions";

/// Counts, or makes, what the page adds.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let additions = additions(&document::read(PAGE)?)?;
    ensure!(!additions.is_empty(), "{PAGE} shows no addition");
    if let Some(folder) = &args.into {
        // One after the other: additions to one file must not stand in each other's way.
        for addition in &additions {
            addition.make(folder, &mut |path, text| {
                let path = folder.join(path);
                fs::create_dir_all(path.parent().unwrap_or(folder))?;
                fs::write(&path, text).with_context(|| path.display().to_string())
            })?;
        }
        return Ok(());
    }
    for addition in &additions {
        addition.make(workspace::root(), &mut |_, _| Ok(()))?;
    }
    let mode = if args.check { Mode::Check } else { Mode::Write };
    document::section(PAGE, "additions", &table(&additions), mode, COMMAND)
}

/// A thing that is added.
#[derive(Debug, PartialEq)]
struct Addition {
    /// The heading that it stands under.
    name: String,
    edits: Vec<Edit>,
}

/// A block of code, and the file that it is of.
#[derive(Debug, PartialEq)]
struct Edit {
    path: String,
    is_diff: bool,
    /// Its lines, each with its end.
    lines: Vec<String>,
}

/// The additions of a page.
fn additions(page: &str) -> anyhow::Result<Vec<Addition>> {
    let mut additions: Vec<Addition> = Vec::new();
    let (mut heading, mut path) = (String::new(), None);
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(fence) = line.strip_prefix("```") {
            let (ticks, language) = fence.split_at(fence.len() - fence.trim_start_matches('`').len());
            let end = format!("```{ticks}");
            let block: Vec<_> =
                lines.by_ref().take_while(|line| *line != end).map(|line| format!("{line}\n")).collect();
            let Some(path) = path.take() else { continue };
            ensure!(!block.is_empty(), "{PAGE}: an empty block for {path}");
            let edit = Edit { path, is_diff: language == "diff", lines: block };
            match additions.last_mut().filter(|addition| addition.name == heading) {
                Some(addition) => addition.edits.push(edit),
                None => additions.push(Addition { name: heading.clone(), edits: vec![edit] }),
            }
        } else if line.starts_with('#') {
            heading = line.trim_start_matches('#').trim().to_owned();
        } else if !line.is_empty() {
            let named = line.strip_prefix('`').and_then(|line| line.strip_suffix("`:"));
            path = named.filter(|path| !path.contains('`')).map(str::to_owned);
        }
    }
    Ok(additions)
}

impl Addition {
    /// What its files are with it, below a root; each is given to `write` once it is known.
    fn make(&self, root: &Path, write: &mut impl FnMut(&str, &str) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut files: BTreeMap<&str, String> = BTreeMap::new();
        for edit in &self.edits {
            let place = || format!("{PAGE}, {:?}: {}", self.name, edit.path);
            let old = match files.get(edit.path.as_str()) {
                Some(text) => Some(text.clone()),
                None => fs::read_to_string(root.join(&edit.path)).ok(),
            };
            files.insert(&edit.path, edit.applied(old.as_deref()).with_context(place)?);
        }
        files.iter().try_for_each(|(path, text)| write(path, text))
    }

    /// Lines that come.
    fn lines(&self) -> usize {
        let comes = |edit: &Edit| edit.lines.iter().filter(|line| !edit.is_diff || line.starts_with('+')).count();
        self.edits.iter().map(comes).sum()
    }

    /// Files, and how many of them are new.
    fn files(&self) -> (usize, usize) {
        let mut files: BTreeMap<&str, bool> = BTreeMap::new();
        for edit in &self.edits {
            *files.entry(&edit.path).or_default() |= !edit.is_diff;
        }
        (files.len(), files.values().filter(|is_new| **is_new).count())
    }
}

impl Edit {
    /// The file's text with it.
    fn applied(&self, old: Option<&str>) -> anyhow::Result<String> {
        let Some(old) = old.filter(|_| self.is_diff) else {
            ensure!(!self.is_diff, "there is no such file to change");
            ensure!(old.is_none(), "the file is there already");
            return Ok(self.lines.concat());
        };
        let (mut before, mut after) = (String::new(), String::new());
        for line in &self.lines {
            let Some(mark) = line.chars().next() else { continue };
            let text = if line == "\n" { line } else { &line[mark.len_utf8()..] };
            match mark {
                '+' => after += text,
                '-' => before += text,
                ' ' | '\n' => {
                    before += text;
                    after += text;
                }
                _ => bail!("a line of a diff begins with a space, + or -: {line:?}"),
            }
        }
        ensure!(!before.is_empty(), "nothing says where the lines go");
        // Whole lines: at the file's beginning, or behind the end of a line.
        let starts = old.match_indices(&before).map(|(at, _)| at);
        let starts: Vec<_> = starts.filter(|&at| at == 0 || old[..at].ends_with('\n')).collect();
        match starts[..] {
            [at] => Ok([&old[..at], &after, &old[at + before.len()..]].concat()),
            [] => bail!("these lines are not in the file:\n{before}"),
            _ => bail!("these lines are in the file {} times:\n{before}", starts.len()),
        }
    }
}

fn table(additions: &[Addition]) -> String {
    let mut table = Table::new(1, &["to add", "files", "of them new", "lines"]);
    for addition in additions {
        let (files, new) = addition.files();
        table.row([addition.name.clone(), files.to_string(), new.to_string(), addition.lines().to_string()]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Contributing

## A thing

`src/thing.rs`:

```rust
//! A thing.
fn thing() {}
```

and a line of the list in `src/lib.rs`, as others have it:

`src/lib.rs`:

```diff
 mod other;
+mod thing;

-fn old() {}
+fn new() {}
```

Then run it:

```sh
cargo run
```

### Another

`src/lib.rs`:

````diff
 mod other;
+mod another;
````
";

    const LIB: &str = "mod other;\n\nfn old() {}\n";

    #[test]
    fn blocks_belong_to_the_file_named_before_them_and_the_heading_above() {
        let additions = additions(TEXT).unwrap();
        let counted: Vec<_> = additions.iter().map(|one| (one.name.as_str(), one.files(), one.lines())).collect();
        assert_eq!(counted, [("A thing", (2, 1), 4), ("Another", (1, 0), 1)]);
        let expected = "| to add  | files | of them new | lines |
|---------|------:|------------:|------:|
| A thing |     2 |           1 |     4 |
| Another |     1 |           0 |     1 |
";
        assert_eq!(table(&additions), expected);
    }

    #[test]
    fn what_fits_is_made_and_later_additions_find_what_earlier_ones_left() {
        let folder = std::env::temp_dir().join(format!("nvfp4-additions-{}", std::process::id()));
        fs::create_dir_all(folder.join("src")).unwrap();
        fs::write(folder.join("src/lib.rs"), LIB).unwrap();
        for addition in additions(TEXT).unwrap() {
            addition.make(&folder, &mut |path, text| Ok(fs::write(folder.join(path), text)?)).unwrap();
        }
        let read = |path: &str| fs::read_to_string(folder.join(path)).unwrap();
        assert_eq!(read("src/lib.rs"), "mod other;\nmod another;\nmod thing;\n\nfn new() {}\n");
        assert_eq!(read("src/thing.rs"), "//! A thing.\nfn thing() {}\n");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_no_longer_fits_is_refused_with_the_reason() {
        let refused = |is_diff: bool, lines: &[&str], old: Option<&str>| {
            let lines = lines.iter().map(|line| format!("{line}\n")).collect();
            Edit { path: String::new(), is_diff, lines }.applied(old).unwrap_err().to_string()
        };
        assert_eq!(refused(false, &["x"], Some(LIB)), "the file is there already");
        assert_eq!(refused(true, &[" x", "+y"], None), "there is no such file to change");
        assert_eq!(refused(true, &["+y"], Some(LIB)), "nothing says where the lines go");
        assert_eq!(refused(true, &[" od other;", "+y"], Some(LIB)), "these lines are not in the file:\nod other;\n");
        assert_eq!(refused(true, &[" other;", "+y"], Some(LIB)), "these lines are not in the file:\nother;\n");
        let twice = "a\nb\na\n";
        assert_eq!(refused(true, &[" a", "+y"], Some(twice)), "these lines are in the file 2 times:\na\n");
        assert!(refused(true, &["x"], Some(LIB)).starts_with("a line of a diff begins with"));
    }
}
