//! Locations in the source that the PTX was generated from: `.file`, `.loc`, and the calls that a compiler inlined.

use std::collections::BTreeMap;

/// Source line that `.loc` gives for the instructions after it (PTX ISA, "Debugging Directives: .loc").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceLine {
    pub file: u32,
    pub line: u32,
    pub column: u32,
    /// Line of the directive in the PTX.
    pub directive: u32,
}

/// A module's source files, and the calls that the compiler inlined.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `.file` numbers and names.
    pub files: BTreeMap<u32, String>,
    /// Inlined calls, by the PTX line of a `.loc`: the part of that line that names the calls. It is the manual's
    /// `inlined_at`, or LLVM's comment `@[ file:line:column @[ … ] ]`.
    inlined: BTreeMap<u32, String>,
}

impl Sources {
    /// Collects the inlined calls of a PTX text.
    pub fn of_text(text: &str) -> Sources {
        let lines = (1..).zip(text.lines()).filter(|(_, line)| line.trim_start().starts_with(".loc"));
        let inlined = lines.filter_map(|(number, line)| {
            let at = line.find("inlined_at").or_else(|| line.find("@["))?;
            Some((number, line[at..].to_owned()))
        });
        Sources { files: BTreeMap::new(), inlined: inlined.collect() }
    }

    /// Formats a location as `file:line:column`, followed by the calls that it was inlined into, innermost first.
    pub fn describe(&self, at: SourceLine) -> Option<String> {
        let inlined = self.inlined.get(&at.directive).map(|text| self.callers(text)).unwrap_or_default();
        let first = (at.line > 0).then(|| self.place(at.file, at.line, at.column))?;
        Some([first].into_iter().chain(inlined).collect::<Vec<_>>().join(", inlined at "))
    }

    fn place(&self, file: u32, line: u32, column: u32) -> String {
        format!("{}:{line}:{column}", self.files.get(&file).map_or("?", String::as_str))
    }

    fn callers(&self, text: &str) -> Vec<String> {
        match text.strip_prefix("inlined_at") {
            Some(numbers) => {
                let mut numbers = numbers.split_whitespace().map_while(|word| word.parse().ok());
                let [file, line, column] = [(); 3].map(|()| numbers.next());
                file.zip(line).map(|(file, line)| self.place(file, line, column.unwrap_or(0))).into_iter().collect()
            }
            None => text.split("@[").skip(1).map(|place| self.full(place.trim_matches([' ', ']']))).collect(),
        }
    }

    /// Completes the path in LLVM's comment, which omits the folder of the compilation. If exactly one `.file` ends
    /// with the comment's path, that file is meant.
    fn full(&self, place: &str) -> String {
        let path = place.rsplitn(3, ':').nth(2).unwrap_or(place);
        let ends_so = |file: &&String| file.strip_suffix(path).is_some_and(|folder| folder.ends_with('/'));
        let mut files = self.files.values().filter(ends_so);
        match (files.next(), files.next()) {
            (Some(file), None) => format!("{file}{}", &place[path.len()..]),
            _ => place.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(text: &str, line: u32) -> String {
        let mut sources = Sources::of_text(text);
        for (number, name) in [(1, "/a/kernels/src/gemm.rs"), (2, "/a/std/src/shared.rs"), (3, "/b/std/src/shared.rs")]
        {
            sources.files.insert(number, name.to_owned());
        }
        sources.describe(SourceLine { file: 2, line: 47, column: 9, directive: line }).unwrap()
    }

    #[test]
    fn llvm_comment_gives_every_inlined_call() {
        let text =
            "\t.loc\t2 47 9 // src/shared.rs:47:9 @[ src/shared.rs:3:1 @[ src/gemm.rs:375:5 @[ src/gemm.rs:60:7 ] ] ]";
        let want = "/a/std/src/shared.rs:47:9, inlined at src/shared.rs:3:1, inlined at /a/kernels/src/gemm.rs:375:5, \
                    inlined at /a/kernels/src/gemm.rs:60:7";
        assert_eq!(describe(text, 1), want);
    }

    #[test]
    fn inlined_at_gives_its_call() {
        let text = "ret;\n.loc 2 47 9, function_name $L__info_string0, inlined_at 1 375 5";
        assert_eq!(describe(text, 2), "/a/std/src/shared.rs:47:9, inlined at /a/kernels/src/gemm.rs:375:5");
    }

    #[test]
    fn location_without_inlining_stands_alone() {
        assert_eq!(describe(".loc 2 47 9 // src/shared.rs:47:9", 1), "/a/std/src/shared.rs:47:9");
        assert_eq!(Sources::default().describe(SourceLine::default()), None);
    }
}
