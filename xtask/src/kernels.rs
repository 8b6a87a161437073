//! `cargo xtask kernels`: writes the table of kernels in the documents from `[package.metadata.kernels]` and the first
//! paragraph of each kernel's `mod.rs`.

use std::fs;

use anyhow::{Context, ensure};
use cuda_builder::KernelCrate;

use crate::{
    document::{self, Mode},
    table::Table,
    workspace,
};

/// Renew the table of kernels in the documents.
#[derive(clap::Args)]
pub struct Args {
    /// Fail if a table in the documents is out of date
    #[arg(long)]
    check: bool,
}

const PAGES: [&str; 2] = ["docs/book/src/concepts/kernels.md", "kernels-gpu/README.md"];

/// Writes or checks the table.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut table = Table::new(3, &["kernel", "compiled for", "what it is"]);
    for kernel in KernelCrate::open(workspace::kernels())?.kernels() {
        let arches: Vec<_> = kernel.arches.iter().map(ToString::to_string).collect();
        let file = workspace::kernel_source(&kernel.name)?;
        let source = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let about = first_paragraph(&source);
        ensure!(!about.is_empty(), "{} must begin with a `//!` paragraph that describes the kernel", file.display());
        table.row([format!("`{}`", kernel.name), arches.join(", "), about]);
    }
    let mode = if args.check { Mode::Check } else { Mode::Write };
    let text = table.to_string();
    PAGES.iter().try_for_each(|page| document::section(page, "kernels", &text, mode, "cargo xtask kernels"))
}

/// Returns the first paragraph of a module's documentation as one line.
fn first_paragraph(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraph_ends_at_empty_line_or_end_of_documentation() {
        assert_eq!(first_paragraph("//! A kernel\n//! of two lines.\n//!\n//! # Contract\n"), "A kernel of two lines.");
        assert_eq!(first_paragraph("//! One.\nuse x;\n//! No more.\n"), "One.");
        assert_eq!(first_paragraph("use x;\n"), "");
    }
}
