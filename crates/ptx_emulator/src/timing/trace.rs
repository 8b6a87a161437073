//! Drawings of the activity of SMs: a trace for <https://ui.perfetto.dev>, and a picture.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::report::Span;

/// Groups the spans by lane, in the order of the lanes' names.
fn lanes(spans: &[Span]) -> BTreeMap<&str, Vec<&Span>> {
    let mut lanes: BTreeMap<&str, Vec<&Span>> = BTreeMap::new();
    for span in spans.iter().filter(|span| span.to > span.from) {
        lanes.entry(&span.lane).or_default().push(span);
    }
    lanes
}

/// Converts spans to trace events ("Trace Event Format", complete events), in microseconds.
pub fn events(spans: &[Span], cycles_per_us: f64) -> Value {
    let mut events = Vec::new();
    for (lane, (name, spans)) in lanes(spans).into_iter().enumerate() {
        events.push(json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}}));
        for span in spans {
            let (at, length) = (span.from as f64 / cycles_per_us, (span.to - span.from) as f64 / cycles_per_us);
            events.push(json!({"ph": "X", "name": span.name, "pid": 0, "tid": lane, "ts": at, "dur": length}));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

/// Draws the spans between two times as an SVG with one row per lane.
pub fn picture(spans: &[Span], (from, to): (u64, u64), cycles_per_us: f64) -> String {
    const ROW: usize = 14;
    const LEFT: usize = 260;
    const WIDTH: f64 = 1000.0;
    let inside: Vec<Span> = spans.iter().filter(|span| span.to > from && span.from < to).cloned().collect();
    let lanes = lanes(&inside);
    let x = |time: u64| LEFT as f64 + (time.clamp(from, to) - from) as f64 / (to - from).max(1) as f64 * WIDTH;
    let (width, height) = (LEFT + WIDTH as usize + 10, (lanes.len() + 2) * ROW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"10\">\n"
    );
    for (row, (name, spans)) in lanes.iter().enumerate() {
        let y = (row + 1) * ROW;
        svg += &format!("<text x=\"4\" y=\"{}\">{name}</text>\n", y + 10);
        for span in spans {
            let (left, right) = (x(span.from), x(span.to));
            let (color, what) = (color(span.name), span.name);
            svg += &format!(
                "<rect x=\"{left:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{}\" fill=\"{color}\"><title>{what}</title></rect>\n",
                (right - left).max(0.3),
                ROW - 2
            );
        }
    }
    let us = |time: u64| time as f64 / cycles_per_us;
    svg += &format!("<text x=\"{LEFT}\" y=\"10\">{:.2} to {:.2} µs</text>\n</svg>\n", us(from), us(to));
    svg
}

fn color(name: &str) -> &'static str {
    match name {
        "matrix" => "#2a7",
        "copy" => "#47c",
        "tensor core" => "#9c9",
        "another warp" => "#ca5",
        "barrier" => "#c66",
        _ => "#aaa",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans() -> Vec<Span> {
        let span = |lane: &str, name, from, to| Span { lane: lane.to_owned(), name, from, to };
        vec![span("b", "matrix", 100, 300), span("a", "copy", 0, 100), span("a", "copy", 300, 300)]
    }

    #[test]
    fn trace_has_one_lane_per_unit_and_microseconds() {
        let trace = events(&spans(), 100.0);
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 4);
        assert_eq!(events[3], json!({"ph": "X", "name": "matrix", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.0}));
    }

    #[test]
    fn picture_shows_only_its_period() {
        let svg = picture(&spans(), (50, 250), 100.0);
        assert!(svg.contains("0.50 to 2.50") && svg.matches("<rect").count() == 2, "{svg}");
    }
}
