//! The workspace's sources, parsed; and what of them is a test.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use syn::Attribute;

/// A file of Rust.
pub struct Source {
    pub text: String,
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
            let tree = syn::parse_file(&text).map_err(|error| {
                io::Error::other(format!("{}:{}: {error}", path.display(), error.span().start().line))
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

/// Whether an item is compiled for tests alone: `#[test]`, `#[cfg(test)]` and what is as narrow, such as
/// `#[cfg(all(test, unix))]`.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let cfg_words = || {
            let words = attribute.meta.require_list().map(|list| list.tokens.to_string()).unwrap_or_default();
            let mut words =
                words.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect::<Vec<_>>();
            words.retain(|word| !word.is_empty());
            words
        };
        let narrow = || {
            let words = cfg_words();
            words.iter().any(|word| word == "test") && !words.iter().any(|word| ["not", "any"].contains(&word.as_str()))
        };
        attribute.path().is_ident("test") || attribute.path().is_ident("cfg") && narrow()
    })
}

/// The attributes of an item of a file, a module or a function's body.
pub fn of_item(item: &syn::Item) -> &[Attribute] {
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
pub fn of_impl_item(item: &syn::ImplItem) -> &[Attribute] {
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
    use super::*;

    #[test]
    fn only_what_is_compiled_for_tests_alone_is_a_test() {
        let is_test = |item: &str| is_test(of_item(&syn::parse_str(item).unwrap()));
        for test in ["#[test] fn f() {}", "#[cfg(test)] mod m {}", "#[cfg(all(test, unix))] use a::b;"] {
            assert!(is_test(test), "{test}");
        }
        for code in
            ["fn test() {}", "#[cfg(not(test))] mod m {}", "#[cfg(any(test, unix))] mod m {}", "#[inline] fn f() {}"]
        {
            assert!(!is_test(code), "{code}");
        }
    }

    #[test]
    fn a_file_that_does_not_parse_is_named_with_the_line() {
        let files = [(PathBuf::from("a/b.rs"), "//! B.\nfn f( {}\n".to_owned())];
        let error = Sources::parse(files.into_iter()).err().unwrap().to_string();
        assert!(error.starts_with("a/b.rs:2: "), "{error}");
    }
}
