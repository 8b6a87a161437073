//! Functions that are too long to read at once.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Expr, Signature, Stmt};

/// Maximum lines of a function, from `fn` to its closing brace.
pub const MOST_LINES: usize = 80;

/// Maximum lines of an arm of a table.
const MOST_LINES_OF_AN_ARM: usize = 4;

/// Returns the functions that are too long and are not tables, each as its line and a message.
///
/// A table is a function whose body is one `match`, or `Some` of one, with arms of at most [`MOST_LINES_OF_AN_ARM`]
/// lines. It is read arm by arm.
pub fn too_long(file: &syn::File) -> impl Iterator<Item = String> {
    let mut finder = Finder(Vec::new());
    finder.visit_file(file);
    let finder = finder.0.into_iter();
    finder.map(|(line, name, lines)| {
        format!("{line}: fn {name} has {lines} lines, expected at most {MOST_LINES}; split it, or make it a table")
    })
}

struct Finder(Vec<(usize, String, usize)>);

impl Finder {
    fn check(&mut self, signature: &Signature, block: &Block) {
        let (first, last) = (signature.span().start().line, block.brace_token.span.close().end().line);
        let lines = last + 1 - first;
        if lines > MOST_LINES && !is_table(block) {
            self.0.push((first, signature.ident.to_string(), lines));
        }
    }
}

fn is_table(block: &Block) -> bool {
    let [Stmt::Expr(body, _)] = &block.stmts[..] else { return false };
    let table = match body {
        Expr::Call(call) if call.args.len() == 1 => &call.args[0],
        body => body,
    };
    let Expr::Match(table) = table else { return false };
    let lines = |arm: &syn::Arm| arm.span().end().line + 1 - arm.span().start().line;
    table.arms.iter().all(|arm| lines(arm) <= MOST_LINES_OF_AN_ARM)
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.check(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.check(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.check(&function.sig, block);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::parse;

    fn found(text: &str) -> Vec<String> {
        too_long(&parse(text).unwrap()).collect()
    }

    /// Returns a function of `lines` lines.
    fn function(lines: usize) -> String {
        format!("fn f() {{\n{}}}\n", "g();\n".repeat(lines - 2))
    }

    #[test]
    fn long_functions_are_found_in_every_kind_of_block() {
        assert_eq!(found(&function(MOST_LINES)), [""; 0]);
        let long = function(MOST_LINES + 1);
        let words = "fn f has 81 lines, expected at most 80; split it, or make it a table";
        assert_eq!(found(&long), [format!("1: {words}")]);
        // Comments and attributes do not count.
        assert_eq!(found(&format!("/// F.\n#[inline]\n{long}")), [format!("3: {words}")]);
        for around in ["impl S {", "impl T for S {", "trait T {", "mod m {"] {
            assert_eq!(found(&format!("{around}\n{long}}}")), [format!("2: {words}")], "{around}");
        }
        assert_eq!(found(&format!("#[cfg(test)] mod tests {{ {long} }}")), [""; 0]);
    }

    #[test]
    fn long_table_with_short_arms_is_accepted() {
        let table = |arm: &str| found(&format!("fn f() {{\nmatch x {{\n{}}}\n}}\n", arm.repeat(50)));
        assert_eq!(table("1 => a(),\n2 => {\nb();\nc()\n}\n"), [""; 0]);
        assert_eq!(table("1 => {\na();\nb();\nc();\nd()\n}\n").len(), 1);
        assert_eq!(found(&format!("fn f() {{\nSome(match x {{\n{}}})\n}}\n", "1 => a(),\n".repeat(90))), [""; 0]);
        assert_eq!(found(&format!("fn f() {{\ng();\nmatch x {{\n{}}}\n}}\n", "1 => a(),\n".repeat(90))).len(), 1);
    }
}
