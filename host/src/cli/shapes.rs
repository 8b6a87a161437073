//! `nvfp4 shapes`: the built-in shapes and layers.

use std::io::Write;
use std::process::ExitCode;

use comfy_table::{ColumnConstraint, ContentArrangement, Width};
use nvfp4::problem::Group;
use nvfp4::{moe, shape};

use super::table;

/// Largest number of columns of a line.
const WIDTH: u16 = 100;

/// List the built-in shapes of groups and of layers. `NAME@tp8` and `NAME@ep8` are a GPU's part of a layer with tensor
/// and expert parallelism.
#[derive(clap::Args)]
pub struct Args {}

/// Prints a table of shapes, and tables of the layers' sizes and computations.
pub fn run(_: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    const LIGHT_AND_BEST: &str = "B200: light, best public";
    let mut rows = table::table(&["shape", "op", "input", "groups", "M", "N", "K", LIGHT_AND_BEST], 3);
    // Sizes of many groups take several lines.
    rows.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    for (column, width) in rows.column_iter_mut().zip([None, None, None, None, Some(14), Some(9), Some(9), Some(17)]) {
        let width =
            width.map_or(ColumnConstraint::ContentWidth, |width| ColumnConstraint::UpperBoundary(Width::Fixed(width)));
        column.set_constraint(width);
    }
    for shape in shape::builtin() {
        let all = |size: fn(&Group) -> usize| {
            let mut sizes: Vec<_> = shape.groups.iter().map(size).collect();
            sizes.dedup();
            sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
        };
        let times = shape.b200_light_us.zip(shape.b200_best_public_us);
        rows.add_row([
            shape.name.clone(),
            shape.op.name().into(),
            shape.input.name().into(),
            shape.groups.len().to_string(),
            all(|group| group.m),
            all(|group| group.n),
            all(|group| group.k),
            times.map_or(String::new(), |(light, best)| format!("{light}, {best} µs")),
        ]);
    }
    writeln!(out, "{rows}\n\n{}\n\n{}", sizes_of_layers(), computations_of_layers())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the table of the sizes of layers for `run --op moe`.
fn sizes_of_layers() -> comfy_table::Table {
    let mut rows = table::table(&["layer", "H", "I", "experts", "of", "top-k", "shared I", "tokens"], 1);
    for layer in moe::shape::builtin() {
        let size = |size: Option<usize>| size.map_or(String::new(), |size| size.to_string());
        rows.add_row([
            layer.name.clone(),
            layer.hidden.to_string(),
            layer.intermediate.to_string(),
            layer.experts.to_string(),
            size(layer.named_experts),
            layer.top_k.to_string(),
            size(layer.shared_intermediate),
            layer.tokens.to_string(),
        ]);
    }
    rows
}

/// Returns the table of activations and routers. Test layers have no model's router: they show how generated steps name
/// experts.
fn computations_of_layers() -> comfy_table::Table {
    let mut rows = table::table(&["layer", "activation", "router"], 3);
    for layer in moe::shape::builtin() {
        rows.add_row([
            layer.name.clone(),
            layer.activation.to_string(),
            if layer.router.is_empty() { layer.routing.name().into() } else { layer.router.clone() },
        ]);
    }
    rows
}
