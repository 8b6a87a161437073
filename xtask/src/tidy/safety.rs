//! Unsafe functions whose documentation lacks the caller's obligations.
//!
//! Functions in an `impl` of a trait are skipped, because the trait documents them. Functions that a macro writes are
//! found in the macro's tokens.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, Lit, Meta, Signature};

/// Heading of the section that states the caller's obligations.
const HEADING: &str = "# Safety";

/// Returns the unsafe functions without the heading, each as its line and a message.
pub fn unexplained(file: &syn::File) -> impl Iterator<Item = String> {
    let mut finder = Finder(Vec::new());
    finder.visit_file(file);
    finder.0.into_iter().map(|(line, name)| format!("{line}: unsafe fn {name} has no `{HEADING}` section"))
}

struct Finder(Vec<(usize, String)>);

impl Finder {
    fn check(&mut self, attributes: &[Attribute], signature: &Signature) {
        if signature.unsafety.is_some() && !attributes.iter().any(has_heading) {
            self.0.push((signature.fn_token.span.start().line, signature.ident.to_string()));
        }
    }

    /// Finds `unsafe fn NAME`, with or without an ABI, and checks the attributes before it.
    fn check_tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let is = |at: usize, word: &str| matches!(tokens.get(at), Some(TokenTree::Ident(name)) if name == word);
        // Index of the first token of the current item.
        let mut begin = 0;
        for at in 0..tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.check_tokens(group.stream());
                    if group.delimiter() == Delimiter::Brace {
                        begin = at + 1;
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => begin = at + 1,
                TokenTree::Ident(word) if word == "unsafe" => {
                    let mut at_fn = at + 1;
                    while is(at_fn, "extern") || matches!(tokens.get(at_fn), Some(TokenTree::Literal(_))) {
                        at_fn += 1;
                    }
                    // A function type has no name: `unsafe fn(u8)`. A name that a procedural macro inserts, `#ident`,
                    // brings its documentation with it.
                    let mut name = tokens.iter().skip(at_fn + 1).take(2).map(ToString::to_string);
                    let name = match name.next() {
                        Some(dollar) if dollar == "$" => dollar + &name.next().unwrap_or_default(),
                        name => name.unwrap_or_default(),
                    };
                    let heading = |token: &TokenTree| token.to_string().contains(HEADING);
                    if is(at_fn, "fn") && !name.starts_with(['(', '#']) && !tokens[begin..at].iter().any(heading) {
                        self.0.push((word.span().start().line, name));
                    }
                }
                _ => {}
            }
        }
    }
}

fn has_heading(attribute: &Attribute) -> bool {
    let Meta::NameValue(pair) = &attribute.meta else { return false };
    let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &pair.value else { return false };
    pair.path.is_ident("doc") && text.value().lines().any(|line| line.trim() == HEADING)
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.check(&function.attrs, &function.sig);
        visit::visit_item_fn(self, function);
    }

    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        if block.trait_.is_none() {
            for item in &block.items {
                if let syn::ImplItem::Fn(function) = item {
                    self.check(&function.attrs, &function.sig);
                }
            }
        }
        visit::visit_item_impl(self, block);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        self.check(&function.attrs, &function.sig);
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_foreign_item_fn(&mut self, function: &'ast syn::ForeignItemFn) {
        self.check(&function.attrs, &function.sig);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.check_tokens(call.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::parse;

    fn found(text: &str) -> Vec<String> {
        unexplained(&parse(text).unwrap()).collect()
    }

    #[test]
    fn unsafe_functions_without_heading_are_found() {
        for text in [
            "\nunsafe fn f() {}",
            "/// Does it.\nunsafe fn f() {}",
            "/// It is # Safety first.\npub unsafe extern \"C\" fn f() {}",
            "impl S {\n  unsafe fn f() {} }",
            "trait T {\n  unsafe fn f(); }",
            "unsafe extern \"C\" {\n  unsafe fn f(); }",
            "fn g() {\n  unsafe fn f() {} }",
            "macro_rules! m { () => {\n  pub unsafe fn f() {} } }",
            "m! { /** # Safety */ unsafe fn g() {}\n  unsafe extern \"C\" fn f() {} }",
        ] {
            assert_eq!(found(text), ["2: unsafe fn f has no `# Safety` section"], "{text}");
        }
        assert_eq!(found("m! { unsafe fn $name() {} }"), ["1: unsafe fn $name has no `# Safety` section"]);
    }

    #[test]
    fn documented_and_test_functions_are_accepted() {
        for text in [
            "/// Does it.\n///\n/// # Safety\n///\n/// `p` is valid.\nunsafe fn f(p: *const u8) {}",
            "unsafe impl T for S { unsafe fn f() {} }",
            "#[cfg(test)] mod tests { unsafe fn f() {} }",
            "#[test] fn g() { unsafe fn f() {} }",
            "impl S { #[cfg(test)] unsafe fn f() {} }",
            "struct S { f: unsafe extern \"C\" fn(u8) }",
            "m! { f: unsafe extern \"C\" fn(u8), g: unsafe fn() }",
            "m! {\n/// # Safety\n///\n/// Any.\n#[inline]\npub unsafe fn f() {} }",
            "m! { unsafe { g() } }",
        ] {
            assert_eq!(found(text), [""; 0], "{text}");
        }
    }
}
