//! `cargo xtask additions`: counts the files and lines of the example additions in CONTRIBUTING.md.
//!
//! The page shows each addition under its own heading, as code blocks. The line before a block names the file:
//!
//! ````text
//! ## A shape
//!
//! `crates/nvfp4_core/src/shapes.json`:
//!
//! ```diff
//!  [ +{"name": "mine", "op": "gated", "groups": [[80, 4096, 7168]]},
//! ```
//! ````
//!
//! A `diff` block changes a file: lines with `+` are added, lines with `-` are removed, and lines with a space are
//! context. The removed and context lines must occur in the file exactly once. Any other block is a new file. An
//! addition that does not match the tree is an error.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::{
    document::{self, Mode},
    table::Table,
    workspace,
};

/// Count the files and lines of each addition in CONTRIBUTING.md, and renew the page's table
#[derive(clap::Args)]
pub struct Args {
    /// Fail if an addition does not fit the tree or the table is out of date
    #[arg(long)]
    check: bool,
    /// Apply all additions to this copy of the repository instead, so that it can be built and tested
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    into: Option<PathBuf>,
}

const PAGE: &str = "CONTRIBUTING.md";
const COMMAND: &str = "cargo xtask additions";

/// Counts or applies the additions of the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let additions = additions(&document::read(PAGE)?)?;
    ensure!(!additions.is_empty(), "{PAGE} contains no addition");
    if let Some(folder) = &args.into {
        // One after the other: an addition must fit a file that earlier additions have changed.
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

/// An addition of the page.
#[derive(Debug, PartialEq)]
struct Addition {
    /// Heading above the addition.
    name: String,
    edits: Vec<Edit>,
}

/// A code block and the path of its file.
#[derive(Debug, PartialEq)]
struct Edit {
    path: String,
    is_diff: bool,
    /// Lines with their line ends.
    lines: Vec<String>,
}

/// Returns the additions of a page.
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
            ensure!(!block.is_empty(), "{PAGE}: the block for {path} is empty");
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
    /// Applies the addition below `root`, and passes the path and new text of each file to `write`.
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

    /// Number of added lines.
    fn lines(&self) -> usize {
        let comes = |edit: &Edit| edit.lines.iter().filter(|line| !edit.is_diff || line.starts_with('+')).count();
        self.edits.iter().map(comes).sum()
    }

    /// Number of files, and number of new files among them.
    fn files(&self) -> (usize, usize) {
        let mut files: BTreeMap<&str, bool> = BTreeMap::new();
        for edit in &self.edits {
            *files.entry(&edit.path).or_default() |= !edit.is_diff;
        }
        (files.len(), files.values().filter(|is_new| **is_new).count())
    }
}

impl Edit {
    /// Returns the text of the file after the edit. `old`: its text before, if it exists.
    fn applied(&self, old: Option<&str>) -> anyhow::Result<String> {
        let Some(old) = old.filter(|_| self.is_diff) else {
            ensure!(!self.is_diff, "the file of this diff does not exist");
            ensure!(old.is_none(), "the new file already exists");
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
                _ => bail!("a diff line must begin with a space, + or -, found {line:?}"),
            }
        }
        ensure!(!before.is_empty(), "the diff has no context or removed line, so its place is unknown");
        // Match whole lines only: at the beginning of the file or after a line end.
        let starts = old.match_indices(&before).map(|(at, _)| at);
        let starts: Vec<_> = starts.filter(|&at| at == 0 || old[..at].ends_with('\n')).collect();
        match starts[..] {
            [at] => Ok([&old[..at], &after, &old[at + before.len()..]].concat()),
            [] => bail!("the file does not contain these lines:\n{before}"),
            _ => bail!("the file contains these lines {} times, expected once:\n{before}", starts.len()),
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
    fn blocks_belong_to_the_file_and_heading_before_them() {
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
    fn additions_apply_one_after_the_other() {
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
    fn edit_that_does_not_fit_is_refused() {
        let refused = |is_diff: bool, lines: &[&str], old: Option<&str>| {
            let lines = lines.iter().map(|line| format!("{line}\n")).collect();
            Edit { path: String::new(), is_diff, lines }.applied(old).unwrap_err().to_string()
        };
        assert_eq!(refused(false, &["x"], Some(LIB)), "the new file already exists");
        assert_eq!(refused(true, &[" x", "+y"], None), "the file of this diff does not exist");
        assert_eq!(
            refused(true, &["+y"], Some(LIB)),
            "the diff has no context or removed line, so its place is unknown"
        );
        assert_eq!(
            refused(true, &[" od other;", "+y"], Some(LIB)),
            "the file does not contain these lines:\nod other;\n"
        );
        assert_eq!(refused(true, &[" other;", "+y"], Some(LIB)), "the file does not contain these lines:\nother;\n");
        let twice = "a\nb\na\n";
        assert_eq!(
            refused(true, &[" a", "+y"], Some(twice)),
            "the file contains these lines 2 times, expected once:\na\n"
        );
        assert!(refused(true, &["x"], Some(LIB)).starts_with("a diff line must begin with"));
    }
}
