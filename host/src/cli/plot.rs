//! Pictures of a model's weights for `--plot FILE`: errors by layer, use of codes and scales, outlier columns. A picture is
//! drawn as SVG; PNG is rendered from it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nvfp4::checkpoint::{ComparedWeight, Errors, Usage, natural, without_expert};
use plotters::coord::Shift;
use plotters::prelude::*;
use resvg::{tiny_skia, usvg};

/// Width of a picture, and height of each panel, in pixels.
const WIDTH: u32 = 1200;
const HEIGHT: u32 = 400;

/// Width of the legend beside a panel.
const LEGEND: u32 = 340;

/// Pixels of a PNG per pixel of the picture.
const ZOOM: f32 = 2.0;

/// Colors that people with color blindness can tell apart (Okabe and Ito, "Color Universal Design").
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];

/// Largest number of series in a legend; further series share one.
const MAX_SERIES: usize = 14;

/// Parses the argument of `--plot`.
pub fn parse(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(path),
        _ => Err("a picture must end in .svg or .png".into()),
    }
}

/// Values of one kind of weight by layer.
type Series = BTreeMap<usize, Vec<f64>>;

/// A part of a picture.
pub enum Panel {
    /// Values by layer: the middle one of a layer's experts as a point, and a line from the smallest to the largest.
    Layers { title: String, unit: &'static str, series: Vec<(String, Series)> },
    /// Shares in percent.
    Bars { title: String, what: &'static str, bars: Vec<(String, f64)> },
}

/// Returns the panel of the relative errors of weights; `None` if no weight is in a layer.
pub fn errors(weights: &[ComparedWeight]) -> Option<Panel> {
    let percent = |errors: Errors| 100.0 * errors.relative_rms();
    let values = weights.iter().map(|weight| (&weight.module[..], percent(weight.errors)));
    layers("Relative RMS error of weights", "%", values.filter(|(_, value)| value.is_finite()))
}

/// Returns the panels about codes, scales and columns of weights.
pub fn usage(weights: &[Usage]) -> Vec<Panel> {
    let (mut codes, mut powers) = ([0; 16], [0; 18]);
    for weight in weights {
        codes.iter_mut().zip(weight.codes).for_each(|(sum, count)| *sum += count);
        powers.iter_mut().zip(weight.scales_by_power()).for_each(|(sum, count)| *sum += count);
    }
    let blocks: u64 = weights.iter().map(Usage::blocks).sum();
    if blocks == 0 {
        return Vec::new();
    }
    let share = |count: u64, all: u64| 100.0 * count as f64 / all as f64;
    // From -6 to 6: negative codes downwards, then positive codes.
    let order = (8..16).rev().chain(0..8);
    let by_value = order.map(|code: usize| {
        let sign = if code >= 8 { "-" } else { "" };
        let value = ["0", "0.5", "1", "1.5", "2", "3", "4", "6"][code % 8];
        (format!("{sign}{value}"), share(codes[code], 16 * blocks))
    });
    let by_power =
        powers.iter().enumerate().map(|(index, &count)| (format!("2^{}", index as i32 - 9), share(count, blocks)));
    let mut panels = vec![
        Panel::Bars { title: "Codes of the values".into(), what: "values", bars: by_value.collect() },
        Panel::Bars {
            title: "Scales of the blocks, from each power of two to the next".into(),
            what: "blocks",
            bars: by_power.collect(),
        },
    ];
    let ratios = weights.iter().map(|weight| (&weight.module[..], weight.column_ratio));
    panels.extend(layers("Outlier columns: RMS of the largest column relative to the median column", "×", ratios));
    panels
}

/// Returns a panel of values by layer; `None` if no module is in a layer.
fn layers<'m>(title: &str, unit: &'static str, values: impl Iterator<Item = (&'m str, f64)>) -> Option<Panel> {
    let (mut series, mut outside): (BTreeMap<String, Series>, usize) = (BTreeMap::new(), 0);
    for (module, value) in values {
        match kind_and_layer(module) {
            Some((kind, layer)) => series.entry(kind).or_default().entry(layer).or_default().push(value),
            None => outside += 1,
        }
    }
    if series.is_empty() {
        return None;
    }
    let mut series: Vec<_> = series.into_iter().collect();
    series.sort_by_cached_key(|(kind, _)| natural(kind));
    if series.len() > MAX_SERIES {
        let others = series.split_off(MAX_SERIES - 1);
        let count = others.len();
        let mut joined = Series::new();
        for (layer, values) in others.into_iter().flat_map(|(_, series)| series) {
            joined.entry(layer).or_default().extend(values);
        }
        series.push((format!("{count} other kinds"), joined));
    }
    let title = match outside {
        0 => title.to_owned(),
        count => format!("{title} (without {count} outside of layers)"),
    };
    Some(Panel::Layers { title, unit, series })
}

/// Splits `model.layers.3.mlp.experts.5.up_proj` into `mlp.experts.*.up_proj` and 3. Other stacks than `model.layers` keep
/// their name.
fn kind_and_layer(module: &str) -> Option<(String, usize)> {
    let name = without_expert(module);
    let parts: Vec<&str> = name.split('.').collect();
    let place = parts.iter().position(|part| part.parse::<usize>().is_ok())?;
    let layer = parts[place].parse().ok()?;
    let (stack, kind) = (parts[..place].join("."), parts[place + 1..].join("."));
    let is_usual = ["model.layers", "model.language_model.layers", "language_model.model.layers"].contains(&&stack[..]);
    Some((if is_usual { kind } else { format!("{stack}.*.{kind}") }, layer))
}

/// Draws the panels, and writes the picture. The file appears when it is complete.
pub fn write(path: &Path, panels: &[Panel]) -> anyhow::Result<()> {
    if panels.is_empty() {
        bail!("{}: there is no weight to draw; leave out --plot, or choose other weights", path.display());
    }
    let svg = draw(panels)?;
    let bytes = match path.extension().is_some_and(|extension| extension == "png") {
        true => png(&svg).with_context(|| path.display().to_string())?,
        false => svg.into_bytes(),
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = || -> std::io::Result<()> {
        let mut file = tempfile::Builder::new().permissions(permissions()).tempfile_in(folder)?;
        file.write_all(&bytes)?;
        file.persist(path)?;
        Ok(())
    };
    written().with_context(|| format!("{}: the picture cannot be written", path.display()))
}

/// Permissions of a new file, before the process's mask.
#[cfg(unix)]
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}

/// Returns the picture as SVG.
fn draw(panels: &[Panel]) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT * panels.len() as u32)).into_drawing_area();
        // A background of its own keeps the picture legible on dark pages.
        root.fill(&WHITE).map_err(failed)?;
        for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
            match panel {
                Panel::Layers { title, unit, series } => draw_layers(area, title, unit, series),
                Panel::Bars { title, what, bars } => draw_bars(area, title, what, bars),
            }
            .map_err(failed)?;
        }
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

/// Turns an error of the drawing library into one of the command.
fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("the picture cannot be drawn: {error}")
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn draw_layers<'a>(area: &Area<'a>, title: &str, unit: &str, series: &[(String, Series)]) -> Drawn<'a> {
    let (area, legend) = area.split_horizontally(WIDTH - LEGEND);
    let layers = || series.iter().flat_map(|(_, series)| series.keys().copied());
    let values = series.iter().flat_map(|(_, series)| series.values().flatten());
    let (first, last) = (layers().min().unwrap_or(0), layers().max().unwrap_or(0));
    let most = values.copied().fold(0.0, f64::max);
    let top = if most > 0.0 { 1.1 * most } else { 1.0 };
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(first as f64 - 0.5..last as f64 + 0.5, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("layer")
        .x_labels((last - first + 1).min(20))
        .x_label_formatter(&|x| if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() })
        .y_desc(unit)
        .label_style(("sans-serif", 14))
        .draw()?;
    // Points of many layers are smaller, so that they lie side by side.
    let radius = if last - first < 24 { 4 } else { 2 };
    for (index, (kind, values)) in series.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let is_filled = index < COLORS.len();
        // Kinds of a layer lie side by side.
        let shift = if series.len() > 1 { 0.6 * (index as f64 / (series.len() - 1) as f64 - 0.5) } else { 0.0 };
        for (&layer, values) in values {
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            let (low, middle, high) = (sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
            let x = layer as f64 + shift;
            chart.draw_series([PathElement::new(vec![(x, low), (x, high)], color.stroke_width(2))])?;
            let style = if is_filled { color.filled() } else { color.stroke_width(2) };
            chart.draw_series([Circle::new((x, middle), radius, style)])?;
        }
        let y = 50 + 22 * index as i32;
        let style = if is_filled { color.filled() } else { color.stroke_width(2) };
        legend.draw(&Circle::new((8, y), 5, style))?;
        legend.draw(&Text::new(shortened(kind), (20, y - 7), ("sans-serif", 14)))?;
    }
    Ok(())
}

/// Returns a name that fits into the legend: its end says more than its beginning.
fn shortened(name: &str) -> String {
    const LONGEST: usize = 40;
    let length = name.chars().count();
    if length <= LONGEST {
        return name.to_owned();
    }
    let end: String = name.chars().skip(length - LONGEST + 1).collect();
    format!("…{end}")
}

fn draw_bars<'a>(area: &Area<'a>, title: &str, what: &str, bars: &[(String, f64)]) -> Drawn<'a> {
    let most = bars.iter().map(|(_, share)| *share).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(-0.5..bars.len() as f64 - 0.5, 0.0..1.15 * most.max(1e-9))?;
    let label = |x: &f64| match bars.get(x.round() as usize) {
        Some((label, _)) if x.fract() == 0.0 && *x >= 0.0 => label.clone(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(bars.len())
        .x_label_formatter(&label)
        .y_desc(format!("% of the {what}"))
        .label_style(("sans-serif", 14))
        .draw()?;
    for (index, (_, share)) in bars.iter().enumerate() {
        let x = index as f64;
        chart.draw_series([Rectangle::new([(x - 0.4, 0.0), (x + 0.4, *share)], COLORS[0].filled())])?;
        let text = match *share {
            0.0 => "0".to_owned(),
            share if share < 0.1 => "<0.1".to_owned(),
            share => format!("{share:.1}"),
        };
        let (left, bottom) = (-(text.len() as i32) * 3, -16);
        let style = ("sans-serif", 12);
        chart.draw_series([EmptyElement::at((x, *share)) + Text::new(text, (left, bottom), style)])?;
    }
    Ok(())
}

/// Renders a picture with a font of this system.
fn png(svg: &str) -> anyhow::Result<Vec<u8>> {
    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_system_fonts();
    let families = |face: &usvg::fontdb::FaceInfo| face.families.first().map(|(name, _)| name.clone());
    let is_plain = |name: &String| name.contains("Sans") && !name.contains("Mono");
    let named: Vec<String> = fonts.faces().filter_map(families).collect();
    let Some(family) = named.iter().find(|name| is_plain(name)).or(named.first()).cloned() else {
        bail!("this system has no fonts, which a PNG needs; write an .svg file instead");
    };
    fonts.set_sans_serif_family(family);
    let tree = usvg::Tree::from_str(svg, &options).context("the picture cannot be rendered")?;
    let size = tree.size();
    let mut pixels = tiny_skia::Pixmap::new((ZOOM * size.width()) as u32, (ZOOM * size.height()) as u32)
        .context("the picture has no size")?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(ZOOM, ZOOM), &mut pixels.as_mut());
    pixels.encode_png().context("the picture cannot be encoded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_kinds_and_layers() {
        for (module, kind, layer) in [
            ("model.layers.3.mlp.experts.5.up_proj", "mlp.experts.*.up_proj", 3),
            ("model.layers.12.self_attn.q_proj", "self_attn.q_proj", 12),
            ("talker.model.layers.0.mlp.up_proj", "talker.model.layers.*.mlp.up_proj", 0),
        ] {
            assert_eq!(kind_and_layer(module), Some((kind.to_owned(), layer)));
        }
        assert_eq!(kind_and_layer("lm_head"), None);
    }

    #[test]
    fn pictures_have_every_series_and_bar() {
        let values = (0..40).map(|index| (format!("model.layers.{}.mlp.kind{}", index / 20, index % 20), index as f64));
        let values: Vec<_> = values.collect();
        let mut panels: Vec<_> =
            layers("Title", "%", values.iter().map(|(name, value)| (&name[..], *value))).into_iter().collect();
        panels.push(Panel::Bars {
            title: "Bars".into(),
            what: "values",
            bars: vec![("-6".into(), 99.96), ("2^8".into(), 0.04)],
        });
        let svg = draw(&panels).unwrap();
        for words in ["Title", "mlp.kind0", "mlp.kind12", "7 other kinds", "Bars", "-6", "2^8", "100.0", "&lt;0.1"] {
            assert!(svg.contains(words), "{words}");
        }
        assert!(!svg.contains("mlp.kind13"));
        assert_eq!(shortened(&"a".repeat(50)).chars().count(), 40);
        assert!(parse("a.jpg").is_err() && parse("a.png").is_ok() && parse("a.svg").is_ok());
        assert!(write(Path::new("a.svg"), &[]).is_err());
    }
}
