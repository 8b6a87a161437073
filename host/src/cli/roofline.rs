//! `nvfp4 roofline`: minimum cost of a shape, and the effect of each tile size.

use std::io::Write;
use std::process::ExitCode;

use nvfp4::plan::roofline::{Bound, GPUS, Gpu, Roofline};
use nvfp4::plan::tile::{TILE_WEIGHT_ROWS, TOKEN_TILES, Tiling};
use nvfp4::problem::{Op, TokenDtype};
use nvfp4::shape;

use super::{parse, table};

/// Bytes, operations and minimum time of a shape on a GPU; tiles and waves for each tile size.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 roofline
  nvfp4 roofline --shape decode-1 --gpu h200
  nvfp4 roofline --shape mine.json#layer-3")]
pub struct Args {
    /// A built-in shape (see `nvfp4 shapes`), FILE.json or FILE.json#NAME.
    #[arg(long, default_value = "moe-1", value_parser = parse::grouped_shape(), hide_possible_values = true)]
    shape: String,
    /// Operation to use instead of the shape's operation.
    #[arg(long, value_parser = parse::op())]
    op: Option<Op>,
    /// The GPU to plan for.
    #[arg(long, default_value = GPUS[0].name, value_parser = parse::gpu())]
    gpu: Gpu,
}

/// Prints the work, its time, and a table of tile sizes.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let mut shape = shape::find(&args.shape)?;
    shape.op = args.op.unwrap_or(shape.op);
    let problem = shape.problem(TokenDtype::F16)?;
    let (gpu, work) = (args.gpu, Roofline::new(&problem));
    let part = |bytes: usize| table::bytes(bytes as f64);

    writeln!(out, "{} {} on {}, groups: {}", args.shape, shape.op.name(), gpu.name, problem.groups().len())?;
    writeln!(
        out,
        "  bytes       {} (weights {}, tokens {}, output {})",
        part(work.bytes()),
        part(work.weight_bytes),
        part(work.token_bytes),
        part(work.output_bytes)
    )?;
    writeln!(out, "  operations  {:.2} GFLOP", work.operations / 1e9)?;
    let (memory, compute) = (work.memory_seconds(gpu.peaks), work.compute_seconds(gpu.peaks));
    writeln!(out, "  memory      {} at {:.2} TB/s", table::time(memory), gpu.peaks.bytes_per_second / 1e12)?;
    writeln!(
        out,
        "  compute     {} at {:.0} TFLOP/s {}",
        table::time(compute),
        gpu.peaks.ops_per_second / 1e12,
        gpu.arithmetic
    )?;
    let bound = match work.bound(gpu.peaks) {
        Bound::Memory => "memory",
        Bound::Compute => "compute",
    };
    writeln!(out, "  light       {}, bound by {bound}\n", table::time(work.seconds(gpu.peaks)))?;

    writeln!(out, "Tiles of {TILE_WEIGHT_ROWS} weight rows × N tokens, one at a time on each of {} SMs:", gpu.sms)?;
    let mut rows = table::table(&["tokens", "tiles", "waves", "idle in the last", "useful MMA", "weight reads"], 0);
    for tile_tokens in TOKEN_TILES {
        let tiling = Tiling::new(&problem, tile_tokens, gpu.sms);
        rows.add_row([
            tile_tokens.to_string(),
            tiling.tiles.to_string(),
            tiling.waves.to_string(),
            format!("{:.1} %", 100.0 * tiling.last_wave_idle),
            format!("{:.1} %", 100.0 * tiling.useful),
            format!("{:.2}×", tiling.weight_reads),
        ]);
    }
    writeln!(out, "{rows}")?;
    Ok(ExitCode::SUCCESS)
}
