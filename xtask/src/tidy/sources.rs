//! Parsed sources of the workspace, without code that is compiled for tests only.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use syn::Attribute;
use syn::visit_mut::{self, VisitMut};

/// A Rust source file.
pub struct Source {
    /// Full text of the file.
    pub text: String,
    /// Syntax tree without code that is compiled for tests only.
    pub tree: syn::File,
}

/// Files by their path relative to the workspace.
pub struct Sources(BTreeMap<PathBuf, Source>);

impl Sources {
    /// Reads all `.rs` files below a folder of the workspace `root`, except in `target` and in hidden folders.
    pub fn read(root: &Path, folder: &str) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        let mut folders = vec![PathBuf::from(folder)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(root.join(&folder))? {
                let entry = entry?;
                let (name, path) = (entry.file_name(), folder.join(entry.file_name()));
                let is_folder = entry.file_type()?.is_dir();
                if is_folder && name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                    folders.push(path);
                } else if !is_folder && path.extension().is_some_and(|extension| extension == "rs") {
                    let text = fs::read_to_string(root.join(&path))?;
                    files.insert(path, text);
                }
            }
        }
        Self::parse(files.into_iter())
    }

    /// Parses texts, each with its path.
    pub fn parse(files: impl Iterator<Item = (PathBuf, String)>) -> io::Result<Self> {
        let parse = |(path, text): (PathBuf, String)| {
            let tree = parse(&text).map_err(|error| {
                let line = error.span().start().line;
                io::Error::other(format!("{}:{line}: {error}", path.display()))
            })?;
            Ok((path, Source { text, tree }))
        };
        files.map(parse).collect::<io::Result<_>>().map(Self)
    }

    /// Whether there are no files.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all files with their paths.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &Source)> {
        self.0.iter().map(|(path, source)| (path.as_path(), source))
    }

    /// Returns the file at a path, and the path as stored here.
    pub fn get(&self, path: &Path) -> Option<(&Path, &Source)> {
        self.0.get_key_value(path).map(|(path, source)| (path.as_path(), source))
    }
}

/// Parses a file and removes its tests.
pub fn parse(text: &str) -> syn::Result<syn::File> {
    let mut tree = syn::parse_file(text)?;
    WithoutTests.visit_file_mut(&mut tree);
    Ok(tree)
}

/// Visitor that removes code that is compiled for tests only.
struct WithoutTests;

impl VisitMut for WithoutTests {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        file.items.retain(|item| !is_test(of_item(item)));
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut module.content {
            items.retain(|item| !is_test(of_item(item)));
        }
        visit_mut::visit_item_mod_mut(self, module);
    }

    fn visit_item_impl_mut(&mut self, block: &mut syn::ItemImpl) {
        block.items.retain(|item| !is_test(of_impl_item(item)));
        visit_mut::visit_item_impl_mut(self, block);
    }

    fn visit_block_mut(&mut self, block: &mut syn::Block) {
        block.stmts.retain(|statement| !matches!(statement, syn::Stmt::Item(item) if is_test(of_item(item))));
        visit_mut::visit_block_mut(self, block);
    }
}

/// Whether attributes contain `#[test]`, `#[cfg(test)]` or a narrower condition, such as `#[cfg(all(test, unix))]`. The
/// feature `fake` counts as `test`: only tests of other crates enable it.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident("test") || is_cfg_test(attribute))
}

fn is_cfg_test(attribute: &Attribute) -> bool {
    let Ok(cfg) = attribute.meta.require_list() else { return false };
    let text = cfg.tokens.to_string();
    let words: Vec<_> = text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    // With `not` or `any`, the code is compiled in other builds too.
    cfg.path.is_ident("cfg")
        && ["test", "fake"].iter().any(|word| words.contains(word))
        && !words.contains(&"not")
        && !words.contains(&"any")
}

/// Attributes of an item of a file, a module or a function body.
fn of_item(item: &syn::Item) -> &[Attribute] {
    use syn::Item::*;
    match item {
        Const(item) => &item.attrs,
        Enum(item) => &item.attrs,
        ExternCrate(item) => &item.attrs,
        Fn(item) => &item.attrs,
        ForeignMod(item) => &item.attrs,
        Impl(item) => &item.attrs,
        Macro(item) => &item.attrs,
        Mod(item) => &item.attrs,
        Static(item) => &item.attrs,
        Struct(item) => &item.attrs,
        Trait(item) => &item.attrs,
        TraitAlias(item) => &item.attrs,
        Type(item) => &item.attrs,
        Union(item) => &item.attrs,
        Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Attributes of an item of an `impl`.
fn of_impl_item(item: &syn::ImplItem) -> &[Attribute] {
    use syn::ImplItem::*;
    match item {
        Const(item) => &item.attrs,
        Fn(item) => &item.attrs,
        Macro(item) => &item.attrs,
        Type(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use syn::visit::Visit;

    use super::*;

    /// Returns the names of the functions that remain in a text.
    fn left(text: &str) -> Vec<String> {
        struct Names(Vec<String>);
        impl<'ast> Visit<'ast> for Names {
            fn visit_signature(&mut self, signature: &'ast syn::Signature) {
                self.0.push(signature.ident.to_string());
            }
        }
        let mut names = Names(Vec::new());
        names.visit_file(&parse(text).unwrap());
        names.0
    }

    #[test]
    fn only_test_code_is_removed() {
        for around in
            ["ITEM", "mod m { ITEM }", "mod m { mod m { ITEM } }", "impl S { ITEM }", "const C: u8 = { ITEM 0 };"]
        {
            let left = |attribute: &str| left(&around.replace("ITEM", &format!("{attribute} fn f() {{}} fn g() {{}}")));
            for test in ["#[test]", "#[cfg(test)]", "#[cfg(all(test, unix))]", "#[inline] #[cfg(test)]"] {
                assert_eq!(left(test), ["g"], "{test} in {around}");
            }
            for code in ["", "#[inline]", "#[cfg(not(test))]", "#[cfg(any(test, unix))]", "#[cfg(feature = \"tests\")]"]
            {
                assert_eq!(left(code), ["f", "g"], "{code} in {around}");
            }
        }
        assert_eq!(left("#[cfg(test)] mod tests { fn f() {} } #[cfg(test)] impl S { fn f() {} }"), [""; 0]);
    }

    #[test]
    fn parse_error_names_file_and_line() {
        let files = [(PathBuf::from("a/b.rs"), "//! B.\nfn f( {}\n".to_owned())];
        let error = Sources::parse(files.into_iter()).err().unwrap().to_string();
        assert!(error.starts_with("a/b.rs:2: "), "{error}");
    }
}
