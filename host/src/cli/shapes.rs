//! `nvfp4 shapes`: the built-in shapes and layers.

use std::io::Write;
use std::process::ExitCode;

use nvfp4::problem::Group;
use nvfp4::{moe, shape};

use super::table;

/// List the built-in shapes of groups and of layers. `NAME@tp8` and `NAME@ep8` are a GPU's part of a layer with tensor
/// and expert parallelism.
#[derive(clap::Args)]
pub struct Args {}

/// Prints one table of shapes and one table of layers.
pub fn run(_: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let mut rows = table::table(&["shape", "op", "input", "groups", "M", "N", "K", "B200 light", "best public"], 3);
    for shape in shape::builtin() {
        let all = |size: fn(&Group) -> usize| {
            let mut sizes: Vec<_> = shape.groups.iter().map(size).collect();
            sizes.dedup();
            sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
        };
        let us = |time: Option<f64>| time.map_or(String::new(), |us| format!("{us} µs"));
        rows.add_row([
            shape.name.clone(),
            shape.op.name().into(),
            shape.input.name().into(),
            shape.groups.len().to_string(),
            all(|group| group.m),
            all(|group| group.n),
            all(|group| group.k),
            us(shape.b200_light_us),
            us(shape.b200_best_public_us),
        ]);
    }
    writeln!(out, "{rows}\n\n{}", layers())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the table of layers for `run --op moe`.
fn layers() -> comfy_table::Table {
    let mut rows =
        table::table(&["layer", "activation", "router", "H", "I", "experts", "of", "top-k", "shared I", "tokens"], 3);
    for layer in moe::shape::builtin() {
        let size = |size: Option<usize>| size.map_or(String::new(), |size| size.to_string());
        rows.add_row([
            layer.name.clone(),
            layer.activation.to_string(),
            if layer.router.is_empty() { layer.routing.name().into() } else { layer.router.clone() },
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
