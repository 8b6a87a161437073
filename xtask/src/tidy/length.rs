//! Functions that are too long to be understood at one look.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Expr, Signature, Stmt};

/// The most lines of a function, from `fn` to its last brace.
pub const MOST_LINES: usize = 80;

/// The most lines of an arm of a table.
const MOST_LINES_OF_AN_ARM: usize = 4;

/// The functions that are longer and no tables, each as its line and words.
///
/// A table is a function whose body is one `match`, of which no arm is longer than [`MOST_LINES_OF_AN_ARM`] lines: it is read
/// arm by arm.
pub fn too_long(file: &syn::File) -> impl Iterator<Item = String> {
    let mut finder = Finder(Vec::new());
    finder.visit_file(file);
    let finder = finder.0.into_iter();
    finder.map(|(line, name, lines)| {
        format!("{line}: fn {name} has {lines} lines, more than {MOST_LINES}, and is no table")
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
    let [Stmt::Expr(Expr::Match(table), _)] = &block.stmts[..] else { return false };
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

    /// A function of so many lines.
    fn function(lines: usize) -> String {
        format!("fn f() {{\n{}}}\n", "g();\n".repeat(lines - 2))
    }

    #[test]
    fn one_line_too_many_is_found_wherever_the_function_stands() {
        assert_eq!(found(&function(MOST_LINES)), [""; 0]);
        let long = function(MOST_LINES + 1);
        let words = "fn f has 81 lines, more than 80, and is no table";
        assert_eq!(found(&long), [format!("1: {words}")]);
        // Comments are no part of it.
        assert_eq!(found(&format!("/// F.\n#[inline]\n{long}")), [format!("3: {words}")]);
        for around in ["impl S {", "impl T for S {", "trait T {", "mod m {"] {
            assert_eq!(found(&format!("{around}\n{long}}}")), [format!("2: {words}")], "{around}");
        }
        assert_eq!(found(&format!("#[cfg(test)] mod tests {{ {long} }}")), [""; 0]);
    }

    #[test]
    fn a_table_may_be_long_as_long_as_its_arms_are_short() {
        let table = |arm: &str| found(&format!("fn f() {{\nmatch x {{\n{}}}\n}}\n", arm.repeat(50)));
        assert_eq!(table("1 => a(),\n2 => {\nb();\nc()\n}\n"), [""; 0]);
        assert_eq!(table("1 => {\na();\nb();\nc();\nd()\n}\n").len(), 1);
        assert_eq!(found(&format!("fn f() {{\ng();\nmatch x {{\n{}}}\n}}\n", "1 => a(),\n".repeat(90))).len(), 1);
    }
}
