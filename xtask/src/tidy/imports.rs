//! Imports between the files of a crate, and cycles of them.
//!
//! A file imports the files that its paths name, both in `use` and in code, including macros. A path belongs to the
//! file of the last module in it: `crate::a::b::Item` to `a/b.rs`. If `a/mod.rs` re-exports the item (`pub use
//! b::Item`), then a file that names `crate::a::Item` imports both `a/mod.rs` and `a/b.rs`. The re-export is an import
//! of `a/mod.rs` only if `a/mod.rs` also uses the item itself. Declarations (`mod b;`), visibilities (`pub(in
//! crate::a)`) and links in comments are not imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::sources::Sources;

/// Imported names, by importing file and imported file.
type Imports<'a> = BTreeMap<&'a Path, BTreeMap<&'a Path, BTreeSet<String>>>;

/// Returns a message for every import cycle: the files, and the names that each imports from others of the cycle.
pub fn circles(sources: &Sources) -> Vec<String> {
    let mut modules_of_others = BTreeSet::new();
    for (file, source) in sources.files() {
        modules_of_others.extend(children(sources, file, &source.tree).into_values());
    }
    // A file that no module declaration names is the root of a crate: a library, program, test or build script.
    let roots = sources.files().map(|(file, _)| file).filter(|file| !modules_of_others.contains(file));
    let found = roots.flat_map(|root| {
        let imports = imports(sources, root);
        let circles = strongly_connected(&imports).into_iter();
        circles.map(|circle| describe(root, &circle, &imports)).collect::<Vec<_>>()
    });
    found.collect()
}

/// Returns a message for every import from a lower floor of a crate to a higher one. Floors are files and folders of
/// the crate's `src`, from the lowest up. The crate's root is above all floors.
pub fn upward(sources: &Sources, src: &Path, floors: &[&[&str]]) -> Vec<String> {
    let Some((root, _)) = sources.get(&src.join("lib.rs")) else { return Vec::new() };
    let floor = |file: &Path| {
        let place = file.strip_prefix(src).ok()?.iter().next()?.to_str()?.trim_end_matches(".rs");
        floors.iter().position(|names| names.contains(&place))
    };
    let mut found = Vec::new();
    for (from, others) in imports(sources, root).into_iter().filter(|(from, _)| *from != root) {
        let Some(own) = floor(from) else {
            found.push(format!("{}: the file is on no floor of {}; add it to FLOORS", from.display(), src.display()));
            continue;
        };
        for (to, names) in others.into_iter().filter(|(to, _)| floor(to).is_none_or(|floor| floor > own)) {
            let names: Vec<_> = names.into_iter().collect();
            found.push(format!(
                "{}: imports {} from a higher floor, {}",
                from.display(),
                names.join(", "),
                to.display()
            ));
        }
    }
    found
}

fn describe(root: &Path, circle: &BTreeSet<&Path>, imports: &Imports<'_>) -> String {
    let mut text = format!("{}: import cycle of {} files:", root.display(), circle.len());
    for (from, others) in circle.iter().map(|file| (file, &imports[file])) {
        for (to, names) in others.iter().filter(|(to, _)| circle.contains(*to)) {
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            text += &format!("\n  {} → {}: {}", from.display(), to.display(), names.join(", "));
        }
    }
    text
}

/// Returns the files of the modules that a file declares, by module path relative to the file's own module.
fn children<'a>(sources: &'a Sources, file: &Path, tree: &syn::File) -> BTreeMap<Vec<String>, &'a Path> {
    fn collect(items: &[syn::Item], inside: &mut Vec<String>, declared: &mut Vec<Vec<String>>) {
        for item in items {
            let syn::Item::Mod(module) = item else { continue };
            inside.push(module.ident.to_string());
            match &module.content {
                Some((_, items)) => collect(items, inside, declared),
                None => declared.push(inside.clone()),
            }
            inside.pop();
        }
    }
    let mut declared = Vec::new();
    collect(&tree.items, &mut Vec::new(), &mut declared);
    let folder = file.parent().unwrap_or(Path::new(""));
    // Submodules of `a.rs` lie in `a/`. Submodules of `mod.rs` and of a crate root lie beside it.
    let folders = [folder.join(file.file_stem().unwrap_or_default()), folder.to_owned()];
    let place = |path: &Vec<String>| {
        let places = folders.iter().flat_map(|folder| {
            let module = path.iter().fold(folder.clone(), |folder, name| folder.join(name));
            [module.with_extension("rs"), module.join("mod.rs")]
        });
        places.into_iter().find_map(|place| sources.get(&place)).map(|(file, _)| file)
    };
    declared.into_iter().filter_map(|path| place(&path).map(|file| (path, file))).collect()
}

/// Returns the imports between the files of a crate.
fn imports<'a>(sources: &'a Sources, root: &'a Path) -> Imports<'a> {
    let mut tree = Crate::default();
    let mut new = vec![(Vec::new(), root)];
    while let Some((path, file)) = new.pop() {
        let (file, source) = sources.get(file).expect("every module has a file");
        tree.add(&path, file, &source.tree.items);
        let children = children(sources, file, &source.tree).into_iter();
        new.extend(children.map(|(below, child)| ([path.clone(), below].concat(), child)));
    }
    let mut imports = Imports::new();
    for (path, module) in &tree.0 {
        let in_parents_file = path.split_last().is_some_and(|(_, parent)| tree.0[parent].file == module.file);
        if !in_parents_file {
            let (_, source) = sources.get(module.file).expect("every module has a file");
            let mut finder = Finder { tree: &tree, module: path.clone(), file: module.file, found: BTreeMap::new() };
            finder.visit_file(&source.tree);
            imports.insert(module.file, finder.found);
        }
    }
    imports
}

/// Modules of a crate, by path.
#[derive(Default)]
struct Crate<'a>(BTreeMap<Vec<String>, Module<'a>>);

struct Module<'a> {
    file: &'a Path,
    /// Names that the module re-exports (`pub use`), each with its original path.
    handed_on: BTreeMap<String, Vec<String>>,
}

impl<'a> Crate<'a> {
    /// Adds a module and the inline modules in its file.
    fn add(&mut self, path: &[String], file: &'a Path, items: &[syn::Item]) {
        let mut handed_on = BTreeMap::new();
        for item in items {
            match item {
                syn::Item::Mod(syn::ItemMod { ident, content: Some((_, items)), .. }) => {
                    self.add(&[path, &[ident.to_string()]].concat(), file, items);
                }
                syn::Item::Use(item) if hands_on(item) => {
                    handed_on.extend(leaves(&item.tree).into_iter().filter_map(|leaf| Some((leaf.name?, leaf.path))));
                }
                _ => {}
            }
        }
        self.0.insert(path.to_vec(), Module { file, handed_on });
    }

    /// Returns the modules that `path`, used in `module`, is imported from, with the name in each. The first one is the
    /// last module in the path itself. If that module re-exports the name, the original module follows, and so on.
    fn resolve(&self, module: &[String], path: &[String]) -> Vec<(&'a Path, String)> {
        let (mut module, mut path) = (module.to_vec(), path.to_vec());
        let mut found = Vec::new();
        while let Some((at, rest)) = self.walk(&module, &path) {
            let name = rest.first().or(at.last()).map_or_else(|| "crate".to_owned(), String::clone);
            let target = &self.0[&at];
            found.push((target.file, name.clone()));
            // Bounds the search: two modules may re-export a name from each other.
            let Some(from) = target.handed_on.get(&name).filter(|_| !rest.is_empty() && found.len() < 16) else {
                break;
            };
            (module, path) = (at, [from, &rest[1..]].concat());
        }
        found
    }

    /// Splits `path`, used in `module`, into the last module in it and the rest. `None`: the path belongs to another
    /// crate.
    fn walk<'p>(&self, module: &[String], path: &'p [String]) -> Option<(Vec<String>, &'p [String])> {
        let mut at = module.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => at.clear(),
            "self" | "super" => {}
            // A path may begin with a submodule of the current module.
            first if self.0.contains_key(&[module, &[first.to_owned()]].concat()) => {}
            _ => return None,
        }
        while let Some((name, behind)) = rest.split_first() {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                _ => {
                    at.push(name.clone());
                    if !self.0.contains_key(&at) {
                        at.pop();
                        break;
                    }
                }
            }
            rest = behind;
        }
        Some((at, rest))
    }
}

/// Whether a `use` is a re-export.
fn hands_on(item: &syn::ItemUse) -> bool {
    !matches!(item.vis, syn::Visibility::Inherited) && item.leading_colon.is_none()
}

/// A path of a `use`, and the name that it is bound to. `None`: `*` or `_`.
struct Leaf {
    path: Vec<String>,
    name: Option<String>,
}

fn leaves(tree: &syn::UseTree) -> Vec<Leaf> {
    fn collect(tree: &syn::UseTree, path: &mut Vec<String>, found: &mut Vec<Leaf>) {
        let (last, name) = match tree {
            syn::UseTree::Path(part) => {
                path.push(part.ident.to_string());
                collect(&part.tree, path, found);
                path.pop();
                return;
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| collect(tree, path, found));
                return;
            }
            syn::UseTree::Name(name) => (name.ident.to_string(), Some(name.ident.to_string())),
            syn::UseTree::Rename(name) => (name.ident.to_string(), Some(name.rename.to_string())),
            syn::UseTree::Glob(_) => ("*".to_owned(), None),
        };
        let leaf = if last == "self" {
            Leaf { path: path.clone(), name: name.filter(|name| name != "self").or(path.last().cloned()) }
        } else {
            Leaf { path: [path.as_slice(), &[last]].concat(), name }
        };
        found.push(leaf);
    }
    let mut found = Vec::new();
    collect(tree, &mut Vec::new(), &mut found);
    found
}

/// Visitor that collects the imports of a file.
struct Finder<'a, 'm> {
    tree: &'m Crate<'a>,
    /// Path of the current module.
    module: Vec<String>,
    file: &'a Path,
    found: BTreeMap<&'a Path, BTreeSet<String>>,
}

impl Finder<'_, '_> {
    /// Records a path if it leads into this crate.
    fn note(&mut self, path: &[String]) {
        for (file, name) in self.tree.resolve(&self.module, path) {
            if file != self.file {
                self.found.entry(file).or_default().insert(name);
            }
        }
    }

    /// Records a path in code: a path of two or more names, or one that begins with a name the module re-exports.
    fn note_spelt(&mut self, path: &[String]) {
        let Some(first) = path.first() else { return };
        if let Some(from) = self.tree.0.get(&self.module).and_then(|module| module.handed_on.get(first)) {
            self.note(&[from, &path[1..]].concat());
        } else if path.len() > 1 {
            self.note(path);
        }
    }

    /// Records every path in the tokens of a macro, whose syntax is unknown.
    fn note_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    // After two colons a name continues the path. Otherwise it begins a new path.
                    if colons != 2 {
                        self.note_spelt(&path);
                        path.clear();
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                other => {
                    self.note_spelt(&path);
                    path.clear();
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.note_tokens(group.stream());
                    }
                }
            }
        }
        self.note_spelt(&path);
    }
}

impl<'ast> Visit<'ast> for Finder<'_, '_> {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.module.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for leaf in leaves(&item.tree) {
            // The names that a `*` re-exports are unknown, so the module counts as importing them itself.
            if item.leading_colon.is_none() && !(hands_on(item) && leaf.name.is_some()) {
                self.note(&leaf.path);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.note_spelt(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        visit::visit_macro(self, call);
        self.note_tokens(call.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

/// Returns the sets of at least two files that all reach each other.
fn strongly_connected<'a>(imports: &Imports<'a>) -> Vec<BTreeSet<&'a Path>> {
    let reached = |from: &'a Path| {
        let (mut reached, mut new) = (BTreeSet::new(), vec![from]);
        while let Some(file) = new.pop() {
            new.extend(imports[file].keys().filter(|other| reached.insert(**other)));
        }
        reached
    };
    let reached: BTreeMap<&Path, BTreeSet<&Path>> = imports.keys().map(|file| (*file, reached(file))).collect();
    let mut circles: Vec<BTreeSet<&Path>> = Vec::new();
    for (file, others) in &reached {
        let circle: BTreeSet<_> = others.iter().copied().filter(|other| reached[other].contains(file)).collect();
        if circle.len() > 1 && !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    circles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Sources {
        Sources::parse(files.iter().map(|(path, text)| (path.into(), (*text).to_owned()))).unwrap()
    }

    /// Returns what `src/a.rs` with this text imports in a small crate, as `file: names`.
    fn imported(text: &str) -> Vec<String> {
        let files = [
            (
                "src/lib.rs",
                "mod a; mod b; mod c; pub use b::{Exported, Old as New}; pub mod sys { pub use crate::c::d::*; }",
            ),
            ("src/a.rs", text),
            ("src/b.rs", "pub mod inside { pub fn f() {} } pub(crate) use crate::c::d::Far;"),
            ("src/c/mod.rs", "pub mod d;"),
            ("src/c/d.rs", ""),
            ("src/a/e.rs", ""),
        ];
        let sources = sources(&files);
        let imports = imports(&sources, Path::new("src/lib.rs"));
        let of = |(file, names): (&&Path, &BTreeSet<String>)| {
            format!("{}: {}", file.display(), names.iter().cloned().collect::<Vec<_>>().join(" "))
        };
        imports[Path::new("src/a.rs")].iter().map(of).collect()
    }

    #[test]
    fn imports_from_higher_floors_are_found() {
        let lib = ("src/lib.rs", "mod a; mod b; mod c; pub use b::B;");
        let (b, c) = (("src/b.rs", "use crate::a::A;"), ("src/c.rs", ""));
        let floors: [&[&str]; 2] = [&["a"], &["b", "c"]];
        let found =
            |a: &'static str, floors| upward(&sources(&[lib, ("src/a/mod.rs", a), b, c]), Path::new("src"), floors);
        assert!(found("fn f() {}", &floors).is_empty());
        assert_eq!(found("use crate::b::B;", &floors), ["src/a/mod.rs: imports B from a higher floor, src/b.rs"]);
        assert_eq!(found("use crate::B;", &floors).len(), 2);
        assert_eq!(found("", &[&["a"], &["b"]]), ["src/c.rs: the file is on no floor of src; add it to FLOORS"]);
    }

    #[test]
    fn path_belongs_to_file_of_its_last_module() {
        for (text, expected) in [
            ("use crate::b::{X, Y as Z};", "src/b.rs: X Y"),
            ("use super::b::*;", "src/b.rs: *"),
            ("use crate::c::d;", "src/c/d.rs: d"),
            ("use crate::c::{self, C};", "src/c/mod.rs: C c"),
            ("use crate::c::d::D;", "src/c/d.rs: D"),
            ("use crate::Exported;", "src/b.rs: Exported; src/lib.rs: Exported"),
            ("use crate::New;", "src/b.rs: Old; src/lib.rs: New"),
            ("use crate::b::Far;", "src/b.rs: Far; src/c/d.rs: Far"),
            ("use crate::sys::Thing;", "src/lib.rs: Thing"),
            ("mod e; pub use e::E; fn f() -> E {}", "src/a/e.rs: E"),
            ("mod e; pub use e::E; fn f() { E::new() }", "src/a/e.rs: E"),
            ("mod e; pub use e::E; fn f() { vec![E] }", "src/a/e.rs: E"),
            ("mod e; pub use e::*;", "src/a/e.rs: *"),
            ("use crate::b::inside::f;", "src/b.rs: f"),
            ("mod e; use e::E;", "src/a/e.rs: E"),
            ("mod e; use self::e::E;", "src/a/e.rs: E"),
            ("mod e; fn f() { e::g() }", "src/a/e.rs: g"),
            ("fn f(x: super::b::X) {}", "src/b.rs: X"),
            ("fn f() -> u8 { crate::c::d::D::new() }", "src/c/d.rs: D"),
            ("mod inner { use super::super::b::X; }", "src/b.rs: X"),
            ("mod inner { fn f() { use crate::b::X; } }", "src/b.rs: X"),
            ("fn f() { println!(\"{}\", crate::b::X); }", "src/b.rs: X"),
            (
                "macro_rules! m { ($t:ty) => { impl $crate::c::d::D for $t { fn f() { if a { super::b::g() } } } } }",
                "src/b.rs: g; src/c/d.rs: D",
            ),
        ] {
            assert_eq!(imported(text).join("; "), expected, "{text}");
        }
    }

    #[test]
    fn declarations_visibilities_and_comments_are_no_imports() {
        for text in [
            "mod e;",
            "mod e; pub use e::E;",
            "mod e; pub(crate) use self::e::{E, F as G};",
            "#[cfg(test)] mod tests { use crate::b::X; }",
            "#[cfg(test)] use crate::b::X;",
            "#[cfg(feature = \"fake\")] use crate::b::X;",
            "impl S { #[cfg(test)] fn f() { crate::b::X } }",
            "pub(in crate::c) fn f() {}",
            "pub(super) fn f() {}",
            "use ::b::X; use std::b::X; use c::d::D;",
            "/// See [`crate::b::X`].\nfn f() {}",
            "use self::Own; use super::a::Other; enum Own { A } fn f() { Own::A }",
            "fn f(b: u8) { s! { b: c } }",
        ] {
            assert_eq!(imported(text).join("; "), "", "{text}");
        }
    }

    #[test]
    fn import_cycle_is_reported_with_its_names() {
        let ring = |files: usize| {
            let modules: String = (0..files).map(|at| format!("mod m{at};")).collect();
            let mut all = vec![("src/lib.rs".to_owned(), modules)];
            for at in 0..files {
                all.push((format!("src/m{at}.rs"), format!("use crate::m{}::N{at};", (at + 1) % files)));
            }
            let all: Vec<_> = all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
            circles(&sources(&all))
        };
        assert_eq!(ring(1), [""; 0]);
        let shown = "src/lib.rs: import cycle of 3 files:
  src/m0.rs → src/m1.rs: N0
  src/m1.rs → src/m2.rs: N1
  src/m2.rs → src/m0.rs: N2";
        assert_eq!(ring(3), [shown]);
    }

    #[test]
    fn files_outside_a_cycle_are_not_part_of_it() {
        let text = [
            ("src/lib.rs", "mod a; mod b; mod c; mod d; mod e; use a::A;"),
            ("src/a.rs", "use crate::b::B;"),
            ("src/b.rs", "use crate::a::A; use crate::c::C;"),
            ("src/c.rs", "use crate::d::D;"),
            ("src/d.rs", "use crate::c::C; use crate::e::E;"),
            ("src/e.rs", ""),
        ];
        let sources = sources(&text);
        let found = strongly_connected(&imports(&sources, Path::new("src/lib.rs")));
        let pair = |a, b| BTreeSet::from([a, b].map(Path::new));
        assert_eq!(found, [pair("src/a.rs", "src/b.rs"), pair("src/c.rs", "src/d.rs")]);
    }
}
