//! The workspace's sources, parsed, without what is compiled for tests alone.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use syn::Attribute;
use syn::visit_mut::{self, VisitMut};

/// A file of Rust.
pub struct Source {
    /// All of it.
    pub text: String,
    /// What is not compiled for tests alone.
    pub tree: syn::File,
}

/// Files by their path below the workspace.
pub struct Sources(BTreeMap<PathBuf, Source>);

impl Sources {
    /// Reads all `.rs` files below a folder of the workspace `root`; what cargo writes and what is hidden is left out.
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

    /// Whether there is no file.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All files.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &Source)> {
        self.0.iter().map(|(path, source)| (path.as_path(), source))
    }

    /// The file at a path, with its path as it is kept here.
    pub fn get(&self, path: &Path) -> Option<(&Path, &Source)> {
        self.0.get_key_value(path).map(|(path, source)| (path.as_path(), source))
    }
}

/// A file's items but for tests.
pub fn parse(text: &str) -> syn::Result<syn::File> {
    let mut tree = syn::parse_file(text)?;
    WithoutTests.visit_file_mut(&mut tree);
    Ok(tree)
}

/// Takes out of a file what is compiled for tests alone.
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

/// Whether attributes say `#[test]`, `#[cfg(test)]` or what is as narrow, such as `#[cfg(all(test, unix))]`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident("test") || is_cfg_test(attribute))
}

fn is_cfg_test(attribute: &Attribute) -> bool {
    let Ok(cfg) = attribute.meta.require_list() else { return false };
    let text = cfg.tokens.to_string();
    let words: Vec<_> = text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    // `not` and `any` let other builds in.
    cfg.path.is_ident("cfg") && words.contains(&"test") && !words.contains(&"not") && !words.contains(&"any")
}

/// The attributes of an item of a file, a module or a function's body.
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

/// The attributes of an item of an `impl`.
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

    /// The names of functions that are left of a text.
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
    fn only_what_is_compiled_for_tests_alone_is_taken_out() {
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
    fn a_file_that_does_not_parse_is_named_with_the_line() {
        let files = [(PathBuf::from("a/b.rs"), "//! B.\nfn f( {}\n".to_owned())];
        let error = Sources::parse(files.into_iter()).err().unwrap().to_string();
        assert!(error.starts_with("a/b.rs:2: "), "{error}");
    }
}
